"""Savings of memory or time that diffusers and transformers offer.

They change a model's outputs only by rounding. The proof at load
(`flowrl.models.diffusers.replay.proof`) runs with them on, and the check of the first ratio reports
their effect on it.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Literal

import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch._dynamo import config
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from flowrl.errors import UserError
from flowrl.models.out_of_memory import raise_memory

GRAPHS = 64  # of one block's code


def checkpoint_denoisers(denoisers: Iterable[Any]) -> None:
    """Keep only the inputs of denoiser blocks, and run the blocks again in backward.

    Uses diffusers' own method, which needs no training mode and so enables no dropout. Raises
    UserError for a model without this method.
    """
    for denoiser in denoisers:
        try:
            denoiser.enable_gradient_checkpointing()
        except ValueError as error:
            raise UserError(
                f"train.gradient_checkpointing: {type(denoiser).__name__} does not support it; "
                "leave it out, and lower train.rows_per_call instead"
            ) from error


def checkpoint_decoder(pipe: Any) -> None:
    """Checkpoint a VAE that supports it, for decoding with gradients. Changes nothing without
    gradients."""
    vae = vars(pipe).get("vae")
    if isinstance(vae, ModelMixin) and vae._supports_gradient_checkpointing:
        vae.enable_gradient_checkpointing()


def checkpoint_layers(model: nn.Module) -> None:
    """Checkpoint a language model by wrapping the `forward` of its layers.

    transformers' own method needs training mode, in which `generate` has no cache and dropout is
    on. Raises UserError for a model without layers of transformers' kind.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"train.gradient_checkpointing: {type(model).__name__} does not support it; leave "
            "it out, and lower train.rows_per_call instead"
        )
    for layer in layers:
        layer.forward = _again(layer.forward)


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **named)
        return checkpoint(forward, *args, use_reentrant=False, **named)

    return checkpointed


def attention(denoisers: Iterable[Any], backend: str) -> None:
    """Set an attention kernel by its name in `diffusers.attention_dispatch`."""
    denoisers = list(denoisers)
    for denoiser in denoisers:
        processors = [vars(m).get("processor") for m in denoiser.modules()]
        if not any("_attention_backend" in dir(processor) for processor in processors):
            raise UserError(
                f"model.attention: the attention of {type(denoiser).__name__} is not dispatched by "
                "diffusers; leave it out"
            )
    if "sage" in backend:
        raise UserError(
            f"model.attention: {backend} has no backward pass, so attention would have no "
            "gradient; use flash, flex, xformers or native"
        )
    for denoiser in denoisers:
        try:
            denoiser.set_attention_backend(backend)
        except (ValueError, RuntimeError, ImportError) as error:
            raise_memory(error)
            raise UserError(f"model.attention: {backend}: {error}") from error
    if "cudnn" in backend and functional.scaled_dot_product_attention is PLAIN_ATTENTION:
        functional.scaled_dot_product_attention = attention_with_cudnn


PLAIN_ATTENTION = functional.scaled_dot_product_attention


class OwnLayout(torch.autograd.Function):
    """Hand a tensor on, and give its gradient the tensor's own strides.

    torch 2.11 keeps the kernel of cuDNN's backward pass by the layouts of q, k and v alone, built
    for the layout of the first gradient of the output. Another one's, as that of a block which
    joins attention with its MLP before one projection, is read with the strides of the first:
    tiny FLUX.1 had wrong gradients, with and without NaN, on an H200. Later sources of PyTorch keep
    kernels by this layout, too.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.strides = tensor.stride()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if grad.stride() == ctx.strides:
            return grad
        return torch.empty_strided(
            grad.shape, ctx.strides, dtype=grad.dtype, device=grad.device
        ).copy_(grad)


@wraps(PLAIN_ATTENTION)
def attention_with_cudnn(*args: Any, **named: Any) -> Tensor:
    """PyTorch's attention, whose gradient comes in the layout of its output."""
    out = PLAIN_ATTENTION(*args, **named)
    return OwnLayout.apply(out) if out.requires_grad else out


@wraps(PLAIN_ATTENTION)
def unmasked_with_cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """The same, which leaves cuDNN out of calls with a mask or with one query."""
    if attn_mask is None and query.shape[-2] > 1:
        return attention_with_cudnn(query, key, value, attn_mask, *rest, **named)
    enabled = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    backends = [backend for backend in enabled if enabled[backend]]
    if not backends:  # the caller asks for cuDNN alone, as diffusers' own backend of it does
        return attention_with_cudnn(query, key, value, attn_mask, *rest, **named)
    with sdpa_kernel(backends):
        return PLAIN_ATTENTION(query, key, value, attn_mask, *rest, **named)


def cudnn_attention(use: bool | Literal["unmasked"]) -> None:
    """Allow or forbid cuDNN's attention in this process, or allow it in calls without a mask."""
    torch.backends.cuda.enable_cudnn_sdp(use is not False)
    chosen = {True: attention_with_cudnn, "unmasked": unmasked_with_cudnn}
    replaced = functional.scaled_dot_product_attention in chosen.values()
    if use is not False:  # models look it up there in every call
        functional.scaled_dot_product_attention = chosen[use]
    elif replaced:
        functional.scaled_dot_product_attention = PLAIN_ATTENTION


def compile_blocks(denoisers: Iterable[Any], backend: str = "inductor") -> None:
    """Compile the repeated blocks at their first call (torch.compile).

    These are the blocks that diffusers names for the model, or otherwise the entries of its lists
    of blocks. Sampling and training compile to different graphs; the check of the first ratio
    reports a difference in their rounding.

    A model has two or three kinds of blocks, each called with and without gradients, with frozen
    and with trained weights, with one row and with many. torch stops compiling after eight graphs,
    so this raises its limit for the whole process.
    """
    denoisers = list(denoisers)
    refuse_without_blocks(denoisers)
    config.cache_size_limit = max(config.cache_size_limit, GRAPHS)  # recompile_limit, since 2.7
    for denoiser in denoisers:
        if denoiser._repeated_blocks:
            denoiser.compile_repeated_blocks(backend=backend)
            continue
        for block in _listed(denoiser):
            block.compile(backend=backend)


def refuse_without_blocks(denoisers: Iterable[Any]) -> None:
    """UserError for a denoiser without blocks that `compile_blocks` could compile."""
    for denoiser in denoisers:
        if not denoiser._repeated_blocks and not _listed(denoiser):
            raise UserError(
                f"model.compile: {type(denoiser).__name__} has no repeated blocks; leave it out"
            )


def _listed(denoiser: nn.Module) -> list[nn.Module]:
    return [block for listed in outer_lists(denoiser) for block in listed]


def uncompile(roots: Iterable[nn.Module]) -> None:
    """Call all modules uncompiled again."""
    for root in roots:
        for module in root.modules():
            module._compiled_call_impl = None


def are_compiled(roots: Iterable[nn.Module]) -> bool:
    modules = (module for root in roots for module in root.modules())
    return any(module._compiled_call_impl is not None for module in modules)


def outer_lists(denoiser: nn.Module) -> list[nn.ModuleList]:
    """Lists of blocks that are not inside another list."""
    lists = {n: m for n, m in denoiser.named_modules() if isinstance(m, nn.ModuleList)}
    return [m for n, m in lists.items() if not any(n.startswith(f"{other}.") for other in lists)]


def decoder(pipe: Any, *, tiling: bool, slicing: bool) -> None:
    """Make the VAE decode one tile or one sample at a time."""
    vae = vars(pipe).get("vae")
    for wanted, name in ((tiling, "tiling"), (slicing, "slicing")):
        if not wanted:
            continue
        owner = type(pipe).__name__ if vae is None else type(vae).__name__
        lacking = UserError(f"model.vae.{name}: {owner} does not support it; leave it out")
        if (method := getattr(vae, f"enable_{name}", None)) is None:
            raise lacking
        try:
            method()
        except NotImplementedError as error:  # diffusers' own, for a VAE without tiles or slices
            raise lacking from error
