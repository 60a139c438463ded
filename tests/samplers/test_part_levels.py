"""Parts of a state at levels of their own: the same flow, in the state's levels."""

import pytest
import torch
from torch import Tensor

from samplers import CPS, euler
from samplers.layout import Layout
from samplers.part_levels import (
    from_own,
    own_level,
    to_own,
    velocity_from_own,
    velocity_to_own,
)

SHIFTS = (12.0, 3.0, 0.5)  # of the state's levels, and of two parts beside the first
LAYOUT = Layout(
    ("video", "audio", "more"),
    ((2, 3), (4,), (5,)),
    data=tuple(SHIFTS[0] / shift for shift in SHIFTS),
)
BASE = torch.tensor([1.0, 0.7, 0.3, 0.05], dtype=torch.float64)


def shifted(base: Tensor, shift: float) -> Tensor:
    """Levels of a flow with a shift (arXiv:2403.03206, eq. 23)."""
    return shift * base / (1 + (shift - 1) * base)


def drawn(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(BASE), LAYOUT.size, generator=generator, dtype=torch.float64)


def noised(x0: Tensor, noise: Tensor, base: Tensor) -> Tensor:
    """Each part at the level of its own shift."""
    parts = zip(LAYOUT.unpack(x0), LAYOUT.unpack(noise), SHIFTS, strict=True)
    found = []
    for clean, rest, shift in parts:
        level = shifted(base, shift).view(-1, *[1] * (clean.ndim - 1))
        found.append((1 - level) * clean + level * rest)
    return LAYOUT.pack(found)


def larger(x0: Tensor) -> Tensor:
    """Clean samples of the flow at the state's levels."""
    return LAYOUT.pack([k * part for k, part in zip(LAYOUT.data, LAYOUT.unpack(x0), strict=True)])


def test_a_shift_is_a_size_of_the_data():
    """States and velocities at own levels are those of one flow, whose data is larger."""
    x0, noise, sigma = drawn(0), drawn(1), shifted(BASE, SHIFTS[0])
    for data, shift in zip(LAYOUT.data, SHIFTS, strict=True):
        torch.testing.assert_close(own_level(sigma, data), shifted(BASE, shift))
    own, level = noised(x0, noise, BASE), sigma[:, None]
    x = from_own(LAYOUT, own, sigma)
    torch.testing.assert_close(x, (1 - level) * larger(x0) + level * noise)
    torch.testing.assert_close(to_own(LAYOUT, x, sigma), own)
    v = velocity_from_own(LAYOUT, own, noise - x0, sigma)
    torch.testing.assert_close(v, noise - larger(x0))
    torch.testing.assert_close(velocity_to_own(LAYOUT, own, v, sigma), noise - x0)


@pytest.mark.parametrize("noisy", [False, True])
def test_a_step_is_that_of_each_part_at_its_own_levels(noisy: bool):
    """For any velocity, not only the true one: Euler's step, and CPS with its noise."""
    own, predicted = drawn(2), drawn(3)
    after = BASE / 2
    sigma, following = shifted(BASE, SHIFTS[0]), shifted(after, SHIFTS[0])
    x, v = from_own(LAYOUT, own, sigma), velocity_from_own(LAYOUT, own, predicted, sigma)
    fresh, kernel = drawn(4), CPS(0.7)

    def step(x: Tensor, v: Tensor, sigma: Tensor, following: Tensor, fresh: Tensor) -> Tensor:
        if not noisy:
            return euler(x, v, sigma, following)
        mean, std = kernel(x, v, sigma, following)
        return mean + std.view(-1, *[1] * (x.ndim - 1)) * fresh

    parts = zip(*map(LAYOUT.unpack, (own, predicted, fresh)), SHIFTS, strict=True)
    alone = [
        step(each, velocity, shifted(BASE, shift), shifted(after, shift), noise)
        for each, velocity, noise, shift in parts
    ]
    together = to_own(LAYOUT, step(x, v, sigma, following, fresh), following)
    torch.testing.assert_close(together, LAYOUT.pack(alone))


def test_without_other_sizes_nothing_changes():
    """To the bit: the very tensor; and a part of size 1 keeps its numbers beside others."""
    plain, x, sigma = Layout(LAYOUT.names, LAYOUT.shapes), drawn(0).float(), BASE.float()
    for layout in (None, plain):
        assert to_own(layout, x, sigma) is x and velocity_from_own(layout, x, x, sigma) is x
    video = LAYOUT.sizes[0]
    assert torch.equal(to_own(LAYOUT, x, sigma)[:, :video], x[:, :video])
    assert torch.equal(velocity_from_own(LAYOUT, x, -x, sigma)[:, :video], -x[:, :video])
