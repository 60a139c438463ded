"""Rewards without a run: measure them on human preferences, and serve them to other processes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.api.calls import checked_arguments, public_call
from flowrl.api.parts import GivenReward, GivenRewards, SomeRewards
from flowrl.api.untouched import untouched
from flowrl.cli.serve import Serve, run_reward_server
from flowrl.errors import UserError
from flowrl.evaluation.agreement import Ties
from flowrl.evaluation.folders import Where
from flowrl.evaluation.reward_evaluation import EvaluateRewards
from flowrl.evaluation.scoring import ScoreArguments, score_folder
from flowrl.settings.file.plain import texts_of_paths
from flowrl.votes.voted_table import report_rewards_on_votes


@dataclass(frozen=True)
class RewardEvaluation:
    """Result of a comparison of rewards.

    folder   has evaluation.html, a page to read, and evaluation.json
    results  the contents of the JSON: `rewards` by label (accuracy, ranks, robustness, cost),
             `agreement`, `sentences`; docs/rewards.md explains them
    """

    folder: Path
    results: Mapping[str, Any]


@public_call
def evaluate_rewards(  # noqa: PLR0913 one keyword for each option of the command
    data: str | Path,
    rewards: SomeRewards,
    *,
    judges: Sequence[str | Mapping[str, Any]] = (),
    out: str | Path | None = None,
    layout: str | None = None,
    dimension: str | None = None,
    columns: Sequence[str] = (),
    images: str | Path | None = None,
    prompts: int | None = None,
    ties: Ties | None = None,
    level: float = 0.99,
    resamples: int = 2000,
    robust: int = 200,
    examples: int = 6,
    chunk: int = 16,
    frames: int = 16,
    seed: int = 0,
    options: Mapping[str, Any] = {},
) -> RewardEvaluation:
    """Measure which reward to trust, like `flowrl evaluate-rewards`.

    data     a table, or a folder of tables: prompt, a, b, label; or a public layout; or a folder
             of votes
    rewards  names, mappings with a name, or callables
    judges   judges of pairs, by name
    out      a new folder; by default the next free `reward-evaluation-0001`
    options  the keywords below as a mapping, which take precedence: {"robust": 0, "seed": 1}

    layout, dimension, columns, images  how the table is read: its layout, the column with labels,
             its names of a layout's columns, the folder of its paths
    prompts  the most prompts, selected with the seed
    ties     how ties count in the main result; None: as in the data set's paper
    level, resamples  of the intervals
    robust   pairs whose samples are edited to find out which edits fool the rewards
    examples, chunk, frames  pairs to show per reward, samples per call, frames of a video
    """
    place = "flowrl.evaluate_rewards"
    read = GivenRewards.of(rewards, f"{place}: rewards")
    named = [spec for spec in read.specs if not _is_object(spec, read)]
    values = {
        "dataset": data,
        "rewards": tuple(json.dumps(spec) for spec in named),
        "judges": tuple(json.dumps(texts_of_paths(one)) for one in judges),
        "out": out, "layout": layout, "dimension": dimension, "columns": tuple(columns),
        "images": images, "prompts": prompts, "ties": ties, "level": level,
        "resamples": resamples, "robust": robust, "examples": examples, "chunk": chunk,
        "frames": frames, "seed": seed,
    }  # fmt: skip
    arguments = checked_arguments(EvaluateRewards, values, options, place)
    with untouched():
        folder = report_rewards_on_votes(arguments, read.objects)
    return RewardEvaluation(folder, json.loads((folder / "evaluation.json").read_text()))


@public_call
def serve_reward(  # noqa: PLR0913 one keyword for each option of the command
    reward: GivenReward,
    *,
    port: int = 8100,
    host: str = "127.0.0.1",
    token: str | None = None,
    judge: bool = False,
    batch: int = 64,
    wait: float = 0.01,
    body: int = 256,
    pixels: int = 32,
    values: int = 500,
    options: Mapping[str, Any] = {},
) -> None:
    """Serve a reward over HTTP until Ctrl-C, as `flowrl serve-reward` does. Runs use it as
    {"name": "remote", "url": ...}.

    reward   a name, a mapping with a name, or a callable
    token    name of an environment variable with a token that clients must send
    judge    serve the file's judge of pairs; without it, pairs are compared by their scores
    batch, wait  the most samples per call, and the seconds that a request waits for others to join
    body, pixels, values  limits of a request: MiB, 2**20 pixels, thousands of JSON values
    options  these keywords as a mapping, which take precedence: {"batch": 32, "judge": True}
    """
    place = "flowrl.serve_reward"
    read = GivenRewards.of([reward], place)
    objects = list(read.objects.items())
    name = objects[0][0] if objects else json.dumps(read.specs[0])
    named = {
        "reward": name, "port": port, "host": host, "token": token, "judge": judge, "batch": batch,
        "wait": wait, "body": body, "pixels": pixels, "values": values,
    }  # fmt: skip
    arguments = checked_arguments(Serve, named, options, place)
    if objects and arguments.judge:
        raise UserError(f"{place}: judge is only for rewards given by name: leave it out")
    with untouched():
        run_reward_server(arguments, objects[0][1] if objects else None)


def _is_object(spec: Mapping[str, Any], read: GivenRewards) -> bool:
    return spec.get("label") in read.objects


@public_call
def score(
    folder: str | Path,
    rewards: SomeRewards,
    *,
    prompts: str | Path | None = None,
    prompts_from: Where = "auto",
    sheet: int = 96,
    chunk: int = 16,
    frames: int = 16,
    out: str | Path | None = None,
) -> Path:
    """Score a folder of images or videos, as `flowrl score` does. Returns the folder with
    scores.csv, scores.parquet and contact sheets.

    folder         its subfolders are read too
    rewards        names, mappings with a name, or callables
    prompts        a table with the columns file and prompt; None: one of the folder's own
    prompts_from   table, captions (NAME.txt beside NAME.png), metadata or names; auto tries them in
                   this order
    sheet          images on a contact sheet; 0: no sheets
    chunk, frames  samples per call, and frames of a video
    out            a folder; None: FOLDER/scores
    """
    read = GivenRewards.of(rewards, "flowrl.score: rewards")
    named = [spec for spec in read.specs if not _is_object(spec, read)]
    values = {
        "folder": folder, "rewards": tuple(json.dumps(spec) for spec in named), "prompts": prompts,
        "prompts_from": prompts_from, "sheet": sheet, "chunk": chunk, "frames": frames, "out": out,
    }  # fmt: skip
    arguments = checked_arguments(ScoreArguments, values, {}, "flowrl.score")
    with untouched():
        return score_folder(arguments, read.objects)
