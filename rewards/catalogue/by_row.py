"""Each row's own reward, by a column of the prompt file: for prompts of several data sets.

    {name: by_row, rewards: {gsm8k: exact_answer, code: {name: code_tests}}, weights: {code: 2}}

`data_set` is the column that flowrl adds where `prompts.train` lists several data sets; files of
verl have `data_source`. A value without a reward is an error, unless `otherwise` is its score, or
`abstain`: then it applies to other rows only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from rewards.checks.self_test import ChecksPrompts
from rewards.checks.winnable import KnowsSlowly, KnowsWinnable, Winnable
from rewards.combine import reward_scores
from rewards.types import Reports, Reward, RewardScores, Samples, cell


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
        found = RewardScores.nowhere(n)
        if self.otherwise is not None and self.otherwise != "abstain":
            found.values.fill_(self.otherwise)
            found.applies.fill_(True)
        for value, some in rows.items():
            own = reward_scores(value, self.rewards[value], samples.take(some))
            weight = self.weights.get(value, 1.0)
            found.put(some, own._replace(values=own.values * weight))
            known = own.values[~own.values.isnan()]
            past = self.seen.get(value, [0.0, 0.0])
            self.seen[value] = [past[0] + float(known.sum()), past[1] + len(known)]
        return found.plain

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError for a row without a reward, or with a reward that cannot score it."""
        for value, some in self._rows(prompts, meta).items():
            reward = self.rewards[value]
            if isinstance(reward, ChecksPrompts):
                reward.check_prompts([prompts[i] for i in some], [meta[i] for i in some])

    def winnable(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> list[Winnable]:
        """The answer of each row's reward; unknown for a reward that has none."""
        found = [Winnable("unknown")] * len(prompts)
        for value, some in self._rows(prompts, meta).items():
            reward = self.rewards[value]
            if isinstance(reward, KnowsWinnable):
                answers = reward.winnable([prompts[i] for i in some], [meta[i] for i in some])
                for row, one in zip(some, answers, strict=True):
                    found[row] = one
        return found

    def answer_keys(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]
    ) -> list[str | None]:
        """The key of each row's reward."""
        found: list[str | None] = [None] * len(prompts)
        for value, some in self._rows(prompts, meta).items():
            reward = self.rewards[value]
            if isinstance(reward, KnowsSlowly):
                keys = reward.answer_keys([prompts[i] for i in some], [meta[i] for i in some])
                for row, key in zip(some, keys, strict=True):
                    found[row] = key
        return found

    def report(self) -> dict[str, float]:
        """Mean score of each value of the column, before its weight, and the reports of its
        reward."""
        found = {value: total / count for value, (total, count) in self.seen.items() if count}
        self.seen.clear()
        for value, reward in self.rewards.items():
            if isinstance(reward, Reports):
                found |= {f"{value}/{name}": number for name, number in reward.report().items()}
        return found

    def _rows(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]
    ) -> dict[str, list[int]]:
        """The rows per value that has a reward."""
        found: dict[str, list[int]] = {}
        for row, columns in enumerate(meta or [{} for _ in prompts]):
            value = str(cell(columns, self.column))
            if value in self.rewards:
                found.setdefault(value, []).append(row)
            elif self.otherwise is None:
                raise ValueError(
                    f"by_row: row {row + 1} (prompt {prompts[row][:60]!r}) has {value!r} in the "
                    f"column {self.column!r}, but only {', '.join(self.rewards)} have rewards: "
                    "add one, or set `otherwise` to the score of such rows, or to "
                    "`abstain` if other rewards score them"
                )
        return found


def load(
    rewards: Mapping[str, Reward],
    weights: Mapping[str, float] | None = None,
    column: str = "data_set",
    otherwise: float | Literal["abstain"] | None = None,
) -> Reward:
    """rewards    value of the column -> reward of its rows
    weights    value -> factor of its scores; 1 for others
    column     names a row's data set, or what else rows differ in
    otherwise  score of rows with other values, or "abstain"
    """
    if not rewards:
        raise ValueError("by_row: give a reward for at least one value of the column")
    if wrong := [value for value in weights or () if value not in rewards]:
        raise ValueError(f"by_row: weights: {wrong[0]!r} has no reward")
    return ByRow(rewards, weights or {}, column, otherwise)
