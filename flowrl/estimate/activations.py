"""Bytes that one call of a denoiser keeps for its backward pass.

They are counted on torch's meta device, where no weights exist, by the hooks with which autograd
saves tensors: in one row's call at its own size, with the run's adapters and dtypes. Of an adapted
linear autograd keeps the input of A, in the adapter's dtype, and the input of B; of a frozen linear
nothing; and the inputs of norms, activation functions and products of activations. Attention counts
as flash attention. A storage counts once.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from flowrl.estimate.flops import INPUTS, UNCOUNTABLE, text_tokens
from flowrl.estimate.sizes import RowShape
from flowrl.estimate.started_adapters import StartedAdapters, layers_of
from flowrl.models.description import describe
from flowrl.models.diffusers.lora.lora import chosen_targets
from flowrl.models.open import DTYPES
from flowrl.models.savings import outer_lists
from flowrl.settings import ModelSettings, PipelineSettings
from flowrl.settings.model.adapters import Lora


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that one row's call keeps.

    whole   without gradient checkpointing
    blocks  of them in repeated blocks
    block   of them in the largest block
    inputs  of the blocks, which are kept with gradient checkpointing
    """

    whole: int
    blocks: int
    block: int
    inputs: int

    @property
    def checkpointed(self) -> int:
        """Bytes with gradient checkpointing, while the largest block runs again."""
        return self.whole - self.blocks + self.inputs + self.block


@dataclass
class _Seen:
    """Storages, each once. Weights are no part of what a call keeps."""

    skipped: set[int]
    held: dict[int, Any] = field(default_factory=dict)
    bytes: int = 0

    def add(self, value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        place = storage._cdata
        if place not in self.skipped and place not in self.held:
            self.held[place] = storage  # a freed one's place would be another's
            self.bytes += storage.nbytes()
        return value


def kept_by_call(m: ModelSettings) -> KeptBytes | None:
    """Count the bytes that a call of the first denoiser keeps. None for a model whose inputs are
    not known."""
    if not isinstance(m, PipelineSettings):
        return None
    lora = None if m.lora is None else _AdapterForm.of(m.lora, m.half_adapters)
    sizes = {"height": m.height, "width": m.width, "call": m.call}
    alike = PipelineSettings(pipeline=m.pipeline, dtype=m.dtype, lora=None, **sizes)
    return _kept(alike.model_dump_json(), lora)


class _AdapterForm(NamedTuple):
    """Adapters of a call: new ones at `targets`, or those of a file in its `layers`."""

    rank: int
    dora: bool
    half: bool
    targets: tuple[str, ...] | None
    layers: tuple[str, ...] = ()

    @classmethod
    def of(cls, lora: Lora, half: bool) -> "_AdapterForm":
        if (started := StartedAdapters.of(lora)) is None:
            return cls(lora.rank, lora.dora, half, lora.targets)
        return cls(started.rank, started.dora, half, None, started.layers)


@lru_cache(maxsize=16)
def _kept(settings: str, lora: "_AdapterForm | None") -> KeptBytes | None:
    m = PipelineSettings.model_validate_json(settings)
    described = describe(m)
    if described is None or type(described.first).__name__ not in INPUTS:
        return None
    name, dtype = type(described.first).__name__, DTYPES[m.dtype]
    model: Any = deepcopy(described.first)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    inputs = INPUTS[name](model, RowShape.of(described, m), text_tokens(described, m, name))
    named_inputs = {k: _of(dtype, k, value) for k, value in inputs.items()}
    model.requires_grad_(lora is None)
    if lora is not None:
        ends = layers_of(model, lora.layers) or chosen_targets(model, lora.targets)
        with torch.device("meta"):  # peft makes new layers on the CPU, and a plan needs none of it
            model.add_adapter(
                LoraConfig(
                    r=lora.rank, lora_alpha=lora.rank, target_modules=ends, use_dora=lora.dora
                )
            )
        for parameter_name, p in model.named_parameters():
            if ".lora_" in parameter_name:
                p.data = p.data.to(
                    torch.bfloat16 if lora.half else torch.promote_types(dtype, torch.float32)
                )
    try:
        return _counted(model, named_inputs)
    except UNCOUNTABLE:
        return None


def _of(dtype: torch.dtype, name: str, value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point() and "ids" not in name
    return value.to(dtype) if floats else value


def _counted(model: nn.Module, named_inputs: dict[str, Any]) -> KeptBytes:
    weights = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    seen, entered = _Seen(set(weights)), _Seen(set(weights))
    inside: list[int] = []
    begun: list[int] = []

    def enter(_: Any, args: Any, named: Any) -> None:
        for leaf in tree_leaves((args, named)):
            if isinstance(leaf, Tensor):
                entered.add(leaf)
        begun.append(seen.bytes)

    def leave(*_: Any) -> None:
        inside.append(seen.bytes - begun.pop())

    hooks = [
        hook
        for blocks in outer_lists(model)
        for block in blocks
        for hook in (
            block.register_forward_pre_hook(enter, with_kwargs=True),
            block.register_forward_hook(leave),
        )
    ]
    saved = torch.autograd.graph.saved_tensors_hooks(seen.add, lambda value: value)
    with _FlashAttention(), saved:
        out = model(**named_inputs)
    for hook in hooks:
        hook.remove()
    del out
    return KeptBytes(seen.bytes, sum(inside), max(inside, default=0), entered.bytes)


class _Attention(torch.autograd.Function):
    """Keeps what flash attention does: its inputs, its output, and a float32 number per query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1]).float())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("a call is counted, and has no backward pass")


class _FlashAttention(TorchFunctionMode):
    """Each call of torch's attention keeps what flash attention keeps."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention:
            return _kept_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _kept_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    return _Attention.apply(query, key, value)
