"""The budget of an iteration: which prompts are drawn, how often, and which samples are trained on.

`Rationed` follows the settings of `budget`. It gets the scores of all processes, so that all make
the same decisions. g draws, n samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate.utils import gather_object
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.budget.groups import Groups, grouped
from flowrl.budget.knapsack import knapsack
from flowrl.budget.rates import Difficulty, Rates
from flowrl.budget.successes import Success, Successes, cut, put, signature
from flowrl.credit.values import masked_std
from flowrl.likelihoods.rows import Rows, trimmed
from flowrl.prompts import Draws, PromptSet
from flowrl.settings.sections.budget import BudgetSettings
from rewards.types import Scores

R = TypeVar("R")
LATER_ROUNDS = 2**40  # ids of a further round's draws are so much above those of the round before
RARE = 0.5  # successes of prompts that succeed more often than this are not kept


@dataclass(frozen=True)
class DrawRequest:
    """Draws requested for an iteration. `weights` come from a tracker; None draws prompts in
    turn."""

    prompts: PromptSet
    count: int
    seed: int
    iteration: int
    weights: Float[Tensor, " p"] | None

    def drawn(self) -> Draws:
        """The prompts in turn, or by the weights."""
        return self.prompts.draw(self.iteration, self.count, self.seed, self.weights)


class RoundScores(NamedTuple):
    """Draws of a round and the weighted scores [n] of each plan's samples, NaN for unscored
    samples."""

    draws: Draws
    totals: tuple[Tensor, ...]


@dataclass(frozen=True)
class RoundOutcome:
    """Scores of one plan's samples in a round. `mine`: this process's draws, if they count."""

    draws: Draws
    scores: Scores
    totals: Float[Tensor, " n"]
    mine: range
    counts: bool
    iteration: int

    def grouped(self) -> Float[Tensor, "g m"]:
        return self.totals.view(len(self.draws.ids), -1)


class Rationed:
    """Selects draws and samples according to the settings. `group`: samples per draw."""

    def __init__(self, settings: BudgetSettings, group: int) -> None:
        self.settings, self.group = settings, group
        low, high = settings.rates or (0.0, 1.0)
        self.difficulty = Difficulty(low, high, settings.revisit, settings.order == "uncertain")
        self.rates, self.successes = Rates(), Successes(settings.replay)
        self._metrics: dict[str, float] = {}

    def draws(self, call: DrawRequest, rounds: Sequence[RoundScores]) -> Draws | None:
        """Draws of the next round, or None to stop. The first round is never empty."""
        if rounds and (
            self.settings.flat != "resample"
            or len(rounds) >= self.settings.rounds
            or int(self._worth(rounds).sum()) >= call.count
        ):
            return None
        before = {row for f in rounds for row in f.draws.rows}
        prompts = self._prompts(call, len(rounds), before)
        merged = (1,) * len(prompts)
        if self.settings.repeat > 1:
            guess = [self.rates.guess(p, self.difficulty, call.iteration) for p in prompts]
            rates = torch.tensor(guess, dtype=torch.float64)
            shares = knapsack(rates, call.count, 0, self.settings.repeat, self.group)
            merged = tuple(share for share in shares if share)
            prompts = [row for row, n in zip(prompts, shares, strict=True) for _ in range(n)]
        first = call.iteration * call.count + LATER_ROUNDS * len(rounds)
        return Draws(tuple(range(first, first + call.count)), tuple(prompts), merged)

    def first_draws(self, call: DrawRequest) -> tuple[Draws, dict[str, float]]:
        """Draws of the first round of an iteration that is sampled ahead, and the metrics of their
        selection, which belong to that iteration."""
        pending, self._metrics = self._metrics, {}
        draws = self.draws(call, [])
        assert draws is not None, "the first round is never empty"
        more, self._metrics = self.metrics(), pending
        return draws, more

    def _prompts(self, call: DrawRequest, number: int, before: set[int]) -> list[int]:
        """One prompt per draw; prompts already drawn in this iteration come last."""
        if number == 0 and self.difficulty.indifferent:
            return list(call.drawn().rows)
        even = call.prompts.weights()
        weights = even if call.weights is None else even * call.weights.double()
        key = (call.seed, "prompts", call.iteration, number)
        order = self.rates.order(self.difficulty, call.iteration, weights, key)
        order.sort(key=lambda prompt: prompt in before)
        chosen = [order[i % len(order)] for i in range(call.count)]
        if number == 0:
            fit = [self.rates.inside(p, self.difficulty, call.iteration) for p in chosen]
            self._metrics["outside"] = 1 - sum(fit) / len(fit)
        return chosen

    def scored(self, rollout: R, outcome: RoundOutcome) -> tuple[R, Scores]:
        """Update from the scores, and return what to train on: this process's rollout and all
        scores, with some samples possibly replaced."""
        grouped_scores = outcome.grouped()
        won = grouped_scores >= self.settings.success  # NaN is none
        replayed = self._replayed(rollout, outcome, won)
        self.rates.learn(outcome.draws.rows, won, ~grouped_scores.isnan(), outcome.iteration)
        taught, values, scored = {}, outcome.scores.values.clone(), outcome.scores.scored.clone()
        abstained = ~outcome.scores.applies
        for draw, success in replayed.items():
            sample = (draw + 1) * grouped_scores.shape[1] - 1  # a draw's last makes room
            values[sample], scored[sample] = success.scores.to(values), success.scored
            abstained[sample] = False if success.abstained is None else success.abstained
            if draw in outcome.mine and outcome.counts:
                taught[sample - outcome.mine.start * grouped_scores.shape[1]] = success.pieces
        self._remember(rollout, outcome, won)
        self._metrics["replayed"] = self._metrics.get("replayed", 0.0) + len(replayed)
        learned = put(rollout, taught) if self.settings.replay else rollout
        return learned, replace(outcome.scores, values=values, scored=scored, abstained=abstained)

    def _replayed(self, rollout: Any, outcome: RoundOutcome, won: Tensor) -> dict[int, Success]:
        """Successes for draws whose group has none, keyed by the first draw of each such group."""
        groups = Groups(outcome.draws.merged, 1)
        lost = ~groups.filled(won.any(1)).view(-1, groups.most).any(1)
        plan, replayed = signature(rollout), {}
        for draw in groups.first[lost].tolist():
            success = self.successes.of(outcome.draws.rows[draw], plan)
            if success is not None:
                replayed[draw] = success
        return replayed

    def _remember(self, rollout: Any, outcome: RoundOutcome, won: Tensor) -> None:
        """Store one success of each draw with few successes, over all processes, in the order of
        draws."""
        if self.settings.replay == 0:
            return
        rare = won.any(1) & (won.double().mean(1) <= RARE)
        mine = outcome.mine if outcome.counts else range(0)
        local, group = dict[int, tuple[int, Success]](), won.shape[1]
        for draw in (d for d in mine if rare[d]):
            sample = draw * group + int(won[draw].int().argmax())
            pieces = cut(rollout, sample - mine.start * group)
            success = Success(
                scores=outcome.scores.values[sample].clone(),
                scored=outcome.scores.scored[sample].clone(),
                pieces=pieces,
                abstained=(~outcome.scores.applies)[sample].clone(),
            )
            local[draw] = outcome.draws.rows[draw], success
        by_draw = {
            draw: success_of_row
            for part in gather_object([local])
            for draw, success_of_row in part.items()
        }
        for prompt, success in by_draw.values():
            self.successes.add(prompt, signature(rollout), success)

    def _worth(self, rounds: Sequence[RoundScores]) -> Bool[Tensor, " g"]:
        """Draws of groups whose scores differ, under any of the plans."""
        merged = tuple(n for f in rounds for n in f.draws.merged)
        worth = torch.zeros(len(merged), dtype=torch.bool)
        for totals in zip(*(f.totals for f in rounds), strict=True):
            scores = torch.cat(totals).double()
            groups = Groups(merged, len(scores) // sum(merged))
            whole = groups.filled(scores, torch.nan).view(len(merged), -1, 1)
            scored = ~whole.isnan()
            worth |= masked_std(whole.nan_to_num(0.0), scored, 1, 0)[:, 0, 0] > self.settings.spread
        return worth[grouped(merged)]

    def kept(self, call: DrawRequest, rounds: Sequence[RoundScores]) -> Bool[Tensor, " g"]:
        """The first informative groups, up to the requested count; the first round's groups if
        there are none."""
        count = sum(len(f.draws.ids) for f in rounds)
        informative = torch.ones(count, dtype=torch.bool)
        # flat groups are masked in the credit, and no loss learns from them
        worth = informative if self.settings.flat == "keep" else self._worth(rounds)
        if self.settings.flat == "resample":
            merged = [n for f in rounds for n in f.draws.merged]
            ends = torch.where(worth, worth.cumsum(0), call.count + 1)
            # a group is kept as a whole
            last = torch.tensor(merged).cumsum(0) - 1
            informative = (ends[last] <= call.count)[grouped(merged)]
            if not informative.any():
                informative = torch.arange(count) < len(rounds[0].draws.ids)
        self._metrics |= {
            "rounds": float(len(rounds)),
            "drawn": float(count),
            "kept": float((informative & worth).sum()),
            "prompts": float(len({row for f in rounds for row in f.draws.rows})),
            "stored": float(len(self.successes.kept)),
        }
        return informative

    def rows(self, rows: Rows, together: int) -> Rows:
        """The rows without those that no loss reads, which would cost gradients for nothing."""
        return trimmed(rows, together)

    def metrics(self) -> dict[str, float]:
        """Metrics of this iteration; resets the counters."""
        metrics, self._metrics = self._metrics, {}
        return {f"budget/{name}": value for name, value in metrics.items()}

    def state(self) -> dict[str, Any]:
        return {"rates": self.rates.state(), "successes": self.successes.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.rates.restore(state["rates"])
        self.successes.restore(state["successes"])


def open_budget(settings: BudgetSettings, group: int) -> Rationed | None:
    """Open the budget. None without one: prompts are drawn in turn, and all samples are trained
    on."""
    return None if settings == BudgetSettings() else Rationed(settings, group)
