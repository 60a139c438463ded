"""The proof that a driven pipeline equals its own call: replay the call and compare, to the bit.

Two claims differ. The pipeline's own scheduler, stepped with flowrl's velocities from
flowrl's first state, reproduces its latents and media: shown by the first state, every prediction
and the decoder. Flowrl's own solver does so too only if its steps equal the scheduler's.
`whole_proof` compares whole samples.

Not covered: steps of a scheduler that draws noise (only how it interprets the prediction is
compared); a rounded list of levels, which is reported; negative prompts by themselves, which are
compared after guidance has combined them with the prompt's prediction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.received import Received
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES, its_own, shown_call
from flowrl.models.diffusers.call.inputs.columns import Extra
from flowrl.models.diffusers.call.inputs.conditioning import Conditioning
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule, Way
from flowrl.models.diffusers.call.loop.image_shapes import follows_pictures
from flowrl.models.diffusers.call.loop.inpainting import blends
from flowrl.models.diffusers.call.loop.loop import Loop
from flowrl.models.diffusers.call.loop.own_steps import renews_noise
from flowrl.models.diffusers.call.results import proof_checks
from flowrl.models.diffusers.call.results.decoder import Decoded
from flowrl.models.diffusers.call.results.proof_checks import largest_difference, shown
from flowrl.models.diffusers.call.traits.neutral import counted_rows
from flowrl.models.diffusers.modular.face import form_of, guider_named, listed_levels
from flowrl.models.diffusers.modular.guiders import (
    guider_passes,
    remembering_guider,
    remembering_loop,
    zeroing_guider,
)
from flowrl.models.diffusers.replay.own_call import record
from flowrl.models.diffusers.replay.proof_images import OtherImages
from flowrl.models.diffusers.replay.proof_neighbours import Neighbours
from flowrl.models.diffusers.replay.proof_steps import StepProof
from flowrl.models.diffusers.replay.replay import Replay
from flowrl.models.out_of_memory import raise_memory


@dataclass(frozen=True)
class Subject:
    """A loop to prove, with two prompts (and their images), steps and guidance.

    `complete`: also check the first state and the independence of rows, which hold for every
    guidance scale. `gradient`: also check that a gradient reaches the weights.
    """

    loop: Loop
    prompts: Sequence[str]
    extras: Sequence[Extra]
    steps: int
    guidance: float | None
    complete: bool = True
    gradient: bool = True

    def prove(self) -> Replay:
        """Prove a pipeline by replaying every step of its own call.

        Raises UserError if neither way reproduces the arguments of the pipeline's own steps, where
        the first state or the decoder differs, where the state changes between steps, where rows
        depend on each other, where the scheduler interprets the prediction differently, where
        guidance has no effect, and where no gradient reaches the weights.
        """
        if self.loop.levels is None:
            proof_checks.check_listed_steps(
                self.loop.name, listed_levels(self.loop.pipe), self.steps
            )
        changes = proof_checks.unbroken(self.loop.name, self.own)
        if changes and not blends(self.loop, self.own, self.conditioning, self.steps):
            raise UserError(changes)
        self._check_sizes()
        way = self._way()
        decodes_in_loop = self._decoder(way)
        steps = StepProof(self.loop, self.own, self.schedule, self.recorded[2])
        first = steps.first()
        if not (steps.quiet or self.loop.own_sampler) and renews_noise(self.loop, self.steps):
            raise UserError(
                f"{self.loop.name}: every step of its {type(steps.scheduler).__name__} adds fresh "
                f"noise to the predicted sample, as few-step models do, so steps without noise "
                "would sample another distribution: set recipe: {plan: {kernel: scheduler}}"
            )
        if self.complete:
            steps.check_start(self.conditioning, self.steps)
        padding = self._padding(way)
        together = self._together(replace(way, decodes_in_loop=decodes_in_loop))
        self._check_guidance(way)
        if self.gradient:
            self._check_gradient(way)
        return Replay(
            pipeline=self.loop.name,
            scheduler=type(self.loop.pipe.scheduler).__name__,
            dtype=str(self.own[0].output.dtype).removeprefix("torch."),
            steps=self.steps,
            guidance=self.guidance,
            way="forward" if way.forward else "pinned",
            mixed=way.mixed,
            euler=steps.euler(),
            kind=self.loop.traits.kind,
            first=first,
            decodes_in_loop=decodes_in_loop,
            noisy=not self.recorded[2],
            reading=steps.reading(),
            padding=padding,
            user_levels=self.loop.levels is not None,
            video=self.recorded[1].media.ndim == 5,
            sound=self.recorded[1].sound_alone,
            levels=way.levels,
            parts=() if (layout := self.loop.layout) is None else layout.names,
            data=() if layout is None else layout.data,
            together=together,
            evaluations=self._evaluations(way),
            sampler=self.loop.own_sampler,
            form=form_of(self.loop.pipe),
            guider=guider_named(self.loop.pipe),
            drawn=self._draws_to_decode(replace(way, decodes_in_loop=decodes_in_loop)),
            moved="" if self.schedule.clock is None else self.schedule.clock.moved,
        )

    @cached_property
    def schedule(self) -> PipelineSchedule:
        return self.loop.start(self.steps).schedule

    @cached_property
    def conditioning(self) -> Conditioning:
        return self.loop.encode(self.prompts, self.extras)

    @cached_property
    def recorded(self) -> tuple[list[Received], Decoded, bool]:
        """The pipeline's own call: its steps, its media, and whether it draws no noise."""
        whole_steps = self.loop.driver.clockwork is not None
        if whole_steps:  # the order of its parts' calls depends on the number of steps
            self.loop.start(self.steps)
        steps, media, repeatable = self._record()
        if self.schedule.clock is not None and not whole_steps:  # its parts are known only now
            steps, media, repeatable = self._record()
        predicted = [media.values, *(step.output for step in steps)]
        proof_checks.finite(self.loop.name, self.loop.pipe.components, predicted)
        if not media.sound_alone and not shown(media.media) and self.loop.traits.form == "pt":
            # some pipelines scale to 0..1 only there
            self.loop.show(form="np")
            steps, media, repeatable = self._record()
        visits, rows = len(self.schedule.visits), len(self.prompts)
        proof_checks.check_states(self.loop.name, steps, self.steps, visits, rows)
        return steps, media, repeatable

    def _record(self) -> tuple[list[Received], Decoded, bool]:
        return record(self.loop, self.prompts, self.extras, self.steps, self.guidance)

    @property
    def own(self) -> list[Received]:
        return self.recorded[0]

    def sigma(self, step: int) -> Tensor:
        return torch.full((len(self.prompts),), self.schedule.visits[step])

    def state(self, step: int) -> Tensor:
        """State [n *d] at a step, as the denoiser received it."""
        state = self.own[step].state
        assert state is not None
        return state

    def _way(self) -> Way:
        reasons = []
        for name, forward, levels in self._ways():
            way = Way(self.steps, self.guidance, forward=forward, mixed=False, levels=levels)
            reason = self._mismatch(way)
            if reason is None:
                return replace(way, mixed=not forward and self._mixes(way))
            reasons.append(f"{name} {reason}")
        if self._takes_later():
            return self._way()
        refused = (
            f"{self.loop.name} cannot be driven with {shown_call(self.loop.call)}, guidance "
            f"{self.guidance}, {self.steps} steps: "
        )
        pipe = self.loop.pipe
        guides = self.guidance is None or self.guidance > 1
        remembers = remembering_guider(pipe) or (remembering_loop(pipe) if guides else "")
        if remembers:
            raise UserError(refused + remembers)
        raise UserError(
            f"{refused}when driven, its steps receive other values ({'; '.join(reasons)}). Leave "
            "arguments out one by one to find the cause, or use another pipeline"
        )

    def _ways(self) -> Iterator[tuple[str, bool, bool]]:
        """Ways to try, in order: their names, `forward` and `levels` (see `Way`)."""
        if self.schedule.clock is not None:  # the parts' times follow from the step's index
            yield "fast-forward", True, False
            return
        yield "pinned", False, False
        if self.loop.traits.kind in ("flow", "inverted"):
            yield "with its levels pinned too", False, True
        yield "fast-forward", True, False

    def _takes_later(self) -> bool:
        """Give states after the first the dtype that they have in the pipeline's own call, if it
        differs.

        FlowMatchEulerDiscreteScheduler rounds its result to the network's dtype.
        """
        first, last = self.state(0).dtype, self.state(-1).dtype
        settled = self.loop.traits.later is not None or "prepare_latents" not in dir(self.loop.pipe)
        if settled or first == last:
            return False
        self.loop.show(later=last)
        return True

    def _mismatch(self, way: Way) -> str | None:
        """Return where and by how much a driven prediction differs; None where all are equal."""
        for step, received in enumerate(self.own):
            try:
                with torch.no_grad():
                    x, sigma = self.state(step), self.sigma(step)
                    driven = self.loop.received(x, sigma, self.conditioning, way)
                away = largest_difference(driven.output, received.output)
            except FAILURES as error:
                raise_memory(error)
                return f"fails at step {step} ({type(error).__name__}: {error})"
            if away != 0:
                return f"is off by {away:.3g} at step {step}"
        return None

    def _padding(self, way: Way) -> float | None:
        """Share of a prediction due to other prompts encoded in the same call; UserError if rows
        mix."""
        if not self.complete or self.loop.traits.single:
            return None
        states = []
        for step in dict.fromkeys((0, len(self.own) // 2)):
            x = self.state(step)
            states.append((torch.cat([x, -x[:1]]), self.schedule.visits[step]))
        with its_own(self.loop.name, self.loop.call):
            return Neighbours(self.loop, self.prompts[0], self.extras, states, way).check()

    def _together(self, way: Way) -> tuple[str, ...]:
        """The columns of images if rows with other images of their size may share a call."""
        if not self.extras or self.loop.traits.single:
            return ()
        steps = dict.fromkeys((0, len(self.own) // 2))
        states = [(self.state(step), self.schedule.visits[step]) for step in steps]
        return OtherImages(self.loop, self.prompts, self.extras, states, way).shared()

    def _check_sizes(self) -> None:
        """Refuse pipelines in which images decide the size of the latents, since a batch could have
        several sizes.

        Tried with the first row's image in five shapes: square, wide and tall. A pipeline that maps
        all of them to one size passes; if another image shape later leads to another size, the run
        ends with an error.
        """
        if self.extras and follows_pictures(self.loop, self.extras[0]):
            raise UserError(
                f"{self.loop.name} makes latents in the shape of its image, so images of "
                "different shapes could not be trained on together: set height and width, or "
                "give rows columns of these names"
            )

    def _mixes(self, way: Way) -> bool:
        """Whether rows of several steps in one call have the same predictions as in separate
        calls."""
        count, rows = len(self.own), len(self.prompts)
        if count < 2 or rows < 2:
            return False
        for first in range(count):
            # each row takes each step once, so that every timestep shares a call with another
            at = [(first + row) % count for row in range(rows)]
            x = torch.stack([self.state(step)[row] for row, step in enumerate(at)])
            wanted = torch.stack([self.own[step].output[row] for row, step in enumerate(at)])
            sigma = torch.cat([self.sigma(step)[:1] for step in at])
            try:
                with torch.no_grad():
                    driven = self.loop.received(x, sigma, self.conditioning, way)
                if largest_difference(driven.output, wanted) != 0:
                    return False
            except FAILURES as error:
                raise_memory(error)
                return False
        return True

    def _decoder(self, way: Way) -> bool:
        """Whether decoding needs the loop to run; UserError if the result differs both with and
        without it."""
        last, reasons = self.own[-1].following, []
        assert last is not None
        for through in (False, True):
            how = replace(way, decodes_in_loop=through)
            try:
                result = self.loop.decode(last, self.conditioning, how)
                decoded = result.media
                away = largest_difference(result.values, self.recorded[1].values)
            except proof_checks.NotFinitePartError:
                raise
            except FAILURES as error:
                raise_memory(error)
                reasons.append(f"fails ({type(error).__name__}: {error})")
                continue
            check = proof_checks.check_waveforms if result.sound_alone else proof_checks.coloured
            check(self.loop.name, decoded)
            if away == 0 and (result.sound_alone or shown(decoded)):
                return through
            if away == 0:
                raise UserError(
                    f"{self.loop.name} decodes to values from {float(decoded.min()):.3g} to "
                    f"{float(decoded.max()):.3g}, not to images in 0..1"
                )
            reasons.append(f"is off by {away:.3g}")
        raise UserError(
            f"{self.loop.name}: decoding its own last state {reasons[0]}, and after a loop that "
            f"changes nothing it {reasons[1]}"
        )

    def _draws_to_decode(self, way: Way) -> bool:
        """Whether decoding draws noise (LTX-2.5's decoder is a diffusion model).

        A row's would be that of its place in a batch. Decoded alone, each has the same.
        """
        last = self.own[-1].following
        assert last is not None
        first, shown = self.conditioning.take([0]), []
        for seed in (0, 1):
            with self.loop.driver.seeded(seed):
                shown.append(self.loop.decode(last[:1], first, way).values)
        return largest_difference(*shown) != 0

    def _evaluations(self, way: Way) -> float:
        """Evaluations of the network for a row's velocity, at the first step or in the middle; the
        mean over all steps where a guider is on at some of them."""
        counts, pipe = [], self.loop.pipe
        passes = (
            guider_passes(pipe, self.guidance, self.steps) if form_of(pipe) == "modular" else []
        )
        if len(set(passes)) > 1:
            return sum(passes) / len(passes)
        for step in dict.fromkeys((0,) if way.forward else (0, len(self.own) // 2)):
            with torch.no_grad(), counted_rows(self.loop.driver.denoisers) as rows:
                self.loop.received(self.state(step), self.sigma(step), self.conditioning, way)
            counts.append(sum(rows) / len(self.prompts))
        return max(counts)

    def _check_guidance(self, way: Way) -> None:
        """Refuse guidance without effect (from a missing negative prompt), since it is a
        mistake."""
        if way.guidance is None or way.guidance <= 1:
            return
        more = replace(way, guidance=way.guidance + 1, mixed=False)
        if self._mismatch(more) is not None:  # some guide a part of the steps only
            return
        raise UserError(
            f"guidance {way.guidance} has no effect on {self.loop.name} with "
            f"{shown_call(self.loop.call)}: "
            "set model.call.negative_prompt, or leave guidance out"
        )

    def _check_gradient(self, way: Way) -> None:
        x = self.state(0)[:1].float().requires_grad_()
        with torch.enable_grad(), its_own(self.loop.name, self.loop.call):
            taken = self.conditioning.take([0])
            driven = self.loop.received(x, self.sigma(0)[:1], taken, way)
        if not driven.output.requires_grad:
            zeroes = zeroing_guider(self.loop.pipe)
            raise UserError(
                f"{self.loop.name} has no gradient at its first step: {zeroes}"
                if zeroes
                else f"{self.loop.name} detaches the gradient inside its loop: it cannot be trained"
            )
