"""A user's own model as a flow policy, with the same batches, plans and losses as a pipeline."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.media.tensors import drawn
from flowrl.models.adapters import (
    ADAPTER_WEIGHTS,
    has_adapters,
    load_adapters,
    peft_adapter,
    refuse_full_weights,
    save_adapters,
)
from flowrl.models.call_sizes import CallKind, CallSizes, SamplingCallSize
from flowrl.models.diffusers.batch import MediaBatch, Scales
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule
from flowrl.models.diffusers.call.results.decoder import Decoded
from flowrl.models.out_of_memory import raise_memory
from flowrl.models.own.calls import ModelCalls, OwnConditioning
from flowrl.models.own.checks import checked
from flowrl.models.own.lora import add_own_lora
from flowrl.models.own.protocol import OwnModel, sound_rate, state_shape, trained_parts
from flowrl.models.own.schedule import Levels, Scheduled
from flowrl.settings.checks.machine import refuse_scheduler
from flowrl.settings.model.pipeline import GuidanceScale
from rewards import Samples
from rewards.audio import Audio
from rewards.types import MediaForm
from samplers import Begin, Ode, Plan, Velocity
from samplers.layout import Layout
from samplers.noise import NoiseKind
from samplers.storage import Storage

MODEL_FILE = "model.safetensors"  # of all weights


class OwnPolicy:
    """Velocities, decoded samples and trainable weights of a module with `OwnModel`'s members.

    `levels` are noise levels in place of evenly spaced ones, `weights` a safetensors file with all
    weights of the module. With a `device` the module is moved there, in `dtype`, with its weights
    frozen; without, it stays as it is.

    UserError for a module without those members, whose parametrization does not determine a
    velocity, or that the file does not fit.
    """

    rows_per_call = SamplingCallSize()

    def __init__(
        self,
        model: Any,
        *,
        name: str = "",
        levels: Levels | None = None,
        storage: Storage = Storage(),
        noise: NoiseKind = "generator",
        weights: Path | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.name = name or type(model).__name__
        if not (isinstance(model, nn.Module) and isinstance(model, OwnModel)):
            raise UserError(
                f"{self.name}: your own model must be a torch.nn.Module with state, encode(prompts"
                ", rows) and forward(x, sigma, encoded); see docs/own_models.md"
            )
        self.model: Any = model.eval()
        self.calls = ModelCalls(self.name, self.model)
        self.sizes = CallSizes()
        self.guidance = Scales(None, None)  # a model guides itself, if it does
        self.storage = storage
        self.noise: NoiseKind = noise
        self.scheduled = Scheduled.of(self.name, model, levels)
        self.trained = trained_parts(self.name, model)
        self.row_shape = state_shape(self.name, model.state)
        self.rate = sound_rate(self.name, model)
        self.form: MediaForm | None = None  # of its samples, once they were made
        if weights is not None:
            _load_whole(self.name, model, weights)
        if device is None:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
        else:
            model.requires_grad_(False).to(device=device, dtype=dtype)
        self.device = device

    # what a `MediaBatch` uses

    layout: Layout | None = None  # one tensor is the whole state

    @property
    def sound_rate(self) -> int | None:
        """The rate in Hz of sound alone; None for samples of another kind."""
        return self.rate

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        floats = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return next(floats, torch.float32)

    @property
    def arithmetic(self) -> torch.dtype:
        """Dtype of states and velocities: float32 even around half-precision networks."""
        return torch.promote_types(self.dtype, torch.float32)

    def schedule(self, steps: int) -> PipelineSchedule:
        return self.scheduled.schedule(steps)

    def shape(self, steps: int) -> tuple[int, ...]:
        del steps
        return self.row_shape

    def begin(self, conditioning: OwnConditioning, steps: int) -> Begin | None:
        """Return the function from noise [n *d] to first states; None if the noise itself is the
        first state."""
        del conditioning
        if self.scheduled.levels is None:
            return None
        sigma = self.schedule(steps).sigmas[0]
        return lambda noise, _: self.scheduled.begin(noise, sigma)

    def scale(self, guidance: GuidanceScale) -> None:
        """Always None. UserError for a guidance scale, since a user's model applies guidance in its
        own `forward`."""
        if guidance not in (None, "none", 1.0):
            raise UserError(
                f"guidance {guidance}: {self.name} is your own model, which can only apply "
                "guidance in its forward: leave guidance out"
            )

    def guided(self, sample: GuidanceScale, train: GuidanceScale) -> "OwnPolicy":
        """This policy. UserError for guidance scales: see `scale`."""
        self.scale(sample)
        self.scale(train)
        return self

    def fitted(self, plans: Sequence[Plan], steps: int) -> tuple[Plan, ...]:
        """The unchanged plans. UserError for plans with a scheduler's steps."""
        del steps
        refuse_scheduler(plans, self.name)
        return tuple(plans)

    def held(self, conditioning: OwnConditioning, steps: int) -> None:
        """None: all entries are sampled."""
        del conditioning, steps

    def pictured(self, conditioning: OwnConditioning, steps: int) -> bool:
        """Whether the first states contain an image besides noise: never."""
        del conditioning, steps
        return False

    def latents(self, x: Tensor, steps: int) -> Tensor:
        del steps
        return x

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]] = ()
    ) -> OwnConditioning:
        """Encode prompts. UserError for anything but tensors with one row per prompt."""
        parts = self.calls.encode(prompts, list(meta) or [{} for _ in prompts])
        return OwnConditioning({name: part.to(self.device) for name, part in parts.items()})

    def bind(
        self,
        conditioning: OwnConditioning,
        *,
        steps: int,
        guidance: float | None = None,
        kind: CallKind = "sampling",
    ) -> Velocity:
        """Return the velocity function (x [n *d], sigma [n], prompt [n]) -> v [n *d] in
        `arithmetic`, with gradients."""
        del guidance
        if any(module.training for module in self.model.modules()):
            self.model.eval()  # dropout would make the ratio of new to old differ from 1
        schedule, dtype = self.schedule(steps), self.dtype

        def part(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
            state, time = self.scheduled.asked(x, sigma, schedule)
            predicted = self.calls.forward(state.to(dtype), time, conditioning.take(prompt))
            return self.scheduled.velocity(x, sigma, predicted.to(x.dtype))

        def velocity(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
            size = self.sizes.rows(kind, len(sigma))
            if len(x) <= size:
                return part(x, sigma, prompt)
            rows = zip(x.split(size), sigma.split(size), prompt.split(size), strict=True)
            return torch.cat([part(*call) for call in rows])

        return velocity

    def decode(
        self,
        x0: Tensor,
        conditioning: OwnConditioning,
        *,
        steps: int,
        guidance: float | None = None,
        graded: bool = False,
    ) -> Tensor:
        """Decode clean states [n *d] to samples, in float32 at least. `graded` keeps the gradient
        with respect to x0."""
        del steps, guidance
        size, dtype = self.sizes.rows("decoding", len(x0)), self.dtype
        parts: list[Tensor] = []
        with torch.set_grad_enabled(graded):
            for at in torch.arange(len(x0)).split(size):
                decoded = self.calls.decode(x0[at.to(x0.device)], conditioning.take(at), dtype)
                parts.append(decoded.to(torch.promote_types(decoded.dtype, torch.float32)))
        media = torch.cat(parts) if parts else x0
        if self.rate is not None:
            media = self.calls.waveforms(media)
        self.form = self.form or self.calls.form(media, self.rate)
        return media

    def decoded(
        self,
        x0: Tensor,
        conditioning: OwnConditioning,
        *,
        steps: int,
        guidance: float | None = None,
        graded: bool = False,
    ) -> Decoded:
        """The samples, which are sound alone if the model has a rate."""
        media = self.decode(x0, conditioning, steps=steps, guidance=guidance, graded=graded)
        return Decoded(media) if self.rate is None else Decoded.of_sound(Audio(media, self.rate))

    # what a `Policy` is, beside

    def open(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]], steps: int
    ) -> MediaBatch:
        return MediaBatch(self, self.encode(prompts, meta), steps)

    def plain(self, group: int) -> Ode:
        return Ode(group)

    def automatic(self, steps: int) -> int:
        del steps
        return automatic_rows(math.prod(self.row_shape))

    def proofs(
        self, prompts: Sequence[str], steps: int, meta: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        return checked(self, prompts, steps, meta)

    def roots(self) -> dict[str, nn.Module]:
        """The trained modules. UserError for a name that is not a submodule."""
        if not self.trained:
            return {"model": self.model}
        try:
            return {name: self.model.get_submodule(name) for name in self.trained}
        except AttributeError as error:
            raise UserError(f"{self.name}: trained: {error}") from error

    def trainable(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters if there are any, otherwise all parameters of the trained
        modules."""
        named = {
            f"{root}.{name}": p
            for root, module in self.roots().items()
            for name, p in module.named_parameters()
        }
        return {name: p for name, p in named.items() if ".lora_" in name} or named

    def train_all(self) -> None:
        self.model.requires_grad_(False)
        for module in self.roots().values():
            module.requires_grad_(True)

    def add_lora(
        self,
        *,
        rank: int,
        alpha: int | float,
        targets: Sequence[str] | None,
        seed: int,
        dora: bool = False,
    ) -> None:
        """Add adapters to linear layers of the trained modules: to all, or to the layers named by
        `targets`."""
        add_own_lora(
            self.model,
            self.trained,
            rank=rank,
            alpha=alpha,
            targets=targets,
            seed=seed,
            dora=dora,
        )

    def begin_from(self, source: str) -> None:
        """Add the adapters of a peft folder, which train from there."""
        config, at = peft_adapter(source)
        targets = sorted(config.target_modules or ())
        self.add_lora(
            rank=config.r,
            alpha=config.lora_alpha,
            targets=targets,
            seed=0,
            dora=bool(config.use_dora),
        )
        load_adapters(self.model, at, complete=True)

    def checkpoint_gradients(self) -> None:
        raise UserError(
            f"train.gradient_checkpointing: {self.name} is your own model: call "
            "torch.utils.checkpoint in its forward, and leave the setting out"
        )

    def save(self, folder: Path) -> None:
        """Save an adapter in peft's format, or all weights in a file for safetensors'
        load_model."""
        if has_adapters(self.model):
            save_adapters(self.model, folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            save_model(self.model, str(folder / MODEL_FILE))

    def merge(self) -> None:
        """Add the adapters' products to the weights, and remove the adapters."""
        for name, module in list(self.model.named_modules()):
            if isinstance(module, BaseTunerLayer):
                module.merge()
                self.model.set_submodule(name, module.get_base_layer())

    def load_weights(self, folder: Path) -> None:
        """Load weights that `save` wrote."""
        if (folder / ADAPTER_WEIGHTS).is_file():
            load_adapters(self.model, folder)
        elif (folder / MODEL_FILE).is_file():
            refuse_full_weights(folder, has_adapters(self.model))
            load_model(self.model, str(folder / MODEL_FILE))
        else:
            raise UserError(
                f"{folder} has neither {ADAPTER_WEIGHTS} nor {MODEL_FILE}: no saved weights"
            )

    def close(self) -> None:
        """Do nothing, since the policy holds nothing outside this process."""


def _load_whole(name: str, model: nn.Module, file: Path) -> None:
    """Load all weights from a safetensors file. UserError for the weights of another model."""
    try:
        load_model(model, str(file))
    except (RuntimeError, SafetensorError, OSError) as error:
        raise_memory(error)
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"model.weights: {file} does not fit {name}: {reason}") from error


def shown_by(policy: Any, samples: Samples) -> Samples:
    """Samples as pages show them: tensors of a user's own model, and sound alone, as images."""
    return drawn(samples, policy.calls.image if isinstance(policy, OwnPolicy) else undrawn)


def undrawn(sample: Tensor) -> None:
    """No image of its own, for a sample of a model that draws none."""
    del sample


def automatic_rows(numbers: int) -> int:
    """Rows per call, from the size of a row's state."""
    return max(1, min(4096, 2**18 // max(1, numbers)))
