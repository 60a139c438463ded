"""An algorithm is five choices. Nothing here runs anything."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from flowrl.credit.advantages import Estimator, ScaleSteps
from flowrl.credit.comparisons import BestWorst, Exponential
from flowrl.credit.trackers import NoTracker, Tracker
from flowrl.credit.turns import ByTurn, GreedyBaseline, Penalize
from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Likelihood, Transition
from flowrl.losses.base import RatioLoss
from flowrl.losses.ratio import NFT, Objective, Preference, Weighted
from flowrl.losses.weights import HighEntropy
from samplers import Particled, Plan, Planner
from samplers.completions import TextPlan, TextPlanner
from samplers.noise import generator

RESERVED = frozenset({"new", "old", "ref", "current"})


@dataclass(frozen=True)
class Decay:
    """An average's decay at optimizer step s: 0 while s < flat, then start + slope (s - flat), at
    most `most`. At 0 the average is a copy."""

    start: float = 0.0
    slope: float = 0.0
    flat: int = 0
    most: float = 1.0

    def __call__(self, step: int) -> float:
        return (
            0.0
            if step < self.flat
            else min(self.most, self.start + self.slope * (step - self.flat))
        )


@dataclass(frozen=True)
class Average:
    """A slow copy of the weights: average <- d average + (1 - d) current, after each iteration."""

    name: str
    decay: Decay


@dataclass(frozen=True)
class Algorithm:
    """`steps` sampling steps, or the most tokens of a text; `behaviour` samples: "current", or one
    of `averages` by name.

    Mixtures that would train on nonsense are refused with a `UserError`, before any weights load.
    """

    steps: int
    plan: Planner | TextPlanner
    advantage: Estimator
    likelihood: Likelihood
    loss: Objective
    averages: tuple[Average, ...] = ()
    behaviour: str = "current"
    tracker: Callable[[], Tracker] = NoTracker  # what credit remembers between iterations

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise UserError(f"steps is {self.steps}: take at least 2")
        self._check_names()
        if isinstance(self.plan, Particled) and not isinstance(self.likelihood, Matching):
            raise UserError(
                "steer: particles are not the policy's own samples, so they have no density to "
                "train on; take a recipe that learns from clean samples (awm, nft, dpo, rwr)"
            )
        plans = self._placeholder_plans()
        for plan in plans:
            if plan.group < 2 and self.tracker is NoTracker:
                raise UserError("a group of one has no advantage: take a group of at least 2")
            if isinstance(plan, TextPlan):
                self._check_text(plan)
            else:
                self._check_plan(plan)
        self._check_pairs()
        self._check_loss()

    @property
    def group(self) -> int:
        """Samples a draw, of an iteration's largest plan."""
        return max(plan.group for plan in self._placeholder_plans())

    @property
    def chains(self) -> bool:
        """Is every sample drawn alike and by itself: none part of another, steered, or greedy?"""
        return not isinstance(self.plan, Particled) and all(
            set(plan.columns.nodes) == {plan.group}
            and not (isinstance(plan, TextPlan) and (plan.forking or plan.greedy))
            for plan in self._placeholder_plans()
        )

    @property
    def reads_reference(self) -> bool:
        """Does credit read how far samples are from the start?"""
        return any(isinstance(t, Penalize) for t in self.advantage.transforms)

    @property
    def by_turn(self) -> bool:
        """Do a sample's turns differ in credit?"""
        return any(isinstance(t, ByTurn) for t in self.advantage.transforms)

    @property
    def roles(self) -> frozenset[str]:
        """Policies that are asked beside the trained one, by the loss or for credit."""
        return self.loss.roles | ({"ref"} if self.reads_reference else set())

    @property
    def text(self) -> bool:
        """Does it draw completions, from a language model?"""
        return isinstance(self.likelihood, Token)

    def _placeholder_plans(self) -> tuple[Plan, ...] | tuple[TextPlan, ...]:
        """The plans of iteration 0 on evenly spaced levels; the model's own are not known yet."""
        sigmas = [1 - k / self.steps for k in range(self.steps)] + [0.0]
        try:
            return self.plan(sigmas, 0, 0)
        except ValueError as problem:
            raise UserError(f"the plan does not fit {self.steps} steps: {problem}") from problem

    def _check_names(self) -> None:
        names = [average.name for average in self.averages]
        for name in names:
            if name in RESERVED or names.count(name) > 1:
                raise UserError(f"an average is called {name!r}, a name taken: choose another")
        if self.behaviour != "current":
            self._known(self.behaviour, ["current", *names], "behaviour")
        for role in sorted(self.loss.roles):
            self._known(role, ["old", "ref", *names], "the loss")

    @staticmethod
    def _known(name: str, names: list[str], who: str) -> None:
        if name in names:
            return
        close = difflib.get_close_matches(name, names, 1)
        guess = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(
            f"{who} asks for the policy {name!r}, but there are {', '.join(names)}: add an "
            f"Average of that name{guess}"
        )

    def _check_plan(self, plan: Plan) -> None:
        if isinstance(self.likelihood, Token):
            raise UserError("the Token likelihood needs a plan of text: Completions or Segments")
        if self.reads_reference:
            raise UserError(
                "Penalize sums log-probabilities of tokens, and pictures have none: take an Anchor "
                "of the loss"
            )
        drawn = any(step.noisy for step in plan.steps) or plan.solver.random
        if plan.shared_noise and not drawn:
            raise UserError(
                "all samples of a group would be the same: a deterministic plan needs its own "
                "noise a sample, so set shared_noise to False"
            )
        if isinstance(self.likelihood, Transition) and not any(s.train for s in plan.steps):
            raise UserError(
                "a Transition likelihood needs noisy, trained steps, and this plan is "
                "deterministic: use Chain, Window, Fork or Tree, or the Matching likelihood"
            )
        if isinstance(self.likelihood, Matching):
            levels = [step.sigma for step in plan.steps]
            self.likelihood.times(levels, self.likelihood.draws, generator(0))
        if plan.kernel is None and ScaleSteps("std") in self.advantage.transforms:
            raise UserError("ScaleSteps('std') needs a plan with a kernel: leave it out")
        if self.advantage.fusion == "path":
            if any(step.branch > 1 and not step.train for step in plan.steps[1:]):
                raise UserError(
                    "path fusion reads the log-densities of the steps that branch: train on all "
                    "of them, or take fusion='mean'"
                )

    def _check_text(self, plan: TextPlan) -> None:
        if not isinstance(self.likelihood, Token):
            raise UserError("a plan of text needs the Token likelihood")
        if plan.temperature == 0:
            raise UserError("at temperature 0 nothing is drawn, so nothing can be learned")
        if plan.forking is not None and self.advantage.fusion == "path":
            raise UserError("path fusion needs uniform trees: take fusion='mean' or 'max'")
        drawn = [t.samples for t in self.advantage.transforms if isinstance(t, GreedyBaseline)]
        if drawn != [plan.group] * plan.greedy:
            raise UserError(
                "GreedyBaseline and Completions(greedy=True) go together: one takes the other's "
                "last completion as the baseline, and counts the completions of a draw with it"
            )
        if self.reads_reference and (plan.cuts or plan.forking is not None):
            raise UserError(
                "Penalize takes a completion's divergence off its own reward, and in a tree "
                "completions share tokens, which count once: take an Anchor of the loss"
            )
        if any(isinstance(t, ScaleSteps) for t in self.advantage.transforms):
            raise UserError("ScaleSteps weighs noise levels, and text has none: leave it out")

    def _check_pairs(self) -> None:
        if self.likelihood.unit != self.loss.unit:
            raise UserError(
                "Preference learns from pairs, and only it does: set Matching(paired=True) with "
                "Preference, and leave it out with every other loss"
            )
        paired = any(isinstance(t, BestWorst) for t in self.advantage.transforms[-1:])
        if isinstance(self.loss, Preference) and not paired:
            raise UserError("Preference needs BestWorst as the last transform of the advantage")

    def _check_loss(self) -> None:
        if isinstance(self.loss, RatioLoss):
            self._check_tokens(self.loss)
        if isinstance(self.loss, NFT):
            if not isinstance(self.likelihood, Matching):
                raise UserError("NFT compares velocities: use the Matching likelihood")
            if self.behaviour == "current":
                raise UserError(
                    "NFT steps away from a slower policy that samples: add an average, such as "
                    "Average('trailing', Decay(slope=0.001, most=0.5)), and name it as behaviour"
                )
        if isinstance(self.loss, Weighted):
            if not any(isinstance(t, Exponential) for t in self.advantage.transforms[-1:]):
                raise UserError(
                    "Weighted needs weights of at least 0: make Exponential the last transform"
                )

    def _check_tokens(self, loss: RatioLoss) -> None:
        """What only token policies can say."""
        if loss.weights and not isinstance(self.likelihood, Token):
            raise UserError("a loss's weights read tokens: leave them out of losses on pictures")
        uncertain = loss.entropy > 0 or any(isinstance(w, HighEntropy) for w in loss.weights)
        if uncertain and not (isinstance(self.likelihood, Token) and self.likelihood.entropy):
            raise UserError(
                "this loss reads entropies: it needs the likelihood Token(entropy=True)"
            )
