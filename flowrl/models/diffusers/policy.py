"""A diffusers pipeline as a policy: its own `__call__` is the velocity field.

There is no model-specific code here. The pipeline is driven through a stand-in for its
scheduler (`flowrl.models.diffusers.call.drive.driver`), and the result is compared with the
pipeline's own call, with the user's arguments, before it is used
(`flowrl.models.diffusers.replay.proof`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.models.call_sizes import CallKind, CallSizes, SamplingCallSize
from flowrl.models.diffusers.batch import MediaBatch, Scales
from flowrl.models.diffusers.call.drive.driver import DENOISERS
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.inputs.columns import Extra
from flowrl.models.diffusers.call.inputs.conditioning import LONG_PROMPT, SHORT_PROMPT, Conditioning
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule, Start, Way
from flowrl.models.diffusers.call.levels.user_levels import UserLevels
from flowrl.models.diffusers.call.loop.image_shapes import fit_images
from flowrl.models.diffusers.call.loop.inpainting import held_entries, picture
from flowrl.models.diffusers.call.loop.loop import Loop
from flowrl.models.diffusers.call.loop.own_steps import own_plans
from flowrl.models.diffusers.call.results.decoder import Decoded
from flowrl.models.diffusers.call.rows import row_calls
from flowrl.models.diffusers.call.rows.encoding_cache import EncodingCache
from flowrl.models.diffusers.call.traits import checks
from flowrl.models.diffusers.call.traits.neutral import neutral_scale
from flowrl.models.diffusers.lora import given_adapters
from flowrl.models.diffusers.lora.weights import DenoiserWeights
from flowrl.models.diffusers.memory.experts import RestingExperts
from flowrl.models.diffusers.memory.offload import BaseMemory, OffloadedParts, placed_parts
from flowrl.models.diffusers.modular.face import faced, form_of
from flowrl.models.diffusers.modular.folder import ModularSource
from flowrl.models.diffusers.replay import proof
from flowrl.models.diffusers.sizes import by_size
from flowrl.models.diffusers.sizes.by_size import LoopSize, Sizable
from flowrl.settings.model.adapters import FrozenAdapter
from flowrl.settings.model.model import GuidanceScale
from samplers import Begin, Ode, Plan, Scheduler, Velocity
from samplers.held import Held
from samplers.layout import Layout
from samplers.noise import NoiseKind
from samplers.scheduler import unbound
from samplers.storage import Storage


class PipelinePolicy(DenoiserWeights, Sizable):
    """Velocities, decoded samples and trainable weights of one diffusers pipeline.

    `call` holds arguments of the pipeline's own `__call__` (height, width, negative_prompt, ...).
    `rows_per_call` bounds the samples that one call of the denoiser, encoders or decoder sees;
    `levels` are noise levels in place of the pipeline's own.
    Raises UserError, with the reason, for a pipeline that cannot be driven.
    """

    rows_per_call = SamplingCallSize()

    def __init__(
        self,
        pipe: Any,
        *,
        call: Mapping[str, Any],
        rows_per_call: int | None = None,
        levels: UserLevels | None = None,
    ) -> None:
        pipe = faced(pipe) if form_of(pipe) == "modular" else pipe
        self.pipe, self.sizes = pipe, CallSizes.same(rows_per_call)
        self.guidance = Scales()
        self.device = torch.device("cpu")  # of sampling
        self.frozen = OffloadedParts()  # on the device only while in use
        self.experts = RestingExperts()  # likewise
        pipe.set_progress_bar_config(disable=True)
        for name, module in pipe.components.items():
            if isinstance(module, nn.Module):
                module.eval()
                if name not in DENOISERS:  # control networks ask for it, and not all have it
                    vars(module).setdefault("gradient_checkpointing", False)
        self.loop = Loop(pipe, call, levels)
        self.name, self.call = self.loop.name, self.loop.call
        self.denoisers: tuple[nn.Module, ...] = tuple(self.loop.driver.denoisers.values())
        self.known_proofs: dict[tuple[int, float | None], proof.Replay] = {}
        self.loops = by_size.Loops()  # of other sizes
        self.used, self.one_size = {}, False
        self.last_held: tuple[Conditioning, int, Held | None] | None = None
        self.encoding_cache: EncodingCache | None = None  # None: prompts are encoded in batches
        self.storage = Storage()  # of the states that are trained on
        self.noise: NoiseKind = "generator"

    @classmethod
    def load(
        cls,
        source: str | ModularSource,
        *,
        dtype: torch.dtype,
        device: str | torch.device,
        call: Mapping[str, Any],
        held: BaseMemory = BaseMemory(),
        levels: UserLevels | None = None,
        adapters: Sequence[FrozenAdapter] = (),
        scheduler: Mapping[str, Any] = {},
    ) -> "PipelinePolicy":
        """Load a pipeline from a folder or hub name, and merge adapters into it. Components that
        its index does not list are left out. A ModularSource is driven in its modular form."""
        if isinstance(source, str):
            pipe = checks.from_pretrained(source, dtype, levels, held.quantized, scheduler)
        else:
            pipe = checks.from_blocks(source, dtype, levels, held.quantized, scheduler)
        given_adapters.merge_adapters(pipe, adapters)
        own = torch.device(device)
        frozen, experts = placed_parts(pipe, DENOISERS, own, held.offload, held.experts)
        policy = cls(pipe, call=call, levels=levels)
        policy.device, policy.frozen, policy.experts = own, frozen, experts
        frozen.rest()
        return policy

    def open(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]], steps: int
    ) -> by_size.OpenedBatch:
        if self.one_size:
            return MediaBatch(self, self.encode(prompts, meta), steps)
        return by_size.open_by_size(self, prompts, meta, steps)

    def plain(self, group: int) -> Ode:
        return Ode(group, kernel=Scheduler() if self.loop.own_sampler else None)

    def fitted(self, plans: Sequence[Plan], steps: int) -> tuple[Plan, ...]:
        """Plans with the numbers of the pipeline's own scheduler, if they use its steps.

        UserError for a scheduler without such steps, for a plan that does not fit it, and for a
        plan without scheduler steps when other plans use them.
        """
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
        found = neutral_scale(self.loop.driver, self.loop.traits)
        self.frozen.rest()
        return found

    @property
    def arithmetic(self) -> torch.dtype:
        """Dtype of states and velocities: float32 even around half-precision networks."""
        return torch.promote_types(next(self.denoisers[0].parameters()).dtype, torch.float32)

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
            fit_images(self.loop, extras, columns.places(meta) if meta else prompts)
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
            found = row_calls.encoded_in_calls(encode, prompts, extras, rows)
        else:
            call = LoopSize.of(self.loop).call
            found = self.encoding_cache.encode(encode, prompts, extras, self.device, call)
        self.frozen.rest()
        return found

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
        last = self.last_held
        if last is None or last[0] is not conditioning or last[1] != steps:
            last = conditioning, steps, held_entries(self.loop, conditioning, steps)
            self.last_held = last
            self.frozen.rest()
        return last[2]

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
    def layout(self) -> Layout | None:
        """The parts of a flat state (a video and its sound); None for a state of one tensor."""
        return self.loop.driver.layout

    def decode(
        self,
        x0: Tensor,
        conditioning: Conditioning,
        *,
        steps: int,
        guidance: float | None,
        graded: bool = False,
    ) -> Tensor:
        """Decode x0 [n *d] to images [n 3 h w] or videos [n f 3 h w], float32 in 0..1.

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
    ) -> Decoded:
        """Decode x0 as `decode` does, and its sound too."""
        assert len(x0) == len(conditioning), "decode takes one row of conditioning per sample"
        proof = self.known_proofs.get((steps, guidance))
        way = Way(steps, guidance, forward=False, mixed=False) if proof is None else proof.to_way

        def decode(x: Tensor, rows: Conditioning) -> Decoded:
            return self.loop.decode(x, rows, way, graded)

        size = self.sizes.rows("decoding", len(x0))
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
        extras = columns.extras(meta, self.loop.driver.parameters)
        tried = self.loop.tried(self.row_arguments(meta, prompts) if extras else ())
        return self._prove(
            proof.Subject(self.loop, prompts, tried, steps, guidance, complete, gradient)
        )

    def _prove(self, subject: proof.Subject) -> proof.Replay:
        found = self.known_proofs[subject.steps, subject.guidance] = subject.prove()
        self.frozen.rest()
        return found

    def close(self) -> None:
        """Do nothing, since the policy holds nothing outside this process."""
