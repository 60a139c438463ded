"""Sample in three ways from the same first state, for `whole_proof` to compare.

The pipeline's own call; its own scheduler, stepped with flowrl's velocities; flowrl's own steps.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.call.drive.clocked_entry import ClockedEntry
from flowrl.models.diffusers.call.drive.image_to_image import GivenNoise, RecordedNoise
from flowrl.models.diffusers.call.drive.latents import Entry, PartEntries, PipelineCall
from flowrl.models.diffusers.call.drive.patches import Patch, patched
from flowrl.models.diffusers.call.drive.received import MAIN_SCHEDULER
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES, data_size
from flowrl.models.diffusers.call.inputs.conditioning import Conditioning
from flowrl.models.diffusers.call.loop.inpainting import first_flow
from flowrl.models.diffusers.call.results.decoder import Decoded
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.replay.proof_neighbours import nudged
from flowrl.models.out_of_memory import raise_memory
from samplers import Latents, Velocity, roll
from samplers.adapt import scale
from samplers.clock import PartClock
from samplers.kernels import per_row
from samplers.layout import Layout
from samplers.noise import cpu_noise
from samplers.part_levels import from_own, velocity_to_own


class StepPlace(NamedTuple):
    """The place of a call of a scheduler's step: the number of the loop's step, that of the state's
    part, the states of the other parts before it (of the first part), whether it is the first call
    of the step, and whether it is the part's first."""

    step: int
    part: int
    before: Sequence[Tensor]
    leads: bool
    begins: bool


# (real step, its arguments, its place)
StepCall = Callable[[Any, inspect.BoundArguments, StepPlace], Any]


@dataclass(frozen=True)
class WholeSample:
    """A whole sample. `draws` are the prompts' indices: as in a rollout, noise is keyed by (seed,
    0, draw)."""

    policy: PipelinePolicy
    batch: MediaBatch
    seed: int
    guidance: float | None

    @property
    def conditioning(self) -> Conditioning:
        conditioning = self.batch.conditioning
        assert isinstance(conditioning, Conditioning), "a pipeline encodes to these"
        return conditioning

    @property
    def rows(self) -> Tensor:
        return torch.arange(len(self.conditioning))

    @cached_property
    def noise(self) -> Tensor:
        """Noise [n *d], in the shape that the loop's steps receive."""
        keys = [(self.seed, 0, draw, "root", 0) for draw in self.rows.tolist()]
        return cpu_noise(keys, self.policy.shape(self.batch.steps), self.policy.layout)

    @cached_property
    def first(self) -> Tensor:
        """flowrl's first flow states, from the keyed noise or from the noise that the call
        draws."""
        if self.given is None:
            return first_flow(self.policy.loop, self.conditioning, self.batch.steps)
        begin = self.policy.begin(self.conditioning, self.batch.steps)
        return self.noise if begin is None else begin(self.noise, self.rows)

    @cached_property
    def given(self) -> dict[str, Tensor] | None:
        """Arguments that give a call its noise; None if it cannot be given and the call draws it
        from its seed."""
        entry = self.policy.loop.traits.entry
        if isinstance(entry, ClockedEntry):
            return None
        if isinstance(entry, PartEntries):
            alone = all(part.output is None and part.size == 1 for part in entry.parts)
            return entry.arguments(self.noise) if alone else None
        try:
            return {"latents": self.latents}
        except ValueError:
            return None

    @cached_property
    def latents(self) -> Tensor:
        """The value of `latents` for which the loop's first state is `noise`, unscaled.

        This is the noise itself, prepare_latents' own output with the noise inside (fixed frames),
        or the noise before it is packed. ValueError if there is no such value.
        """
        draws, loop, shape = RecordedNoise(1.0), self.policy.loop, self.noise.shape
        entry = loop.traits.entry
        assert isinstance(entry, Entry), "states of one tensor"
        steps = self.batch.steps
        if (
            "latents" not in loop.driver.parameters
            or self.policy.pictured(self.conditioning, steps)
            # Z-Image noises the held entries with another draw where it is given `latents`
            or self.policy.held(self.conditioning, steps) is not None
        ):
            raise ValueError(f"{loop.traits.name} does not take latents that are pure noise")
        assert self._seen(None, draws).shape == shape
        if entry.output is None:
            return self.noise
        prepared = loop.driver.prepared(self._call(None))
        outputs = prepared[0] if isinstance(prepared[0], tuple) else (prepared[0],)
        candidates = [entry.fill(outputs[entry.output], self.noise)]
        for drawn in draws.drawn:
            positions = torch.arange(drawn.numel(), dtype=torch.float32).reshape(drawn.shape)
            seen = self._try(positions)
            if seen is not None and bool((seen == seen.round()).all()) and seen.max() < 2**24:
                flat = drawn.clone().flatten()
                flat[seen.flatten().long()] = self.noise.flatten().to(flat)
                candidates.append(flat.reshape(drawn.shape))
        for latents in candidates:
            seen = self._try(latents)
            if seen is not None and torch.equal(seen, self.noise.to(seen)):
                return latents
        raise ValueError(f"{loop.name} takes latents in an unknown form")

    def own(self, unit: float = 0.0) -> tuple[Tensor, Tensor]:
        """(latents, as flow states, and media) of the pipeline's own call.

        With `unit` it starts from latents that differ by it (`nudged`), or steps from such states
        if the call takes no latents.
        """

        def step(real: Any, bound: inspect.BoundArguments, at: StepPlace) -> Any:
            if at.begins and unit and self.given is None:
                x = bound.arguments["sample"]
                if self.policy.schedule(self.batch.steps).clock is not None:
                    x.copy_(nudged(x, unit))  # a part is a view of the state: a scheduler keeps it
                else:
                    bound.arguments["sample"] = nudged(x, unit).to(x)
            return real(*bound.args, **bound.kwargs)

        return self._own_call(step, unit)

    def stepped(self) -> Tensor:
        """Latents with our predictions and first state, but the pipeline's own call and
        scheduler."""
        loop, steps = self.policy.loop, self.batch.steps
        velocity = self.policy.bind(self.conditioning, steps=steps, guidance=self.guidance)
        visits = self.policy.schedule(steps).visits
        clock = self.policy.schedule(steps).clock
        if clock is not None:
            return self._stepped_in_turn(clock, velocity)

        states_and_outputs: list[tuple[Tensor, Tensor]] = []  # a step's states and outputs

        def output_of(
            real: Any, bound: inspect.BoundArguments, at: StepPlace
        ) -> tuple[Tensor, Tensor]:
            """States and outputs of a whole step, for the first of its parts."""
            size = data_size(loop.driver.real)
            sample = self._whole(bound.arguments["sample"], at.before)
            ones = torch.ones_like(sample)
            if "scale_model_input" in dir(real.__self__):
                ones = real.__self__.scale_model_input(ones, bound.arguments["timestep"])
            folded = len(sample) != len(self.rows)  # frames are rows of their own
            shape = self.noise.shape if folded else sample.shape
            sample, ones = sample.reshape(shape), ones.reshape(shape) / size
            sigma = torch.full((len(sample),), visits[at.step])
            if at.step == 0:
                sample = (loop.state(self.first, sigma) / ones).to(sample)
            flow = loop.flow(sample * ones, sigma)
            with torch.no_grad(), patched(self._processors()):
                v = velocity(flow, sigma, self.rows)
            return sample, size * self._prediction(sample * ones, flow, v, sigma)

        def step(real: Any, bound: inspect.BoundArguments, at: StepPlace) -> Any:
            if at.leads:
                states_and_outputs[:] = [output_of(real, bound, at)]
            sample, output = (self._part(whole, at.part) for whole in states_and_outputs[0])
            output = output.to(bound.arguments["model_output"].dtype)
            like = bound.arguments["sample"].shape
            bound.arguments |= {
                "sample": sample.reshape(like),
                "model_output": output.reshape(like),
            }
            return real(*bound.args, **bound.kwargs)

        return self._own_call(step)[0]

    def _stepped_in_turn(self, clock: PartClock, velocity: Velocity) -> Tensor:
        """The same where steps move parts of the state. A part may be a view of the loop's latents,
        of which its scheduler keeps those of earlier steps: so states are written into them."""
        loop, layout, visits = self.policy.loop, self.policy.layout, clock.sigmas
        assert layout is not None, "a clock is that of parts"
        now, outputs = layout.unpack(self.first), list[Tensor]()

        def step(real: Any, bound: inspect.BoundArguments, at: StepPlace) -> Any:
            if at.leads:
                sigma = torch.full((len(self.rows),), visits[at.step])
                with torch.no_grad():
                    v = velocity(layout.pack(now), sigma, self.rows)
                outputs[:] = layout.unpack(loop.traits.sign * clock.own_velocity(v, sigma))
            like, output = bound.arguments["sample"], bound.arguments["model_output"]
            like.copy_(now[at.part].reshape(like.shape))
            bound.arguments["model_output"] = outputs[at.part].reshape(like.shape).to(output.dtype)
            result = real(*bound.args, **bound.kwargs)
            state = result[0] if isinstance(result, tuple) else result.prev_sample
            now[at.part] = state.clone().reshape(now[at.part].shape)  # some loops write into it
            return result

        return self._own_call(step)[0]

    def _processors(self) -> list[Patch]:
        """The networks' attention processors, which a call within a call must leave as they are.
        A loop that reads attention maps (SAG) sets its own, and restores the others at its end
        only."""
        networks = self.policy.loop.driver.denoisers.values()
        attributes_of = [
            (module, vars(module)) for network in networks for module in network.modules()
        ]
        name = "processor"
        return [
            Patch(module, name, attributes[name])
            for module, attributes in attributes_of
            if name in attributes
        ]

    def flowrl(self) -> Tensor:
        """Latents after flowrl's steps."""
        steps, policy = self.batch.steps, self.policy
        velocity = policy.bind(self.conditioning, steps=steps, guidance=self.guidance)
        plans = policy.plain(1)(policy.schedule(steps).sigmas, 0, self.seed)
        (rollout,) = roll(
            policy.fitted(plans, steps),
            velocity,
            Latents(
                policy.shape(steps),
                policy.device,
                begin=lambda _noise, _prompt: self.first,
                held=policy.held(self.conditioning, steps),
                layout=policy.layout,
            ),
            self.rows.tolist(),
            seed=self.seed,
            iteration=0,
        )
        return policy.latents(rollout.x0, steps)

    def media(self, latents: Tensor, *, together: bool = True) -> Tensor:
        """The decoded values, of sound too, with the rows in one call as in the pipeline's own. A
        decoder that draws noise draws other noise for rows that are not `together`."""
        conditioning, steps = self.conditioning, self.batch.steps
        decoded = self.policy.decoded(
            latents, conditioning, steps=steps, guidance=self.guidance, together=together
        )
        return decoded.values

    def _own_call(self, step: StepCall, unit: float = 0.0) -> tuple[Tensor, Tensor]:
        """(latents, media) of the pipeline's own call, with `step` around its scheduler's.

        Uses a copy that shares all modules, so that the pipeline's scheduler stays unchanged.
        """
        twin, states = copy.copy(self.policy.pipe), list[Tensor]()
        driver = self.policy.loop.driver
        scheduler = copy.deepcopy(self.policy.loop.driver.real)
        beside = {name: copy.deepcopy(real) for name, real in driver.real_beside.items()}
        vars(twin).update({MAIN_SCHEDULER: scheduler, **beside})
        layout = self.policy.layout
        ended: dict[int, Tensor] = {}  # of the parts

        def around(kind: Any) -> Callable[..., Any]:
            def stepped(self_: Any, *args: Any, **named: Any) -> Any:
                real = kind.step.__get__(self_)
                at = self._place(states)
                draws = self._step_noise(at.step, at.part)
                with patched(() if draws is None else draws.patches(self_)):
                    result = step(real, inspect.signature(real).bind(*args, **named), at)
                state = result[0] if isinstance(result, tuple) else result.prev_sample
                states.append(state.clone())  # some loops write into it
                ended[at.part] = states[-1]
                return result

            vars(stepped)["__signature__"] = inspect.signature(kind.step)
            return stepped

        for stepper in (scheduler, *beside.values()):
            kind = type(stepper)
            if layout is None:  # Bria's loop asks for the scheduler's class
                vars(stepper)["step"] = MethodType(around(kind), stepper)
            else:  # by its class: a loop of several states steps a copy of it
                stepper.__class__ = type(kind.__name__, (kind,), {"step": around(kind)})
        arguments = self._arguments(self.guidance)
        for name, latents in (self.given or {}).items():
            latents = nudged(latents, unit) if unit else latents
            latents = latents.to(self.policy.loop.start(self.batch.steps).dtype)
            arguments[name] = latents.clone()  # some loops write into it
        if "generator" in self.policy.loop.driver.parameters:
            seed = self.seed if self.given is not None else 0  # 0 as in `Driver`
            arguments["generator"] = torch.Generator().manual_seed(seed)
        # one posterior for each image
        silent = Patch(driver.logger, "disabled", True)  # it warns of states that are given
        memo = () if driver.memo is None else driver.memo.patches()
        with torch.no_grad(), patched((silent, *memo)):
            media = Decoded.of(twin, twin(**arguments)).values
        parts = [ended[part] for part in sorted(ended)]
        last = states[-1] if layout is None else self._packed(parts)
        last = last / data_size(scheduler)
        shape = (len(self.rows), *self.noise.shape[1:])
        last = self._blended(last if last.shape == shape else last.reshape(shape))
        return from_own(layout, last, last.new_zeros(len(last))), media

    def _place(self, states: Sequence[Tensor]) -> StepPlace:
        """The place of the call of a scheduler's step that comes after those with these results."""
        layout, clockwork = self.policy.layout, self.policy.loop.driver.clockwork
        if clockwork is None:
            count = 1 if layout is None else len(layout.names)
            index, part = divmod(len(states), count)
            before = states[-count + 1 :] if count > 1 else []
            return StepPlace(index, part, before, part == 0, index == 0)
        parts_of = clockwork.orders[self.batch.steps].parts
        calls = [(step, part) for step, parts in enumerate(parts_of) for part in parts]
        step, part = calls[len(states)]
        earlier = calls[: len(states)]
        return StepPlace(
            step,
            part,
            before=(),
            leads=step not in [index for index, _ in earlier],
            begins=part not in [index for _, index in earlier],
        )

    def _packed(self, parts: Sequence[Tensor]) -> Tensor:
        """Flat states of parts as a loop steps them, whose rows may be frames or tokens."""
        return Layout.pack([part.reshape(len(self.rows), -1) for part in parts])

    def _blended(self, last: Tensor) -> Tensor:
        """The loop's last state: the result of its last step, with its held entries."""
        held = self.policy.held(self.conditioning, self.batch.steps)
        if held is None:
            return last
        flow = replace(held, end=1.0)
        return flow.put(last, last, self.rows, None)

    def _whole(self, sample: Tensor, other_parts: Sequence[Tensor]) -> Tensor:
        """A step's whole states, from its first part and the others, as the step before left
        them."""
        layout = self.policy.layout
        if layout is None:
            return sample
        return self._packed([sample, *other_parts]) if other_parts else self.first.to(sample)

    def _part(self, whole: Tensor, part: int) -> Tensor:
        layout = self.policy.layout
        return whole if layout is None else layout.unpack(whole)[part]

    def _step_noise(self, step: int, part: int) -> "GivenNoise | None":
        """The noise of flowrl's step if its steps are the scheduler's; otherwise the scheduler
        draws it."""
        if not self.policy.loop.own_sampler:
            return None
        keys = [(self.seed, 0, draw, "step", 0, step, 0) for draw in self.rows.tolist()]
        noise = cpu_noise(keys, self.noise.shape[1:], self.policy.layout)
        return GivenNoise(self._part(noise, part))

    def _prediction(self, state: Tensor, x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
        """The model output that the scheduler interprets as the flow velocity v at flow states x,
        which are the loop's `state`."""
        kind, s = self.policy.loop.traits.kind, per_row(sigma, x)
        if kind in ("flow", "inverted"):
            velocity = velocity_to_own(self.policy.layout, state, v, sigma)
            return self.policy.loop.traits.sign * velocity
        x0, noise = x - s * v, x + (1 - s) * v
        size = per_row(scale(sigma), x)
        of_kind = {"epsilon": noise, "sample": x0}
        of_kind["v_prediction"] = (1 - s) * size * noise - s * size * x0
        return of_kind[kind]

    def _arguments(self, guidance: float | None) -> dict[str, Any]:
        c = self.conditioning
        return self.policy.loop.arguments(c.prompts, self.batch.steps, guidance, c.extras)

    def _call(self, latents: Tensor | None) -> PipelineCall:
        traits = self.policy.loop.traits
        arguments = self._arguments(traits.trial_guidance)
        arguments |= {} if latents is None else {"latents": latents}
        return PipelineCall(arguments, self.conditioning.calls(), stubs=traits.stubs)

    def _seen(self, latents: Tensor | None, draws: RecordedNoise) -> Tensor:
        with torch.no_grad():
            first = self.policy.loop.driver.first(self._call(latents), draws, native_scale=False)
        return first.folded(len(self.rows)).sample

    def _try(self, latents: Tensor) -> Tensor | None:
        try:
            return self._seen(latents, RecordedNoise(1.0))
        except FAILURES as error:
            raise_memory(error)
            return None
