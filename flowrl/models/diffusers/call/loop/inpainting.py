"""The blend of inpainting with weights not trained for masks: part of the state follows the image.

After each step such a loop replaces the entries outside the mask by the image's latents, noised to
the next level with the noise of the first state. Mask and image are found by two calls whose first
step returns 0 and 1 everywhere: the next step receives (1 - mask) image, and the same plus the
mask.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.image_to_image import CleanPart, RecordedNoise, clean_part
from flowrl.models.diffusers.call.drive.latents import PipelineCall
from flowrl.models.diffusers.call.drive.received import Received
from flowrl.models.diffusers.call.drive.scheduler_standin import its_own
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.inputs.conditioning import Conditioning
from flowrl.models.diffusers.call.loop.loop import Loop
from flowrl.models.diffusers.call.loop.own_steps import MeasuredScheduler
from samplers.adapt import scale
from samplers.held import Held

BLEND_TOLERANCE = 1e-4  # of a state's size, between the loop's next state and ours


def held_entries(loop: Loop, conditioning: Conditioning, steps: int) -> Held | None:
    """The entries of each row's states that the loop takes from its image; None if there are none.

    UserError for masks with soft edges, where states would mix both.
    """
    extras = conditioning.extras
    if not extras or not any("mask" in name for name in columns.images(extras[0])):
        return None
    start = loop.start(steps)
    sigmas, last = start.schedule.sigmas, start.schedule.sigmas[-1]
    if len(sigmas) < 3:
        return None  # no step follows the only one, which would show a blend
    factor: float | None = None
    free: dict[int, Tensor] = {}
    clean: dict[int, Tensor] = {}
    for rows in columns.by_image(extras):
        nothing, one = (_after_first(loop, conditioning.take(rows[:1]), steps, x) for x in (0, 1))
        mask = one - nothing
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise UserError(
                f"{loop.name}: the mask has soft edges, where the loop would mix the image into "
                "the state: use black-and-white masks with edges on the grid of the latents"
            )
        if bool(mask.all()):
            return None
        factor = factor or MeasuredScheduler.of(loop, steps).factor(1)
        free |= dict.fromkeys(rows, mask == 1)
        clean |= dict.fromkeys(rows, nothing / (factor * (1 - sigmas[1])))
    part = picture(loop, conditioning, steps)
    indices = range(len(conditioning))
    return Held(
        torch.cat([free[i] for i in indices]),
        torch.cat([clean[i] for i in indices]),
        None if part is None else part.state,
        start.noise if part is None else sigmas[0],
        1.0 if last == 0 else 1 / float(scale(torch.tensor([last], dtype=torch.float64))),
    )


def _after_first(loop: Loop, conditioning: Conditioning, steps: int, value: float) -> Tensor:
    """The second step's state [1 *d] if the first step returns `value` everywhere, without
    noise."""
    call = loop.traits.trial_call(conditioning, steps)
    with torch.no_grad(), its_own(loop.name, loop.call):
        state = loop.driver.after_first(call, RecordedNoise(0.0), value)
    state = state.to(torch.promote_types(state.dtype, torch.float32))
    return state if len(state) == 1 else state[None]


def blends(loop: Loop, records: Sequence[Received], conditioning: Conditioning, steps: int) -> bool:
    """Whether the states of a recorded call change between steps only as held entries do, up to
    rounding."""
    held = held_entries(loop, conditioning, steps)
    if held is None:
        return False
    scheduler, rows = MeasuredScheduler.of(loop, steps), torch.arange(len(conditioning))
    sigmas, start = scheduler.schedule.sigmas, records[0].sample / scheduler.factor(0)
    for k, (before, after) in enumerate(pairwise(records), 1):
        assert before.following is not None
        factor: Any = scheduler.factor(k)
        ours = factor * held.put(before.following / factor, start, rows, sigmas[k])
        away = (ours - after.sample).abs().max()
        if not float(away) <= BLEND_TOLERANCE * float(after.sample.abs().max()):
            return False
    return True


def picture(loop: Loop, conditioning: Conditioning, steps: int) -> CleanPart | None:
    """First flow states [n *d] without their noise; None if they are pure noise."""
    if not conditioning.extras or not columns.images(conditioning.extras[0]):
        return None
    if _noise_alone(loop, conditioning, steps):
        return None
    sigma, parts, size = loop.start(steps).schedule.sigmas[0], {}, 1.0
    for rows in columns.by_image(conditioning.extras):
        call = loop.trial(conditioning.take(rows[:1]), steps)
        with torch.no_grad(), its_own(loop.name, loop.call):
            clean = clean_part(lambda draws, c=call: _begun(loop, c, draws), sigma, loop.name)
        if clean is None:  # this image is zero
            return None
        size = clean.scale
        parts |= dict.fromkeys(rows, clean.state)
    return CleanPart(torch.cat([parts[i] for i in range(len(conditioning))]), size)


def first_flow(loop: Loop, conditioning: Conditioning, steps: int) -> Tensor:
    """Flow states from which our samplers start for the noise of the pipeline's own call."""
    start, part = loop.start(steps), picture(loop, conditioning, steps)
    factor = start.scale if part is None else part.scale
    return factor * loop.first(conditioning, steps).to(
        torch.promote_types(start.dtype, torch.float32)
    )


def _noise_alone(loop: Loop, conditioning: Conditioning, steps: int) -> bool:
    """Whether first states are independent of the images; found once for each set of arguments.

    With two rows, as in the trial that found the encoding, so that stubs know the form of their
    output.
    """
    names = tuple(conditioning.extras[0]), steps
    if names not in loop.noise_alone:
        call = loop.trial(conditioning.take([0] if loop.traits.single else [0, 0]), steps)
        with torch.no_grad(), its_own(loop.name, loop.call):
            state = _begun(loop, call, RecordedNoise(0.0))
        loop.noise_alone[names] = not bool(state.any())
    return loop.noise_alone[names]


def _begun(loop: Loop, call: PipelineCall, draws: RecordedNoise) -> Tensor:
    state = loop.driver.first(call, draws, native_scale=False).sample
    return state if len(state) == 1 else state[None]
