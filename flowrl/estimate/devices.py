"""Peak arithmetic, memory and memory bandwidth of GPUs, from their makers' data sheets.

bf16       dense bfloat16 with float32 accumulation, TFLOP/s (no structured sparsity)
fp32       float32 without tensor cores, TFLOP/s: torch's default precision of matrix products
bandwidth  of the device's memory, TB/s
memory     GB of 10^9 bytes
"""

import re
from difflib import get_close_matches
from typing import NamedTuple

from flowrl.errors import UserError


class GpuKind(NamedTuple):
    bf16: float
    fp32: float
    bandwidth: float
    memory: float
    source: str


GPU_KINDS: dict[str, GpuKind] = {
    "A100": GpuKind(312.0, 19.5, 2.039, 80, "NVIDIA A100 data sheet, 80 GB SXM"),
    "A100-40GB": GpuKind(312.0, 19.5, 1.555, 40, "NVIDIA A100 data sheet, 40 GB"),
    "H100": GpuKind(989.4, 66.9, 3.35, 80, "NVIDIA H100 architecture white paper, SXM5"),
    "H100-PCIe": GpuKind(756.0, 51.2, 2.0, 80, "NVIDIA H100 architecture white paper, PCIe"),
    "H200": GpuKind(989.4, 66.9, 4.8, 141, "NVIDIA H200 data sheet, SXM"),
    "L40S": GpuKind(362.05, 91.6, 0.864, 48, "NVIDIA L40S data sheet"),
    "L40": GpuKind(181.05, 90.5, 0.864, 48, "NVIDIA L40 data sheet"),
    "L4": GpuKind(121.0, 30.3, 0.3, 24, "NVIDIA L4 data sheet, half of its figure with sparsity"),
    "A40": GpuKind(149.7, 37.4, 0.696, 48, "NVIDIA A40 data sheet"),
    "RTX-A6000": GpuKind(154.8, 38.7, 0.768, 48, "NVIDIA GA102 white paper"),
    "RTX-6000-Ada": GpuKind(364.2, 91.1, 0.96, 48, "NVIDIA Ada white paper"),
    "RTX-4090": GpuKind(165.2, 82.6, 1.008, 24, "NVIDIA Ada white paper, float32 accumulation"),
    "RTX-3090": GpuKind(71.0, 35.6, 0.936, 24, "NVIDIA GA102 white paper, float32 accumulation"),
}


class DeviceGroup(NamedTuple):
    """`number` devices of one kind."""

    number: int
    name: str
    kind: GpuKind

    def peak(self, dtype: str) -> float:
        """FLOP/s of one device in a run's dtype."""
        return (self.kind.bf16 if dtype in ("bfloat16", "float16") else self.kind.fp32) * 1e12


def parse_devices(text: str) -> DeviceGroup:
    """Parse "8xH100" or "RTX 4090". UserError for another form or an unknown device."""
    match = re.fullmatch(r"(?:([0-9]{1,5}) ?[xX*] ?)?(.+)", text.strip())
    kinds = {_plain(name): name for name in GPU_KINDS}
    written = "" if match is None else _plain(match[2])
    kind = kinds.get(written) or kinds.get(f"rtx{written}")
    if match is None or kind is None or match[1] == "0":
        near = get_close_matches(written, kinds, n=1)
        hint = f"did you mean {kinds[near[0]]}?" if near else f"one of {', '.join(GPU_KINDS)}"
        raise UserError(
            f"--devices: {text[:60]!r} is not a known device: {hint} (8xH100 means eight of one)"
        )
    return DeviceGroup(int(match[1] or 1), kind, GPU_KINDS[kind])


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
