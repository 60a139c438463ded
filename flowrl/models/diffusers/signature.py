"""A pipeline's denoising loop from outside: what goes in, and what a step would integrate.

Nothing here knows a family. What a pipeline needs (an image, a packed state, a scaled input) is
found by trying it out once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers import checks, columns
from flowrl.models.diffusers.columns import Extra
from flowrl.models.diffusers.conditioning import (
    SHORT_PROMPT,
    SINGLE,
    Calls,
    Conditioning,
    EncodingLayout,
    check_constants,
    flatten,
    learn,
    same_form,
)
from flowrl.models.diffusers.driver import Driver, PipelineCall, Target
from flowrl.models.diffusers.image_to_image import CleanPart, RecordedNoise, clean_part, noise_sizes
from flowrl.models.diffusers.latents import Entry
from flowrl.models.diffusers.proof_checks import media_of
from flowrl.models.diffusers.schedule import ModelOutput, PipelineSchedule, Start, Way
from flowrl.models.diffusers.scheduler_standin import Received
from samplers.adapt import flow_velocity, scale, to_vp

PROBE_SIZE = 64  # pixels of an image for trying out, where the call gives no size
PROBE_FRAMES = 9  # of a video for trying out, likewise
MANY = 20  # steps of a call that ends before the first
FLOAT = torch.float32
TRIED = 2.0  # guidance of probing calls: with negative prompts
UNGUIDED = 1.0


class Loop:
    """Raises UserError, with the reason, for a pipeline that cannot be driven."""

    def __init__(self, pipe: Any, call: Mapping[str, Any]) -> None:
        self.pipe = pipe
        self.name = type(pipe).__name__
        checks.refuse_pipeline(pipe)
        self.driver = Driver(pipe)
        self.kind: ModelOutput = checks.prediction(pipe.scheduler, self.name)
        self.sign = -1 if self.kind == "inverted" else 1  # of a flow's output; the replay checks it
        denoisers = tuple(self.driver.denoisers.values())
        self.guidance = checks.guidance_argument(self.driver.parameters, denoisers)
        given = checks.arguments(self.name, call, self.driver.parameters, self.guidance)
        self.shared = columns.shared_images(given)
        self.call = {k: v for k, v in given.items() if not columns.images([k])}
        self._layouts: dict[tuple[str, ...], tuple[EncodingLayout, bool]] = {}
        self._plain: dict[tuple[str, ...], EncodingLayout] = {}  # without guidance, where another
        self._probe = TRIED  # guidance of probing calls
        self._starts: dict[int, Start] = {}
        self._entry: Entry | None = None
        self.form = "pt"  # of media; "np" where a pipeline scales tensors otherwise than images
        self.single = False  # whether it makes one prompt a call
        self._sample = self._needed()
        self._blank = self.encode([SHORT_PROMPT], (self._sample,) if self._sample else ())

    def arguments(
        self,
        prompts: Sequence[str],
        steps: int,
        guidance: float | None,
        extras: Sequence[Extra] = (),
    ) -> dict[str, Any]:
        """Arguments of the pipeline's own call for a sample of each prompt."""
        given = dict(self.call)
        for name, value in given.items():
            if columns.TEXT_COLUMNS.fullmatch(name) and isinstance(value, str):
                given[name] = [value] * len(prompts)
        if extras:
            assert len(extras) == len(prompts)
            given |= columns.merged_call(extras, each=self._layout(extras[0])[1])
        given |= {"prompt": list(prompts), "num_inference_steps": steps}
        given |= {"output_type": self.form, "return_dict": False}
        if self.single:
            texts = [name for name in given if columns.TEXT_COLUMNS.fullmatch(name) and given[name]]
            given |= {name: given[name][0] for name in texts}
        if guidance is not None:
            if self.guidance is None:
                raise UserError(f"{self.name} takes no guidance: leave guidance out (null)")
            given[self.guidance] = float(guidance)
        return given

    def encode(self, prompts: Sequence[str], extras: Sequence[Extra]) -> Conditioning:
        """In one call. Rows of `extras`, if there are any, have the same images."""
        with checks.its_own(self.name, self.call):
            layout, _ = self._layout(extras[0] if extras else {})
            whole = self._cut(layout, prompts, extras)
            layout = self._plain.get(tuple(extras[0]) if extras else ())
            if layout is None:
                return whole
            with self._unguided():
                return replace(whole, plain=self._cut(layout, prompts, extras))

    def _cut(
        self, layout: EncodingLayout, prompts: Sequence[str], extras: Sequence[Extra]
    ) -> Conditioning:
        if self.single:
            each = [self._encoded([p], extras[i : i + 1]) for i, p in enumerate(prompts)]
            return Conditioning(layout, (each,), tuple(prompts), tuple(extras))
        counts, values = flatten(self._encoded(prompts, extras))
        assert counts == layout.counts
        check_constants(layout, values, self.name)
        return Conditioning(layout, values, tuple(prompts), tuple(extras))

    @contextmanager
    def _unguided(self) -> Iterator[None]:
        self._probe = UNGUIDED
        try:
            yield
        finally:
            self._probe = TRIED

    def extras(self, meta: Sequence[Mapping[str, Any]], rows: int) -> tuple[Extra, ...]:
        """Return each prompt's own arguments: columns of its row, and the images that all share.

        Raises UserError where an image is missing that the pipeline cannot go without.
        """
        found = columns.extras(meta, self.driver.parameters) or ({},) * rows
        whole = tuple({**self.shared, **extra} for extra in found)
        if rows and not whole[0] and self._sample:
            names = " and ".join(self._sample)
            raise UserError(f"{self.name} needs {names}: give a column of the prompts, or `call`")
        return whole if rows and whole[0] else ()

    @property
    def pictures(self) -> tuple[str, ...]:
        """The arguments that it cannot go without."""
        return tuple(self._sample)

    def tried(self, extras: Sequence[Extra]) -> tuple[Extra, ...]:
        """Two rows: the first one's images, own texts. Without any, those for trying out."""
        if not extras:
            return (self._sample, self._sample) if self._sample else ()
        pictures = {name: extras[0][name] for name in columns.images(extras[0])}
        return tuple({**extra, **pictures} for extra in extras)

    def start(self, steps: int) -> Start:
        if steps not in self._starts:
            blank = self._blank
            given = self.arguments(blank.prompts, steps, self._guided, blank.extras)
            call = PipelineCall(given, blank.calls())
            with torch.no_grad(), checks.its_own(self.name, self.call):
                draws = RecordedNoise(1.0)
                first = self.driver.first(call, draws, own_scale=False).folded(1).sample
                seen = self.driver.first(call, RecordedNoise(1.0), own_scale=True).folded(1).state
                assert seen is not None
                shape = tuple(first.shape[1:])
                if self._entry is None:
                    self._entry = self.driver.learned(call, shape)
                visited = self.driver.visited(call)
            schedule = PipelineSchedule.of(self.driver.scheduler, visited, self.kind, self.name)
            if len(schedule.sigmas) != steps + 1 and "strength" not in self.driver.parameters:
                raise UserError(
                    f"{self.name} visits the levels {schedule.sigmas} in {steps} steps: use "
                    "another scheduler, such as FlowMatchEulerDiscreteScheduler or DDIMScheduler"
                )
            own, size = noise_sizes(first, seen, draws.drawn)
            if schedule.levels is not None:
                size /= scale(torch.tensor(schedule.sigmas[:1], dtype=torch.float64)).item()
            sizes = own * size, size
            self._starts[steps] = Start(schedule, shape, first.dtype, first.device, *sizes)
        return self._starts[steps]

    def first(self, conditioning: Conditioning, steps: int) -> Tensor:
        """The loop's first states [n *d], unscaled, of the noise that its own call draws."""
        if self.single and len(conditioning) > 1:
            rows = range(len(conditioning))
            return torch.cat([self.first(conditioning.take([i]), steps) for i in rows])
        given = self.arguments(conditioning.prompts, steps, self._guided, conditioning.extras)
        call = PipelineCall(given, conditioning.calls())
        with torch.no_grad(), checks.its_own(self.name, self.call):
            return self.driver.received(call, None).folded(len(conditioning)).sample

    def first_flow(self, conditioning: Conditioning, steps: int) -> Tensor:
        """The same as flow states, as our samplers begin with that noise."""
        start, part = self.start(steps), self.picture(conditioning, steps)
        factor = start.scale if part is None else part.scale
        return factor * self.first(conditioning, steps).to(torch.promote_types(start.dtype, FLOAT))

    def state(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The loop's states, as its denoiser sees them, of flow states x [n *d] at sigma [n]."""
        return x if self.kind in ("flow", "inverted") else to_vp(x, sigma.to(x.device))

    def latents(self, x: Tensor, steps: int) -> Tensor:
        """Return the latents to decode, for flow states x [n *d] at the schedule's last level."""
        last = self.start(steps).schedule.sigmas[-1]
        return x if last == 0 else to_vp(x, torch.full((len(x),), last, device=x.device))

    def follows_pictures(self, extra: Extra) -> bool:
        """Whether a wider image makes latents of another shape; never where a size is given."""
        names = columns.images(extra)
        sized = {"height", "width"} <= set(self.call)
        if sized or not names or not {"height", "width"} <= set(self.driver.parameters):
            return False
        shapes = []
        for factor in (1, 2):
            wide = {**extra, **{name: columns.widened(extra[name], factor) for name in names}}
            steps = MANY if "strength" in self.driver.parameters else 2
            shapes.append(self.first(self.encode([SHORT_PROMPT], (wide,)), steps).shape)
        return shapes[0] != shapes[1]

    def picture(self, conditioning: Conditioning, steps: int) -> CleanPart | None:
        """The first states [n *d] without noise, as flow states; None where noise is all."""
        if not conditioning.extras or not columns.images(conditioning.extras[0]):
            return None
        sigma, parts, scale = self.start(steps).schedule.sigmas[0], {}, 1.0
        for rows in columns.by_image(conditioning.extras):
            one = conditioning.take(rows[:1])
            given = self.arguments(one.prompts, steps, self._guided, one.extras)
            call = PipelineCall(given, one.calls())
            with torch.no_grad(), checks.its_own(self.name, self.call):
                made = clean_part(lambda draws, c=call: self._begun(c, draws), sigma, self.name)
            if made is None:  # what begins at noise alone does so for every image
                return None
            scale = made.scale
            parts |= dict.fromkeys(rows, made.state)
        return CleanPart(torch.cat([parts[i] for i in range(len(conditioning))]), scale)

    def _begun(self, call: PipelineCall, draws: RecordedNoise) -> Tensor:
        state = self.driver.first(call, draws, own_scale=False).sample
        return state if len(state) == 1 else state[None]

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, way: Way) -> Tensor:
        """Return v [n *d] at flow states x [n *d], sigma [n]; rows have the same images."""
        if self.kind in ("flow", "inverted"):
            output = self.received(x, sigma, conditioning, way).output
            return output if self.sign > 0 else -output
        state = self.state(x, sigma)
        return self.read(state, self.received(state, sigma, conditioning, way).output, sigma)

    def read(self, state: Tensor, output: Tensor, sigma: Tensor) -> Tensor:
        """The flow's velocity in what a step receives at a state of the loop."""
        if self.kind in ("flow", "inverted"):
            return output if self.sign > 0 else -output
        if output.shape[1] == 2 * state.shape[1]:  # a learned variance comes behind
            output = output[:, : state.shape[1]]
        return flow_velocity(self.kind, state.to(output.device), output, sigma.to(output.device))

    def received(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, way: Way) -> Received:
        """Return what `scheduler.step` receives at these states, in one call if possible."""
        if self.single and len(x) > 1:
            rows = [slice(i, i + 1) for i in range(len(x))]
            parts = [self.received(x[i], sigma[i], conditioning.take([i.start]), way) for i in rows]
            return Received.joined(parts)
        start = self.start(way.steps)
        if way.forward:
            index = set(start.schedule.index(sigma).tolist())
            if len(index) != 1 or -1 in index:
                raise UserError(
                    f"{self.name} with {self.call} depends on the step's index: it has velocities "
                    f"at one of its own {way.steps} sigmas at a time, not at {sigma.tolist()}"
                )
            target = Target(torch.empty(0), start.schedule.place(index.pop()))
        else:
            times = start.schedule.times(sigma).to(start.device)
            target = Target(times[0] if bool((times == times[0]).all()) else times)
        call = self._at(x, conditioning, way.steps, way.guidance)
        return self.driver.received(call, target).folded(len(x))

    def decode(self, x0: Tensor, conditioning: Conditioning, way: Way) -> Tensor:
        """x0 [n *d] -> [n 3 h w] or [n f 3 h w], float32; rows have the same images."""
        if self.single and len(x0) > 1:
            rows = range(len(x0))
            return torch.cat([self.decode(x0[[i]], conditioning.take([i]), way) for i in rows])
        call = self._at(x0.detach(), conditioning, way.steps, way.guidance)
        return media_of(self.driver.finished(call, through=way.through)[0])

    def record(
        self, prompts: Sequence[str], extras: Sequence[Extra], steps: int, guidance: float | None
    ) -> tuple[list[Received], Tensor, bool]:
        """The pipeline's own call as a user would make it.

        Its steps, its media, and whether its scheduler's step draws no noise.
        """
        if self.single and len(prompts) > 1:
            each = [
                self.record([p], extras[i : i + 1], steps, guidance) for i, p in enumerate(prompts)
            ]
            records, media, repeatable = zip(*each, strict=True)
            joined = [Received.joined(step) for step in zip(*records, strict=True)]
            return joined, torch.cat(media), all(repeatable)
        with checks.its_own(self.name, self.call):
            given = self.arguments(prompts, steps, guidance, extras)
            try:
                records, result, repeatable = self.driver.recorded(given)
                media = media_of(result[0])
            except torch.OutOfMemoryError:
                raise
            except checks.FAILURES:
                if len(prompts) < 2:
                    raise
                self._split_rows()
                return self.record(prompts, extras, steps, guidance)
            return [r.folded(len(prompts)) for r in records], media, repeatable

    def _split_rows(self) -> None:
        """Fall back to one row per call: the decoder (HunyuanVideo 1.5), else the call."""
        vae = vars(self.pipe).get("vae")
        if vae is not None and vars(vae).get("use_slicing") is False:
            vae.use_slicing = True
        else:
            self.single = True
            self._layouts.clear()
            self._plain.clear()

    def _at(
        self, x: Tensor, conditioning: Conditioning, steps: int, guidance: float | None
    ) -> PipelineCall:
        start = self.start(steps)
        assert self._entry is not None
        assert len(x) == len(conditioning)
        given = self.arguments(conditioning.prompts, steps, guidance, conditioning.extras)
        x = x.to(start.device, start.dtype)
        guided = guidance is None or guidance > 1
        return PipelineCall(given, conditioning.calls(guided=guided), x, self._entry)

    def _encoded(self, prompts: Sequence[str], extras: Sequence[Extra]) -> Calls:
        return self.driver.encoded(self._tried(prompts, extras))

    def _tried(self, prompts: Sequence[str], extras: Sequence[Extra]) -> dict[str, Any]:
        """Arguments of a call that ends before its first step."""
        # a strength leaves a part of the steps, which must not be none
        steps = MANY if "strength" in self.driver.parameters else 2
        return self.arguments(prompts, steps, self._guided, extras)

    @property
    def _guided(self) -> float | None:
        """Some cannot be called without any guidance (Ideogram 4)."""
        return None if self.guidance is None else self._probe

    def _layout(self, extra: Extra) -> tuple[EncodingLayout, bool]:
        """Return the layout of encodings, and whether an image is passed once per row."""
        names = tuple(extra)
        if names not in self._layouts:
            reasons: list[Exception] = []
            for each in (False, True) if columns.images(names) else (False,):
                self._layouts[names] = SINGLE, each  # for the arguments of the probes
                try:
                    self._layouts[names] = self._learned(extra), each
                    self._learn_unguided(extra)
                    return self._layouts[names]
                except torch.OutOfMemoryError:
                    raise
                except checks.FAILURES as error:
                    reasons.append(error)
            del self._layouts[names]
            raise reasons[0]
        return self._layouts[names]

    def _learned(self, extra: Extra) -> EncodingLayout:
        """Probe the encoder, and whether the denoiser takes two rows.

        Every text argument takes the probes' lengths: a mask may be left out where none differ.
        """
        texts = [name for name in extra if columns.TEXT_COLUMNS.fullmatch(name)]

        def encode(prompts: Sequence[str]) -> Calls:
            rows = [{**extra, **dict.fromkeys(texts, prompt)} for prompt in prompts]
            return self._encoded(prompts, rows if extra else ())

        layout = SINGLE if self.single else learn(encode, self.name)
        if self._probe == UNGUIDED:
            return layout
        prompts = [SHORT_PROMPT] if self.single else [SHORT_PROMPT] * 2
        given = self._tried(prompts, [extra] * len(prompts) if extra else ())
        with torch.no_grad():
            self.driver.received(PipelineCall(given, encode(prompts)), Target(torch.empty(0), 0))
        return layout

    def _learn_unguided(self, extra: Extra) -> None:
        """Find out whether outputs have another form without guidance.

        Older pipelines return negative prompts and prompts as one tensor, or prompts alone.
        """
        rows = (extra,) if extra else ()
        if self.guidance is None:
            return
        guided = self._encoded([SHORT_PROMPT], rows)
        with self._unguided():
            try:
                plain = self._encoded([SHORT_PROMPT], rows)
            except checks.FAILURES:  # it cannot be called without guidance (Ideogram 4)
                return
            if not same_form(guided, plain):
                self._plain[tuple(extra)] = self._learned(extra)

    def _needed(self) -> Extra:
        """Placeholders for the images that the pipeline requires.

        One that takes no batch in any way is called with one prompt at a time.
        """
        width, height = self.call.get("width", PROBE_SIZE), self.call.get("height", PROBE_SIZE)
        frames = self.call.get("num_frames", PROBE_FRAMES)
        likely = [[], *checks.needed_images(self.driver.parameters)]
        reasons: list[Exception] = []
        for self.single in (False, True):
            for names in likely:
                sample = {**columns.placeholder_images(names, width, height, frames), **self.shared}
                try:
                    self._layout(sample)
                    return sample
                except torch.OutOfMemoryError:
                    raise
                except checks.FAILURES as error:
                    reasons.append(error)
        reason = reasons[len(likely) - 1]  # of the most that can be given
        if isinstance(reason, UserError):
            raise reason
        raise checks.refused(self.name, self.call, reason) from reason
