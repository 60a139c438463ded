"""A diffusers pipeline as a policy: its own `__call__` is the velocity field.

There is no model-specific code here. The pipeline is driven through a stand-in for its
scheduler (`flowrl.models.diffusers.call.drive.driver`), and the result is compared with the
pipeline's own call, with the user's arguments, before it is used
(`flowrl.models.diffusers.replay.proof`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models.call_sizes import CallKind, CallSizes, SamplingCallSize
from flowrl.models.diffusers.batch import MediaBatch, Rolls, RollsHere, Scales
from flowrl.models.diffusers.call.drive.driver import DENOISERS
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.inputs.columns import Extra
from flowrl.models.diffusers.call.inputs.conditioning import LONG_PROMPT, SHORT_PROMPT, Conditioning
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule, Start, Way
from flowrl.models.diffusers.call.levels.user_levels import UserLevels
from flowrl.models.diffusers.call.loop.image_shapes import check_several, fit_images
from flowrl.models.diffusers.call.loop.inpainting import held_entries, picture
from flowrl.models.diffusers.call.loop.loop import Loop
from flowrl.models.diffusers.call.loop.own_steps import own_plans
from flowrl.models.diffusers.call.results.decoder import Decoded, rate_alone
from flowrl.models.diffusers.call.rows import row_calls
from flowrl.models.diffusers.call.rows.encoding_cache import EncodingCache
from flowrl.models.diffusers.call.rows.prompt_alone import through_prompt
from flowrl.models.diffusers.call.traits import checks
from flowrl.models.diffusers.call.traits.neutral import neutral_scale, prompt_weight
from flowrl.models.diffusers.lora import given_adapters
from flowrl.models.diffusers.lora.weights import DenoiserWeights
from flowrl.models.diffusers.memory.experts import RestingExperts
from flowrl.models.diffusers.memory.offload import BaseMemory, OffloadedParts, placed_parts
from flowrl.models.diffusers.modular.face import faced, form_of
from flowrl.models.diffusers.modular.folder import ModularSource
from flowrl.models.diffusers.replay import proof
from flowrl.models.diffusers.sizes import by_size
from flowrl.models.diffusers.sizes.by_size import LoopSize, LoopState, Sizable
from flowrl.settings.model.adapters import FrozenAdapter
from flowrl.settings.model.pipeline import GuidanceScale
from samplers import Begin, Ode, Plan, Scheduler, Velocity
from samplers.clock import on_clock
from samplers.held import Held
from samplers.layout import Layout
from samplers.noise import NoiseKind
from samplers.scheduler import unbound
from samplers.storage import Storage


@dataclass(frozen=True)
class SchedulerUse:
    """The use of a pipeline's scheduler.

    levels     noise levels in place of its own
    settings   in place of those of its configuration
    own_steps  samples are made by its steps
    """

    levels: UserLevels | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    own_steps: bool = False


@dataclass(frozen=True)
class PipelineUse:
    """The use of a pipeline.

    device          of sampling
    frozen          parts that are on the device only while in use
    experts         denoisers that are, likewise
    guidance        scales of sampling and training
    encoding_cache  None: prompts are encoded in batches
    storage         of the states that are trained on
    noise           how the noise of samples is drawn
    alone           factor of the prompt's prediction in the velocity of training, through which
                    alone a gradient flows then; None: through both predictions
    rolls           samples, with the model or elsewhere
    """

    device: torch.device = torch.device("cpu")
    frozen: OffloadedParts = field(default_factory=OffloadedParts)
    experts: RestingExperts = field(default_factory=RestingExperts)
    guidance: Scales = Scales()
    encoding_cache: EncodingCache | None = None
    storage: Storage = Storage()
    noise: NoiseKind = "generator"
    alone: float | None = None
    rolls: Rolls = field(default_factory=RollsHere)


@dataclass
class HeldEntries:
    """The entries of states that follow a given image, of the prompts that were asked about
    last."""

    prompts: Conditioning | None = None
    steps: int = 0
    entries: Held | None = None

    def of(self, loop: Loop, prompts: Conditioning, steps: int) -> tuple[Held | None, bool]:
        """The entries, and whether the pipeline was called to find them."""
        if self.prompts is prompts and self.steps == steps:
            return self.entries, False
        self.entries = held_entries(loop, prompts, steps)
        self.prompts, self.steps = prompts, steps
        return self.entries, True


class PipelinePolicy(DenoiserWeights, Sizable):
    """Velocities, decoded samples and trainable weights of one diffusers pipeline.

    `call` holds arguments of the pipeline's own `__call__` (height, width, negative_prompt, ...).
    `rows_per_call` bounds the samples that one call of the denoiser, encoders or decoder sees;
    `levels` are noise levels in place of the pipeline's own; `own_sampler`: samples are made by the
    steps of the pipeline's scheduler. Raises UserError, with the reason, for a pipeline that cannot
    be driven.

    A policy never changes. What changes in a run are objects that it holds, and that policies of
    the same pipeline at other sizes or scales may share: `state`, the weights, the proofs.
    """

    rows_per_call = SamplingCallSize()

    def __init__(
        self,
        pipe: Any,
        *,
        call: Mapping[str, Any],
        rows_per_call: int | None = None,
        levels: UserLevels | None = None,
        own_sampler: bool = False,
        use: PipelineUse = PipelineUse(),
    ) -> None:
        pipe = faced(pipe) if form_of(pipe) == "modular" else pipe
        pipe.set_progress_bar_config(disable=True)
        for name, module in pipe.components.items():
            if isinstance(module, nn.Module):
                module.eval()
                if name not in DENOISERS:  # control networks ask for it, and not all have it
                    vars(module).setdefault("gradient_checkpointing", False)
        loop = Loop(pipe, call, levels, own_sampler=own_sampler)
        self._hold(LoopState(loop, sizes=CallSizes.same(rows_per_call)), use)

    def _hold(self, state: LoopState, use: PipelineUse) -> None:
        self.state, self.use = state, use
        self.pipe, self.name, self.call = state.loop.pipe, state.loop.name, state.loop.call
        self.denoisers: tuple[nn.Module, ...] = tuple(state.loop.driver.denoisers.values())
        self._held = HeldEntries()

    @property
    def loop(self) -> Loop:
        return self.state.loop

    @property
    def known_proofs(self) -> by_size.Proofs:
        return self.state.proofs

    @property
    def sizes(self) -> CallSizes:
        return self.state.sizes

    @property
    def device(self) -> torch.device:
        return self.use.device

    @property
    def frozen(self) -> OffloadedParts:
        return self.use.frozen

    @property
    def experts(self) -> RestingExperts:
        return self.use.experts

    @property
    def guidance(self) -> Scales:
        return self.use.guidance

    @property
    def encoding_cache(self) -> EncodingCache | None:
        return self.use.encoding_cache

    @property
    def storage(self) -> Storage:
        return self.use.storage

    @property
    def noise(self) -> NoiseKind:
        return self.use.noise

    def alike(self, state: LoopState, use: PipelineUse) -> "PipelinePolicy":
        """A policy of the same pipeline, with the same weights, in another state or use."""
        policy = PipelinePolicy.__new__(PipelinePolicy)
        policy._hold(state, use)
        return policy

    def with_own_steps(self) -> "PipelinePolicy":
        """This policy with samples by the steps of the pipeline's scheduler, not yet proven."""
        return self.alike(self.state.at(self.loop.with_own_steps(), {}), self.use)

    def guided(self, sample: GuidanceScale, train: GuidanceScale) -> "PipelinePolicy":
        """This policy at other guidance scales: see `scale`."""
        scales = Scales(self.scale(sample), self.scale(train))
        return self.alike(self.state, replace(self.use, guidance=scales))

    @classmethod
    def load(
        cls,
        source: str | ModularSource,
        *,
        dtype: torch.dtype,
        device: str | torch.device,
        call: Mapping[str, Any],
        held: BaseMemory = BaseMemory(),
        adapters: Sequence[FrozenAdapter] = (),
        scheduler: SchedulerUse = SchedulerUse(),
    ) -> "PipelinePolicy":
        """Load a pipeline from a folder or hub name, and merge adapters into it. Components that
        its index does not list are left out. A ModularSource is driven in its modular form."""
        levels, settings = scheduler.levels, scheduler.settings
        if isinstance(source, str):
            pipe = checks.from_pretrained(source, dtype, levels, held.quantized, settings)
        else:
            pipe = checks.from_blocks(source, dtype, levels, held.quantized, settings)
        given_adapters.merge_adapters(pipe, adapters)
        torch_device = torch.device(device)
        frozen, experts = placed_parts(pipe, DENOISERS, torch_device, held.offload, held.experts)
        use = PipelineUse(torch_device, frozen, experts)
        policy = cls(pipe, call=call, levels=levels, own_sampler=scheduler.own_steps, use=use)
        frozen.rest()
        return policy

    def open(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]], steps: int
    ) -> by_size.OpenedBatch:
        if self.state.rows.own_size_alone:
            return MediaBatch(self, self.encode(prompts, meta), steps, rolls=self.use.rolls)
        return by_size.open_by_size(self, prompts, meta, steps)

    def plain(self, group: int) -> Ode:
        return Ode(group, kernel=Scheduler() if self.loop.own_sampler else None)

    def fitted(self, plans: Sequence[Plan], steps: int) -> tuple[Plan, ...]:
        """Plans with the numbers of the pipeline's own scheduler, if they use its steps.

        Where parts of a state have levels of their own, its steps are taken part by part.

        UserError for a scheduler without such steps, for a plan that does not fit it or the parts'
        levels, and for a plan without scheduler steps when other plans use them.
        """
        clock = self._start(steps).schedule.clock
        if clock is not None:
            try:
                return tuple(on_clock(plan, clock) for plan in plans)
            except ValueError as error:
                raise UserError(
                    f"{self.name} steps parts of its state at levels of their own, and the plan "
                    f"does not fit them: {error}"
                ) from error
        if self.loop.own_sampler or any(unbound(plan) for plan in plans):
            return own_plans(self.loop, plans, steps)
        return tuple(plans)

    def automatic(self, steps: int) -> int:
        """Rows per call for the largest latents of a row, based on measurements of small models."""
        return max(1, min(128, 2**18 // max(math.prod(p.shape(steps)) for p in self.sized)))

    def scale(self, guidance: GuidanceScale) -> float | None:
        """The pipeline's own scale for a setting; `none` is the scale at which it applies no
        guidance."""
        if guidance != "none":
            return guidance
        neutral = neutral_scale(self.loop.driver, self.loop.traits)
        self.frozen.rest()
        return neutral

    @property
    def arithmetic(self) -> torch.dtype:
        """Dtype of states and velocities: float32 even around half-precision networks."""
        return torch.promote_types(next(self.denoisers[0].parameters()).dtype, torch.float32)

    def through_prompt(self) -> "PipelinePolicy":
        """This policy with a gradient through the prompt's prediction alone. UserError for guidance
        that is not linear in its predictions."""
        loop, scale = self.loop, self.guidance.train
        weight = prompt_weight(loop.driver, loop.traits, scale, self.scale("none"))
        self.frozen.rest()
        return self.alike(self.state, replace(self.use, alone=weight))

    def schedule(self, steps: int) -> PipelineSchedule:
        return self._start(steps).schedule

    def shape(self, steps: int) -> tuple[int, ...]:
        """Shape of one row's latents as the loop's steps see them, packed or not."""
        return self._start(steps).shape

    def _start(self, steps: int) -> Start:
        start = self.loop.start(steps)
        if self.frozen.parts:
            self.frozen.rest()
        return start

    def row_arguments(
        self, meta: Sequence[Mapping[str, Any]], prompts: Sequence[str]
    ) -> tuple[Extra, ...]:
        """Arguments of each row; the form of latents is fitted to their images."""
        extras = self.loop.extras(meta, prompts)
        if extras:
            places = columns.places(meta) if meta else prompts
            check_several(self.loop, extras, places)
            fit_images(self.loop, extras, places)
        return extras

    def encode(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]] = ()
    ) -> Conditioning:
        """Encode prompts as the pipeline's own call does, including negative rows.

        `meta` are the prompts' rows of their file: columns named like the pipeline's own arguments
        (negative_prompt, image) are conditioning too.
        """
        extras = self.row_arguments(meta, prompts)
        assert not extras or len(extras) == len(prompts)
        encode = self.loop.encode
        if self.encoding_cache is None:
            rows = self.sizes.rows("sampling", len(prompts))
            conditioning = row_calls.encoded_in_calls(encode, prompts, extras, rows)
        else:
            call = LoopSize.of(self.loop).call
            conditioning = self.encoding_cache.encode(encode, prompts, extras, self.device, call)
        self.frozen.rest()
        return conditioning

    def begin(self, conditioning: Conditioning, steps: int) -> Begin | None:
        """Return the function from noise [n *d] to first states [n *d]; None if the noise itself is
        the first state.

        These are the states that the pipeline's own call passes to its network for that noise.
        """
        start = self._start(steps)
        part = picture(self.loop, conditioning, steps) if conditioning.extras else None
        if part is not None:
            clean, sigma = part.state, start.schedule.sigmas[0]
            return lambda noise, prompt: clean.to(noise)[prompt] + sigma * noise
        size = start.noise
        return None if size == 1.0 else lambda noise, _: size * noise

    def held(self, conditioning: Conditioning, steps: int) -> Held | None:
        """The entries of states that follow a given image (inpainting); None if all are sampled."""
        if not conditioning.extras:
            return None
        held, called = self._held.of(self.loop, conditioning, steps)
        if called:
            self.frozen.rest()
        return held

    def pictured(self, conditioning: Conditioning, steps: int) -> bool:
        """Whether the first states contain an image besides noise (a `strength`)."""
        return picture(self.loop, conditioning, steps) is not None

    def latents(self, x: Tensor, steps: int) -> Tensor:
        """Latents for `decode`, from states x [n *d] at the schedule's last level.

        They differ only for schedulers that end above 0 (DDIM, set_alpha_to_one false).
        """
        return self.loop.latents(x, steps).to(x.dtype)

    def bind(
        self,
        conditioning: Conditioning,
        *,
        steps: int,
        guidance: float | None,
        kind: CallKind = "sampling",
    ) -> Velocity:
        """Return the velocity function (x [n *d], sigma [n], prompt [n]) -> v [n *d] in
        `arithmetic`, with gradients.

        `prompt` are rows of the conditioning. Proves the pipeline first, unless that was done.
        """
        if self.use.alone is not None and kind == "training" and guidance == self.guidance.train:
            plain = self.alike(self.state, replace(self.use, alone=None))
            guided, alone = (
                plain.bind(conditioning, steps=steps, guidance=scale, kind=kind)
                for scale in (guidance, self.scale("none"))
            )
            return through_prompt(guided, alone, self.use.alone)
        replay = self.known_proofs.get((steps, guidance))
        if replay is None:
            tried = self.loop.tried(conditioning.extras[:1] * 2)
            prompts = [SHORT_PROMPT, LONG_PROMPT]
            replay = self._prove(proof.Subject(self.loop, prompts, tried, steps, guidance))
        for denoiser in self.denoisers:  # dropout would make the ratio of new to old differ from 1
            if any(module.training for module in denoiser.modules()):
                denoiser.eval()
        loop, way, dtype = self.loop, replay.to_way, self.arithmetic

        def most(rows: int) -> int:  # read at each call, since a search or a failure changes it
            return self.sizes.rows(kind, rows)

        velocity = row_calls.velocity_in_calls(loop.velocity, conditioning, way, most, dtype)
        held = self.held(conditioning, steps)
        if held is None:
            return velocity
        return lambda x, sigma, prompt: held.velocity(velocity(x, sigma, prompt), x, sigma, prompt)

    @property
    def sound_rate(self) -> int | None:
        """The rate in Hz of sound alone; None for samples of another kind."""
        return rate_alone(self.pipe)

    @property
    def layout(self) -> Layout | None:
        """The parts of a flat state (a video and its sound); None for a state of one tensor."""
        return self.loop.layout

    def decode(
        self,
        x0: Tensor,
        conditioning: Conditioning,
        *,
        steps: int,
        guidance: float | None,
        graded: bool = False,
    ) -> Tensor:
        """Decode x0 [n *d] to images [n 3 h w] or videos [n f 3 h w], float32 in 0..1, or to
        waveforms [n channels time] of sound alone.

        Row i of the conditioning belongs to row i of x0. `graded` keeps the gradient with respect
        to x0.
        """
        return self.decoded(x0, conditioning, steps=steps, guidance=guidance, graded=graded).media

    def decoded(
        self,
        x0: Tensor,
        conditioning: Conditioning,
        *,
        steps: int,
        guidance: float | None,
        graded: bool = False,
        together: bool = False,
    ) -> Decoded:
        """Decode x0 as `decode` does, and its sound too. Samples are decoded one by one where the
        decoder draws noise, unless `together` asks for what the pipeline's own call draws."""
        assert len(x0) == len(conditioning), "decode takes one row of conditioning per sample"
        proof = self.known_proofs.get((steps, guidance))
        way = Way(steps, guidance, forward=False, mixed=False) if proof is None else proof.to_way

        def decode(x: Tensor, rows: Conditioning) -> Decoded:
            return self.loop.decode(x, rows, way, graded)

        x0 = self.loop.data(x0)
        size = self.sizes.rows("decoding", len(x0))
        if proof is not None and proof.drawn and not together:
            size = 1
        whole = row_calls.decoded_in_calls(
            decode, x0, conditioning, size, way.together, graded=graded
        )
        if self.frozen.parts:
            self.frozen.rest()
        return whole

    def prove(
        self,
        prompts: Sequence[str],
        *,
        steps: int,
        guidance: float | None,
        meta: Sequence[Mapping[str, Any]] = (),
        complete: bool = True,
        gradient: bool = True,
    ) -> proof.Replay:
        """Compare with the pipeline's own call, step by step. UserError unless they are equal.

        Uses two rows: the first two prompts, or the only one twice, with the first prompt's images.
        """
        prompts, meta = [*prompts, *prompts][:2], [*meta, *meta][:2]
        extras = self.loop.row_extras(meta)
        tried = self.loop.tried(self.row_arguments(meta, prompts) if extras else ())
        return self._prove(
            proof.Subject(
                loop=self.loop,
                prompts=prompts,
                extras=tried,
                steps=steps,
                guidance=guidance,
                complete=complete,
                gradient=gradient,
            )
        )

    def _prove(self, subject: proof.Subject) -> proof.Replay:
        replay = self.known_proofs[subject.steps, subject.guidance] = subject.prove()
        self.frozen.rest()
        return replay

    def close(self) -> None:
        """Leave the engine that samples, if one does."""
        self.use.rolls.close()
