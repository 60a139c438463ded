"""Parts of a state at noise levels of their own, as one flow at the state's levels.

Schedules of flows that differ by a shift (arXiv:2403.03206, eq. 23) have levels whose odds s / (1 -
s) differ by a constant factor. A part whose odds are 1 / k of the state's, at the level s of the
state, is at its own level

    s_p = s / (k + (1 - k) s)

and k + (1 - k) s times its own state (1 - s_p) x0 + s_p noise is (1 - s) k x0 + s noise: a
rectified flow at the state's level, whose data is k times as large. So kernels, solvers, plans and
losses see one list of levels, and `Layout.data` holds the k of each part. Euler's step, and every
step that mixes the predicted clean sample and noise by the next level, is the same in both forms. A
density changes by a constant factor, which cancels in ratios. In one state the error of the flow's
velocity is k / (k + (1 - k) s) times that of the part's own.

Shapes: n rows; `x` and `v` are flat, [n d]; sigma is the state's level. Without data of other sizes
all of these functions return what they were given.
"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from samplers.kernels import lift, per_row
from samplers.layout import Layout


def own_level(sigma: Tensor, data: float) -> Tensor:
    """Return the own level of a part whose data is this large, in the form of `sigma`."""
    return sigma / (data + (1 - data) * sigma)


def to_own(
    layout: Layout | None, x: Float[Tensor, "n d"], sigma: Float[Tensor, " n"]
) -> Float[Tensor, "n d"]:
    """Convert states of the flow to those of the parts at their own levels."""
    return _changed(layout, x, x, sigma, lambda _, factor, x, __: x / factor)


def from_own(
    layout: Layout | None, x: Float[Tensor, "n d"], sigma: Float[Tensor, " n"]
) -> Float[Tensor, "n d"]:
    """Inverse of `to_own`."""
    return _changed(layout, x, x, sigma, lambda _, factor, x, __: x * factor)


def velocity_from_own(
    layout: Layout | None,
    x: Float[Tensor, "n d"],
    v: Float[Tensor, "n d"],
    sigma: Float[Tensor, " n"],
) -> Float[Tensor, "n d"]:
    """The flow's velocity noise - k x0, from the parts' own states and velocities noise - x0."""
    return _changed(
        layout, v, x, sigma, lambda data, factor, v, x: (1 - data) * x + data / factor * v
    )


def velocity_to_own(
    layout: Layout | None,
    x: Float[Tensor, "n d"],
    v: Float[Tensor, "n d"],
    sigma: Float[Tensor, " n"],
) -> Float[Tensor, "n d"]:
    """The parts' own velocities, from their own states and the flow's velocity."""
    return _changed(
        layout, v, x, sigma, lambda data, factor, v, x: factor / data * (v - (1 - data) * x)
    )


def _changed(
    layout: Layout | None,
    first: Tensor,
    second: Tensor,
    sigma: Tensor,
    change: Callable[[float, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the first of two flat tensors, with the parts changed whose data has another size than
    1. `change` takes that size, its factor at the level [n 1], and the part of each tensor."""
    if layout is None or not layout.data:
        return first
    parts, other_parts = (layout.unpack(whole.reshape(len(whole), -1)) for whole in (first, second))
    changed: list[Tensor] = []
    for data, part, other in zip(layout.data, parts, other_parts, strict=True):
        if data == 1:
            changed.append(part)
            continue
        level = lift(sigma).to(part.device)
        factor = per_row(data + (1 - data) * level, part)
        changed.append(change(data, factor, lift(part), lift(other)))
    return layout.pack(changed).reshape(first.shape)
