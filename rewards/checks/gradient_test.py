"""Test a reward's gradient before a run: its scores must be the plain ones, and its slope right.

The plain score sees 8-bit images and PIL's resizing, the differentiable one floats. Both must rank
a group of images alike, and the gradient must agree with finite differences.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from rewards.audio import Audio
from rewards.checks.differentiable import DifferentiableScore, differentiable_score
from rewards.checks.self_test import Prompts
from rewards.combine import scored
from rewards.types import Kind, Reward, Samples

ALIKE, SLOPES = 64, 4  # images of the group, and those of them whose gradient is tested
SIDE, PATCHES, FRAMES = 64, 6, 8  # pixels, patches along a side, frames of a video
HEARD, HEARD_RATE = 1_600, 16_000  # numbers of a sound, and those of a second
RANKS = 0.999  # least rank correlation of the two scores in the group
LARGEST_GAP = 0.05  # largest difference of the two scores, in standard deviations within the group
SLOPE = 0.05  # largest relative error of the gradient against finite differences
NUDGES = (1.0, 0.3, 0.1, 0.03, 0.01)  # of the differences, in the norm of an image's change


@dataclass(frozen=True)
class Agreement:
    """Distance between the differentiable and the plain scores of the same samples."""

    ranks: float  # Spearman's correlation
    gap: float  # the largest difference, in standard deviations of the plain scores

    @classmethod
    def of(cls, plain: Float[Tensor, " n"], graded: Float[Tensor, " n"]) -> "Agreement":
        """Compare with the plain scores of the same samples; perfect agreement for fewer than
        two."""
        scored = ~plain.isnan()
        a, b = (
            plain[scored].double().cpu(),
            graded.detach()[scored.to(graded.device)].double().cpu(),
        )
        if len(a) < 2:
            return cls(1.0, 0.0)
        x, y = (values.argsort(stable=True).argsort().double() for values in (a, b))
        ranks = 1 - 6 * (x - y).square().sum() / (len(a) * (len(a) ** 2 - 1))
        spread = a.std(correction=0).clamp(min=torch.finfo(torch.float64).tiny)
        return cls(float(ranks), float(((a - b).abs() / spread).max()))

    @property
    def close(self) -> bool:
        return self.ranks >= RANKS and self.gap <= LARGEST_GAP

    def __str__(self) -> str:
        return f"rank correlation {self.ranks:.4f}, differences up to {self.gap:.1%} of the spread"


def group_of(kind: Kind, prompts: Prompts) -> Samples:
    """A group with one prompt: smooth patches of colour, which in videos move to the right. Tensors
    are standard normal, and sounds are such noise at 0.1 of full scale."""
    if kind == "sound":
        draws = torch.Generator().manual_seed(0)
        noise = 0.1 * torch.randn(ALIKE, 1, HEARD, generator=draws)
        samples = _of_one_prompt(noise, prompts)
        return replace(samples, audio=Audio(noise, HEARD_RATE))
    if kind == "tensor":
        draws = torch.Generator().manual_seed(0)
        media = torch.randn(ALIKE, *prompts.shape, generator=draws)
        return _of_one_prompt(media, prompts)
    grids = torch.rand(ALIKE, 3, PATCHES, PATCHES, generator=torch.Generator().manual_seed(0))
    media = functional.interpolate(grids, (SIDE, SIDE), mode="bicubic").clamp(0.02, 0.98)
    if kind == "video":
        media = torch.stack([media.roll(2 * frame, -1) for frame in range(FRAMES)], 1)
    return _of_one_prompt(media, prompts)


def _of_one_prompt(media: Tensor, prompts: Prompts) -> Samples:
    meta = [prompts.meta[0]] * ALIKE if prompts.meta else ()
    return Samples(media, [prompts.texts[0]] * ALIKE, torch.zeros(ALIKE, dtype=torch.long), meta)


def gradient_test(name: str, reward: Reward, prompts: Prompts | None = None) -> str:
    """Test the gradient of a reward and return a sentence. ValueError, naming it, if it fails.

    Failures: there is no gradient, or it does not reach the media; the two scores rank the group
    differently or differ by more than 5 % of its spread; finite differences disagree with the
    gradient.
    """
    score = differentiable_score(name, reward)
    samples = group_of("image" if prompts is None else prompts.kind, prompts or Prompts())
    plain = scored(name, reward, samples)
    with torch.no_grad():
        near = Agreement.of(plain, differentiable_scores(name, score, samples.media, samples))
    if not near.close:
        raise ValueError(
            f"reward {name}: `differentiable` does not match the reward's own score: {near} "
            f"(required: at least {RANKS} and at most {LARGEST_GAP:.0%})"
        )
    few = samples.take(range(SLOPES))
    media = few.media.clone().requires_grad_()
    graded = differentiable_scores(name, score, media, few)
    if not graded.requires_grad:
        raise ValueError(
            f"reward {name}: `differentiable` has no gradient with respect to the media"
        )
    (slope,) = torch.autograd.grad(graded.sum(), media, allow_unused=True)
    error = slope_error(score, few, slope)
    if not error <= SLOPE:
        raise ValueError(
            f"reward {name}: its gradient differs from finite differences of its scores by "
            f"{error:.0%}: is a part of it detached?"
        )
    return (
        f"{name} with gradients: {near}; its gradient agrees with finite differences to {error:.1%}"
    )


def differentiable_scores(
    name: str, score: DifferentiableScore, media: Tensor, samples: Samples
) -> Float[Tensor, " n"]:
    """Call a differentiable reward. ValueError, naming it, unless it returns n floats."""
    result: object = score(media, samples)
    shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    if not isinstance(result, Tensor) or shape != (len(media),) or not result.is_floating_point():
        raise ValueError(
            f"reward {name}: `differentiable` must return a float tensor [{len(media)}], not "
            f"{shape}"
        )
    return result


def slope_error(score: DifferentiableScore, samples: Samples, slope: Tensor | None) -> float:
    """Relative error of the gradient along its own direction, for the best of several step sizes;
    NaN without a gradient."""
    if slope is None or not bool(slope.isfinite().all()) or not bool((slope != 0).any()):
        return float("nan")
    sizes = slope.flatten(1).norm(dim=1)
    unit = slope / sizes.clamp(min=1e-30).view(-1, *[1] * (slope.ndim - 1))
    media, errors = samples.media, []
    with torch.no_grad():
        for step in NUDGES:
            up, down = (score(media + way * step * unit, samples) for way in (1, -1))
            measured = ((up - down).double() / (2 * step)).sum()
            errors.append(abs(float(measured / sizes.double().sum()) - 1))
    return min(errors)
