"""Recipes whose samples branch during sampling: forks and trees. Defaults are the published
numbers.

The common rules of `flowrl/recipes/grpo.py` apply here too.
"""

from typing import Literal

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Clip, Estimator, ScaleSteps, Standardize, Sum, Transform
from flowrl.credit.comparisons import PruneWidth, TwoLevel
from flowrl.credit.steps import EvenDepths
from flowrl.credit.values import Fusion, LikelyPaths
from flowrl.errors import UserError
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import Scale, anchors, named
from samplers import (
    ConstantSDE,
    FlowSDE,
    Fork,
    Kernel,
    Moving,
    Progressive,
    Prune,
    Stripes,
    Tree,
)


@rests_on("arrays", "tempflow_perstep")
def temp_flow(
    *, steps: int = 10, roots: int = 4, branch: int = 6, eta: float = 0.7, clip: float = 1e-4,
    kl: float = 0.004, scale: Scale = "group", kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """TempFlow-GRPO, arXiv:2508.04324: at every step 6 noisy children leave an ODE trunk, and are
    credited to that step only. SD3.5-M: 10 steps, 4 roots x 6 branches, eta 0.7 (FLUX 0.9),
    KL 0.004 (PickScore 0.001), a step's loss weighted by its std over the steps' mean std.

    The weight is exact, where the code has a constant (2.25 for SD3, 1.73 for FLUX). Statistics are
    computed over a prompt's 24 samples at a step, as in the code.

    roots   initial noises per prompt, each with a trunk, at least 1; more make advantages less
            noisy
    branch  noisy children that leave each trunk at a step, at least 1; `roots` times `branch`
            samples are compared at each step
    """
    return Algorithm(
        steps=steps,
        plan=Fork(kernel or FlowSDE(eta), branch, roots),
        advantage=Estimator((Standardize(scale), Clip(), ScaleSteps("std"))),
        likelihood=Transition(),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )


def _depth_by_depth(
    scale: Scale, prune: str = "none", fusion: Fusion = "mean", keep: float = 0.5,
    depth_weight: float = 0.0, siblings: float = 0.0,
) -> Estimator:  # fmt: skip
    width: tuple[Transform, ...] = ()
    if prune in ("branch", "extremes"):
        width = (PruneWidth("branch" if prune == "branch" else "extremes", keep),)
    if not 0 <= siblings <= 1:
        raise UserError(
            f"siblings is a share of the advantage and must be in [0, 1], not {siblings}"
        )
    even = (EvenDepths(depth_weight),) if depth_weight else ()
    standardize = Standardize(scale, correction=1, eps=1e-8)
    levels = TwoLevel(siblings, 1 - siblings, standardize) if siblings else standardize
    return Estimator((Sum(), levels, *width, Clip(), *even), fusion)


def _untrained(prune: str, steps: int, at: tuple[int, ...]) -> Prune | None:
    """The steps that are excluded from training: the code's window, the paper's, or none."""
    if prune == "deeper":
        first = max(at) + 1
        return Prune(tuple(range(first, min(first + 4, steps - 1))), every=30, move=1)
    if prune != "depth":
        return None
    stop = max(max(at) - 1, 0)  # the published depths count children, one more than their step
    late = tuple(range(max(steps - 6, max(at) + 1), steps - 1))
    return Prune(late, every=30, move=-1, stop=stop)


@rests_on("arrays", "branch_tree_advantage")
def branch_grpo(
    *, steps: int = 20, at: tuple[int, ...] = (0, 3, 6, 9), branch: int = 2,
    eta: float = 0.3, clip: float = 1e-3, split: float | None = None,
    prune: Literal["none", "branch", "extremes", "depth", "deeper"] = "none", keep: float = 0.5,
    fusion: Literal["mean", "max", "path", "likely_paths"] = "mean", fusion_beta: float = 1.0,
    depth_weight: float = 0.0, siblings: float = 0.0, scale: Scale = "group", roots: int = 1,
    kl: float = 0.0, kernel: Literal["constant", "flow_sde"] | Kernel = "constant",
) -> Algorithm:  # fmt: skip
    """BranchGRPO, arXiv:2509.06040. FLUX: 20 steps, two children at steps 0, 3, 6, 9, eta 0.3, clip
    1e-3; an edge's advantage is its child's advantage among the nodes of the same depth.

    Differences: the code scales a split's noise by 4 but scores it unscaled, and stores states in
    bfloat16 after scoring them, so that its first ratio is not 1: neither is reproduced. Its width
    pruning by branch keeps a chain's first steps, since all advantages of a chain are equal; here
    the better leaves are kept. The last step is not trained.

    at            steps at which each node splits, counted from 0 and before the last step; each
                  multiplies the samples by `branch`
    branch        children of a node at each split, at least 2
    split         distance between siblings' noises, (noise of the parent + split times its own) /
                  sqrt(1 + split^2), above 0: 4 in the paper, larger makes them more different; null
                  draws them independently
    prune         nodes or steps that are not trained. Width, after the last split: only the best
                  `keep` of each `branch` (with two children the paper's Parent-Top1), or that share
                  of the draw's leaves at its `extremes` (the paper's best b and worst b leaves, b =
                  keep leaves / 2). Depth: the code's `depth` leaves the steps 14 to 18 of 20
                  untrained, moving to earlier steps every 30 iterations; the paper's `deeper`
                  leaves 4 steps from the last split on untrained, moving to later steps
    keep          share of the leaves that `prune` by `branch` or `extremes` leaves, in (0, 1];
                  smaller trains fewer rows; no effect with other values of `prune`
    fusion        a node's value from its leaves: their `mean`, their `max`, by the edges' densities
                  (`path`, the code's tree_prob_weighted), or by softmax(fusion_beta log-density of
                  a leaf's path) (`likely_paths`, the paper's)
    fusion_beta   sharpness of `likely_paths`, at least 0; larger follows the likeliest leaf, 0 is
                  the mean; no effect with other values of `fusion`
    depth_weight  ours: an edge has the weight nodes^-depth_weight, any number, with the number of
                  nodes at its depth; 1 gives all depths the same weight, 0 gives most of it to
                  those after the last split
    siblings      ours: share of the advantage that is among the children of one parent, in [0, 1];
                  the rest is among all nodes of the depth
    roots         ours: initial noises per prompt, each with a tree, at least 1; more make
                  advantages less noisy
    kl            ours: weight of the divergence from the initial policy in the loss, at least 0;
                  larger keeps the policy nearer to it, 0 leaves it out
    """
    noise = named(kernel, {"constant": ConstantSDE(eta), "flow_sde": FlowSDE(eta)})
    plan = Tree(noise, at, branch, roots, split=split, prune=_untrained(prune, steps, at))
    fused = LikelyPaths(fusion_beta) if fusion == "likely_paths" else fusion
    return Algorithm(
        steps=steps,
        plan=plan,
        advantage=_depth_by_depth(scale, prune, fused, keep, depth_weight, siblings),
        likelihood=Transition(),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )


@rests_on("arrays", "branch_tree_advantage")
def branch_grpo_mix(
    *, steps: int = 20, at: tuple[int, ...] = (0, 3, 6, 9), branch: int = 2,
    eta: float = 0.3, clip: float = 1e-3, window: int = 4, every: int = 30,
    moving: bool = False, scale: Scale = "group", kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """BranchGRPO's mixed mode: noise at the splits and in the steps k with k % every < window, and
    an ODE elsewhere; only noisy steps are trained. Published: window 4, every 30. See
    `branch_grpo`. The paper's window moves by a step every `every` iterations: `moving: true`.

    at      steps at which each node splits, counted from 0 and before the last step; each
            multiplies the samples by `branch`
    branch  children of a node at each split, at least 2
    window  noisy and trained steps beside the splits, at least 0: the first of each `every` steps,
            or the size of the window if it is `moving`
    every   steps after which noise is repeated, at least 1, or iterations after which the window
            moves by a step if it is `moving`
    moving  whether one window moves over the steps with the iteration, as in the paper, in place of
            steps that stay
    """
    noisy = Moving(window, Progressive(every)) if moving else Stripes(window, every)
    return Algorithm(
        steps=steps,
        plan=Tree(kernel or ConstantSDE(eta), at, branch, stripes=noisy),
        advantage=_depth_by_depth(scale),
        likelihood=Transition(),
        loss=Surrogate(clip, clip),
    )
