"""The recipe `text`: an algorithm for language models, composed from named choices.

Every other text recipe is a preset of it, in `flowrl/recipes/text_presets.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Estimator, LeaveOneOut, Standardize, Transform
from flowrl.credit.comparisons import BestWorst, ParentDifference, TwoLevel
from flowrl.credit.selection import DropFlat
from flowrl.credit.success import BetaNormalize, MaxRL, PassAtK, RiskPO
from flowrl.credit.trackers import PromptValues, ScoreQuantiles, Tracker
from flowrl.credit.trees import GlobalLocal
from flowrl.credit.turns import (
    Baseline,
    Discount,
    GreedyBaseline,
    LengthBaseline,
    Penalize,
    States,
    Turns,
    WhitenTokens,
    WhitenTurns,
)
from flowrl.errors import UserError
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.token_ratios import KLEstimator, RatioLevel
from flowrl.likelihoods.transition import Likelihood
from flowrl.losses.base import Objective, Weight
from flowrl.losses.ratio import Preference, Surrogate
from flowrl.losses.token import CISPO, GMPO, GPPO, SAPO, VESPO, Reinforce
from flowrl.losses.weights import HighEntropy, OffPolicyMask
from flowrl.recipes.credit_choices import credit_chain, credit_tracker
from flowrl.recipes.grpo import anchors
from flowrl.recipes.text_choices import (
    CHOICE_SETTINGS,
    ON_TREES,
    TREE_ADVANTAGES,
    TREES,
    AdvantageName,
    DenominatorName,
    LossName,
    PlanName,
)
from samplers.completions import Completions, Forks, Segments, TextPlanner
from samplers.forks import Forking


@dataclass(frozen=True, kw_only=True)
class TextMixture:
    """Any mixture of published parts: GSPO's ratio with Dr. GRPO's advantage, for example, is
    `ratio: sequence, advantage: mean`. The other text recipes are presets of it. The defaults are
    ours. A setting that no chosen part reads is an error. A plan, an advantage (one transform), a
    likelihood or a loss of your own is FILE.py:NAME.

    plan         completions  `group` independent completions of a prompt
                 segments     `roots` completions that branch into `branch` after `at` tokens each
                              (SPO, arXiv:2505.23564)
                 forks        `roots` completions, forked `rounds` times at their `top` most
                              uncertain tokens, `branch` new ones from each (TreeRL,
                              arXiv:2506.11902)
    advantage    of all plans: group (mean and std), mean (no std, arXiv:2503.20783), leave_one_out
                 (arXiv:2402.14740); `blend` is as in `flow_grpo`
                 of trees: parent (a node less its parent), local and treerl (above the draw's mean
                 and above the parent; treerl counts first nodes twice), tempo (arXiv:2509.18314),
                 two_level (half among siblings, half among the nodes of a depth)
                 of completions: greedy (arXiv:2310.10505), length (arXiv:2505.23585), whitened and
                 mean_whitened (over the batch's tokens, arXiv:2501.03262), maxrl
                 (arXiv:2602.02710), pass_at_k (`k`, `form`), beta (`most`, arXiv:2506.02864), risk
                 (`bundle`, `quantile_low`, `quantile_high`, `mix`, arXiv:2510.00911), tracked
                 (`keep`, `uncertain`, arXiv:2509.13232), best_worst (for loss: preference), gdpo,
                 aapo (`keep`) and best_gap (see `flowrl/recipes/credit_choices.py`)
                 of turns: states (`weight`, `gamma`, `scale`, arXiv:2505.10978), turns
                 (arXiv:2510.11062), returns (`gamma`, arXiv:2510.01051)
    drop_flat    leave out groups whose samples score the same (arXiv:2503.14476)
    ratio        of a token, of the sequence (its geometric mean), or the product of its tokens'
    loss         surrogate and gppo (clipped at 1 - `low` and 1 + `high`), gmpo (at e^-`low` and
                 e^`high`), cispo (ratio at most `bound`), sapo (`positive`, `negative`), vespo,
                 reinforce (no ratio), preference (DPO, `beta`)
    denominator  mean over all tokens, over each row's tokens and then rows, sums over rows
                 (sequences), or sums divided by `length`
    kl           weight of the KL to the start, in the loss (estimated by `kl_form`) or taken off
                 the reward: a completion's, or with whitened tokens each token's and what follows
    share        train on this share of the tokens only, the most uncertain (arXiv:2506.01939)
    entropy      bonus of this times the mean entropy of tokens
    off_policy   leave out bad completions that are less likely by more (arXiv:2512.02556)
    temperature, top_p, top_k, min_p  of sampling; the likelihood is that of the tokens they leave.
                 top_k 0 and min_p 0 leave all
    cut          completions cut off at `length`: trained on, or masked
    """

    plan: PlanName | TextPlanner = "completions"
    length: int = 1024
    group: int = 16
    roots: int = 4
    branch: int = 2
    at: tuple[int, ...] = (256,)
    top: int = 2
    rounds: int = 1
    by: Literal["entropy", "surprise"] = "surprise"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    cut: Literal["train", "mask"] = "train"
    drop_flat: bool = False
    advantage: AdvantageName | Transform = "group"
    blend: float = 0.0
    k: int = 4
    form: Literal["leave_one_out", "analytic"] = "analytic"
    most: float = 10.0
    bundle: int = 5
    quantile_low: float = 0.2
    quantile_high: float = 0.8
    mix: float = 1.5
    keep: float = 0.9
    uncertain: bool = True
    weight: float = 1.0
    gamma: float = 0.95
    scale: bool = False
    ratio: RatioLevel = "token"
    likelihood: Literal["token"] | Likelihood = "token"
    loss: LossName | Objective = "surrogate"
    low: float = 0.2
    high: float = 0.2
    keep_low: float = 1.0
    keep_high: float = 1.0
    bound: float = 5.0
    positive: float = 1.0
    negative: float = 1.05
    beta: float = 0.1
    denominator: DenominatorName = "tokens"
    kl: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_form: KLEstimator = "k3"
    share: float | None = None
    entropy: float = 0.0
    off_policy: float | None = None

    def algorithm(self) -> Algorithm:
        """Raise a `UserError` for choices that make no sense together."""
        self._check()
        return Algorithm(
            steps=self.length,
            plan=self._plan(),
            advantage=Estimator(self._credit()),
            likelihood=self._likelihood(),
            loss=self._loss(),
            tracker=self._tracker(),
        )

    def _check(self) -> None:
        for choice, readers, settings in CHOICE_SETTINGS:
            chosen = getattr(self, choice)
            for name in settings if chosen not in readers else ():
                own = not isinstance(chosen, str)
                if own and name == "ratio" and choice == "loss":
                    continue  # the likelihood reads it, whose log-ratio every loss may take
                if getattr(self, name) != getattr(TextMixture, name):
                    raise UserError(
                        f"{choice}: {type(chosen).__name__ if own else chosen} does not read "
                        f"{name}, which belongs to {', '.join(readers)}; leave {name} out"
                    )
        if problem := self._conflict():
            raise UserError(problem)

    def _conflict(self) -> str | None:
        """Why two of the choices do not go together, if they do not."""
        if not isinstance(self.loss, str) and self.kl and self.kl_in == "loss":
            return (
                "kl is a term of the published losses, and a loss of your own has its own terms: "
                "leave kl out, or set kl_in: reward"
            )
        if not isinstance(self.advantage, str) or not isinstance(self.plan, str):
            return self._conflict_of_sizes()
        if self.plan in TREES and self.advantage not in ON_TREES:
            return (
                f"advantage: {self.advantage} compares whole completions, and plan: {self.plan} "
                f"branches them; take plan: completions, or one of {', '.join(ON_TREES)}"
            )
        if self.plan not in TREES and self.advantage in TREE_ADVANTAGES:
            return (
                f"advantage: {self.advantage} compares a node with its parent, and independent "
                "completions have none; take plan: segments or forks"
            )
        if (self.advantage == "best_worst") != (self.loss == "preference"):
            return "loss: preference and advantage: best_worst go together; set both or neither"
        if self.loss == "preference" and self.kl:
            return "loss: preference has its KL in beta; leave kl out"
        return self._conflict_of_sizes()

    def _conflict_of_sizes(self) -> str | None:
        if self.drop_flat and self.plan == "completions" and self.group < 2:
            return "drop_flat drops every group of one; leave it out, or take a larger group"
        if self.kl_in == "reward" and self.kl <= 0:
            return f"kl_in: reward takes kl off the reward, and kl is {self.kl}: set it above 0"
        return None

    def _plan(self) -> TextPlanner:
        rule: dict[str, Any] = {
            name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")
        }
        if not isinstance(self.plan, str):
            return self.plan
        if self.plan == "segments":
            return Segments(self.roots, self.branch, self.at, **rule)
        if self.plan == "forks":
            return Forks(self.roots, Forking(self.top, self.branch, self.rounds, self.by), **rule)
        return Completions(self.group, **rule, greedy=self.advantage == "greedy")

    def _credit(self) -> tuple[Transform, ...]:
        """The transforms, with the KL where its paper takes it off: a completion's before samples
        are compared but after the greedy baseline, a token's after the group's mean."""
        flat = (DropFlat(),) if self.drop_flat else ()
        each = self.advantage in ("whitened", "mean_whitened")
        kl = (Penalize(self.kl, each),) if self.kl_in == "reward" else ()
        rules = self._rules()
        place = 1 if self.advantage in ("greedy", "mean_whitened") else 0
        return (*flat, *rules[:place], *kl, *rules[place:])

    def _rules(self) -> tuple[Transform, ...]:
        if not isinstance(self.advantage, str):
            return (self.advantage,)
        mean, own = Standardize(scale=None), Standardize("group", 1, blend=self.blend)
        over_batch = Standardize("batch", 1, centre="batch")
        known: dict[AdvantageName, Callable[[], tuple[Transform, ...]]] = {
            "group": lambda: credit_chain("group", own),
            "gdpo": lambda: credit_chain("gdpo", own),
            "aapo": lambda: credit_chain("aapo", own),
            "best_gap": lambda: credit_chain("best_gap", own),
            "two_level": lambda: (TwoLevel(rule=own),),
            "mean": lambda: (mean,),
            "leave_one_out": lambda: (LeaveOneOut(),),
            "greedy": lambda: (GreedyBaseline(self.group + 1),),
            "length": lambda: (LengthBaseline(),),
            "whitened": lambda: (WhitenTokens(),),
            "mean_whitened": lambda: (mean, WhitenTokens()),
            "maxrl": lambda: (MaxRL(),),
            "pass_at_k": lambda: (PassAtK(self.k, self.form),),
            "beta": lambda: (BetaNormalize(self.most),),
            "risk": lambda: (RiskPO(*self._quantiles, self.mix), over_batch),
            "tracked": lambda: (Baseline(), over_batch),
            "best_worst": lambda: (BestWorst(),),
            "parent": lambda: (ParentDifference(),),
            "local": lambda: (GlobalLocal(),),
            "treerl": lambda: (GlobalLocal(first=True),),
            "tempo": lambda: (GlobalLocal(power=1.0, scaled=True),),
            "states": lambda: (States(self.weight, self.gamma, self.scale),),
            "turns": lambda: (Turns(), Standardize("group", correction=1)),
            "returns": lambda: (Discount(self.gamma), WhitenTurns()),
        }
        return known[self.advantage]()

    @property
    def _quantiles(self) -> tuple[int, float, float]:
        return self.bundle, self.quantile_low, self.quantile_high

    def _tracker(self) -> Callable[[], Tracker]:
        if self.advantage == "risk":
            return partial(ScoreQuantiles, *self._quantiles)
        if self.advantage == "tracked":
            return partial(PromptValues, self.keep, uncertain=self.uncertain)
        return credit_tracker(str(self.advantage), self.keep)

    def _likelihood(self) -> Likelihood:
        if not isinstance(self.likelihood, str):
            return self.likelihood
        reads_entropy = self.share is not None or self.entropy > 0
        paired = self.loss == "preference"
        return Token(self.ratio, self.kl_form, reads_entropy, paired, self.cut)

    def _loss(self) -> Objective:
        if not isinstance(self.loss, str):
            return self.loss
        fading: tuple[Weight, ...] = ()
        if self.share is not None:
            fading += (HighEntropy(self.share),)
        if self.off_policy is not None:
            fading += (OffPolicyMask(self.off_policy),)
        common: dict[str, Any] = {
            "anchors": anchors(self.kl) if self.kl_in == "loss" else (),
            "weights": fading,
            "entropy": self.entropy,
            "denominator": self.length if self.denominator == "length" else self.denominator,
        }
        known: dict[LossName, Callable[[], Objective]] = {
            "surrogate": lambda: Surrogate(self.low, self.high, **common),
            "gppo": lambda: GPPO(self.low, self.high, self.keep_low, self.keep_high, **common),
            "cispo": lambda: CISPO(self.bound, **common),
            "sapo": lambda: SAPO(self.positive, self.negative, **common),
            "vespo": lambda: VESPO(**common),
            "gmpo": lambda: GMPO(self.low, self.high, **common),
            "reinforce": lambda: Reinforce(**common),
            "preference": lambda: Preference(self.beta),
        }
        return known[self.loss]()
