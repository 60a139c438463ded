"""Laws of kernels."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.laws.trial import TRIAL_LEVELS, agree, normals, part_title, tried
from samplers import Gaussian, Kernel
from samplers.kernels import is_affine, per_row

_SIZES = (0.01, 1.0, 10.0, 1e3)  # of states and velocities: a clip acts only on large ones
_SHAPES = ((3,), (2, 4, 4))  # of one state


def check_kernel(kernel: Kernel, sigmas: Sequence[float] = TRIAL_LEVELS) -> None:
    """Check a kernel at the steps of a list of noise levels, but for the last one.

    Its `bound` kernel returns a Gaussian with a finite mean [n *d] and a std [n] of at least 0. The
    std depends on the levels alone, a row on no other row, and equal calls return equal steps. If
    the kernel says `affine = True`, its mean is a x + b v, with numbers a and b of the levels
    alone. UserError for a kernel that breaks one of these laws.
    """
    name, levels = part_title(kernel), list(pairwise(sigmas))[: max(1, len(sigmas) - 2)]
    bound = tried(name, "kernel", lambda: kernel.bound(sigmas))
    at, to = (torch.tensor(ends, dtype=torch.float64) for ends in zip(*levels, strict=True))
    for shape in _SHAPES:
        std: Tensor | None = None
        for seed, size in enumerate(_SIZES):
            x, v = (size * normals(len(at), *shape, seed=2 * seed + i) for i in range(2))
            step = _step(name, bound, x, v, at, to)
            std = step.std if std is None else std
            if not agree(step.std, std, std.abs().clamp(min=1e-12)):
                raise UserError(
                    f"{name}: the std of its steps changes with state or velocity; it must depend "
                    "on the noise levels alone, since densities and divergences compare steps of "
                    "equal std"
                )
            _check_calls(name, bound, step, (x, v, at, to))
            if is_affine(kernel):
                _check_affine(name, bound, step, (x, v, at, to))


def _step(name: str, kernel: Kernel, x: Tensor, v: Tensor, at: Tensor, to: Tensor) -> Gaussian:
    step = tried(name, "kernel", lambda: kernel(x.clone(), v.clone(), at.clone(), to.clone()))
    formed = isinstance(step, Gaussian) and all(isinstance(part, Tensor) for part in step)
    if not formed or step.mean.shape != x.shape or step.std.shape != at.shape:
        raise UserError(f"{name} must return samplers.Gaussian(mean [n *d], std [n])")
    if not (step.mean.isfinite().all() and step.std.isfinite().all() and (step.std >= 0).all()):
        raise UserError(
            f"{name}: its steps at the levels {_shown(at)} have a mean or std that is not finite, "
            "or a std below 0"
        )
    return step


def _check_calls(
    name: str, kernel: Kernel, step: Gaussian, inputs: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    """Equal calls are equal, also with fewer rows."""
    again = _step(name, kernel, *inputs)
    if not (torch.equal(again.mean, step.mean) and torch.equal(again.std, step.std)):
        raise UserError(
            f"{name} returns another step for the same state: its noise is drawn by the sampler, "
            "so a kernel must not draw any, nor keep anything between calls"
        )
    fewer = _step(name, kernel, *(part[1:3] for part in inputs))
    if not agree(fewer.mean, step.mean[1:3], step.mean[1:3].abs().clamp(min=1e-9)):
        raise UserError(f"{name}: a row's step depends on the other rows of its call")


def _check_affine(
    name: str, kernel: Kernel, step: Gaussian, inputs: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    x, v, at, to = inputs
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    a, b = (_step(name, kernel, *pair, at, to).mean for pair in ((one, zero), (zero, one)))
    for slope in (a, b):
        first = per_row(slope.flatten(1)[:, 0], x).expand_as(x)
        if not agree(slope, first, slope.abs().max().clamp(min=1e-9)):
            raise UserError(_not_affine(name))
    if not agree(step.mean, a * x + b * v, (a * x).abs() + (b * v).abs() + 1e-9):
        raise UserError(_not_affine(name))


def _not_affine(name: str) -> str:
    return (
        f"{name} says affine = True, but its mean is not a x + b v with numbers a and b of the "
        "noise levels (a clip, for example, ends that): set affine = False; it then runs wherever "
        "nothing needs the property, such as with a kl_form other than velocity"
    )


def _shown(at: Tensor) -> str:
    return ", ".join(f"{level:g}" for level in at.tolist())
