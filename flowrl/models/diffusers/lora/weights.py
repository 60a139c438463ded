"""The trained weights of a pipeline: adapters of its denoisers, or all of their weights."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from flowrl.models import savings
from flowrl.models.diffusers.call.loop.loop import Loop
from flowrl.models.diffusers.lora import given_adapters, lora
from flowrl.models.diffusers.memory.experts import RestingExperts
from flowrl.models.diffusers.saving import save_pipeline
from flowrl.models.quantization import refuse_quantized


class DenoiserWeights:
    """The part of `PipelinePolicy` that adds, trains and saves weights."""

    pipe: Any
    denoisers: tuple[nn.Module, ...]

    @property
    @abstractmethod
    def loop(self) -> Loop: ...

    @property
    @abstractmethod
    def experts(self) -> RestingExperts: ...

    def add_lora(
        self,
        *,
        rank: int,
        alpha: int | float,
        targets: Sequence[str] | None,
        seed: int,
        dora: bool = False,
    ) -> None:
        """Add adapters to every denoiser. None: to attention and feed-forward linear layers."""
        lora.add_lora(self.loop.driver.denoisers, lora.Spec(rank, alpha, targets, seed, dora))
        self.experts.settle()

    def begin_from(self, source: str) -> None:
        """Add a file's adapters to the denoisers, as the start of training."""
        given_adapters.begin_from(self.pipe, self.loop.driver.denoisers, source)
        self.experts.settle()

    def roots(self) -> dict[str, nn.Module]:
        return self.loop.driver.denoisers

    def trainable(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters if there are any, otherwise all parameters of the denoisers."""
        named = {
            f"{component}.{name}": parameter
            for component, denoiser in self.loop.driver.denoisers.items()
            for name, parameter in denoiser.named_parameters()
        }
        return {name: p for name, p in named.items() if ".lora_" in name} or named

    def train_all(self) -> None:
        """Train all weights: every parameter of every denoiser gets a gradient."""
        for name, denoiser in self.loop.driver.denoisers.items():
            refuse_quantized(denoiser, name)
            denoiser.requires_grad_(True)

    def checkpoint_gradients(self) -> None:
        savings.checkpoint_denoisers(self.denoisers)
        savings.checkpoint_decoder(self.pipe)

    def save(self, folder: Path) -> None:
        """Save files that plain diffusers loads: with `load_lora_weights` or `from_pretrained`."""
        if lora.has_lora(self.loop.driver.denoisers):
            lora.save_lora(self.pipe, self.loop.driver.denoisers, folder)
        else:
            save_pipeline(self.pipe, folder)

    def load_weights(self, folder: Path) -> None:
        """Load weights that `save` wrote, or an adapter in peft's own format, into a policy with
        the same base model."""
        opened = given_adapters.in_diffusers_format(self.pipe, str(folder), "adapter")
        with opened as place:
            read = Path(place) if Path(place).is_dir() else Path(place).parent
            lora.load_lora(self.pipe, self.loop.driver.denoisers, read, str(folder))
