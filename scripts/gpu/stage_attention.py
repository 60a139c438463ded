"""Find backends of attention that return a wrong gradient, in the smallest case, and their costs.

First two public cases of cuDNN's backward pass, then the calls of a tiny FLUX.1 whose gradient was
NaN in bfloat16 on an H200, then a grid of dtypes, widths of heads, lengths, masks and scores. Each
call is compared with plain attention in float32 on the same inputs. A finding holds for its torch
and its cuDNN.
"""

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrl.errors import NotFiniteError
from flowrl.iteration.open import open_stages
from flowrl.session.progress import Progress
from scripts.gpu.subjects import FLUX, opened
from scripts.gpu.trial import Trial

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "plain": SDPBackend.MATH,
}
WRONG = 0.05  # relative error of a gradient; rounding to bfloat16 makes about 0.01
GRID_SECONDS = 45.0
SHOWN = 20  # wrong cases that a line names
TENSORS = ("output", "dq", "dk", "dv")
Mask = str | None


class Case(NamedTuple):
    """A call of attention. `low`: all scores are near -120, as a head with massive activations has
    them, which is where cuDNN's backward pass has overflowed."""

    dtype: str
    heads: int
    queries: int
    keys: int
    width: int
    mask: Mask = None
    low: bool = False

    @property
    def size(self) -> int:
        return self.heads * self.queries * self.keys * self.width


PUBLIC = {  # by the report
    "PyTorch 196678": Case("bfloat16", 1, 704, 704, 64, "causal", True),
    "cudnn-frontend 1072": Case("bfloat16", 2, 1, 128, 64, None, True),
}
MASKS: tuple[Mask, ...] = (None, "all", "causal", "padding")
# FLUX.1-dev at 512 x 512 with 512 text tokens, four rows; Wan 2.1 14B at 480 x 832 x 33, one row
SIZES = {"FLUX": (4, 24, 1536, 128), "Wan": (1, 40, 14040, 128)}


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    grad: Tensor  # of the output


class Verdict(NamedTuple):
    """`error` is the largest relative error of the output and of the gradients; NaN: not finite.
    `refused`: the backend has no kernel for the call."""

    error: float = 0.0
    where: str = ""
    refused: str = ""

    @property
    def wrong(self) -> bool:
        return not self.refused and not self.error <= WRONG


def grid(rehearse: bool) -> list[Case]:
    """The cases, the smallest first."""
    widths, lengths = (8, 16, 32, 64, 128), (32, 48, 64, 192, 333, 704)
    if rehearse:
        widths, lengths = (8, 64), (32,)
    cases = [
        Case("bfloat16", 2, length, length, width, mask, low)
        for width, length, mask, low in itertools.product(widths, lengths, MASKS, (False, True))
    ]
    cases += [
        Case("float16", 2, length, length, 64, mask, low)
        for length, mask, low in itertools.product(lengths[-1:], MASKS[:2], (False, True))
    ]
    return sorted(cases, key=lambda case: (case.size, str(case)))


def inputs(case: Case) -> Inputs:
    """Random inputs of a case, with a fixed seed."""
    draw = torch.Generator().manual_seed(case.size % 2**31)

    def drawn(length: int, scale: float = 1.0) -> Tensor:
        shape = (1, case.heads, length, case.width)
        return scale * torch.randn(shape, generator=draw).to("cuda")

    small = 0.1 if case.low else 1.0
    q, k, v = drawn(case.queries, small), drawn(case.keys, small), drawn(case.keys)
    if case.low:
        q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(case.width)
    dtype = getattr(torch, case.dtype)
    tensors = [each.to(dtype) for each in (q, k, v, drawn(case.queries))]
    return Inputs(*tensors[:3], masked(case), tensors[3])


def masked(case: Case) -> Tensor | None:
    """A mask [queries keys], true where a key is seen: all, those before, or all but the last
    eighth."""
    if case.mask is None:
        return None
    mask = torch.ones(case.queries, case.keys, dtype=torch.bool, device="cuda")
    if case.mask == "causal":
        return mask.tril()
    if case.mask == "padding":
        mask[:, case.keys - case.keys // 8 :] = False
    return mask


def gradients(given: Inputs) -> tuple[Tensor, ...]:
    """Output of attention, and the gradients of q, k and v."""
    leaves = [each.detach().requires_grad_() for each in given[:3]]
    out = functional.scaled_dot_product_attention(*leaves, attn_mask=given.mask)
    return (out.detach(), *torch.autograd.grad(out, leaves, given.grad))


def reference(given: Inputs) -> tuple[Tensor, ...]:
    """The same by plain attention in float32."""
    mask = given.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()
    with sdpa_kernel(SDPBackend.MATH):
        return gradients(Inputs(*(each.float() for each in given[:3]), mask, given.grad.float()))


def judged(backend: str, given: Inputs, right: tuple[Tensor, ...]) -> Verdict:
    """Compare a backend's output and gradients with the reference."""
    try:
        with sdpa_kernel(BACKENDS[backend]):
            found = gradients(given)
    except RuntimeError as error:
        if "CUDA error" in str(error):  # which poisons the process
            raise
        return Verdict(refused=" ".join(str(error).split())[:200])
    worst = Verdict()
    for name, one, other in zip(TENSORS, found, right, strict=True):
        if not bool(one.isfinite().all()):
            return Verdict(math.nan, name)
        norm = max(float(other.norm()), 1e-3 * float(given.grad.float().norm()))
        error = float((one.float() - other).norm()) / norm
        if error > worst.error:
            worst = Verdict(error, name)
    return worst


def measure(trial: Trial) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    for name, case in PUBLIC.items():
        one_case(trial, name, inputs(case), case._asdict())
    tiny_flux(trial)
    wrong = by_grid(trial)
    trial.measured("default", setting=default(wrong), wrong=len(wrong))
    costs(trial)


def default(wrong: list[Case]) -> str:
    """The setting `model.cudnn_attention` that follows from cuDNN's wrong cases."""
    if not wrong:
        return "true"
    return "false" if any(case.mask is None for case in wrong) else "unmasked"


def one_case(trial: Trial, name: str, given: Inputs, about: dict[str, Any]) -> None:
    right = reference(given)
    for backend in BACKENDS:
        found = judged(backend, given, right)
        trial.measured(f"{name}, {backend}", wrong=found.wrong, **found._asdict(), **about)


def tiny_flux(trial: Trial) -> None:
    """The calls of a tiny FLUX.1's update in bfloat16: the first whose gradient is not finite, and
    each backend on the inputs of all."""
    model = {"model": {"cudnn_attention": True}}
    with opened(FLUX, model, rehearse=True) as session:
        stages = open_stages(session, Progress(optimizer_steps=1))
        rows = stages.collected(0)
        with recorded() as calls:
            try:
                norm = stages.update(rows).metrics["grad_norm"]
            except NotFiniteError:  # which is what this looks for
                norm = math.nan
    first = next((place for place, call in enumerate(calls) if call.breaks), None)
    trial.measured("tiny FLUX.1", grad_norm=norm, calls=len(calls), first=first)
    for backend in BACKENDS:
        verdicts = [(judged(backend, c.inputs, reference(c.inputs)), c) for c in calls]
        bad = [(v, c) for v, c in verdicts if v.wrong]
        figures: dict[str, Any] = {"wrong": len(bad), "calls": len(calls)}
        if bad:
            verdict, call = min(bad, key=lambda pair: pair[1].inputs.q.numel())
            figures |= {"smallest": {**verdict._asdict(), "shape": list(call.inputs.q.shape),
                                     "keys": call.inputs.k.shape[-2],
                                     "mask": call.inputs.mask is not None}}  # fmt: skip
        trial.measured(f"tiny FLUX.1's calls, {backend}", **figures)


class RecordedCall(NamedTuple):
    inputs: Inputs
    breaks: bool  # the gradient of its output is finite, and one of its inputs' is not


@contextmanager
def recorded() -> Iterator[list[RecordedCall]]:
    """Record the calls of attention with gradients inside; they are complete at the end."""
    calls, open_calls = list[RecordedCall](), list[dict[str, Any]]()
    real = functional.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Tensor:
        out = real(query, key, value, *args, **named)
        if out.requires_grad:
            mask = args[0] if args else named.get("attn_mask")
            call: dict[str, Any] = {"inputs": (query, key, value, mask), "bad": []}
            for each in (query, key, value):
                if each.requires_grad:
                    each.register_hook(
                        lambda grad, call=call: call["bad"].append(not bool(grad.isfinite().all()))
                    )
            out.register_hook(lambda grad, call=call: call.update(grad=grad.detach()))
            open_calls.append(call)
        return out

    with patch.object(functional, "scaled_dot_product_attention", attention):
        yield calls
    for call in open_calls:
        if "grad" in call:
            *tensors, mask = call["inputs"]
            given = Inputs(*(each.detach() for each in tensors), mask, call["grad"])
            fine = bool(given.grad.isfinite().all())
            calls.append(RecordedCall(given, fine and any(call["bad"])))


def by_grid(trial: Trial) -> list[Case]:
    """Judge all backends on the grid, for at most `GRID_SECONDS`. Returns cuDNN's wrong cases."""
    cases, end = grid(trial.rehearse), time.perf_counter() + GRID_SECONDS
    found: dict[str, list[tuple[Case, Verdict]]] = {backend: [] for backend in BACKENDS}
    for case in cases:
        if time.perf_counter() > end:
            break
        given = inputs(case)
        right = reference(given)
        for backend in BACKENDS:
            found[backend].append((case, judged(backend, given, right)))
    for backend, verdicts in found.items():
        wrong = [(case, verdict) for case, verdict in verdicts if verdict.wrong]
        shown = [case._asdict() | verdict._asdict() for case, verdict in wrong[:SHOWN]]
        trial.measured(
            f"grid, {backend}", cases=len(verdicts), of=len(cases), wrong=len(wrong),
            refused=sum(bool(verdict.refused) for _, verdict in verdicts),
            wrong_without_mask=sum(case.mask is None for case, _ in wrong), smallest=shown,
        )  # fmt: skip
    return [case for case, verdict in found["cuDNN"] if verdict.wrong]


def costs(trial: Trial) -> None:
    """Seconds of a call without and with gradients at published sizes, by backend. Plain attention
    holds all scores, which Wan's length has no memory for."""
    for name, (rows, heads, length, width) in SIZES.items():
        shape = (rows, heads, 64 if trial.rehearse else length, width)
        given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        whole = Inputs(*given[:3], None, given[3])
        for backend in BACKENDS:
            if backend != "plain" or name != "Wan":
                cost(trial, f"{name}, {backend}", BACKENDS[backend], whole)


def cost(trial: Trial, what: str, backend: SDPBackend, given: Inputs) -> None:
    with sdpa_kernel(backend), torch.no_grad():
        if not trial.tried(what, lambda: one_call(given)):
            return
        trial.timed(f"{what}, forward", lambda: one_call(given))
    with sdpa_kernel(backend):
        trial.timed(f"{what}, with gradients", lambda: gradients(given))


def one_call(given: Inputs) -> str:
    return str(tuple(functional.scaled_dot_product_attention(*given[:3]).shape))
