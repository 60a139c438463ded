"""Every command and call that asks a reward tells its states and faults in the same words: None and
NaN of all samples or of some, a wrong count, strings, an exception of its code."""

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import flowrl
from flowrl.api import PUBLIC_NAMES
from flowrl.errors import UserError
from flowrl.evaluation.measure import errors_of
from rewards import Samples
from rewards.combine import blamed, judged
from tests.support.warm import small

Door = Callable[[Any, Path, Path], object]
STEPS = 2


def abstains(samples: Samples) -> list[None]:
    return [None] * len(samples.prompts)


def abstains_on_some(samples: Samples) -> list[float | None]:
    return [1.0 if i % 2 else None for i in range(len(samples.prompts))]


def fails(samples: Samples) -> list[float]:
    return [math.nan] * len(samples.prompts)


def fails_on_some(samples: Samples) -> list[float]:
    return [1.0 if i % 2 else math.nan for i in range(len(samples.prompts))]


def counts_wrong(samples: Samples) -> list[float]:
    return [1.0] * (len(samples.prompts) + 1)


def strings(samples: Samples) -> list[Any]:
    return ["0.5"] * len(samples.prompts)


def raises(samples: Samples) -> list[float]:
    raise KeyError("colour")


def of_model(model: Path) -> flowrl.Run:
    return flowrl.Run.of_model(model)


def steers(method: Any) -> Door:
    return lambda reward, model, out: flowrl.steer(
        str(model), "a red ball", [reward], method=method, particles=2, steps=STEPS
    )


def images(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for i in range(4):
        Image.new("RGB", (8, 8), (60 * i, 10, 10)).save(folder / f"{i}.png")
    return folder


def pairs(folder: Path) -> Path:
    images(folder / "images")
    names = [str(folder / "images" / f"{i}.png") for i in range(4)]
    rows = [{"prompt": p, "a": names[2 * i], "b": names[2 * i + 1], "label": i}
            for i, p in enumerate("pq")]  # fmt: skip
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "pairs.jsonl"


def train(reward: Any, model: Path, out: Path) -> object:
    settings = small(model, out) | {"evaluate": {}, "train": {"iterations": 1}}
    settings["prompts"].pop("held_out", None)
    settings.pop("rewards", None)
    settings.pop("held_out_rewards", None)
    return flowrl.train(rewards=[reward], settings=settings, folder=out / "run")


DOORS: dict[str, Door] = {
    "steer: best": steers("best"),
    "steer: importance": steers("importance"),
    "steer: particles": steers("particles"),
    "Run.sample, steered": lambda reward, model, out: of_model(model).sample(
        "a red ball", rewards=[reward], steer="best", particles=2, steps=STEPS
    ),
    "Run.sample, optimised": lambda reward, model, out: of_model(model).sample(
        "a red ball", count=2, rewards=[reward], optimise="search", rounds=1, steps=STEPS
    ),
    "Run.sample, written": lambda reward, model, out: of_model(model).sample(
        "a red ball", count=2, rewards=[reward], steps=STEPS, out=out / "out"
    ),
    "Run.evaluate": lambda reward, model, out: of_model(model).evaluate(
        ["a red ball"], rewards=[reward], samples=2, steps=STEPS, alone=True
    ),
    "score": lambda reward, model, out: flowrl.score(
        images(out / "images"), [reward], out=out / "scores", sheet=0
    ),
    "evaluate_rewards": lambda reward, model, out: flowrl.evaluate_rewards(
        pairs(out), [reward], out=out / "page", robust=0, resamples=20
    ),
    "train": train,
}
CHOOSE = [name for name in DOORS if name.startswith("steer") or name.endswith("steered")]

COUNT = r"reward 'counts_wrong' returned shape \[\d\]; expected \d finite numbers, one per sample"
STRING = r"reward 'strings' returned a list with a str, '0\.5'; expected \d finite numbers"
RAISED = r"the reward raises raised KeyError: 'colour' \(test_reward_doors\.py, \d+\)"
FAULTS = {raises: RAISED, counts_wrong: COUNT, strings: STRING}


def cases(table: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases of a door and a reward. Those of doors that load a model each time are slow, but for
    one reward of each."""
    params, seen = [], set[str]()
    for door, reward, *more in table:
        cheap = door in ("steer: best", "score", "evaluate_rewards") or door not in seen
        seen.add(door)
        marks = () if cheap and door != "train" else pytest.mark.slow
        params.append(
            pytest.param(door, reward, *more, marks=marks, id=f"{door}, {reward.__name__}")
        )
    return params


@pytest.mark.quick_cases("Run.sample, steered", "importance")
@pytest.mark.parametrize(
    ("door", "reward"), cases((door, reward) for reward in FAULTS for door in DOORS)
)
def test_a_fault_of_a_reward_is_one_sentence_that_names_it(
    door: str, reward: Any, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if door == "Run.sample, written":  # the samples are kept, and stay unscored
        DOORS[door](reward, pipeline, tmp_path)
        assert (tmp_path / "out" / "000.png").is_file()
        assert re.search("unscored: " + FAULTS[reward], capsys.readouterr().err)
        return
    with pytest.raises(UserError, match=FAULTS[reward]) as told:
        DOORS[door](reward, pipeline, tmp_path)
    assert str(told.value).count("returned") <= 1, "the sentence is not said twice"


NONE_OF_ALL = {
    **dict.fromkeys(CHOOSE, r"no reward applies to 2 of the 2 samples: one is chosen only where "
                            r"all are such, as for 'a red ball'"),
    "Run.sample, optimised": r"optimise search: no reward applies to any of the first samples "
                             r"\(abstains returned None for each\)",
    "Run.sample, written": r"2 samples in",
    "Run.evaluate": r"abstains: no scores: it applies to none of the 4 samples",
    "score": r"abstains does not apply to 0\.png and 3 others: it returned None",
    "evaluate_rewards": r"abstains does not apply to .*0\.png and 3 others: it returned None",
    "train": r"no reward applies to",
}  # fmt: skip
NAN_OF_ALL = {
    **dict.fromkeys(CHOOSE, r"the reward fails scored none of the 2 samples to which it applies"),
    "Run.sample, optimised": r"fails scored none of the first samples",
    "Run.sample, written": r"2 samples in",
    "Run.evaluate": r"reward fails: it scores none of noise",
    "score": r"fails +- +- +- +- +4",
    "evaluate_rewards": r"fails has no verdict on 2 of 2 pairs",
    "train": r"reward fails: it scores none of noise",
}
NONE_OF_SOME = {
    **dict.fromkeys(CHOOSE, r"no reward applies to 1 of the 2 samples: they are not chosen"),
    "score": r"abstains_on_some does not apply to 0\.png and 1 others: it returned None",
}
NAN_OF_SOME = {
    **dict.fromkeys(CHOOSE, r"1 of the 2 samples have no score: they are not chosen"),
    "score": r"fails_on_some +1 +0 +1 +1 +2",
}
STATES = [
    (door, reward, sentence)
    for reward, table in (
        (abstains, NONE_OF_ALL), (fails, NAN_OF_ALL),
        (abstains_on_some, NONE_OF_SOME), (fails_on_some, NAN_OF_SOME),
    )
    for door, sentence in table.items()
]  # fmt: skip


@pytest.mark.quick_cases("Run.sample, steered", "Run.evaluate", "importance")
@pytest.mark.parametrize(("door", "reward", "sentence"), cases(STATES))
def test_abstaining_and_failing_are_told_apart(
    door: str, reward: Any, sentence: str, pipeline: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    try:
        DOORS[door](reward, pipeline, tmp_path)
        said = ""
    except UserError as error:
        said = str(error)
    printed = capsys.readouterr()
    assert re.search(sentence, said + printed.out + printed.err), said + printed.out + printed.err


def test_every_door_of_rewards_is_tried() -> None:
    """`serve_reward` answers requests; `fit_reward` makes rewards, `list_rewards` names them."""
    asks = {
        name
        for names in PUBLIC_NAMES.values()
        for name in names
        if inspect.isfunction(getattr(flowrl, name))
        and {"rewards", "reward"} & set(inspect.signature(getattr(flowrl, name)).parameters)
    }
    assert asks == {"steer", "score", "evaluate_rewards", "serve_reward", "train"}
    asks_of_run = {
        name
        for name, method in vars(flowrl.Run).items()
        if (not name.startswith("_") or name == "__init__")
        and inspect.isfunction(method)
        and "rewards" in inspect.signature(method).parameters
    }
    assert asks_of_run == {"__init__", "sample", "evaluate"}


def test_a_judge_s_exception_is_told_as_a_reward_s() -> None:
    def judge(samples: Samples, a: Any, b: Any) -> list[float]:
        raise KeyError("colour")

    two = Samples(["x", "y"], ["p"] * 2, torch.zeros(2, dtype=torch.long))
    with pytest.raises(KeyError) as error:
        judged("mine", judge, two, torch.tensor([0]), torch.tensor([1]))
    said = r"the judge mine raised KeyError: 'colour' \(test_reward_doors\.py, \d+\)"
    assert re.fullmatch(said, blamed(error.value) or "")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("bad thing of a kind", "reward 'a': bad thing of a kind"),
        ("the reward ab is missing", "reward 'a': the reward ab is missing"),
        ("reward 'a': no", "reward 'a': no"),
        ("the reward a raised KeyError", "the reward a raised KeyError"),
    ],
)
def test_a_short_name_inside_of_a_word_does_not_name_the_reward(said: str, told: str) -> None:
    with pytest.raises(UserError) as error, errors_of("a"):
        raise UserError(said)
    assert str(error.value) == told
