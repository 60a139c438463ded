"""Votes of people, and a reward fitted to them, from Python."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.api.calls import checked_arguments, public_call
from flowrl.api.untouched import untouched
from flowrl.cli.vote import Vote, ask_for_votes
from flowrl.errors import UserError
from flowrl.evaluation.folders import Where
from flowrl.settings.trust import Trust
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


@public_call
def vote(  # noqa: PLR0913 one keyword for each option of the command
    source: str | Path | Sequence[str | Path],
    *,
    question: str = "Which one do you prefer?",
    votes: int | None = None,
    out: str | Path | None = None,
    raters: int = 1,
    results: bool = False,
    forget: str | None = None,
    export: Literal["argilla", "label-studio", "chosen"] | None = None,
    weights: str = "last",
    trust: Trust = False,
    prompts: str | Path | None = None,
    prompts_from: Where = "auto",
    steps: int | None = None,
    seed: int = 0,
    host: str = "127.0.0.1",
    port: int = 8300,
    person: Literal["page", "simulated"] = "page",
    taste: Literal["large", "left", "warm"] = "large",
    options: Mapping[str, Any] = {},
) -> CollectedVotes:
    """Let people compare samples on a page, as `flowrl vote` does. Prints the page's address, and
    returns once all votes are in.

    source    a run's folder, two of them, a run file, a folder of images, a table of preferences,
              or a folder of votes to resume
    votes     number of pairs, fixed in advance
    raters    people: each gets a link
    results, forget, export  of a folder of votes: say what was found so far, delete all that is
              kept of a rater, or write the votes for a labelling tool; and end
    weights, trust, steps  of a run: last, best or a folder; its rights; denoising steps
    prompts, prompts_from  of a run, another prompt file; of a folder, its table of prompts
    person, taste  a simulated person of the demo's world, for trials
    options   these keywords as a mapping, which take precedence: {"raters": 3, "port": 8301}
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    values = {
        "source": tuple(sources), "question": question, "votes": votes,
        "out": None if out is None else Path(out), "raters": raters, "results": results,
        "forget": forget, "export": export, "weights": weights, "trust": trust,
        "prompts": prompts, "prompts_from": prompts_from, "steps": steps, "seed": seed,
        "host": host, "port": port, "person": person, "taste": taste,
    }  # fmt: skip
    arguments = checked_arguments(Vote, values, options, "flowrl.vote")
    with untouched():
        folder, answer = ask_for_votes(arguments)
    return CollectedVotes(folder, folder / "votes.jsonl", answer)


@public_call
def fit_reward(  # noqa: PLR0913 one keyword for each option of the command
    votes: str | Path | CollectedVotes,
    features: Sequence[str | Mapping[str, Any]] = ("clip", "patches"),
    *,
    out: str | Path | None = None,
    reuse: str | Path | None = None,
    beside: Sequence[str] = (),
    layout: str | None = None,
    columns: Sequence[str] = (),
    images: str | Path | None = None,
    robust: int = 200,
    chunk: int = 16,
    frames: int = 16,
    options: Mapping[str, Any] = {},
) -> FittedReward:
    """Fit a reward to votes, as `flowrl fit-reward` does. The folder `out` is then a reward,
    {"name": "fitted", "path": out}, with a page that says whether it can be trusted.

    votes     votes.jsonl, a folder of votes, any table of preferences, or what `vote` returned
    features  models whose features are used, side by side: clip, pickscore, hps, siglip, dinov2,
              patches, of texts last_hidden, or mappings with settings
    reuse     the folder of an earlier fit, whose features of the same samples are taken
    beside    rewards that are measured on the same votes
    layout, columns, images  how the table is read
    robust    pairs whose samples are edited to find out which edits fool the reward
    chunk, frames  samples per call, and frames of a video
    options   these keywords as a mapping, which take precedence: {"robust": 0}
    """
    if not isinstance(votes, str | Path | CollectedVotes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(
            "flowrl.fit_reward: votes must be a path, or what flowrl.vote returned, not "
            f"{votes!r:.80}"
        )
    table = votes.folder if isinstance(votes, CollectedVotes) else Path(votes)
    words = tuple(
        feature if isinstance(feature, str) else json.dumps(dict(feature)) for feature in features
    )
    values = {
        "votes": table, "features": words, "out": out, "reuse": reuse, "beside": tuple(beside),
        "layout": layout, "columns": tuple(columns), "images": images, "robust": robust,
        "chunk": chunk, "frames": frames,
    }  # fmt: skip
    arguments = checked_arguments(FitReward, values, options, "flowrl.fit_reward")
    with untouched():
        return fit_reward_to(arguments)
