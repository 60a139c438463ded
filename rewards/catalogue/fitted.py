"""A reward fitted to votes of people, from the folder that `flowrl fit-reward` writes.

A linear head on the features of other rewards, fitted as Bradley-Terry with ties (Davidson 1970).
The score is a log-odds: a sample that scores 1 higher than another of its prompt wins 73 % of the
votes between them that have a winner. It is 0 on average over the samples that were voted on.

`cautious: 1` is the mean minus one posterior standard deviation of the score's difference to the
mean of its group (of a sample alone, to the mean of the samples that were voted on), at the fit's
ridge. It then compares within a group, and has no gradient. Without it the reward has one if all of
its features have.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rewards.catalogue import clip, hps, pickscore
from rewards.checks.settings import call_with, converted_settings, settings_of
from rewards.fitted.feature_models import (
    load_dinov2,
    load_last_hidden,
    load_patches,
    load_siglip,
)
from rewards.fitted.folder import HEAD, RECORD, FeatureSource, FittedFolder, fitted_path
from rewards.fitted.scoring import FeatureColumns, FittedScores, GradedFittedScores
from rewards.perception.features import FeatureReward
from rewards.rights import ReadFile, Right, need
from rewards.types import NotNegative, Reward

FEATURED: Mapping[str, Callable[..., FeatureReward]] = {
    "clip": clip.load,
    "hps": hps.load,
    "pickscore": pickscore.load,
    "siglip": load_siglip,
    "dinov2": load_dinov2,
    "patches": load_patches,
    "last_hidden": load_last_hidden,
}
"""What a folder may name for features: no other code runs for it."""


def feature_settings(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a reward with features, checked and converted. ValueError for a reward without
    features, and for a wrong setting. Nothing is loaded."""
    if name not in FEATURED:
        raise ValueError(f"features: {name!r:.50} offers none: use {', '.join(FEATURED)}")
    return converted_settings(f"features: {name}", settings_of(FEATURED[name]), settings)


def load_columns(sources: Sequence[FeatureSource]) -> FeatureColumns:
    """Load the rewards behind features. ValueError as of `feature_settings`, and for weights with
    another digest than the recorded one."""
    rewards = []
    for source in sources:
        settings = feature_settings(source.name, source.settings)
        reward = call_with(FEATURED[source.name], settings)
        source.check(reward)
        rewards.append(reward)
    columns = FeatureColumns(tuple(sources), tuple(rewards))
    assert columns.kinds, "a mixture is refused there"
    return columns


def load(path: ReadFile, cautious: NotNegative = 0.0) -> Reward:
    """Load the reward.

    path      folder that `flowrl fit-reward` wrote
    cautious  posterior standard deviations that are subtracted from the mean, at least 0; more
              scores samples lower that are unlike those that were voted on, compares within a group
              and has no gradient
    """
    folder = fitted_path(path)
    for file in (folder, folder / RECORD, folder / HEAD):  # each may be a link
        need(Right.FILES, path, path=file)
    fitted = FittedFolder.read(folder)
    columns = load_columns(fitted.sources)
    scores = FittedScores(columns, fitted, cautious)
    return GradedFittedScores(scores) if columns.graded and not cautious else scores
