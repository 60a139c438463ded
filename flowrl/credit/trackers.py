"""Statistics that credit keeps between iterations. They are saved in every checkpoint.

A tracker adds its statistics to the context of credit, then updates them from the scores. All
processes see all scores, so their trackers agree. g draws, n samples, r rewards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.credit.values import TRACKED, Context, TrackedStatistics
from flowrl.errors import UserError
from flowrl.number_checks import check_number
from flowrl.prompts import uncertainty
from flowrl.table import Column
from rewards.types import Scores
from samplers.number_ranges import ANY_NUMBER
from samplers.untyped import floats, integers


@runtime_checkable
class Tracker(Protocol):
    """Statistics kept over iterations; `state` is plain JSON data."""

    def weights(self, prompts: int) -> Float[Tensor, " p"] | None:
        """Weights for sampling prompts; None uses them in turn."""
        ...

    def before(self, context: Context) -> Context:
        """Add the statistics to an iteration's context."""
        ...

    def after(self, scores: Scores, context: Context) -> None:
        """Update the statistics with an iteration."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


TRACKER: Column[Tracker] = Column("tracker", "tracker", "whole")
"""The tracker of a run, which its session holds."""


@runtime_checkable
class Bundling(Protocol):
    """A tracker whose credit judges so many consecutive draws as one: an iteration has a multiple
    of them."""

    @property
    def bundle(self) -> int: ...


class NoTracker:
    """No statistics: iterations are independent."""

    def weights(self, prompts: int) -> Float[Tensor, " p"] | None:
        return None

    def before(self, context: Context) -> Context:
        return context

    def after(self, scores: Scores, context: Context) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def draw_means(scores: Scores, context: Context) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"]]:
    """Mean total of each draw's samples with one, and their number."""
    group = context.columns.group
    whole = scores.complete.cpu().view(-1, group)
    total = scores.values.double().cpu() @ context.weights.double().cpu()
    count = whole.sum(1).double()
    return (total.view(-1, group) * whole).sum(1) / count.clamp(min=1), count


@dataclass
class PromptValues:
    """Expected score of each prompt, for single-stream credit (arXiv:2509.13232).

    A prompt has a value v and evidence N, which m new samples of mean s update:

        v <- v + m (s - v) / (keep N + m),  N <- keep N + m

    For rewards of 0 and 1, v is the mean of a Beta distribution whose counts decay by `keep`. The
    authors reduce `keep` by the policy's change since the prompt was last used, to at most 0.96;
    here it is constant. They start from scores sampled beforehand; here a new prompt starts with
    the mean value of the known prompts, or `prior`, and the evidence 1 / (1 - keep), the limit for
    regular use.

    uncertain  samples prompts by `flowrl.prompts.uncertainty` of their values, a curriculum by
               success rate (scores in 0..1), instead of in turn

    keep   share of the evidence that stays at a new use of a prompt, in [0, 1)
    prior  value of a prompt before any prompt has one, any number, in units of the rewards
    """

    keep: float = 0.9
    prior: float = 0.5
    uncertain: bool = False
    known: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])

    def __post_init__(self) -> None:
        if not 0 <= self.keep < 1:
            raise UserError(f"a tracker's keep must be in [0, 1), not {self.keep}")
        check_number("PromptValues's prior", self.prior, ANY_NUMBER)

    def value(self, prompt: int) -> float:
        if prompt in self.known:
            return self.known[prompt][0]
        values = [value for value, _ in self.known.values()]
        return sum(values) / len(values) if values else self.prior

    def weights(self, prompts: int) -> Float[Tensor, " p"] | None:
        if not self.uncertain:
            return None
        values = [self.value(prompt) for prompt in range(prompts)]
        visits = [self.known.get(prompt, (0.0, 1.0))[1] for prompt in range(prompts)]
        rates, evidence = (torch.tensor(part, dtype=torch.float64) for part in (values, visits))
        return uncertainty(rates, evidence)

    def before(self, context: Context) -> Context:
        values = [self.value(prompt) for prompt in _prompts(context)]
        statistics = TrackedStatistics(torch.tensor(values, dtype=torch.float64))
        return context.with_column(TRACKED, statistics)

    def after(self, scores: Scores, context: Context) -> None:
        mean, count = draw_means(scores, context)
        start = 1 / (1 - self.keep)
        fresh = {prompt: self.value(prompt) for prompt in _prompts(context)}
        for prompt, s, m in zip(_prompts(context), floats(mean), floats(count), strict=True):
            if m:
                value, evidence = self.known.get(prompt, (fresh[prompt], start))
                decayed = self.keep * evidence
                self.known[prompt] = (value + m * (s - value) / (decayed + m), decayed + m)

    def state(self) -> dict[str, Any]:
        return {str(prompt): list(pair) for prompt, pair in self.known.items()}

    def restore(self, state: dict[str, Any]) -> None:
        self.known = {int(prompt): (pair[0], pair[1]) for prompt, pair in state.items()}


def _prompts(context: Context) -> list[int]:
    if context.prompts is None:
        raise UserError("a tracker needs the prompts of the draws: Context(prompts=...)")
    return integers(context.prompts)


@runtime_checkable
class ReadsStart(Protocol):
    """A tracker that requests samples of the initial policy, "ref", for new prompts."""

    @property
    def samples(self) -> int: ...  # of the start, per prompt

    def unknown(self, prompts: Sequence[int]) -> list[int]:
        """Prompts without a value, each once, in order."""
        ...

    def learn(self, prompts: Sequence[int], scores: Float[Tensor, "p m"]) -> None:
        """Learn from weighted scores of the initial policy's samples, NaN where unscored."""
        ...


@dataclass
class StartValues:
    """The optimal value of a prompt under a KL penalty: V* of A*-PO (arXiv:2505.20686).

        V* = soft log mean exp(score / soft)

    over `samples` samples of the initial policy, drawn once, at the prompt's first use. `soft:
    null` takes their mean. A prompt whose samples all score 0 or lower is left out of the loss,
    unless `solvable` is false. So is a prompt without a score, which is sampled again at its next
    use.

    samples   samples of the initial policy per prompt, at least 1
    soft      temperature of the mean, in units of the rewards, above 0; null is the plain mean
    solvable  whether prompts without a success are left out
    """

    samples: int = 8
    soft: float | None = 0.5
    solvable: bool = True
    known: dict[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        if self.samples < 1 or (self.soft is not None and not 0 < self.soft < math.inf):
            raise UserError(
                f"start_values: samples must be at least 1 and soft above 0, not {self.samples} "
                f"and {self.soft}"
            )

    def unknown(self, prompts: Sequence[int]) -> list[int]:
        return [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.known]

    def learn(self, prompts: Sequence[int], scores: Float[Tensor, "p m"]) -> None:
        for prompt, sampled in zip(prompts, scores.double().cpu(), strict=True):
            sampled = sampled[sampled.isfinite()]
            if len(sampled) == 0:
                continue
            hopeless = self.solvable and float(sampled.max()) <= 0
            self.known[prompt] = math.nan if hopeless else self._value(sampled)

    def _value(self, scores: Tensor) -> float:
        if self.soft is None:
            return float(scores.mean())
        return self.soft * (float((scores / self.soft).logsumexp(0)) - math.log(len(scores)))

    def weights(self, prompts: int) -> Float[Tensor, " p"] | None:
        return None

    def before(self, context: Context) -> Context:
        values = [self.known.get(prompt, math.nan) for prompt in _prompts(context)]
        statistics = TrackedStatistics(torch.tensor(values, dtype=torch.float64))
        return context.with_column(TRACKED, statistics)

    def after(self, scores: Scores, context: Context) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {str(p): None if math.isnan(value) else value for p, value in self.known.items()}

    def restore(self, state: dict[str, Any]) -> None:
        self.known = {int(p): math.nan if value is None else value for p, value in state.items()}
