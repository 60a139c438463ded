"""Votes of people, and a reward fitted to them, from Python."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.api.scoring import checked_arguments
from flowrl.api.untouched import untouched
from flowrl.cli.vote import Vote, ask_for_votes
from flowrl.votes.answer import VoteAnswer
from flowrl.votes.fit import FitReward, FittedReward, fit_reward_to


@dataclass(frozen=True)
class CollectedVotes:
    """Votes on pairs of samples.

    folder  has votes.jsonl, the log events.jsonl, the samples, and answer.json
    table   votes.jsonl, which `fit_reward` and `evaluate_rewards` take
    answer  what people prefer, with intervals; `sentences` says it in words
    """

    folder: Path
    table: Path
    answer: VoteAnswer


def vote(
    source: str | Path | Sequence[str | Path],
    *,
    question: str = "Which one do you prefer?",
    votes: int | None = None,
    out: str | Path | None = None,
    options: Mapping[str, Any] = {},
) -> CollectedVotes:
    """Let people compare samples on a page, as `flowrl vote` does. Prints the page's address, and
    returns once all votes are in.

    source    a run's folder, two of them, a run file, a folder of images, a table of preferences,
              or a folder of votes to resume
    votes     number of pairs, fixed in advance
    options   the command's other options: {"raters": 3, "port": 8301}
    """
    given = [source] if isinstance(source, str | Path) else list(source)
    values = {
        "source": tuple(given), "question": question, "votes": votes,
        "out": None if out is None else Path(out),
    }  # fmt: skip
    arguments = checked_arguments(Vote, values, options, "flowrl.vote")
    with untouched():
        folder, answer = ask_for_votes(arguments)
    return CollectedVotes(folder, folder / "votes.jsonl", answer)


def fit_reward(
    votes: str | Path | CollectedVotes,
    features: Sequence[str | Mapping[str, Any]] = ("clip",),
    *,
    out: str | Path,
    options: Mapping[str, Any] = {},
) -> FittedReward:
    """Fit a reward to votes, as `flowrl fit-reward` does. The folder `out` is then a reward,
    {"name": "fitted", "path": out}, with a page that says whether it can be trusted.

    votes     votes.jsonl, a folder of votes, any table of preferences, or what `vote` returned
    features  rewards whose features are used: clip, pickscore, hps, or mappings with settings
    options   the command's other options: {"beside": ("pickscore",), "robust": 0}
    """
    table = votes.folder if isinstance(votes, CollectedVotes) else Path(votes)
    words = tuple(each if isinstance(each, str) else json.dumps(dict(each)) for each in features)
    values = {"votes": table, "features": words, "out": Path(out)}
    arguments = checked_arguments(FitReward, values, options, "flowrl.fit_reward")
    with untouched():
        return fit_reward_to(arguments)
