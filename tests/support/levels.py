"""Lists of noise levels for plans under test."""


def shifted_levels(steps: int, shift: float = 1.0) -> tuple[float, ...]:
    """The `steps + 1` levels from 1 to 0, shifted towards noise (arXiv:2403.03206, eq. 23)."""
    even = (1 - k / steps for k in range(steps + 1))
    return tuple(shift * sigma / (1 + (shift - 1) * sigma) for sigma in even)
