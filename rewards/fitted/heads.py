"""A linear head on features, fitted to votes, with the ridge chosen on held-out prompts.

Votes of one prompt are never on both sides of a split: folds are made by a hash of the prompt, and
what is estimated (centre, scale, ridge, weights) is estimated without the fold that judges it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from rewards.fitted.davidson import VoteModel, Votes, fit_votes, log_loss

FOLDS = 5
NO_SPREAD = 1e-6  # of a feature's largest value: a spread that is rounding
RIDGES = tuple(float(x) for x in 10.0 ** np.arange(5, -2.25, -0.5))  # from strong to weak
CURVE = (0.25, 0.5, 0.75)  # parts of the training prompts on the learning curve, besides all

PairRows = Int[np.ndarray, " k"]


def prompt_number(prompt: str) -> int:
    """A number of 64 bits from a prompt's text, the same everywhere."""
    return int.from_bytes(hashlib.sha256(f"fold {prompt}".encode()).digest()[:8], "big")


def prompt_fold(prompt: str, folds: int = FOLDS) -> int:
    """The fold of a prompt, 0 to folds - 1."""
    return prompt_number(prompt) % folds


@dataclass(frozen=True)
class VotedPairs:
    """p votes on pairs of n samples.

    features  [n d] of the samples, in float64
    a, b      [p] rows of the samples of each pair
    label     [p] P(a preferred); 1/2 is a tie
    side      [p] 1 where a was on the left, -1 where b was, 0 where it is not known
    prompts   the prompt of each pair
    """

    features: Float[np.ndarray, "n d"]
    a: PairRows
    b: PairRows
    label: Float[np.ndarray, " p"]
    side: Float[np.ndarray, " p"]
    prompts: Sequence[str]

    @cached_property
    def fold(self) -> PairRows:
        return np.array([prompt_fold(prompt) for prompt in self.prompts], dtype=int)

    @property
    def folds(self) -> list[int]:
        """Folds that have a pair."""
        return sorted({int(fold) for fold in self.fold})

    @cached_property
    def held_out_ridges(self) -> Mapping[int, float]:
        """For each fold the ridge that is chosen on the other folds."""
        rests = {fold: self.where(self.fold != fold) for fold in self.folds}
        return {fold: choose_ridge(pairs).ridge for fold, pairs in rests.items()}

    def where(self, chosen: Bool[np.ndarray, " p"]) -> "VotedPairs":
        rows = np.flatnonzero(chosen)
        prompts = [self.prompts[row] for row in rows.tolist()]
        return VotedPairs(
            self.features, self.a[rows], self.b[rows], self.label[rows], self.side[rows], prompts
        )


@dataclass(frozen=True)
class LinearHead:
    """A score of features: ((features - centre) / scale) weight.

    centre, scale  [d] mean and standard deviation of the samples that were voted on
    model          the weights and their posterior, of the scaled features
    """

    centre: Float[np.ndarray, " d"]
    scale: Float[np.ndarray, " d"]
    model: VoteModel

    @classmethod
    def fit(cls, pairs: VotedPairs, ridge: float) -> "LinearHead":
        """Fit to these votes. ValueError for none."""
        if not len(pairs.a):
            raise ValueError("no vote to fit: all pairs were skipped, or none was voted on")
        centre, scale = _standard(pairs)
        return cls(centre, scale, fit_votes(_votes(pairs, scale), ridge))

    def scaled(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        return (features - self.centre) / self.scale

    def scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """Scores, 0 on average over the samples that were voted on."""
        return self.scaled(features) @ self.model.weight

    def deviations(
        self, features: Float[np.ndarray, "n d"], group: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, " n"]:
        """Posterior standard deviation of each score's difference to the mean of its group, or, for
        a sample that is alone in its group, to the mean of the samples that were voted on. It is
        conditional on the ridge."""
        x = self.scaled(features)
        _, place, count = np.unique(group, return_inverse=True, return_counts=True)
        mean = np.zeros((len(count), x.shape[1]))
        np.add.at(mean, place, x)
        mean = np.where(count[:, None] > 1, mean / count[:, None], 0.0)
        return self.model.deviation(x - mean[place])


def _standard(pairs: VotedPairs) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    """Mean and standard deviation of the samples of these pairs, each counted once. A feature
    without spread, beyond the rounding of float32, has a scale of 1: it is nothing in every
    difference."""
    seen = pairs.features[np.unique(np.concatenate([pairs.a, pairs.b]))]
    scale = seen.std(0)
    return seen.mean(0), np.where(scale > NO_SPREAD * np.abs(seen).max(0), scale, 1.0)


def _votes(pairs: VotedPairs, scale: Float[np.ndarray, " d"]) -> Votes:
    difference = (pairs.features[pairs.a] - pairs.features[pairs.b]) / scale
    return Votes.of(difference, pairs.label, pairs.side)


def _path(pairs: VotedPairs, ridges: Sequence[float]) -> Iterator[LinearHead]:
    """Heads for ridges from strong to weak, each fit beginning at the one before."""
    centre, scale = _standard(pairs)
    votes, model = _votes(pairs, scale), None
    for ridge in ridges:
        model = fit_votes(votes, ridge, model)
        yield LinearHead(centre, scale, model)


class RidgeChoice(NamedTuple):
    """A ridge, and the mean held-out loss of each of `RIDGES`; none if there was one fold."""

    ridge: float
    losses: tuple[float, ...]


def choose_ridge(pairs: VotedPairs, ridges: Sequence[float] = RIDGES) -> RidgeChoice:
    """The ridge with the least mean loss on held-out folds; among equal ones the strongest.

    With prompts of a single fold there is no held-out vote: the ridge is then the number of
    features, with which scores have a prior deviation of one.
    """
    if len(pairs.folds) < 2:
        return RidgeChoice(float(pairs.features.shape[1]), ())
    total, count = np.zeros(len(ridges)), 0
    for fold in pairs.folds:
        held = pairs.where(pairs.fold == fold)
        for i, head in enumerate(_path(pairs.where(pairs.fold != fold), ridges)):
            total[i] += log_loss(head.model, _votes(held, head.scale)).sum()
        count += len(held.a)
    losses = total / count
    return RidgeChoice(ridges[int(np.argmin(losses))], tuple(losses.tolist()))


def held_out_heads(pairs: VotedPairs, part: float = 1.0) -> Mapping[int, LinearHead]:
    """For each fold a head that has not seen its prompts: the ridge is chosen, and the head fitted,
    on the other folds. With `part` below 1, it is fitted on that part of their prompts, in the
    order of their hashes, at the ridge of all. ValueError for prompts of a single fold."""
    if len(pairs.folds) < 2:
        raise ValueError(
            "votes of a single prompt, or of too few, cannot be held out: vote on more prompts"
        )
    heads = {}
    for fold, ridge in pairs.held_out_ridges.items():
        rest = pairs.where(pairs.fold != fold)
        heads[fold] = LinearHead.fit(_some_prompts(rest, part), ridge)
    return heads


def _some_prompts(pairs: VotedPairs, part: float) -> VotedPairs:
    ordered = sorted(set(pairs.prompts), key=lambda prompt: (prompt_number(prompt[::-1]), prompt))
    chosen = set(ordered[: max(1, round(part * len(ordered)))])
    return pairs.where(np.array([prompt in chosen for prompt in pairs.prompts]))


def held_out_margins(pairs: VotedPairs, heads: Mapping[int, LinearHead]) -> Float[np.ndarray, " p"]:
    """Score of a minus score of b by the head that has not seen the pair's prompt."""
    margin = np.empty(len(pairs.a))
    for fold in pairs.folds:
        rows = pairs.fold == fold
        x = pairs.features[pairs.a[rows]] - pairs.features[pairs.b[rows]]
        margin[rows] = (x / heads[fold].scale) @ heads[fold].model.weight
    return margin
