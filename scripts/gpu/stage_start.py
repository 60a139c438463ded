"""The first stage: imports, a tiny update in two precisions, what the device can do, its ceilings.

If it fails, nothing else runs: the machine is given back.
"""

import time
from typing import Any

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.gpu.subjects import SD35, UpdateFigures, first_update, opened, same_gradients
from scripts.gpu.trial import GIB, Trial

COPY, SIDE = 4 * GIB, 8192  # bytes of a copy, side of a product


def measure(trial: Trial) -> None:
    imports = time.time() - psutil.Process().create_time()
    trial.measured("imports", seconds=imports)
    began, found = time.perf_counter(), dict[str, UpdateFigures]()
    for dtype in ("float32", "bfloat16"):
        with opened(SD35, {"model": {"dtype": dtype}}, rehearse=True) as session:
            found[dtype] = first_update(session)
    trial.measured("tiny update", seconds=time.perf_counter() - began)
    same_gradients(trial, "tiny update", found)
    capabilities(trial)
    ceilings(trial)


def capabilities(trial: Trial) -> None:
    """Try what the other stages rest on, and what a pretended device lacks."""

    def attention() -> str:
        if torch.backends.cudnn.version() is None:
            raise RuntimeError("this torch has no cuDNN")
        q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        return f"cuDNN {torch.backends.cudnn.version()}"

    def compiled() -> str:
        from torch.utils._triton import has_triton

        if not has_triton():
            raise RuntimeError("torch finds no Triton for this device")
        x = torch.randn(1024, device="cuda")
        began = time.perf_counter()
        difference = float((torch.compile(lambda y: y.sin() + 1)(x) - (x.sin() + 1)).abs().max())
        return f"{time.perf_counter() - began:.1f} s, differs by {difference:.1e}"

    def graph() -> str:
        x, captured = torch.ones(16, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            y = x * 2
        x.fill_(3.0)
        captured.replay()
        torch.cuda.synchronize()
        if float(y[0]) != 6.0:
            raise RuntimeError(f"a replayed graph has {float(y[0])} where 6 is right")
        return "captured and replayed"

    def statistics() -> str:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
        x = torch.empty(2**20, device="cuda")
        grown = torch.cuda.max_memory_allocated() - before
        del x
        if grown < 4 * 2**20:
            raise RuntimeError(f"4 MiB grew the peak by {grown} bytes")
        return f"{torch.cuda.mem_get_info()[0] / GIB:.1f} GiB free"

    def pinned() -> str:
        source = torch.randn(2**20).pin_memory()
        there = source.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        if not torch.equal(there.cpu(), source):
            raise RuntimeError("a copy of pinned memory has other bits")
        return "copied"

    for what, attempt in (
        ("cuDNN attention with gradients", attention), ("compile", compiled),
        ("CUDA graph", graph), ("memory statistics", statistics), ("pinned copy", pinned),
    ):  # fmt: skip
        trial.tried(what, attempt)


def ceilings(trial: Trial) -> None:
    """The device's own rates, on random data: bytes, products in two precisions, launches."""
    side = 64 if trial.rehearse else SIDE
    size = 2**20 if trial.rehearse else COPY
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    seconds = trial.seconds(lambda: target.copy_(source))
    trial.measured("copy", rate=rate(2 * size, seconds))  # read and written
    del source, target
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(side, side, device="cuda", dtype=dtype) for _ in range(2))
        seconds = trial.seconds(lambda a=a, b=b: a @ b, repeats=3)
        name = str(dtype).removeprefix("torch.")
        trial.measured(f"product in {name}", rate=rate(2 * side**3, seconds))
    x = torch.randn(16, device="cuda")

    def launches() -> Any:
        for _ in range(100):
            x.mul_(1.0)

    trial.measured("launch", seconds=trial.wall(launches) / 100)


def rate(work: float, seconds: list[float]) -> float:
    """Bytes or operations per second, by the median."""
    return work / max(sorted(seconds)[len(seconds) // 2], 1e-9)
