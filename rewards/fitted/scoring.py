"""Fitted heads as rewards: on the features of rewards of the catalogue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rewards.fitted.folder import FeatureSource, FittedFolder, prompt_hash
from rewards.fitted.heads import LinearHead, prompt_fold
from rewards.perception.features import (
    FeatureReward,
    GradedFeatured,
    feature_kinds,
    features_of,
    graded_features_of,
    inner_features,
)
from rewards.perception.media import expect
from rewards.types import Kind, Samples


@runtime_checkable
class KnowsPrompts(Protocol):
    """A reward that was fitted to samples of some prompts, on which its accuracy is no test."""

    def has_seen(self, prompt: str) -> bool: ...


@dataclass(frozen=True)
class FeatureColumns:
    """The features of one or several rewards, side by side."""

    sources: Sequence[FeatureSource]
    rewards: Sequence[FeatureReward]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of samples that all of them read. ValueError if there is none."""
        kinds_by_reward = [feature_kinds(reward) for reward in self.rewards]
        common: tuple[Kind, ...] = tuple(
            k for k in kinds_by_reward[0] if all(k in other for other in kinds_by_reward)
        )
        if not common:
            raise ValueError(
                "features: some are of images and some of texts, so no sample has all of them: "
                "use either"
            )
        return common

    @property
    def graded(self) -> bool:
        """Whether all of them have a gradient."""
        pairs = zip(self.sources, self.rewards, strict=True)
        return all(isinstance(inner_features(s.name, r), GradedFeatured) for s, r in pairs)

    def of(self, samples: Samples) -> Float[np.ndarray, "n d"]:
        """Features of n > 0 samples, in float64."""
        pairs = zip(self.sources, self.rewards, strict=True)
        parts = [features_of(source.name, reward, samples) for source, reward in pairs]
        return torch.cat(parts, 1).double().numpy()

    def with_gradient(self, media: Tensor, samples: Samples) -> Float[Tensor, "n d"]:
        pairs = zip(self.sources, self.rewards, strict=True)
        parts = [graded_features_of(s.name, r, media, samples) for s, r in pairs]
        return torch.cat([part.to(media.device) for part in parts], 1)


@dataclass
class FittedScores:
    """A fitted reward: the score of a head, minus `cautious` posterior standard deviations of its
    difference to the mean of its group. `renew` gives it a later fit on the same features."""

    columns: FeatureColumns
    fitted: FittedFolder
    cautious: float = 0.0

    @property
    def per(self) -> Literal["sample", "group"]:
        """A deviation is that of the difference to the mean of the group."""
        return "group" if self.cautious else "sample"

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        if not samples.prompts:
            return torch.zeros(0, dtype=torch.float64)
        expect(samples, "fitted", *self.columns.kinds)
        features, head = self.columns.of(samples), self.fitted.head
        scores = head.scores(features)
        if self.cautious:
            scores -= self.cautious * head.deviations(features, samples.group.cpu().numpy())
        return torch.from_numpy(scores)

    def renew(self, fitted: FittedFolder) -> None:
        """Score by another fit from now on. ValueError for one on other features."""
        if list(fitted.sources) != list(self.fitted.sources):
            raise ValueError("a fitted reward can only be renewed by a fit on the same features")
        self.fitted = fitted

    def has_seen(self, prompt: str) -> bool:
        return prompt_hash(prompt) in self.fitted.seen


@dataclass(frozen=True)
class GradedFittedScores:
    """A fitted reward without caution, whose features all have a gradient."""

    plain: FittedScores

    @property
    def per(self) -> Literal["sample", "group"]:
        return self.plain.per

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        return self.plain(samples)

    def differentiable(
        self, media: Float[Tensor, "n 3 h w"], samples: Samples
    ) -> Float[Tensor, " n"]:
        features, head = self.plain.columns.with_gradient(media, samples), self.plain.fitted.head
        centre, slope = (
            torch.from_numpy(array).to(features)
            for array in (head.centre, head.model.weight / head.scale)
        )
        return (features - centre) @ slope

    def has_seen(self, prompt: str) -> bool:
        return self.plain.has_seen(prompt)


@dataclass(frozen=True)
class HeldOutScores:
    """Scores of each sample by the head whose fit has not seen the fold of its prompt. Samples of
    one prompt have one head, so their scores can be compared."""

    columns: FeatureColumns
    heads: Mapping[int, LinearHead]

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "fitted", *self.columns.kinds)
        features = self.columns.of(samples)
        folds = [prompt_fold(prompt) for prompt in samples.prompts]
        scores = np.full(len(folds), np.nan)
        for fold, head in self.heads.items():
            rows = [row for row, row_fold in enumerate(folds) if row_fold == fold]
            scores[rows] = head.scores(features[rows])
        return torch.from_numpy(scores)
