"""Context parallelism: processes split the tokens of each denoiser call among them.

diffusers' plan for a model (`_cp_plan`) lists the places where tokens are split and gathered. In
attention each process has all tokens for a part of the heads (Ulysses, arXiv:2309.14509). Processes
of one group hold the same rows and take the same steps. A gather keeps only the gradient of the
process's own tokens, so gradients summed over all processes count each row once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
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
from flowrl.models.description import local_folder
from flowrl.models.diffusers.call.drive.driver import DENOISERS
from flowrl.models.diffusers.replay.proof_steps import STEP_TOLERANCE
from flowrl.settings import ModelSettings, PipelineSettings
from flowrl.settings.checks.model_files import read_json

# gradients compared with those of unshared calls: tests/processes/test_context_parallel.py
PROVEN = {
    "WanTransformer3DModel": "Wan",
    "FluxTransformer2DModel": "FLUX.1",
    "Flux2Transformer2DModel": "FLUX.2",
    "QwenImageTransformer2DModel": "Qwen-Image",
}
TEXT, MASK = "encoder_hidden_states", "encoder_hidden_states_mask"
SETTING = "model.context_parallel"


def refuse_model(m: ModelSettings, processes: int) -> None:
    """UserError for unsupported settings and models, before weights load."""
    if not isinstance(m, PipelineSettings) or m.context_parallel == 1:
        return
    degree = m.context_parallel
    if processes % degree:
        raise UserError(
            f"{SETTING}: {degree} needs a multiple of {degree} processes, but this run has "
            f"{processes}: start more with accelerate launch or torchrun, or remove the setting"
        )
    folder = local_folder(m.pipeline)
    if folder is None:
        return  # `share` checks it after the download
    for name in DENOISERS:
        path = folder / name / "config.json"
        if path.is_file():
            config = read_json(path, "model.pipeline")
            check_denoiser(name, str(config.get("_class_name")), config, degree)


def check_denoiser(name: str, kind: str, config: Mapping[str, Any], degree: int) -> None:
    """UserError if a denoiser of this class and configuration cannot share its calls."""
    if kind not in PROVEN:
        raise UserError(
            f"{SETTING}: diffusers has no plan for sharing calls of the {name} ({kind}), or no "
            f"plan with proven gradients; supported: {', '.join(PROVEN.values())}. Remove the "
            "setting"
        )
    heads = config["num_attention_heads"]
    if heads % degree:
        raise UserError(
            f"{SETTING}: {name} has {heads} attention heads, which {degree} processes cannot "
            "share evenly: set a divisor of the number of heads"
        )


def share(denoisers: Mapping[str, Any], degree: int, device: torch.device) -> dict[str, "Shared"]:
    """Make groups of `degree` processes, by rank, share all further calls of these denoisers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape, names = (world // degree, 1, degree), ("data", "ring", "ulysses")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    # as `enable_parallelism` does, which divides by the number of accelerators: 0 on CPUs
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ulysses_degree=degree))
    config.setup(rank, world, device, mesh=mesh)
    circles = {}
    for name, denoiser in denoisers.items():
        check_denoiser(name, type(denoiser).__name__, denoiser.config, degree)
        circles[name] = Shared(denoiser, config, degree)
    return circles


class Shared:
    """A denoiser whose calls are shared. Its first call is also made unshared, for comparison."""

    def __init__(self, denoiser: Any, config: Any, degree: int) -> None:
        self.denoiser, self.config, self.degree = denoiser, config, degree
        self.on = True
        self.away: float | None = None  # relative difference of the first call from a whole one
        for place, plan in denoiser._cp_plan.items():
            modules = _get_submodule_by_name(denoiser, place)
            for module in modules if isinstance(modules, list) else [modules]:
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

        @wraps(self._forward)  # blocks choose a network's arguments by its signature
        def first(*args: Any, **named: Any) -> Any:
            return self._first(*args, **named)

        denoiser.forward = first

    def _attend(self, config: ParallelConfig | None) -> None:
        for processor in self._processors:
            processor._parallel_config = config

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make each process call the denoiser alone inside the body."""
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
        """Pad the text until it can be split evenly, if the model takes a mask for texts."""
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
            next(t for t in tree_flatten(arguments)[0] if isinstance(t, Tensor))
            for arguments in (shared, whole)
        )
        away = float((ours - theirs).abs().max() / theirs.abs().max())
        if not away <= STEP_TOLERANCE[ours.dtype]:
            raise UserError(
                f"{SETTING}: a call of {type(self.denoiser).__name__} shared by {self.degree} "
                f"processes differs from an unshared one by {away:.1e} of its size: remove the "
                "setting"
            )
        self.away = away


class SplitTensor(ContextParallelSplitHook):
    """diffusers' hook, active while calls are shared; its error includes the numbers."""

    def __init__(self, plan: Any, shared: Shared) -> None:
        super().__init__(plan, shared.config.context_parallel_config)
        self.shared = shared

    def pre_forward(self, module: nn.Module, *args: Any, **named: Any) -> Any:
        return super().pre_forward(module, *args, **named) if self.shared.on else (args, named)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return super().post_forward(module, output) if self.shared.on else output

    def _prepare_cp_input(self, x: Tensor, cp_input: ContextParallelInput) -> Tensor:
        if cp_input.expected_dims not in (None, x.ndim):
            return x  # one timestep per row instead of one per token
        tokens, degree = x.shape[cp_input.split_dim], self.shared.degree
        if tokens % degree:
            raise UserError(
                f"{SETTING}: {degree} processes cannot share {tokens} tokens evenly: change "
                "height, width or num_frames (or max_sequence_length, for text tokens)"
            )
        return super()._prepare_cp_input(x, cp_input)


class Gather(ContextParallelGatherHook):
    def __init__(self, plan: Any, shared: Shared) -> None:
        listed: Any = list(plan) if isinstance(plan, list | tuple) else [plan]
        super().__init__(listed, shared.config.context_parallel_config)
        self.shared = shared

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return super().post_forward(module, output) if self.shared.on else output
