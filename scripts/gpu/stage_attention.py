"""Find backends of attention that return a wrong gradient, in the smallest case, and their costs.

First two public cases of cuDNN's backward pass, then the calls of a tiny FLUX.1 whose gradient was
NaN in bfloat16 on an H200, then a grid of dtypes, widths of heads, lengths, masks and scores, and
one of memory layouts: of the inputs, and of the gradient that comes back. Each call is compared
with attention in float32 on the same inputs. A finding holds for its torch and its cuDNN.
"""

import itertools
import math
import time
from collections import Counter
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
from flowrl.models.savings import PLAIN_ATTENTION, attention_with_cudnn
from flowrl.session.progress import Progress
from scripts.gpu.subjects import FLUX, opened
from scripts.gpu.trial import Trial

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "plain": SDPBackend.MATH,
}
CALLS = {  # what is judged: a backend, and the function that calls it
    **{name: (backend, PLAIN_ATTENTION) for name, backend in BACKENDS.items()},
    "cuDNN by flowrl": (SDPBackend.CUDNN_ATTENTION, attention_with_cudnn),
}
WRONG = 0.05  # relative error of a gradient; rounding to bfloat16 makes about 0.004
GRID_SECONDS = 25.0  # of each grid
SHOWN = 20  # wrong cases that a line names
TENSORS = ("output", "dq", "dk", "dv")
Mask = str | None


class Case(NamedTuple):
    """A call of attention. `low`: all scores are near -120, as a head with massive activations has
    them, which is where cuDNN's backward pass has overflowed. `rows` and `layout` are of the grid
    of layouts."""

    dtype: str
    heads: int
    queries: int
    keys: int
    width: int
    mask: Mask = None
    low: bool = False
    rows: int = 1
    layout: str = ""

    @property
    def size(self) -> int:
        return self.rows * self.heads * self.queries * self.keys * self.width


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
    """`error` is the largest error of the output and of the gradients, relative to what rounding
    acts on; NaN: not finite. `refused`: the backend has no kernel for the call."""

    error: float = 0.0
    where: str = ""
    refused: str = ""

    @property
    def wrong(self) -> bool:
        return not self.refused and not self.error <= WRONG

    @property
    def finite(self) -> bool:
        return math.isfinite(self.error)


class Right(NamedTuple):
    """A tensor in float32, and the size of the terms that it is a sum of: the norm of the root of
    the sum of their squares, which rounding of each moves it by a share of."""

    tensor: Tensor
    terms: float


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


# of q, k and v, and of the gradient of the output; heads come before positions, or after them
STORED = ("heads first", "positions first", "one tensor of q, k and v")
RETURNED = ("heads first", "positions first", "a part of a wider tensor", "one number expanded")


def layouts(rehearse: bool) -> list[Case]:
    """Cases of each layout of the inputs with each layout of the gradient, the smallest first."""
    widths, lengths = (16, 64, 128), (32, 333, 1536)
    if rehearse:
        widths, lengths = (16,), (32,)
    cases = [
        Case("bfloat16", 2, length, length, width, mask, rows=2, layout=f"{stored}; {returned}")
        for width, length, mask, stored, returned in itertools.product(
            widths, lengths, MASKS[:2], STORED, RETURNED
        )
    ]
    return sorted(cases, key=lambda case: (case.size, str(case)))


def laid_out(case: Case, given: Inputs) -> Inputs:
    """The same numbers in the memory layout of a case."""
    stored, _, returned = case.layout.partition("; ")
    q, k, v, grad = (each.transpose(1, 2).contiguous() for each in (*given[:3], given.grad))
    if stored == "one tensor of q, k and v":
        q, k, v = torch.cat([q, k, v], -1).split(case.width, -1)
    if returned == "a part of a wider tensor":  # as the gradient of a concatenation is
        beside = torch.zeros(*grad.shape[:2], 4 * case.heads * case.width).to(grad)
        wider = torch.cat([grad.flatten(2), beside], -1)
        grad = wider[..., : case.heads * case.width].unflatten(-1, (case.heads, case.width))
    if returned == "one number expanded":  # as the gradient of a sum is
        grad = grad[:1, :1, :1, :1].expand(grad.shape)
    q, k, v, grad = (each.transpose(1, 2) for each in (q, k, v, grad))
    if stored == "heads first":
        q, k, v = (each.contiguous() for each in (q, k, v))
    if returned == "heads first":
        grad = grad.contiguous()
    return Inputs(q, k, v, given.mask, grad)


def inputs(case: Case) -> Inputs:
    """Random inputs of a case, with a fixed seed."""
    draw = torch.Generator().manual_seed(case.size % 2**31)

    def drawn(length: int, scale: float = 1.0) -> Tensor:
        shape = (case.rows, case.heads, length, case.width)
        return scale * torch.randn(shape, generator=draw).to("cuda")

    small = 0.1 if case.low else 1.0
    q, k, v = drawn(case.queries, small), drawn(case.keys, small), drawn(case.keys)
    if case.low:
        q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(case.width)
    dtype = getattr(torch, case.dtype)
    tensors = [each.to(dtype) for each in (q, k, v, drawn(case.queries))]
    given = Inputs(*tensors[:3], masked(case), tensors[3])
    return laid_out(case, given) if case.layout else given


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


def gradients(given: Inputs, attention: Any = PLAIN_ATTENTION) -> tuple[Tensor, ...]:
    """Output of attention, and the gradients of q, k and v."""
    leaves = [each.detach().requires_grad_() for each in given[:3]]
    out = attention(*leaves, attn_mask=given.mask)
    return (out.detach(), *torch.autograd.grad(out, leaves, given.grad))


def reference(given: Inputs) -> tuple[Right, ...]:
    """The same in float32, by the formulas: with P the softmax of the scores S = s Q K', the
    gradient of S is dS = P (dP - D), where dP = dO V' and D is the row sum of P dP."""
    q, k, v = (each.float() for each in given[:3])
    grad, scale = given.grad.float(), q.shape[-1] ** -0.5
    scores = scale * q @ k.mT
    if given.mask is not None:
        mask = given.mask
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    p = scores.softmax(-1)
    dp = grad @ v.mT
    ds = scale * p * (dp - (p * dp).sum(-1, keepdim=True))
    return (product(p, v), product(ds, k), product(ds.mT, q), product(p.mT, grad))


def product(one: Tensor, other: Tensor) -> Right:
    whole = one @ other
    terms = float((one.square() @ other.square()).sum().sqrt())
    return Right(whole, max(terms, float(whole.norm())))


def judged(name: str, given: Inputs, right: tuple[Right, ...]) -> Verdict:
    """Compare a backend's output and gradients with the reference."""
    backend, attention = CALLS[name]
    try:
        with sdpa_kernel(backend):
            found = gradients(given, attention)
    except RuntimeError as error:
        if "CUDA error" in str(error):  # which poisons the process
            raise
        return Verdict(refused=" ".join(str(error).split())[:200])
    worst = Verdict()
    least = 1e-3 * float(given.grad.float().norm())
    for tensor, one, other in zip(TENSORS, found, right, strict=True):
        if not bool(one.isfinite().all()):
            return Verdict(math.nan, tensor)
        error = float((one.float() - other.tensor).norm()) / max(other.terms, least)
        if error > worst.error:
            worst = Verdict(error, tensor)
    return worst


def measure(trial: Trial) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    for name, case in PUBLIC.items():
        one_case(trial, name, inputs(case), case._asdict())
    tiny_flux(trial)
    wrong = by_grid(trial, "grid", grid(trial.rehearse))
    wrong += by_grid(trial, "layouts", layouts(trial.rehearse))
    trial.measured("default", setting=default(wrong), wrong=len(wrong))
    costs(trial)


def default(wrong: list[Case]) -> str:
    """The setting `model.cudnn_attention` that follows from the cases in which cuDNN is wrong as
    flowrl calls it; `unmasked` leaves calls with one query out, too."""
    if not wrong:
        return "true"
    unmasked = any(case.mask is None and case.queries > 1 for case in wrong)
    return "false" if unmasked else "unmasked"


def one_case(trial: Trial, name: str, given: Inputs, about: dict[str, Any]) -> None:
    right = reference(given)
    for backend in CALLS:
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
    for backend in CALLS:
        verdicts = [(judged(backend, c.inputs, reference(c.inputs)), c) for c in calls]
        bad = [(v, c) for v, c in verdicts if v.wrong]
        figures: dict[str, Any] = {"wrong": len(bad), "calls": len(calls)}
        if bad:
            verdict, call = min(bad, key=lambda pair: pair[1].inputs.q.numel())
            figures |= {"smallest": {**verdict._asdict(), "shape": list(call.inputs.q.shape),
                                     "keys": call.inputs.k.shape[-2],
                                     "strides": list(call.inputs.q.stride()),
                                     "strides of the gradient": list(call.inputs.grad.stride()),
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


def by_grid(trial: Trial, what: str, cases: list[Case]) -> list[Case]:
    """Judge all backends on cases, for at most `GRID_SECONDS`. Returns those in which cuDNN is
    wrong as flowrl calls it."""
    end = time.perf_counter() + GRID_SECONDS
    found: dict[str, list[tuple[Case, Verdict]]] = {backend: [] for backend in CALLS}
    for case in cases:
        if time.perf_counter() > end:
            break
        given = inputs(case)
        right = reference(given)
        for backend in CALLS:
            found[backend].append((case, judged(backend, given, right)))
    for backend, verdicts in found.items():
        wrong = [(case, verdict) for case, verdict in verdicts if verdict.wrong]
        layout = Counter(case.layout for case, _ in wrong if case.layout)
        trial.measured(
            f"{what}, {backend}", cases=len(verdicts), of=len(cases), wrong=len(wrong),
            not_finite=sum(not verdict.finite for _, verdict in wrong),
            refused=sum(bool(verdict.refused) for _, verdict in verdicts),
            wrong_without_mask=sum(case.mask is None for case, _ in wrong),
            worst_right=max((v.error for _, v in verdicts if not v.wrong), default=0.0),
            **({"by_layout": dict(layout)} if layout else {}),
            smallest=[case._asdict() | verdict._asdict() for case, verdict in wrong[:SHOWN]],
        )  # fmt: skip
    return [case for case, verdict in found["cuDNN by flowrl"] if verdict.wrong]


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
