"""Floating-point operations of a model's calls, counted on torch's meta device, without weights.

torch's `FlopCounterMode` counts the matrix products, convolutions and attention of one call of the
denoiser, of the decoder or of the language model, at a row's own size; a multiplication and an
addition are two operations. Denoisers with unknown inputs are estimated instead:

    2 in out tokens for each linear layer in the blocks, and 4 tokens^2 width for each attention

Beside these, the same call's other kernels are counted: how many, and the bytes that they read and
write. Attention is one kernel, as it is on a GPU.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from flowrl.estimate.sizes import PROMPT, TEXT_MODULES, RowShape, rows_per_state
from flowrl.models.description import Description
from flowrl.models.image_tokens.policy import ImageTokenPolicy
from flowrl.settings import PipelineSettings
from flowrl.settings.model.image_tokens import ImageTokenSettings

# what a call without data raises, and one that needs further inputs
UNCOUNTABLE = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError)

Inputs = dict[str, Any]


VIEWS = {  # no kernel
    "view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "unsqueeze", "permute",
    "detach", "alias", "as_strided", "split", "split_with_sizes", "chunk", "squeeze", "unbind",
    "empty", "empty_like", "new_empty", "empty_strided", "reshape", "_reshape_alias", "unflatten",
}  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """Kernels of one row's call.

    launched    all of them, products and attention included
    operations  of products and attention
    moved       bytes that the others read and write
    """

    launched: int
    operations: float
    moved: float


@dataclass(frozen=True)
class FlopCount:
    """Operations of one call.

    state    one evaluation of the velocity at one state, including guidance rows; for a text one
             pass over prompt and completion
    trained  the same at the guidance of training
    decode   one sample; None if not counted
    counted  False: from a formula with the numbers of weights and tokens
    kernels  of one row's pass, without guidance rows; None if not counted
    """

    state: float
    trained: float
    decode: float | None
    counted: bool
    network: str
    kernels: Kernels | None = None


class KernelCounter(TorchDispatchMode):
    """Counts kernels, and the bytes that those without operations of their own move."""

    def __init__(self) -> None:
        super().__init__()
        self.launched, self.moved, self.inside = 0, 0.0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.inside or func._schema.name.split("::")[1] in VIEWS:
            return out
        self.launched += 1
        if func._overloadpacket not in flop_registry:
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            self.moved += sum(t.numel() * t.element_size() for t in tensors)
        return out

    @contextmanager
    def attention_as_one(self) -> Iterator[None]:
        """Count a call of PyTorch's attention as one kernel whose time is that of its products: on
        the meta device it is computed by its formula."""
        formula = functional.scaled_dot_product_attention

        def attention(*args: Any, **named: Any) -> Tensor:
            self.launched, self.inside = self.launched + 1, True
            try:
                return formula(*args, **named)
            finally:
                self.inside = False

        with patch.object(functional, "scaled_dot_product_attention", attention):
            yield


def counted(model: nn.Module, dtype: torch.dtype, **inputs: Any) -> tuple[float, Kernels]:
    """Count the floating-point operations and the kernels of one model call on the meta device,
    with weights and inputs of a dtype."""
    model = nn.Module.to(deepcopy(model), dtype)  # what is described is kept and shared
    cast = {
        name: value.to(dtype)
        if isinstance(value, Tensor) and value.is_floating_point() and not name.endswith("_ids")
        else value
        for name, value in inputs.items()
    }
    kernels, operations = KernelCounter(), FlopCounterMode(display=False)
    with torch.no_grad(), kernels.attention_as_one(), kernels, operations:
        model(**cast)
    total = float(operations.get_total_flops())
    return total, Kernels(kernels.launched, total, kernels.moved)


def text_flops(described: Description, length: int, dtype: torch.dtype) -> FlopCount:
    """Operations of a language model on a prompt and its completion."""
    model: Any = described.language_model()
    tokens = PROMPT + length
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    mask = _meta(1, 1, tokens, tokens)  # whole, since a mask cannot be made of tokens without data
    kernels: Kernels | None = None
    try:
        count, kernels = counted(model, dtype, input_ids=ids, attention_mask=mask, use_cache=False)
    except UNCOUNTABLE:
        c = model.config.get_text_config()
        attention = 4.0 * tokens**2 * c.hidden_size * c.num_hidden_layers
        weights = sum(p.numel() for p in model.parameters())
        count = 2.0 * weights * tokens + attention
    return FlopCount(count, count, None, kernels is not None, type(model).__name__, kernels)


def image_token_flops(
    described: Description, settings: ImageTokenSettings, length: int
) -> FlopCount | None:
    """Operations of a model that writes images on a prompt and all tokens of an image, with the
    second row of guidance; None without its files. The decoder is not counted."""
    if described.folder is None:
        return None
    policy = ImageTokenPolicy.without_weights(str(described.folder), settings)
    family, rows, tokens = policy.family, policy.guided.rows, PROMPT + length
    width = policy.model.config.get_text_config().hidden_size
    embeddings, mask = _meta(rows, tokens, width), _meta(1, 1, tokens, tokens)

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        hidden = family.states(embeddings, attention_mask=mask, use_cache=False).last_hidden_state
        family.head(hidden[:, -length:])
    count = float(counter.get_total_flops())
    return FlopCount(count, count, None, True, policy.name)


def pipeline_flops(described: Description, m: PipelineSettings, steps: int) -> FlopCount | None:
    """Operations of a pipeline's denoiser and decoder at the run's size, on average over a sample's
    steps; None for a denoiser without tokens whose inputs are unknown."""
    shape = RowShape.of(described, m)
    denoiser = described.first
    name = type(denoiser).__name__
    tokens = text_tokens(described, m, name)
    by_call = _counted_row(denoiser, shape, tokens, getattr(torch, m.dtype))
    if by_call is None and shape.tokens is None:
        return None
    if by_call is not None:
        row, kernels = by_call
    else:
        assert shape.tokens is not None
        row, kernels = formula(denoiser, shape.tokens, tokens), None
    scales = m.guidance.sample, m.guidance.train
    counts = [rows_per_state(described, scale, steps) for scale in scales]
    sample, train = (row * sum(rows) / len(rows) for rows in counts)
    decode = _decode(described, shape)
    return FlopCount(sample, train, decode, by_call is not None, name, kernels)


def _counted_row(
    denoiser: nn.Module, shape: RowShape, text: int, dtype: torch.dtype
) -> tuple[float, Kernels] | None:
    """Operations and kernels of one row; None for a denoiser that takes inputs outside INPUTS."""
    make = INPUTS.get(type(denoiser).__name__)
    if make is None:
        return None
    try:
        return counted(denoiser, dtype, **make(denoiser, shape, text))
    except UNCOUNTABLE:
        return None


def text_tokens(described: Description, m: PipelineSettings, denoiser: str) -> int:
    """Number of text tokens per row that the denoiser receives."""
    name = "max_sequence_length"
    tokens = m.call.get(name, described.default(name))
    if not isinstance(tokens, int):
        return described.clip
    has_two = denoiser == "SD3Transformer2DModel"  # CLIP's tokens, and then T5's
    return tokens + described.clip if has_two else tokens


def formula(denoiser: nn.Module, tokens: int, text: int) -> float:
    """2 in out tokens for each linear layer, and 4 queries keys width for each attention."""
    total = 0.0
    for name, module in denoiser.named_modules():
        if not isinstance(module, nn.Linear) or "." not in name:
            continue
        if any(part in name for part in ("norm", "emb", "time", "adaln", "modulation")):
            continue  # once a row, not a token
        seen = text if TEXT_MODULES.search(name) else tokens
        if "single" in name:  # text and image tokens as one list
            seen = tokens + text
        total += 2.0 * seen * module.in_features * module.out_features
        if name.endswith("to_q"):
            total += 4.0 * _pairs(denoiser, name, tokens, text) * module.out_features
    return total


def _pairs(denoiser: nn.Module, query: str, tokens: int, text: int) -> int:
    """Number of query-key pairs in one attention: to the text, with the text, or among tokens
    alone."""
    if "attn2" in query:
        return tokens * text
    owner = denoiser.get_submodule(query.rpartition(".")[0])
    joint = "single" in query or any(name == "add_q_proj" for name, _ in owner.named_children())
    return (tokens + text) ** 2 if joint else tokens**2


def _decode(described: Description, shape: RowShape) -> float | None:
    kind = described.configs.get("vae", {}).get("_class_name")
    if kind not in ("AutoencoderKL", "AutoencoderKLWan", "AutoencoderKLHunyuanVideo"):
        return None
    vae: Any = described.component("vae")
    image = (1, shape.channels, shape.height, shape.width)
    latents = image if kind == "AutoencoderKL" else (*image[:2], shape.frames, *image[2:])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        vae.decode(_meta(*latents))
    return float(counter.get_total_flops())


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def _sd3(model: Any, shape: RowShape, text: int) -> Inputs:
    c = model.config
    return {
        "hidden_states": _meta(1, c.in_channels, shape.height, shape.width),
        "encoder_hidden_states": _meta(1, text, c.joint_attention_dim),
        "pooled_projections": _meta(1, c.pooled_projection_dim),
        "timestep": _meta(1),
    }


def _flux(model: Any, shape: RowShape, text: int) -> Inputs:
    c, tokens = model.config, shape.tokens or 1
    return {
        "hidden_states": _meta(1, tokens, c.in_channels),
        "encoder_hidden_states": _meta(1, text, c.joint_attention_dim),
        "pooled_projections": _meta(1, c.pooled_projection_dim),
        "timestep": _meta(1),
        "guidance": _meta(1) if c.guidance_embeds else None,
        "img_ids": _meta(tokens, 3),
        "txt_ids": _meta(text, 3),
    }


def _wan(model: Any, shape: RowShape, text: int) -> Inputs:
    c = model.config
    return {
        "hidden_states": _meta(1, c.in_channels, shape.frames, shape.height, shape.width),
        "encoder_hidden_states": _meta(1, text, c.text_dim),
        "timestep": _meta(1),
    }


def _hunyuan(model: Any, shape: RowShape, text: int) -> Inputs:
    c = model.config
    return {
        "hidden_states": _meta(1, c.in_channels, shape.frames, shape.height, shape.width),
        "encoder_hidden_states": _meta(1, text, c.text_embed_dim),
        "encoder_attention_mask": _meta(1, text, dtype=torch.long),
        "pooled_projections": _meta(1, c.pooled_projection_dim),
        "timestep": _meta(1),
        "guidance": _meta(1) if c.guidance_embeds else None,
    }


def _unet(model: Any, shape: RowShape, text: int) -> Inputs:
    c = model.config
    inputs: Inputs = {
        "sample": _meta(1, c.in_channels, shape.height, shape.width),
        "timestep": _meta(1),
        "encoder_hidden_states": _meta(1, text, c.cross_attention_dim),
    }
    if c.addition_embed_type == "text_time":  # Stable Diffusion XL
        pooled = c.projection_class_embeddings_input_dim - 6 * c.addition_time_embed_dim
        added = {"text_embeds": _meta(1, pooled), "time_ids": _meta(1, 6)}
        inputs["added_cond_kwargs"] = added
    if c.time_cond_proj_dim is not None:
        inputs["timestep_cond"] = _meta(1, c.time_cond_proj_dim)
    return inputs


INPUTS: Mapping[str, Callable[[Any, RowShape, int], Inputs]] = {
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "WanTransformer3DModel": _wan,
    "HunyuanVideoTransformer3DModel": _hunyuan,
    "UNet2DConditionModel": _unet,
}
