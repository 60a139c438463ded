"""The noise of sampled tokens by one kernel instead of some thirty, if its bits are the same.

`samplers.tokens.gumbel` hashes a 64-bit counter for each token of the vocabulary and row, by
PyTorch's elementwise kernels, each of which reads and writes everything: 304 bytes a number. One
kernel writes 8. Two ways are tried: PyTorch's compiler, and CUDA's by `torch.cuda.jiterator`.
flowrl uses neither until a GPU has shown the same bits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from samplers.noise import row_keys
from samplers.tokens import FIRST, SECOND, gumbel, gumbel_ahead
from samplers.tokens import _counters as counters_of  # pyright: ignore[reportPrivateUsage]
from samplers.tokens import _gumbel as by_kernels  # pyright: ignore[reportPrivateUsage]
from scripts.gpu.trial import Trial

ROWS, VOCABULARY = 64, 151936  # of a call, of Qwen2.5
UNSIGNED = 2**64
ONE_KERNEL = f"""
template <typename T> T noise(T row, T counter) {{
  unsigned long long z = (unsigned long long) row + (unsigned long long) counter;
  z = (z ^ (z >> 30)) * {FIRST % UNSIGNED}ull;
  z = (z ^ (z >> 27)) * {SECOND % UNSIGNED}ull;
  z = (z ^ (z >> 31)) >> 24;
  float u = ((float) z + 0.5f) * 9.094947017729282e-13f;
  u = u > 0.99999994f ? 0.99999994f : u;
  return (T) __float_as_uint(-logf(-log1pf(-u)));
}}
"""  # the kernel's result has the type of what it reads: the low half of it is the number
Way = Callable[[Tensor, Tensor], Tensor]


def measure(trial: Trial) -> None:
    rows = 2 if trial.rehearse else ROWS
    words = 1000 if trial.rehearse else VOCABULARY
    keys = row_keys([(0, row) for row in range(rows)])
    there, here = keys.to("cuda"), gumbel(keys[:2], 3, words)
    trial.timed("noise of a token, by kernels", lambda: gumbel_ahead(there, 3, 1, words))
    counters = counters_of(3, 1, words, there.device)
    plain = by_kernels(there[:, None] + counters)
    close(trial, "by kernels", plain[:2], here)
    for what, make in (("compiled", compiled), ("in one kernel", one_kernel)):
        found = dict[str, Way]()

        def attempt(make: Callable[[], Way] = make, found: dict[str, Way] = found) -> str:
            found["way"] = make()
            equal = bool((found["way"](there[:, None], counters) == plain).all())
            return "the same bits" if equal else "other bits"

        if trial.tried(f"noise {what}", attempt):
            way = found["way"]
            made = way(there[:, None], counters)
            close(trial, what, made[:2], here)
            same = float((made == plain).float().mean())
            trial.timed(
                f"noise of a token, {what}",
                lambda way=way: way(there[:, None], counters),
                same=same,
            )


def close(trial: Trial, what: str, found: Tensor, wanted: Tensor) -> None:
    """Check noise against the CPU's: logarithms may differ in their last digit."""
    difference = float((found.cpu() - wanted).abs().max())
    trial.check(f"noise {what}: as on the CPU", difference <= 1e-5, difference=difference)


def compiled() -> Way:
    """The same kernels, fused by PyTorch's compiler."""
    from torch.utils._triton import has_triton

    if not has_triton():
        raise RuntimeError("torch finds no Triton for this device")

    def noise(rows: Tensor, counters: Tensor) -> Tensor:
        return by_kernels(rows + counters)

    return torch.compile(noise)


def one_kernel() -> Way:
    """One kernel that CUDA's own compiler makes from its text."""
    if torch.version.cuda is None:
        raise RuntimeError("this torch has no CUDA, whose compiler makes the kernel")
    kernel = torch.cuda.jiterator._create_jit_fn(ONE_KERNEL)

    def noise(rows: Tensor, counters: Tensor) -> Tensor:
        return kernel(rows, counters).view(torch.int32)[..., ::2].view(torch.float32)

    return noise
