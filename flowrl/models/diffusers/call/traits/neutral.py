"""The scale at which a pipeline applies no guidance, and the network evaluations for one row.

Both are measured. Most pipelines mix neg + g (pos - neg), where 1 is no guidance; some mix pos + g
(pos - neg) if g is above 0, so that 0 is no guidance and 1 corresponds to 2 elsewhere.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.driver import Driver
from flowrl.models.diffusers.call.drive.latents import PipelineCall, Target
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES, its_own
from flowrl.models.diffusers.call.inputs.conditioning import SHORT_PROMPT
from flowrl.models.diffusers.call.results.proof_checks import largest_difference
from flowrl.models.diffusers.call.traits.discovery import TRIAL_GUIDANCE, Traits
from flowrl.models.diffusers.modular.face import GUIDER_OFF, form_of
from flowrl.models.diffusers.modular.guiders import guider_passes
from flowrl.models.out_of_memory import raise_memory

CANDIDATES = (1.0, 0.0)
OTHER_NEGATIVE = "green noise, blurred"
MANY_STEPS = 1000  # of which a guider could be on at some
SCALED = (0, 8, 16)  # times a scale, at which guidance that is not linear shows it
CURVED = 0.02  # of the change: what rounding may leave of a line
NO_EFFECT = 1e-3  # of the velocity: what rounding may leave of a negative prompt


@contextmanager
def counted_rows(denoisers: Mapping[str, nn.Module]) -> Iterator[list[int]]:
    """Collect the number of rows in each denoiser call inside the body."""
    rows: list[int] = []

    def count(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        inputs = (v for v in (*args, *named.values()) if isinstance(v, Tensor | list))
        # Cosmos 3 is given the tokens of one prompt first, which are no rows
        of_rows = (v for v in inputs if isinstance(v, list) or v.is_floating_point())
        rows.append(len(next(of_rows)))

    hooks = [d.register_forward_pre_hook(count, with_kwargs=True) for d in denoisers.values()]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def neutral_scale(driver: Driver, traits: Traits) -> float | None:
    """The cheapest guidance scale at which the negative prompt has no effect.

    None for a pipeline without an argument for it; 1 for a model that takes the scale as an input,
    in one evaluation; GUIDER_OFF for a guider, which is then switched off in the call. Raises
    UserError if guidance cannot be switched off.
    """
    with its_own(traits.name, traits.call):
        return _neutral_scale(driver, traits)


def _neutral_scale(driver: Driver, traits: Traits) -> float | None:
    if traits.guidance is None:
        rows = _first_velocity(driver, traits, None)[1]
        if rows == 1:
            return None
        if traits.guider and _first_velocity(driver, traits, GUIDER_OFF)[1] == 1:
            return GUIDER_OFF
        raise UserError(
            f"guidance none: a component of {traits.name} makes {rows} evaluations per row, and "
            "its call takes no scale: change that component, or set model.guidance: null"
        )
    guided = _first_velocity(driver, traits, TRIAL_GUIDANCE)[1]
    if guided == 1:  # its scale is an input, or it has no negative prompt
        return CANDIDATES[0]
    scales: dict[int, float] = {}
    for scale in CANDIDATES:
        try:
            rows = _unguided_rows(driver, traits, scale)
        except FAILURES as error:  # it cannot be called without guidance (Ideogram 4)
            raise_memory(error)
            continue
        if rows is not None:
            scales.setdefault(rows, scale)
    if scales:
        return scales[min(scales)]
    raise UserError(
        f"guidance none: {traits.name} also applies guidance at scales 1 and 0: give a number, "
        "or set model.guidance: null"
    )


def prompt_weight(
    driver: Driver, traits: Traits, scale: float | None, neutral: float | None
) -> float:
    """The factor of the prompt's prediction in a velocity that is guided at a scale.

    Guidance is c + k (scale - neutral) (c - u) with the predictions c with and u without the
    prompt, and k = 1, so that c has the factor 1 + scale - neutral. UserError where a trial shows
    another rule: one evaluation alone, or a mean that is not linear in the scale (a rescaled
    prediction).
    """
    refused = f"model.guidance.through: cond: {traits.name} "
    if scale is None or neutral is None or traits.guidance is None:
        raise UserError(f"{refused}takes no guidance scale in its call: leave it out")
    with its_own(traits.name, traits.call):
        (plain, once), (guided, rows), (twice, _) = (
            _first_velocity(driver, traits, neutral + times * (scale - neutral)) for times in SCALED
        )
    if rows == once:
        raise UserError(f"{refused}makes one prediction at scale {scale:g}: leave it out")
    away, moved = (twice - plain) - 2 * (guided - plain), guided - plain
    dtypes = {
        parameter.dtype
        for denoiser in driver.denoisers.values()
        for parameter in denoiser.parameters()
    }
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    bound = CURVED * float(moved.abs().max()) + 16 * rounding * float(twice.abs().max())
    if float(away.abs().max()) > bound:
        raise UserError(
            f"{refused}mixes its predictions by another rule than classifier-free guidance's: "
            "leave it out"
        )
    return 1 + scale - neutral


def _unguided_rows(driver: Driver, traits: Traits, scale: float) -> int | None:
    """Evaluations per row at a scale; None if a negative prompt has an effect at that scale."""
    modular = form_of(driver.pipe) == "modular"
    if modular and max(guider_passes(driver.pipe, scale, MANY_STEPS)) > 1:
        return None  # a term of a guider that is no scale, perhaps at later steps alone
    velocity, rows = _first_velocity(driver, traits, scale)
    if rows == 1:
        return rows
    if "negative_prompt" not in driver.parameters:
        return None
    other = replace(traits, call={**traits.call, "negative_prompt": OTHER_NEGATIVE})
    away = largest_difference(_first_velocity(driver, other, scale)[0], velocity)
    return rows if away <= NO_EFFECT * float(velocity.abs().max()) else None


def _first_velocity(driver: Driver, traits: Traits, scale: float | None) -> tuple[Tensor, int]:
    """Return the prediction at the first step of one row, and its number of evaluations."""
    prompts, extras = [SHORT_PROMPT], traits.blank.extras
    arguments = traits.arguments(prompts, traits.steps, scale, extras)
    call = PipelineCall(arguments, driver.encoded(arguments), stubs=traits.stubs)
    with torch.no_grad(), counted_rows(driver.denoisers) as rows:
        received = driver.received(call, Target(torch.empty(0), 0))
    return received.output, sum(rows)
