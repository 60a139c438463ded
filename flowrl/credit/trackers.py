"""What credit remembers from iteration to iteration: it is saved in every checkpoint.

A tracker adds what it knows to the credit's context, and learns from the scores afterwards. All
processes see all scores, so all hold the same. g draws, n samples, r rewards.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.credit.values import Context
from flowrl.errors import UserError
from flowrl.prompts import uncertainty
from rewards.types import Scores


@runtime_checkable
class Tracker(Protocol):
    def weights(
        self, prompts: int
    ) -> Float[Tensor, " p"] | None: ...  # to draw them; None: in turn

    def before(self, context: Context) -> Context: ...

    def after(self, scores: Scores, context: Context) -> None: ...

    def state(self) -> dict[str, Any]: ...  # as JSON holds it

    def restore(self, state: dict[str, Any]) -> None: ...


class NoTracker:
    """Credit that begins anew in each iteration."""

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
    """Each draw's mean of its samples' weighted sums, and how many have all their scores."""
    group = context.columns.group
    whole = scores.scored.cpu().all(1).view(-1, group)
    total = scores.values.double().cpu() @ context.weights.double().cpu()
    count = whole.sum(1).double()
    return (total.view(-1, group) * whole).sum(1) / count.clamp(min=1), count


@dataclass
class PromptValues:
    """What each prompt is expected to score: single-stream credit (arXiv:2509.13232).

    A prompt has a value v and evidence N; m new samples of mean s move them by
    v <- v + m (s - v) / (keep N + m) and N <- keep N + m. For rewards of 0 and 1 that is the mean
    of a Beta distribution whose counts fade by `keep`. The authors let `keep` fall with how far
    the policy has moved since the prompt's last visit, to at most 0.96; here it is constant. They
    start from scores sampled beforehand; here a new prompt is worth the mean of the known ones, or
    `prior`, with the evidence 1 / (1 - keep) that a constant stream leads to.

    uncertain  draw prompts by `flowrl.budget.knapsack.uncertainty` of their values, a curriculum by
               success rate (scores in 0..1), and not all in turn
    """

    keep: float = 0.9
    prior: float = 0.5
    uncertain: bool = False
    known: dict[int, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.keep < 1:
            raise UserError(f"a tracker keeps a share in [0, 1) of its evidence, not {self.keep}")

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
        return replace(context, baseline=torch.tensor(values, dtype=torch.float64))

    def after(self, scores: Scores, context: Context) -> None:
        mean, count = draw_means(scores, context)
        start = 1 / (1 - self.keep)
        fresh = {prompt: self.value(prompt) for prompt in _prompts(context)}
        for prompt, s, m in zip(_prompts(context), mean.tolist(), count.tolist(), strict=True):
            if m:
                value, evidence = self.known.get(prompt, (fresh[prompt], start))
                kept = self.keep * evidence
                self.known[prompt] = (value + m * (s - value) / (kept + m), kept + m)

    def state(self) -> dict[str, Any]:
        return {str(prompt): list(pair) for prompt, pair in self.known.items()}

    def restore(self, state: dict[str, Any]) -> None:
        self.known = {int(prompt): (pair[0], pair[1]) for prompt, pair in state.items()}


def _prompts(context: Context) -> list[int]:
    assert context.prompts is not None, "the loop says which prompts were drawn"
    return context.prompts.tolist()


@dataclass
class ScoreQuantiles:
    """Quantiles of bundles' scores that move slowly: RiskPO (arXiv:2510.00911).

    q <- q + rate (level - share of scores below q), the gradient of the pinball loss; the first
    batch's own quantiles are the start.
    """

    bundle: int = 5
    low: float = 0.2
    high: float = 0.8
    rate: float = 0.1
    found: tuple[float, float] | None = None

    def weights(self, prompts: int) -> Float[Tensor, " p"] | None:
        return None

    def before(self, context: Context) -> Context:
        return replace(context, quantiles=self.found)

    def after(self, scores: Scores, context: Context) -> None:
        total = scores.values.double().cpu() @ context.weights.double().cpu()
        bundles = total.view(-1, self.bundle, context.columns.group).sum(1).flatten()
        levels = (self.low, self.high)
        if self.found is None:
            first = torch.quantile(bundles, torch.tensor(levels, dtype=torch.float64)).tolist()
            self.found = (first[0], first[1])
            return
        low, high = (
            q + self.rate * (level - float((bundles < q).double().mean()))
            for q, level in zip(self.found, levels, strict=True)
        )
        self.found = (low, high)

    def state(self) -> dict[str, Any]:
        return {} if self.found is None else {"quantiles": list(self.found)}

    def restore(self, state: dict[str, Any]) -> None:
        self.found = tuple(state["quantiles"]) if state else None
