"""Seconds that a GPU needs at least for an iteration's calls of the denoiser, without any GPU.

    python scripts/benchmarks/roofline.py configs/papers/flow_grpo_flux_pickscore.yaml

One call, and one with its backward pass, run on torch's meta device at the published size. Products
take their operations over the device's peak for their dtype; every other kernel takes the bytes
that it reads and writes over the bandwidth. Attention is one kernel. No overlap, no launch times.

base              the network without adapters
float32           adapters of model.lora.dtype: float32
bfloat16          adapters of model.lora.dtype: bfloat16
bfloat16, merged  the same, merged in sampling steps that no density is stored of
autocast          the peers' way: float32 adapters, cast to bfloat16 in every call
"""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from flowrl.estimate.flops import INPUTS, VIEWS, text_tokens
from flowrl.estimate.sizes import RowShape, rows_per_state
from flowrl.estimate.time import iteration_work
from flowrl.models.description import Description, describe
from flowrl.models.diffusers.lora.lora import default_targets
from flowrl.settings import PipelineSettings, RunSettings
from flowrl.settings.model.pipeline import GuidanceScale
from flowrl.settings.read import override, read_run

PEAK = {torch.bfloat16: 989e12, torch.float32: 67e12}  # of an H100 SXM, dense, without TF32
BANDWIDTH = 3.35e12  # bytes/s of its memory
ARMS = ("base", "float32", "bfloat16", "bfloat16, merged", "autocast")


@dataclass
class Seconds:
    """Least seconds of products and of other kernels, and the number of both."""

    products: float = 0.0
    passes: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.products + other.products, self.passes + other.passes, self.kernels + other.kernels
        )

    def times(self, n: float) -> "Seconds":
        return Seconds(n * self.products, n * self.passes, n * self.kernels)


class Roofline(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seconds = Seconds()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        counts = flop_registry.get(func._overloadpacket)
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        self.seconds.kernels += bool(tensors) and name not in VIEWS
        if counts is not None:
            dtype = next(t.dtype for t in tensors if t.is_floating_point())
            self.seconds.products += counts(*args, **(kwargs or {}), out_val=out) / PEAK[dtype]
        elif name not in VIEWS:
            self.seconds.passes += sum(t.numel() * t.element_size() for t in tensors) / BANDWIDTH
        return out


class Attention(torch.autograd.Function):
    """One kernel forward and one backward, as flash attention is: 4 and 10 pairs x width."""

    @staticmethod
    def forward(ctx: Any, mode: Roofline, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.mode, ctx.save = mode, (q, k, v)
        ctx.count = math.prod(q.shape[:-1]) * k.shape[-2] * q.shape[-1]
        mode.seconds.products += 4 * ctx.count / PEAK[q.dtype]
        mode.seconds.kernels += 1
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.mode.seconds.products += 10 * ctx.count / PEAK[grads[0].dtype]
        ctx.mode.seconds.kernels += 1
        return None, *(torch.empty_like(each) for each in ctx.save)


@contextmanager
def counted() -> Iterator[Roofline]:
    mode = Roofline()

    def attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return Attention.apply(mode, query, key, value)

    with patch("torch.nn.functional.scaled_dot_product_attention", attention), mode:
        yield mode


def call(model: nn.Module, inputs: Callable[[], dict[str, Any]], grad: bool) -> Seconds:
    given = inputs()
    given["hidden_states"].requires_grad_(grad)  # gradients pass through all blocks
    with counted() as mode, torch.set_grad_enabled(grad):
        out = model(**given, return_dict=False)[0]
        if grad:
            out.backward(torch.empty_like(out))
    return mode.seconds


def adapted(model: Any, run: RunSettings, dtype: torch.dtype) -> Any:
    lora = run.model.lora
    assert lora is not None
    targets = default_targets(model) if lora.targets is None else list(lora.targets)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.rank, target_modules=targets)
    model.requires_grad_(False)
    model.add_adapter(config)
    for name, p in model.named_parameters():
        if ".lora_" in name:
            p.data = p.data.to(dtype)
    return model


def made(run: RunSettings) -> tuple[Any, Callable[[], dict[str, Any]]]:
    known = describe(run.model)
    assert known is not None, "the model's sizes are not known"
    assert isinstance(run.model, PipelineSettings), "only denoisers are measured"
    model, shape = known.first, RowShape.of(known, run.model)
    make, text = INPUTS[type(model).__name__], text_tokens(known, run.model, type(model).__name__)
    model = deepcopy(model).to(torch.bfloat16)  # what is described is kept and shared

    def inputs() -> dict[str, Any]:
        floats = make(model, shape, text)
        return {
            name: value.bfloat16()
            if isinstance(value, Tensor) and value.is_floating_point() and "ids" not in name
            else value
            for name, value in floats.items()
        }

    return model, inputs


def guided_rows(known: Description, run: RunSettings, scale: GuidanceScale) -> float:
    """Rows of the denoiser per state at a guidance scale, on average over the steps of a sample."""
    rows = rows_per_state(known, scale, run.algorithm().steps)
    return sum(rows) / len(rows)


def iteration(run: RunSettings) -> dict[str, Seconds]:
    """Seconds of an iteration's calls of the denoiser, for each arm."""
    work, known = iteration_work(run), describe(run.model)
    assert known is not None
    sampled = work.sampling * guided_rows(known, run, run.guidance.sample)
    trained = work.training * guided_rows(known, run, run.training_guidance)
    frozen = work.frozen * guided_rows(known, run, run.training_guidance)
    model, inputs = made(run)
    model.requires_grad_(False)
    free = call(model, inputs, False)
    found = {"base": free.times(sampled + frozen) + call(model, inputs, True).times(trained)}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        lora = adapted(made(run)[0], run, dtype)
        plain, graded = call(lora, inputs, False), call(lora, inputs, True)
        found[name] = (plain.times(sampled + frozen)) + graded.times(trained)
        if name == "bfloat16":
            untrained = max(0.0, sampled - trained)
            rest = plain.times(sampled - untrained + frozen) + graded.times(trained)
            found["bfloat16, merged"] = free.times(untrained) + rest
            adapters = sum(p.numel() for n, p in lora.named_parameters() if ".lora_" in n)
            casts = Seconds(0.0, 6.0 * adapters / BANDWIDTH)  # reads 4 bytes, writes 2
            found["autocast"] = found[name] + casts.times(sampled + frozen + 2 * trained)
        del lora
    return {arm: found[arm] for arm in ARMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+")
    given, options = parser.parse_known_args()
    for path in given.runs:
        found = iteration(override(read_run(Path(path)), options))
        base = found["base"]
        print(f"\n{path}\n\n| adapters | products, s | over base | other kernels, s | all, s |")
        print("|---|---|---|---|---|")
        for arm, each in found.items():
            whole, ratio = each.products + each.passes, each.products / base.products
            print(
                f"| {arm} | {each.products:.1f} | {ratio:.2f} | {each.passes:.1f} | {whole:.1f} |"
            )


if __name__ == "__main__":
    main()
