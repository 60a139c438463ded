"""Processes that share each call of the denoiser, a part of its tokens each.

diffusers' plan of a model (`_cp_plan`) says where tokens are parted and where they come together
again; in attention each process has all tokens of a part of the heads (Ulysses, arXiv:2309.14509).
Those that share calls hold the same rows and take the same steps. Where tokens come together each
process keeps the gradient of its own, so gradients summed over all processes count a row once.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import (
    ContextParallelGatherHook,
    ContextParallelSplitHook,
    _get_submodule_by_name,
)
from diffusers.hooks.hooks import HookRegistry
from diffusers.models._modeling_parallel import (
    ContextParallelConfig,
    ContextParallelInput,
    ParallelConfig,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_flatten

from flowrl.errors import UserError
from flowrl.models.diffusers.driver import DENOISERS
from flowrl.models.diffusers.proof_steps import STEP_TOLERANCE
from flowrl.models.sizes import local_folder
from flowrl.settings import ModelSettings

# whose gradients were held against those of whole calls: tests/processes/test_context_parallel.py
PROVEN = {
    "WanTransformer3DModel": "Wan",
    "FluxTransformer2DModel": "FLUX.1",
    "Flux2Transformer2DModel": "FLUX.2",
    "QwenImageTransformer2DModel": "Qwen-Image",
}
TEXT, MASK = "encoder_hidden_states", "encoder_hidden_states_mask"
SETTING = "model.context_parallel"


def refuse_model(m: ModelSettings, processes: int) -> None:
    """UserError for what cannot be shared, as far as it can be told before weights are loaded."""
    degree = m.context_parallel
    if degree == 1:
        return
    if processes % degree:
        raise UserError(
            f"{SETTING}: {degree} wants a multiple of {degree} processes, and this run has "
            f"{processes}: start more with accelerate launch or torchrun, or leave it out"
        )
    folder = local_folder(m.pipeline or "")
    if folder is None:
        return  # `share` tells once it is here
    for name in DENOISERS:
        path = folder / name / "config.json"
        if path.is_file():
            config = json.loads(path.read_text())
            check_denoiser(name, config["_class_name"], config, degree)


def check_denoiser(name: str, kind: str, config: Mapping[str, Any], degree: int) -> None:
    """UserError for a denoiser of a pipeline, by its class and its configuration."""
    if kind not in PROVEN:
        raise UserError(
            f"{SETTING}: diffusers has no plan for sharing calls of the {name} ({kind}), or none "
            f"that was proven to learn; it has for {', '.join(PROVEN.values())}: leave it out"
        )
    heads = config["num_attention_heads"]
    if heads % degree:
        raise UserError(
            f"{SETTING}: {name} has {heads} attention heads, which {degree} processes cannot share "
            "evenly: set a divisor of it"
        )


def share(denoisers: Mapping[str, Any], degree: int, device: torch.device) -> dict[str, "Shared"]:
    """From now on each `degree` processes, by their ranks, share all calls of these."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape, names = (world // degree, 1, degree), ("data", "ring", "ulysses")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    # what `enable_parallelism` makes of it, which divides by the number of accelerators: on CPUs 0
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ulysses_degree=degree))
    config.setup(rank, world, device, mesh=mesh)
    made = {}
    for name, denoiser in denoisers.items():
        check_denoiser(name, type(denoiser).__name__, denoiser.config, degree)
        made[name] = Shared(denoiser, config, degree)
    return made


class Shared:
    """A denoiser whose calls are shared. The first one is also made whole, to compare."""

    def __init__(self, denoiser: Any, config: Any, degree: int) -> None:
        self.denoiser, self.config, self.degree = denoiser, config, degree
        self.on = True
        self.away: float | None = None  # of the first call from a whole one, beside its size
        for place, plan in denoiser._cp_plan.items():
            found = _get_submodule_by_name(denoiser, place)
            for module in found if isinstance(found, list) else [found]:
                hook = SplitTensor(plan, self) if isinstance(plan, dict) else Gather(plan, self)
                registry = HookRegistry.check_if_exists_or_initialize(module)
                registry.register_hook(hook, f"shared {place}")
        self._processors = [
            processor
            for module in denoiser.modules()
            if "_parallel_config" in dir(processor := vars(module).get("processor"))
        ]
        self._attend(config)
        self._forward: Callable[..., Any] = denoiser.forward
        denoiser.forward = self._first

    def _attend(self, config: ParallelConfig | None) -> None:
        for processor in self._processors:
            processor._parallel_config = config

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Each process makes its calls alone."""
        self.on = False
        self._attend(None)
        try:
            yield
        finally:
            self.on = True
            self._attend(self.config)

    def _first(self, *args: Any, **named: Any) -> Any:
        result = self._forward(*args, **self._padded(named))
        if self.away is None and not torch.is_grad_enabled():
            with self.whole():
                self._compare(result, self._forward(*args, **named))
        return result

    def _padded(self, named: dict[str, Any]) -> dict[str, Any]:
        """A text that is as long as the longest of its batch, in a model that takes a mask for
        that, is padded until it can be shared evenly."""
        text = named.get(TEXT)
        if MASK not in named or text is None or text.shape[1] % self.degree == 0:
            return named
        rows, tokens, width = text.shape
        more = -tokens % self.degree
        mask = named[MASK]
        mask = text.new_ones(rows, tokens, dtype=torch.bool) if mask is None else mask
        return named | {
            TEXT: torch.cat([text, text.new_zeros(rows, more, width)], 1),
            MASK: torch.cat([mask, mask.new_zeros(rows, more)], 1),
        }

    def _compare(self, shared: Any, whole: Any) -> None:
        ours, theirs = (
            next(t for t in tree_flatten(given)[0] if isinstance(t, Tensor))
            for given in (shared, whole)
        )
        away = float((ours - theirs).abs().max() / theirs.abs().max())
        if not away <= STEP_TOLERANCE[ours.dtype]:
            raise UserError(
                f"{SETTING}: a call of {type(self.denoiser).__name__} that {self.degree} processes "
                f"share is off a whole one's by {away:.1e} of its size: leave it out"
            )
        self.away = away


class SplitTensor(ContextParallelSplitHook):
    """diffusers' own, while calls are shared, with numbers in what it refuses."""

    def __init__(self, plan: Any, shared: Shared) -> None:
        super().__init__(plan, shared.config.context_parallel_config)
        self.shared = shared

    def pre_forward(self, module: nn.Module, *args: Any, **named: Any) -> Any:
        return super().pre_forward(module, *args, **named) if self.shared.on else (args, named)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return super().post_forward(module, output) if self.shared.on else output

    def _prepare_cp_input(self, x: Tensor, cp_input: ContextParallelInput) -> Tensor:
        if cp_input.expected_dims not in (None, x.ndim):
            return x  # one time of a row, and not one of each token
        tokens, degree = x.shape[cp_input.split_dim], self.shared.degree
        if tokens % degree:
            raise UserError(
                f"{SETTING}: {degree} processes cannot share {tokens} tokens evenly: change "
                "height, width or num_frames (max_sequence_length, if they are a text's)"
            )
        return super()._prepare_cp_input(x, cp_input)


class Gather(ContextParallelGatherHook):
    def __init__(self, plan: Any, shared: Shared) -> None:
        listed: Any = list(plan) if isinstance(plan, list | tuple) else [plan]
        super().__init__(listed, shared.config.context_parallel_config)
        self.shared = shared

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return super().post_forward(module, output) if self.shared.on else output
