"""Each row's own reward, by a column of the prompt file: for prompts of several data sets.

    {name: by_row, rewards: {gsm8k: exact_answer, code: {name: code_tests}}, weights: {code: 2}}

`data_set` is the column that flowrl adds where `prompts.train` lists several data sets; files of
verl have `data_source`. A value without a reward is an error, unless `otherwise` is its score, or
`abstain`: then it applies to other rows only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from rewards.checks.self_test import ChecksPrompts
from rewards.checks.winnable import KnowsSlowly, KnowsWinnable, Winnable
from rewards.combine import reward_scores
from rewards.types import Finite, Reports, Reward, RewardScores, Samples, cell


@dataclass(frozen=True)
class ByRow:
    rewards: Mapping[str, Reward]
    weights: Mapping[str, float]
    column: str
    otherwise: float | Literal["abstain"] | None
    seen: dict[str, list[float]] = field(default_factory=dict)  # sum and count since a report

    @property
    def parts(self) -> Mapping[str, Reward]:
        return self.rewards

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores:
        rows, n = self._rows(samples.prompts, samples.meta), len(samples.prompts)
        scores = RewardScores.nowhere(n)
        if self.otherwise is not None and self.otherwise != "abstain":
            scores.values.fill_(self.otherwise)
            scores.applies.fill_(True)
        for value, rows_of_value in rows.items():
            of_value = reward_scores(value, self.rewards[value], samples.take(rows_of_value))
            weight = self.weights.get(value, 1.0)
            scores.put(rows_of_value, of_value._replace(values=of_value.values * weight))
            numbers = of_value.values[~of_value.values.isnan()]
            past = self.seen.get(value, [0.0, 0.0])
            self.seen[value] = [past[0] + float(numbers.sum()), past[1] + len(numbers)]
        return scores.plain

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError for a row without a reward, or with a reward that cannot score it."""
        for reward, _, texts, columns in self._shares(prompts, meta):
            if isinstance(reward, ChecksPrompts):
                reward.check_prompts(texts, columns)

    def winnable(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> list[Winnable]:
        """The answer of each row's reward; unknown for a reward that has none."""
        answers = [Winnable("unknown")] * len(prompts)
        for reward, rows, texts, columns in self._shares(prompts, meta):
            if isinstance(reward, KnowsWinnable):
                for row, answer in zip(rows, reward.winnable(texts, columns), strict=True):
                    answers[row] = answer
        return answers

    def answer_keys(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]
    ) -> list[str | None]:
        """The key of each row's reward."""
        keys: list[str | None] = [None] * len(prompts)
        for reward, rows, texts, columns in self._shares(prompts, meta):
            if isinstance(reward, KnowsSlowly):
                for row, key in zip(rows, reward.answer_keys(texts, columns), strict=True):
                    keys[row] = key
        return keys

    def report(self) -> dict[str, float]:
        """Mean score of each value of the column, before its weight, and the reports of its
        reward."""
        means = {value: total / count for value, (total, count) in self.seen.items() if count}
        self.seen.clear()
        for value, reward in self.rewards.items():
            if isinstance(reward, Reports):
                means |= {f"{value}/{name}": number for name, number in reward.report().items()}
        return means

    def _shares(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[Reward, list[int], list[str], list[Mapping[str, Any]]]]:
        """Each reward with its rows: their numbers, prompts and columns."""
        columns = meta or [{} for _ in prompts]
        for value, rows in self._rows(prompts, meta).items():
            yield self.rewards[value], rows, [prompts[i] for i in rows], [columns[i] for i in rows]

    def _rows(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]
    ) -> dict[str, list[int]]:
        """The rows per value that has a reward."""
        rows_by_value: dict[str, list[int]] = {}
        for row, columns in enumerate(meta or [{} for _ in prompts]):
            value = str(cell(columns, self.column))
            if value in self.rewards:
                rows_by_value.setdefault(value, []).append(row)
            elif self.otherwise is None:
                raise ValueError(
                    f"by_row: row {row + 1} (prompt {prompts[row][:60]!r}) has {value!r} in the "
                    f"column {self.column!r}, but only {', '.join(self.rewards)} have rewards: "
                    "add one, or set `otherwise` to the score of such rows, or to "
                    "`abstain` if other rewards score them"
                )
        return rows_by_value


def load(
    rewards: Mapping[str, Reward],
    weights: Mapping[str, Finite] | None = None,
    column: str = "data_set",
    otherwise: Finite | Literal["abstain"] | None = None,
) -> Reward:
    """rewards    names to rewards: each value of the column to the reward of its rows
    weights    values of the column to the factor of their scores, any number; 1 for the others
    column     column of the prompt file that says which reward scores a row; flowrl adds `data_set`
               where prompts.train lists several data sets
    otherwise  score of rows with any other value, any number; abstain: the reward does not apply to
               them; null: they are an error
    """
    if not rewards:
        raise ValueError("by_row: give a reward for at least one value of the column")
    if wrong := [value for value in weights or () if value not in rewards]:
        raise ValueError(f"by_row: weights: {wrong[0]!r} has no reward")
    return ByRow(rewards, weights or {}, column, otherwise)
