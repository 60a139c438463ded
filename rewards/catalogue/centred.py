"""A reward as the gain over a reference sample for the same prompt.

score = reward(x, prompt) - reward(reference, prompt). The part of a score that depends only on the
prompt cancels, which makes prompts comparable. The reference is in a column of the prompt file: the
path of an image (relative to the working directory), or the text itself. A sample without a
reference, or whose reference cannot be read or scored, is unscored. It abstains where the reward
does not apply to the sample or to its reference. Each reference is scored once per call.

    {name: centred, reward: {name: pickscore}, column: reference}
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.combine import reward_scores
from rewards.perception.media import expect
from rewards.perception.references import read_references, reference_key
from rewards.types import Kind, Reward, RewardScores, Samples, cell

SCORED_KINDS: tuple[Kind, ...] = ("image", "text")


@dataclass(frozen=True)
class Centred:
    """Difference from the reference's score, for pointwise rewards: each reference forms its own
    group."""

    reward: Reward
    column: str

    @property
    def parts(self) -> Mapping[str, Reward]:
        return {"reward": self.reward}

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores:
        kind = expect(samples, "centred", "image", "text")
        if not samples.meta:
            raise ValueError(
                f"centred: the prompts have no columns; add a column {self.column!r} with a "
                "reference to the prompt file, or name another with `column`"
            )
        keys = [_key(p, m, self.column) for p, m in zip(samples.prompts, samples.meta, strict=True)]
        first = {key: row for row, key in reversed(list(enumerate(keys))) if key is not None}
        unscored = torch.full((len(keys),), torch.nan, dtype=torch.float64)
        rows = torch.tensor([i for i, key in enumerate(keys) if key is not None])
        if len(rows) == 0:
            return unscored
        cells = [cell(samples.meta[row], self.column) for row in first.values()]
        reference_media = (
            read_references("reference", cells) if kind == "image" else map(str, cells)
        )
        media: Sequence[Any] = list(reference_media)
        references = Samples(
            media,
            [prompt for prompt, _ in first],
            torch.arange(len(first)),
            [samples.meta[row] for row in first.values()],
        )
        index = {key: at for at, key in enumerate(first)}
        at = torch.tensor([index[key] for key in keys if key is not None])
        baseline = reward_scores("reference", self.reward, references)
        of_samples = reward_scores("reward", self.reward, samples.take(rows))
        scores = RewardScores(unscored, torch.ones(len(keys), dtype=torch.bool))
        gain = of_samples.values - baseline.values[at]
        scores.put(rows, RewardScores(gain, of_samples.applies & baseline.applies[at]))
        return scores.plain


def _key(prompt: str, meta: Mapping[str, Any], column: str) -> tuple[str, Hashable] | None:
    key = reference_key(cell(meta, column))
    return None if key is None else (prompt, key)


def load(reward: Reward, column: str = "reference") -> Reward:
    """Load the reward.

    reward  reward of the sample and of its reference; it must score each sample by itself
    column  column of the prompt file with the reference: an image's path, or the text itself
    """
    return Centred(reward, column)
