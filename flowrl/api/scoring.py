"""Rewards without a run: measure them on human preferences, and serve them to other processes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from flowrl.api.parts import GivenReward, GivenRewards
from flowrl.api.untouched import untouched
from flowrl.cli.serve import Serve, run_reward_server
from flowrl.errors import UserError
from flowrl.evaluation.reward_evaluation import EvaluateRewards
from flowrl.pages.reward_page import report_rewards
from flowrl.settings.words.sentences import plain_message

T = TypeVar("T")


@dataclass(frozen=True)
class RewardEvaluation:
    """Result of a comparison of rewards.

    folder   has evaluation.html, a page to read, and evaluation.json
    results  the contents of the JSON: `rewards` by label (accuracy, ranks, robustness, cost),
             `agreement`, `sentences`; docs/rewards.md explains them
    """

    folder: Path
    results: Mapping[str, Any]


def evaluate_rewards(
    data: str | Path,
    rewards: Sequence[GivenReward],
    *,
    judges: Sequence[str | Mapping[str, Any]] = (),
    out: str | Path | None = None,
    options: Mapping[str, Any] = {},
) -> RewardEvaluation:
    """Measure which reward to trust, like `flowrl evaluate-rewards`.

    data     a table, or a folder of tables: prompt, a, b, label; or a public layout
    rewards  names, mappings with a name, or callables
    judges   judges of pairs, by name
    out      a new folder; by default the next free `reward-evaluation-0001`
    options  the command's other options: {"robust": 0, "seed": 1}
    """
    place = "flowrl.evaluate_rewards"
    read = GivenRewards.of(rewards, f"{place}: rewards")
    named = [spec for spec in read.specs if not _is_object(spec, read)]
    values = {
        "dataset": data,
        "rewards": tuple(json.dumps(spec) for spec in named),
        "judges": tuple(json.dumps(one) for one in judges),
        "out": out,
    }
    given = checked_arguments(EvaluateRewards, values, options, place)
    with untouched():
        folder = report_rewards(given, read.objects)
    return RewardEvaluation(folder, json.loads((folder / "evaluation.json").read_text()))


def serve_reward(
    reward: GivenReward,
    *,
    port: int = 8100,
    host: str = "127.0.0.1",
    token: str | None = None,
    options: Mapping[str, Any] = {},
) -> None:
    """Serve a reward over HTTP until Ctrl-C, as `flowrl serve-reward` does. Runs use it as
    {"name": "remote", "url": ...}.

    reward   a name, a mapping with a name, or a callable
    token    name of an environment variable with a token that clients must send
    options  the command's other options: {"batch": 32, "judge": True}
    """
    place = "flowrl.serve_reward"
    read = GivenRewards.of([reward], place)
    objects = list(read.objects.items())
    name = objects[0][0] if objects else json.dumps(read.specs[0])
    values = {"reward": name, "port": port, "host": host, "token": token}
    given = checked_arguments(Serve, values, options, place)
    if objects and given.judge:
        raise UserError(f"{place}: judge is only for rewards given by name: leave it out")
    with untouched():
        run_reward_server(given, objects[0][1] if objects else None)


def _is_object(spec: Mapping[str, Any], read: GivenRewards) -> bool:
    return spec.get("label") in read.objects


def checked_arguments(
    kind: type[T], values: Mapping[str, Any], options: Mapping[str, Any], at: str
) -> T:
    """The arguments of a command. UserError for an unknown option or a value of another type."""
    known = [name for name in kind.__dataclass_fields__ if name not in values]  # type: ignore[attr-defined]
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"{at}: options: {unknown[0]!r} is not one of {', '.join(known)}")
    try:
        return TypeAdapter(kind).validate_python({**values, **options})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{at}: {first['loc'][0]}: {plain_message(first)}") from error
