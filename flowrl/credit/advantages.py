"""Advantages from node values: chained pure functions on arrays [n, k, r].

n samples (contiguous per draw), k decision points, r rewards. Node values, and the helpers that all
transforms share, are in `flowrl/credit/values.py`. Everything is float64 and honours the mask.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.credit.choices import Choices, image_plans, refusal, text_plans
from flowrl.credit.intermediate import reads_intermediate
from flowrl.credit.trackers import NoTracker
from flowrl.credit.uncompared import Uncompared
from flowrl.credit.values import (
    SAMPLE_TURNS,
    Context,
    Credit,
    Fusion,
    Transform,
    applying,
    by_column,
    existing,
    masked_mean,
    masked_std,
    node_values,
)
from flowrl.errors import UserError
from flowrl.number_checks import check_number
from rewards.types import Scores
from samplers.number_ranges import ANY_NUMBER, AT_LEAST_0, FROM_0_BELOW_1
from samplers.planners import CLEAN


@dataclass(frozen=True)
class Sum:
    """The weighted sum of the rewards, [n k r] to [n k 1].

        value = sum_r weight_r value_r

    The sum is over the rewards that apply to the sample; one to which none applies is masked. A
    reward without any score in a group is left out of that group. A sample that lacks a score which
    others of its group have, of a reward that applies, is masked, since its sum is incomplete. With
    `partial` it stays, and the missing score counts as 0, which is sound once rewards are
    standardised (GDPO, arXiv:2601.05242).

    partial  whether a missing score counts as 0; else its sample is masked
    """

    partial: bool = False

    def __call__(self, credit: Credit, context: Context) -> Credit:
        group = context.columns.group
        mask = credit.mask.any(-1, keepdim=True)
        if not self.partial:
            grouped = credit.mask.view(-1, group, *credit.mask.shape[1:])
            present = grouped.any(1).repeat_interleave(group, 0)
            needed = present & applying(credit, context)
            mask = mask & (credit.mask | ~needed).all(-1, keepdim=True)
        weights = context.weights.to(credit.value)
        if SAMPLE_TURNS not in context.table:
            total = (credit.value * credit.mask) @ weights
        else:  # one product per turn, so that the bits do not depend on the number of turns
            points = (credit.value * credit.mask).unbind(1)
            total = torch.stack([point.contiguous() @ weights for point in points], 1)
        return Credit(total[..., None] * mask, mask)


@dataclass(frozen=True)
class Standardize:
    """Normalised advantages, as in GRPO (arXiv:2402.03300), over the nodes of each decision point.

        A = (value - mean) / (std + eps)

    scale       the std of the group, of the batch (Flow-GRPO's global_std), or no division (None)
                (Dr. GRPO, arXiv:2503.20783)
    correction  at least 0: 0 divides by n (Flow-GRPO, with eps 1e-4), 1 by n - 1 (DanceGRPO, with
                1e-8)
    centre      the mean of the group, or of the batch (GDPO's last step)
    trim        in [0, 1): excludes the lowest int(trim n) values from mean and std (MixGRPO's
                trimmed_ratio)
    blend       at least 0, for groups without spread: A = blend (value - batch mean) / batch std; 0
                yields exactly 0

    eps  added to the std, at least 0
    """

    scale: Literal["group", "batch"] | None = "group"
    correction: int = 0
    eps: float = 1e-4
    centre: Literal["group", "batch"] = "group"
    trim: float = 0.0
    blend: float = 0.0

    def __post_init__(self) -> None:
        check_number("Standardize's correction", self.correction, AT_LEAST_0)
        check_number("Standardize's eps", self.eps, AT_LEAST_0)
        check_number("Standardize's trim", self.trim, FROM_0_BELOW_1)
        check_number("Standardize's blend", self.blend, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return by_column(credit, context, self.rule)

    def rule(
        self, value: Float[Tensor, "g m r"], mask: Bool[Tensor, "g m r"]
    ) -> Float[Tensor, "g m r"]:
        """Standardise g groups of m values each."""
        untrimmed = mask if self.trim == 0 else self._untrimmed(value, mask)
        centre = 1 if self.centre == "group" else (0, 1)
        scale = 1 if self.scale == "group" else (0, 1)
        spread = masked_std(value, mask, centre, 0) > 0
        centred = torch.where(spread, value - masked_mean(value, untrimmed, centre), 0.0)
        if self.scale is not None:
            std = masked_std(value, untrimmed, scale, self.correction)
            centred = torch.where(std > 0, centred / (std + self.eps), 0.0)
        if self.blend > 0:
            std = masked_std(value, untrimmed, (0, 1), self.correction)
            whole = (value - masked_mean(value, untrimmed, (0, 1))) / (std + self.eps)
            flat = masked_std(value, mask, 1, 0) == 0
            centred = torch.where(flat & (std > 0), self.blend * whole, centred)
        return centred

    def _untrimmed(self, value: Tensor, mask: Tensor) -> Tensor:
        count = mask.sum(1, keepdim=True)
        drop = torch.minimum((count * self.trim).floor().long(), (count - 1).clamp(min=0))
        rank = value.masked_fill(~mask, torch.inf).argsort(dim=1, stable=True).argsort(1)
        return mask & (rank >= drop)


@dataclass(frozen=True)
class LeaveOneOut:
    """Each value minus the mean of the group's other samples.

        A_i = value_i - mean_{j != i} value_j

    RLOO (arXiv:2402.14740), LOOP (arXiv:2503.00897). A sample whose group has no other score is
    masked, since it has no baseline.
    """

    def __call__(self, credit: Credit, context: Context) -> Credit:
        centred = Standardize(scale=None)

        def rule(value: Tensor, mask: Tensor) -> Tensor:
            count = mask.sum(1, keepdim=True)
            return centred.rule(value, mask) * count / (count - 1).clamp(min=1)

        def by_others(value: Tensor, mask: Tensor) -> Tensor:
            return (mask.sum(1, keepdim=True) - 1).double().expand_as(value)

        mask = credit.mask & (by_column(credit, context, by_others).value > 0)
        return Credit(by_column(credit, context, rule).value, mask)


@dataclass(frozen=True)
class GroupBaseline:
    """Values minus a baseline of their group.

        A = value - (baseline + shift)

    soft   above 0: the baseline is soft log mean exp(value / soft), the value of the optimal
           KL-regularised policy (OPMD; the V* of A*-PO, arXiv:2505.20686); None: the mean
    shift  any number, -0.1 in AsymRE (arXiv:2506.20520): with a baseline below the mean, good
           samples of an older policy weigh more than bad ones
    """

    soft: float | None = None
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.soft is not None and not 0 < self.soft < math.inf:
            raise UserError(f"a soft baseline's temperature must be above 0, got {self.soft}")
        check_number("GroupBaseline's shift", self.shift, ANY_NUMBER)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return by_column(credit, context, self.rule)

    def rule(self, value: Tensor, mask: Tensor) -> Tensor:
        if self.soft is None:
            return Standardize(scale=None).rule(value, mask) - self.shift
        scaled = (value / self.soft).masked_fill(~mask, -torch.inf)
        mean = scaled.logsumexp(1, keepdim=True) - mask.sum(1, keepdim=True).clamp(min=1).log()
        return torch.where(mask, value - (self.soft * mean + self.shift), 0.0)


@dataclass(frozen=True)
class ScaleSteps:
    """Weights for denoising steps, relative to their mean over the trainable steps.

        A_k <- A_k w_k / mean_{j < last} w_j,  w = std or 1 / h

    by "std" is the kernel's standard deviation (TempFlow-GRPO, arXiv:2508.04324), "1/h" the inverse
    of the sigma covered (GRPO-Guard, arXiv:2510.22319). Planners train no step from `last` on: the
    step that reaches 0 or a level below `samplers.planners.CLEAN`.

    A clipped surrogate is positively homogeneous in the advantage, so the advantages can carry the
    weight of a step's loss.

    by  weight of a step: its noise's standard deviation (`std`), or the inverse of the sigma that
        it covers (`1/h`)
    """

    carries_weights = True
    by: Literal["std", "1/h"]

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return credit._replace(value=credit.value * context.step_weights(self._weights))

    def _weights(self, std: Tensor, h: Tensor, slope: Tensor) -> Float[Tensor, " k"]:
        del slope
        weight = std if self.by == "std" else 1 / h
        levels = h.flip(0).cumsum(0).flip(0)  # where each step starts: the last one ends on 0
        last = max(int((levels >= CLEAN).sum()) - 1, 1)  # the first step that no planner trains on
        return weight / weight[:last].mean()

    def refuses(self, choices: Choices) -> str | None:
        if text_plans(choices):
            return "ScaleSteps weights noise levels, which text does not have: leave it out"
        if self.by == "std" and any(plan.kernel is None for plan in image_plans(choices)):
            return "ScaleSteps('std') needs a plan with a kernel: leave it out"
        return None


@dataclass(frozen=True)
class Clip:
    """Advantages clipped to a range: Flow-GRPO (arXiv:2505.05470).

    A <- clip(A, -at, at)

    at  largest size of an advantage, above 0
    """

    at: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.at < math.inf:
            raise UserError(
                f"Clip needs a bound above 0, not {self.at}: every advantage would be 0"
            )

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return credit._replace(value=credit.value.clamp(-self.at, self.at))


@dataclass(frozen=True)
class Rescale:
    """Rescales advantages from the range +-at to +-to: AWM (arXiv:2509.25050).

    A <- A to / at

    at  size of an advantage before, above 0
    to  size that it becomes, above 0
    """

    at: float = 5.0
    to: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.at < math.inf or not 0 < self.to < math.inf:
            raise UserError(
                f"Rescale needs ranges above 0, not {self.at} and {self.to}: every advantage would "
                "be 0 or infinite"
            )

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return credit._replace(value=credit.value * (self.to / self.at))


@dataclass(frozen=True)
class Estimator:
    """Computes advantages from scores: node values, then `transforms` in order.

    A chain without `Sum` starts with one. `fusion`: how `flowrl.credit.values.node_values` makes a
    node's value from its leaves.

    `routes` has the parts of samples (a video and its sound) with the rewards that train each, as
    in OmniNFT (arXiv:2605.12480, from the abstract): every part has advantages of its own, from its
    rewards alone. Without routes one advantage serves all parts.
    """

    transforms: tuple[Transform, ...]
    fusion: Fusion = "mean"
    routes: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @cached_property
    def chain(self) -> tuple[Transform, ...]:
        summed = any(isinstance(t, Sum) for t in self.transforms)
        return self.transforms if summed else (Sum(), *self.transforms)

    @cached_property
    def _behind_sum(self) -> int:
        return 1 + next(i for i, transform in enumerate(self.chain) if isinstance(transform, Sum))

    @cached_property
    def _own(self) -> tuple[Transform, ...]:
        """The transforms up to the sum that read only the samples' own scores."""
        first = self.chain[: self._behind_sum]
        return tuple(transform for transform in first if not reads_intermediate((transform,)))

    def refuses(self, choices: Choices) -> str | None:
        """Refuses groups without differences, trees that `path` cannot weight, and whatever its
        transforms refuse."""
        alone = any(isinstance(t, Uncompared) for t in self.transforms)
        single = any(plan.group < 2 for plan in choices.plans)
        if choices.tracker is NoTracker and single and not alone:
            return "a group of one has no advantage: use a group of at least 2, or split a tree"
        for plan in image_plans(choices):
            random = any(step.noisy for step in plan.steps) or plan.solver.random
            if plan.shared_noise and not random:
                return (
                    "all samples of a group would be identical: a deterministic plan needs "
                    "different noise for each sample, so set shared_noise to False"
                )
        return self._refuses_fusion(choices) or refusal(self.transforms, choices)

    def _refuses_fusion(self, choices: Choices) -> str | None:
        if self.fusion in ("mean", "max"):
            return None
        if any(plan.forking is not None for plan in text_plans(choices)):
            return "path fusion needs uniform trees: use fusion='mean' or 'max'"
        steps = [step for plan in image_plans(choices) for step in plan.steps[1:]]
        if any(step.branch > 1 and not step.train for step in steps):
            return (
                "path fusion reads the log-densities of the steps that branch: train on all of "
                "them, or use fusion='mean'"
            )
        return None

    def summed(self, scores: Scores, context: Context) -> Credit:
        """Node values from the weighted sum of rewards, before other transforms. The mask marks
        samples with enough scores for an advantage; later transforms may mask more."""
        context = replace(context, scores=scores)
        credit = self.node_values(scores, context)
        for transform in self._own:
            credit = transform(credit, context)
        return credit

    def node_values(self, scores: Scores, context: Context) -> Credit:
        """Values of nodes. Where the sum comes first, a reward adds 0 to a leaf to which it does
        not apply, so that a node's value is the mean of its leaves' totals."""
        sums = isinstance(self.chain[0], Sum) and self.fusion != "max"
        return node_values(scores.terms if sums else scores, context, self.fusion)

    def __call__(
        self, scores: Scores, context: Context, summed: Credit | None = None
    ) -> tuple[Float[Tensor, "n k"], Bool[Tensor, "n k"]]:
        """Advantages and mask: one column per decision point, or per token behind
        `Penalize(each=True)`; with routes one per decision point and part, in their order.

        `summed`: the result of the method of that name for these scores, if it is known.
        """
        if self.routes:
            return self._routed(scores, context)
        context = replace(context, scores=scores)
        first = self._behind_sum
        if summed is None or len(self._own) < first:
            summed, first = self.node_values(scores, context), 0
        credit = summed
        for transform in self.chain[first:]:
            credit = transform(credit, context)
        if SAMPLE_TURNS in context.table:
            credit = existing(credit, context)
        return credit.value[..., 0], credit.mask[..., 0]

    def _routed(
        self, scores: Scores, context: Context
    ) -> tuple[Float[Tensor, "n k"], Bool[Tensor, "n k"]]:
        """Advantages of each part from the scores of its own rewards."""
        plain, results = replace(self, routes=()), list[tuple[Tensor, Tensor]]()
        for _, names in self.routes:
            at = [scores.names.index(name) for name in names]
            of_route = replace(context, weights=context.weights[at])
            results.append(plain(scores.of(at), of_route))
        value, mask = (torch.stack(parts, -1).flatten(1) for parts in zip(*results, strict=True))
        return value, mask
