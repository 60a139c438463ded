"""A pipeline's denoising loop as a function: states and prompts in, velocities and media out.

No model family is named here. The pipeline's traits are discovered once by trial calls
(`flowrl.models.diffusers.call.traits.discovery`); everything else follows from them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.clocked import takes_turns
from flowrl.models.diffusers.call.drive.driver import Driver
from flowrl.models.diffusers.call.drive.image_to_image import RecordedNoise, noise_sizes
from flowrl.models.diffusers.call.drive.latents import PipelineCall, Target
from flowrl.models.diffusers.call.drive.patches import patched
from flowrl.models.diffusers.call.drive.received import Received
from flowrl.models.diffusers.call.drive.scheduler_standin import its_own, shown_call
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.inputs.columns import Extra
from flowrl.models.diffusers.call.inputs.conditioning import (
    Conditioning,
    EncodingLayout,
    check_constants,
    flatten,
)
from flowrl.models.diffusers.call.levels.part_schedules import check_shifts, data_sizes
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule, Start, Way
from flowrl.models.diffusers.call.levels.user_levels import UserLevels
from flowrl.models.diffusers.call.results.decoder import Decoded, finite_decoder, sound_form
from flowrl.models.diffusers.call.traits import checks
from flowrl.models.diffusers.call.traits.discovery import (
    SEGMENT,
    TRIAL_GUIDANCE,
    UNGUIDED,
    Encoding,
    Traits,
    discover,
    discover_encoding,
    encoded,
    with_images,
)
from flowrl.models.diffusers.call.traits.missing_texts import MissingTexts
from samplers import Scheduler
from samplers.adapt import flow_velocity, from_vp, scale, to_vp
from samplers.clock import PartClock
from samplers.host import on_host, sent
from samplers.layout import Layout
from samplers.part_levels import (
    from_own,
    own_level,
    to_own,
    velocity_from_own,
)

LEVEL_STEPS = 8  # of a trial that shows the levels of parts


def _ends(scheduler: Any, times: Sequence[Any]) -> bool:
    """Whether a loop visits the last time of its scheduler's list."""
    last = torch.as_tensor(times[-1]).flatten()[0]
    return bool(last.cpu() == vars(scheduler)["timesteps"][-1].cpu())


class Loop:
    """Calls the loop of one pipeline. UserError, with the reason, for a pipeline that cannot be
    driven.

    `traits` is a frozen record. It is replaced when prompts first have new arguments of their own,
    and when the pipeline's own call shows more traits (see `Traits`).
    """

    def __init__(
        self,
        pipe: Any,
        call: Mapping[str, Any],
        levels: UserLevels | None = None,
        *,
        own_sampler: bool = False,
    ) -> None:
        checks.refuse_pipeline(pipe)
        self.pipe, self.levels = pipe, levels
        self.driver = Driver(pipe, checks.scheduler_of(pipe, levels))
        self.traits: Traits = discover(self.driver, call, levels)
        if not columns.shaping(self.driver.parameters):
            self.driver.keep_no_images()
        self.name, self.call = self.traits.name, self.traits.call
        self.guidance = self.traits.guidance
        self.missing = MissingTexts(self.driver)
        self._columns = self.driver.parameters.keys() - {"prompt"}  # that rows may fill
        self.own_kernels: dict[int, Scheduler] = {}  # by number of steps
        self.own_sampler = own_sampler  # whether samples are made by the scheduler's own steps
        self._starts: dict[int, Start] = {}
        self.noise_alone: dict[tuple[tuple[str, ...], int], bool] = {}  # in first states, by images
        self.image_shapes: dict[tuple[Any, ...], tuple[int, ...]] = {}  # of latents, by images
        self.several_images = set[tuple[Any, ...]]()  # forms of several in a row that it takes
        self.own_shape: tuple[int, ...] | None = None  # of them, if only images determine it

    def arguments(
        self,
        prompts: Sequence[str],
        steps: int,
        guidance: float | None,
        extras: Sequence[Extra] = (),
    ) -> dict[str, Any]:
        """Arguments of the pipeline's own call that make one sample per prompt."""
        if extras:
            self._encoding(extras)
        return self.traits.arguments(prompts, steps, guidance, extras)

    def _encoding(self, extras: Sequence[Extra]) -> Encoding:
        """The form of encodings for rows with the same own arguments as the first row."""
        extra: Extra = extras[0] if extras else {}
        if tuple(extra) not in self.traits.encodings:
            encoding = discover_encoding(self.driver, self.traits, extra)
            self.traits = self.traits.knowing(extra, encoding)
        return self.traits.encodings[tuple(extra)]

    def encode(self, prompts: Sequence[str], extras: Sequence[Extra]) -> Conditioning:
        """Encode prompts in one call. Rows of `extras`, if given, share their images."""
        with its_own(self.name, self.call):
            form = self._encoding(extras)
            whole = self._cut(form.layout, prompts, extras, TRIAL_GUIDANCE)
            whole = replace(whole, guided_only=form.guided_only)
            if form.plain is None:
                return whole
            return replace(whole, plain=self._cut(form.plain, prompts, extras, UNGUIDED))

    def _cut(
        self, layout: EncodingLayout, prompts: Sequence[str], extras: Sequence[Extra], scale: float
    ) -> Conditioning:
        if self.traits.single:
            rows = [([p], extras[i : i + 1]) for i, p in enumerate(prompts)]
            encodings = [encoded(self.driver, self.traits, *row, scale) for row in rows]
            return Conditioning(layout, (encodings,), tuple(prompts), tuple(extras))
        counts, values = flatten(encoded(self.driver, self.traits, prompts, extras, scale))
        assert counts == layout.counts
        check_constants(layout, values, self.name)
        return Conditioning(layout, values, tuple(prompts), tuple(extras))

    def extras(
        self, meta: Sequence[Mapping[str, Any]], prompts: Sequence[str]
    ) -> tuple[Extra, ...]:
        """Arguments of each prompt: columns of its row, and images that all prompts share.

        Raises UserError if a required image is missing, and for a text that only other rows have
        and that cannot be replaced.
        """
        row_extras: Sequence[Extra] = ()
        if not self._columns.isdisjoint(set[str]().union(*meta)):
            row_extras = self.row_extras(meta)
        if row_extras:
            triples = zip(row_extras, prompts, columns.places(meta), strict=True)
            row_extras = [self.missing.filled(self.traits, *row) for row in triples]
        rows = row_extras or ({},) * len(prompts)
        if rows and (rows[0] or self.traits.shared):
            return tuple({**self.traits.shared, **extra} for extra in rows)
        if rows and self.traits.required:
            names = " and ".join(self.traits.required)
            raise UserError(f"{self.name} needs {names}: add a prompt column, or set it in `call`")
        return ()

    def row_extras(self, meta: Sequence[Mapping[str, Any]]) -> tuple[Extra, ...]:
        """Arguments that columns of the prompts' rows fill, as they are read from files."""
        form = columns.GivenForm(sound_form(self.pipe), self.call.get("num_frames"))
        return columns.extras(meta, self.driver.parameters, form)

    def tried(self, extras: Sequence[Extra]) -> tuple[Extra, ...]:
        """Rows that have the first prompt's images and sounds, and each its own texts. Without any:
        two rows of placeholders for those that the pipeline requires."""
        if not extras:
            return (self.traits.required,) * 2 if self.traits.required else ()
        names = [*columns.images(extras[0]), *columns.sounds(extras[0])]
        shared = {name: extras[0][name] for name in names}
        return tuple({**extra, **shared} for extra in extras)

    def with_call(self, call: Mapping[str, Any]) -> "Loop":
        """The loop of the same pipeline with other arguments of its call."""
        return Loop(self.pipe, call, self.levels, own_sampler=self.own_sampler)

    def with_own_steps(self) -> "Loop":
        """The loop of the same pipeline, whose samples are made by the scheduler's own steps."""
        return Loop(self.pipe, self.call, self.levels, own_sampler=True)

    def shaped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of latents that images determine alone: the first one that is named stays."""
        self.own_shape = self.own_shape or shape
        return self.own_shape

    def show(self, **shown: Any) -> None:
        """Note traits that the pipeline's own call has shown: see `Traits.showing`."""
        self.traits = self.traits.showing(**shown)

    @property
    def sliced(self) -> bool | None:
        """Whether the decoder takes one sample at a time; None if it has no such switch."""
        vae = vars(self.pipe).get("vae")
        return None if vae is None else vars(vae).get("use_slicing")

    def slice_decoder(self) -> None:
        """Let the decoder take one sample at a time."""
        self.pipe.vae.use_slicing = True

    def fit(self, images: Extra) -> None:
        """Set the shape of the states from these images, if no argument of the call sets it."""
        self.driver.forget_clockwork()
        with its_own(self.name, self.call):
            self.traits = with_images(self.driver, self.traits, images)
        self._starts.clear()
        self.own_kernels.clear()
        self.own_shape = self.start(self.traits.steps).shape

    def start(self, steps: int) -> Start:
        """Schedule and form of the first states, found once per number of steps."""
        if steps not in self._starts:
            call, draws = self.trial(self.traits.blank, steps), RecordedNoise(1.0)
            with torch.no_grad(), its_own(self.name, self.call):
                seen = (
                    self.driver.first(call, RecordedNoise(1.0), native_scale=True).folded(1).state
                )
                visited = self.driver.visited(call, draws)
                if self._takes_turns(visited, call):
                    self._starts[steps] = self._clocked_start(steps)
                    return self._starts[steps]
            assert seen is not None
            first, times = visited[0].folded(1).sample, [step.timestep for step in visited]
            schedule = PipelineSchedule.of(
                self.driver.scheduler, times, self.traits.kind, self.name
            )
            schedule = replace(schedule, beside=self._beside(visited))
            counted = steps + 1 - self._counts_end(steps)
            if len(schedule.sigmas) != counted and "strength" not in self.driver.parameters:
                raise UserError(
                    f"{self.name} visits the levels {schedule.sigmas} in {steps} steps: use "
                    "another scheduler, such as FlowMatchEulerDiscreteScheduler or DDIMScheduler"
                )
            if self.levels is not None:
                self.levels.check(schedule, steps, self.name)
            drawn = draws.drawn
            if self.driver.layout is not None:  # each part draws its own
                drawn = [torch.cat([noise.flatten() for noise in drawn])]
            pipeline_noise, size = noise_sizes(first, seen, drawn)
            self.driver.cut_behind(int(schedule.trig and not _ends(self.driver.scheduler, times)))
            if schedule.preserving:
                size /= scale(torch.tensor(schedule.sigmas[:1], dtype=torch.float64)).item()
            if schedule.beside:
                check_shifts(schedule, self.driver.steppers, self._data_sizes, self.name)
            self._starts[steps] = Start(
                schedule,
                shape=tuple(first.shape[1:]),
                dtype=first.dtype,
                device=first.device,
                noise=pipeline_noise * size,
                scale=size,
            )
        return self._starts[steps]

    def _takes_turns(self, visited: Sequence[Received], call: PipelineCall) -> bool:
        """Whether the loop's steps move some parts of its state, which then have entries.

        Where such parts enter nowhere, the checks of loops of one state say what is wrong.
        """
        if self.driver.clockwork is not None:
            return True
        counts = self.driver.counts if self.traits.stubs else []
        if self.driver.layout is not None or not takes_turns(visited, counts):
            return False
        try:
            entry = self.driver.find_clockwork(call)
        except UserError:
            return False
        self.traits = replace(self.traits, entry=entry)
        return True

    def _clocked_start(self, steps: int) -> Start:
        """The same for a state whose parts move in different steps."""
        if not self.flow_matching:
            raise UserError(
                f"{self.name} steps parts of its state in turn, but its model is no flow: parts "
                "have levels of their own in flows alone"
            )
        call, draws = self.trial(self.traits.blank, steps), RecordedNoise(1.0)
        order = self.driver.find_order(replace(call, entry=self.traits.entry))
        clockwork = self.driver.clockwork
        assert clockwork is not None, "found before"
        visited, parts = self.driver.visited(call, draws), []
        layout, scheduler = clockwork.layout, self.driver.scheduler
        for part in range(len(layout.names)):
            times = [
                step.times[moved.index(part)]
                for step, moved in zip(visited, order.parts, strict=True)
                if part in moved
            ]
            parts.append(PipelineSchedule.of(scheduler, times, self.traits.kind, self.name))
            if len(times) != steps or len(parts[-1].sigmas) != steps + 1:
                raise UserError(
                    f"{self.name} steps {layout.names[part]} {len(times)} times in {steps} steps, "
                    f"at the levels {parts[-1].sigmas}: every part must take each step once"
                )
        if self.levels is not None:
            self.levels.check(parts[0], steps, self.name)
        first, sizes = visited[0].sample, layout.sizes
        noise, _ = noise_sizes(first, first, [torch.cat([of.flatten() for of in draws.drawn])])
        return Start(
            PipelineSchedule.clocked(parts, sizes, order.parts),
            shape=(layout.size,),
            dtype=first.dtype,
            device=first.device,
            noise=noise,
        )

    def trial(self, conditioning: Conditioning, steps: int) -> PipelineCall:
        """A call in which only the states matter."""
        if conditioning.extras:
            self._encoding(conditioning.extras)
        return self.traits.trial_call(conditioning, steps)

    def first(self, conditioning: Conditioning, steps: int) -> Tensor:
        """First states [n *d], unscaled, for given noise of the pipeline's own call."""
        if self.traits.single and len(conditioning) > 1:
            rows = range(len(conditioning))
            return torch.cat([self.first(conditioning.take([i]), steps) for i in rows])
        call = self.trial(conditioning, steps)
        with torch.no_grad(), its_own(self.name, self.call):
            if self.driver.clockwork is not None:  # the first step may move a part alone
                return self.driver.visited(call, RecordedNoise(1.0))[0].sample
            return self.driver.received(call, None).folded(len(conditioning)).sample

    def first_shape(self, conditioning: Conditioning) -> tuple[int, ...]:
        """The shape of a row's first states, which its images may set; (d,) of several segments of
        a video, whose states a loop makes one after the other."""
        steps = self.traits.steps
        if SEGMENT not in self.driver.parameters:
            return tuple(self.first(conditioning, steps).shape[1:])
        call = self.trial(conditioning, steps)
        with its_own(self.name, self.call):
            calls = self.driver.step_calls(call)
        shape, segments = tuple(calls[0].folded(1).sample.shape[1:]), len(calls) // steps
        return shape if segments == 1 else (segments * math.prod(shape),)

    @property
    def flow_matching(self) -> bool:
        """Whether the model's own states are a flow's, not those of a diffusion process."""
        return self.traits.kind in ("flow", "inverted")

    @property
    def layout(self) -> Layout | None:
        """The parts of flow states, with the sizes of their data; None for states of one tensor."""
        if self.driver.clockwork is not None:
            return self.driver.clockwork.layout
        layout = self.driver.layout
        if layout is None or not self.driver.beside:
            return layout
        return replace(layout, data=self._data_sizes)

    @cached_property
    def _data_sizes(self) -> tuple[float, ...]:
        """Sizes of the parts' data in flow states, where some have a scheduler of their own."""
        call, draws = self.trial(self.traits.blank, LEVEL_STEPS), RecordedNoise(1.0)
        with torch.no_grad(), its_own(self.name, self.call):
            visited = self.driver.visited(call, draws)
        times = [step.timestep for step in visited]
        schedule = PipelineSchedule.of(self.driver.scheduler, times, self.traits.kind, self.name)
        schedule = replace(schedule, beside=self._beside(visited))
        return data_sizes(schedule, self.driver.steppers, self.name)

    def _beside(self, visited: Sequence[Received]) -> dict[str, PipelineSchedule]:
        """Schedules of the schedulers beside the main one that step parts, after a call."""
        kind, schedules = self.traits.kind, dict[str, PipelineSchedule]()
        for part, name in enumerate(self.driver.steppers):
            scheduler = self.driver.beside.get(name)
            if scheduler is not None:
                times = [step.times[part] for step in visited]
                schedules[name] = PipelineSchedule.of(scheduler, times, kind, self.name)
        return schedules

    def _counts_end(self, steps: int) -> bool:
        """Whether a number of steps, whose lists are set, counts the last level too, at which no
        network is called (MiniMax-H3)."""
        return len(vars(self.driver.scheduler)["timesteps"]) == steps - 1

    def state(self, x: Tensor, sigma: Tensor) -> Tensor:
        """States that the denoiser receives for flow states x [n *d] at sigma [n]."""
        if self.flow_matching:
            return to_own(self.layout, x, sigma)
        return to_vp(x, sigma.to(x.device))

    def flow(self, state: Tensor, sigma: Tensor) -> Tensor:
        """Flow states for states [n *d] that the denoiser receives at sigma [n]."""
        if self.flow_matching:
            return from_own(self.layout, state, sigma)
        return from_vp(state, sigma.to(state.device))

    def latents(self, x: Tensor, steps: int) -> Tensor:
        """Latents to decode, for flow states x [n *d] at the schedule's last level."""
        last = self.start(steps).schedule.sigmas[-1]
        return x if last == 0 else to_vp(x, torch.full((len(x),), last, device=x.device))

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, way: Way) -> Tensor:
        """Velocities v [n *d] at flow states x [n *d], sigma [n]; rows share their images, or have
        images of one size if `way` allows it."""
        state, levels = self.state(x, sigma), on_host(sigma)
        output, clock = (
            self.received(state, levels, conditioning, way).output,
            self._clock(way.steps),
        )
        return self.read(state, output, sigma, clock=clock)

    def _clock(self, steps: int) -> PartClock | None:
        return self.start(steps).schedule.clock

    def read(
        self,
        state: Tensor,
        output: Tensor,
        sigma: Tensor,
        sign: int = 1,
        clock: PartClock | None = None,
    ) -> Tensor:
        """Convert the model output of a step at a loop state to the flow's velocity; with `sign` -1
        to that of the opposite output of a flow, or to the opposite velocity. `clock` is the
        schedule's."""
        kind = self.traits.kind
        if kind in ("flow", "inverted"):
            v = output if sign * self.traits.sign > 0 else -output
            if clock is not None:
                return clock.velocity(v, sigma)
            return velocity_from_own(self.layout, state.to(v.device), v, sigma)
        if output.shape[1] == 2 * state.shape[1]:  # a learned variance comes behind
            output = output[:, : state.shape[1]]
        v = flow_velocity(kind, state.to(output.device), output, sigma.to(output.device))
        return v if sign > 0 else -v

    def data(self, x: Tensor) -> Tensor:
        """Latents of the loop's own last state, for flow states x [n *d] at level 0."""
        return to_own(self.layout, x, x.new_zeros(len(x)))

    def received(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, way: Way) -> Received:
        """Arguments of `scheduler.step` at these states, in one call if possible."""
        if self.traits.single and len(x) > 1:
            rows = [slice(i, i + 1) for i in range(len(x))]
            parts = [self.received(x[i], sigma[i], conditioning.take([i.start]), way) for i in rows]
            return Received.joined(parts)
        start = self.start(way.steps)
        places = start.schedule.index(sigma)
        if way.forward:
            index = set(places.tolist())
            if len(index) != 1 or -1 in index:
                raise UserError(
                    f"{self.name} with {shown_call(self.call)} depends on the step's index: "
                    f"velocities exist only at its own {way.steps} sigmas, one per call, not at "
                    f"{sigma.tolist()}"
                )
            target = Target(torch.empty(0), start.schedule.first_call(index.pop()))
        else:
            times, device = start.schedule.times(sigma), start.device
            same = bool((times == times[0]).all())  # asked on the CPU, where they are
            timesteps = sent(times[:1], device)[0] if same else sent(times, device)
            levels = start.schedule.levels_of(sigma) if way.levels else None
            if levels is not None:
                levels = sent(levels[:1], device)[0] if same else sent(levels, device)
            target = Target(timesteps, levels=levels, beside=self._times_beside(start, sigma, same))
        call = self._at(x, conditioning, way)
        if not places.any():  # all at the first level
            call = replace(call, held=None)
        seen = self.driver.received(call, target)
        whole = len(seen.output) == len(seen.sample) == len(x)
        return seen if whole else seen.folded(len(x))

    def _times_beside(self, start: Start, sigma: Tensor, same: bool) -> dict[str, Tensor]:
        """Times of the schedulers beside the main one at these levels of the state: all of them, or
        one where they are the same."""
        by_scheduler = dict[str, Tensor]()
        if not start.schedule.beside:
            return by_scheduler
        places, levels = start.schedule.index(sigma), sigma.detach().cpu()
        for name, size in zip(self.driver.steppers, self._data_sizes, strict=True):
            part = start.schedule.beside.get(name)
            if part is not None:
                times = part.times(own_level(levels, size), places)
                by_scheduler[name] = (
                    sent(times[:1], start.device)[0] if same else sent(times, start.device)
                )
        return by_scheduler

    def decode(
        self, x0: Tensor, conditioning: Conditioning, way: Way, graded: bool = False
    ) -> Decoded:
        """Decode x0 [n *d] to [n 3 h w] or [n f 3 h w], float32, and sound if there is any; rows
        share their images. `graded` keeps the gradient with respect to x0 if the pipeline has
        one."""
        if self.traits.single and len(x0) > 1:
            row_pairs = [(x0[[i]], conditioning.take([i])) for i in range(len(x0))]
            return Decoded.joined([self.decode(*row, way, graded) for row in row_pairs])
        call = self._at(x0 if graded else x0.detach(), conditioning, way)
        with patched(finite_decoder(self.pipe)):
            loops = way.decodes_in_loop
            result = self.driver.finished(call, decodes_in_loop=loops, graded=graded)
        return Decoded.of(self.pipe, result, double=graded)

    def _at(self, x: Tensor, conditioning: Conditioning, way: Way) -> PipelineCall:
        start, traits, guidance = self.start(way.steps), self.traits, way.guidance
        assert len(x) == len(conditioning)
        arguments = self.arguments(conditioning.prompts, way.steps, guidance, conditioning.extras)
        calls = conditioning.calls(guided=guidance is None or guidance > UNGUIDED)
        x = x.to(start.device, start.dtype)
        return PipelineCall(arguments, calls, x, traits.entry, traits.stubs, traits.later)
