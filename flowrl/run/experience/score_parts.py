"""Ask rewards that wait for a server while the model samples the other parts of the same plan."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from flowrl.run.experience.score_ahead import Score, ScoreAhead, joined_columns
from rewards import Reward, Samples, Scores
from rewards.checks.self_test import Made
from rewards.types import Waits

R = TypeVar("R")


def asks_server(reward: Reward) -> bool:
    """Whether a reward, or every part of a composite one, waits for a server."""
    if isinstance(reward, Made):
        return bool(reward.parts) and all(asks_server(part) for part in reward.parts.values())
    return isinstance(reward, Waits) and reward.waits


class ScoreParts(Generic[R]):
    """Media and scores of an iteration's rollouts: `ScoreAhead`, and parts of a single plan.

    A part is decoded as soon as it is drawn. The rewards that wait for a server are asked at once
    for its samples; they have all samples of the part's draws. The other rewards score all samples
    together, as ever, so that no batch of theirs is composed otherwise. Use with
    `contextlib.closing`.
    """

    def __init__(
        self, decode: Callable[[R], Samples], rewards: Mapping[str, Reward], score: Score
    ) -> None:
        self.rewards, self.score = rewards, score
        self.asked = {name: reward for name, reward in rewards.items() if asks_server(reward)}
        self.whole = ScoreAhead(decode, rewards, score)
        self.parts = ScoreAhead(decode, self.asked, score)

    def close(self) -> None:
        try:
            self.parts.close()
        finally:
            self.whole.close()

    @property
    def on_part(self) -> Callable[[R], None] | None:
        """None if no reward waits: then parts gain nothing."""
        return self.parts.on_rollout if self.asked else None

    def media(self, rollouts: Sequence[R]) -> list[Samples]:
        """Decode what is not decoded; return the samples of all rollouts."""
        if not self.parts.decoded:
            return self.whole.media(rollouts)
        assert len(rollouts) == 1, "parts are of a single plan"
        return [joined_samples(self.parts.decoded)]

    def scores(self, samples: Sequence[Samples]) -> list[Scores]:
        """Return scores of the samples. An error of a reward in the thread is raised here."""
        if not self.parts.decoded:
            return self.whole.scores()
        here = {name: each for name, each in self.rewards.items() if name not in self.asked}
        found = [self.score(here, samples[0])] if here else []
        return [joined_columns([Scores.joined(self.parts.scores()), *found], tuple(self.rewards))]


def joined_samples(parts: Sequence[Samples]) -> Samples:
    """All samples of parts, in order."""
    first = parts[0].media
    if isinstance(first, Tensor):
        media = torch.cat([each for part in parts if isinstance(each := part.media, Tensor)])
    else:
        media = [item for part in parts for item in part.media]
    prompts = [text for part in parts for text in part.prompts]
    meta = [row for part in parts for row in part.meta]
    return Samples(media, prompts, torch.cat([part.group for part in parts]), meta)
