"""Several held-out data sets, some of which have rewards of their own."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl.errors import UserError
from flowrl.run.watch.judges import judges
from flowrl.run.watch.start_check import check_start, refusals
from flowrl.session.session import OfSets
from flowrl.settings import RunSettings
from flowrl.settings.read import run_from
from rewards import Samples
from tests.support import runs
from tests.support.advice import advice

JUDGES = [
    {"name": "brightness", "label": "all"},
    {"name": "brightness", "label": "cats", "sets": "cats"},
    {"name": "jpeg", "sets": ["dogs"]},
]


def settings(pipeline: Path, folder: Path, **more: Any) -> dict[str, Any]:
    tree = runs.tree(pipeline, folder, runs.NFT)
    for name in ("cats", "dogs"):
        rows = [{"prompt": f"{number} {name}"} for number in ("two", "three")]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [{"source": str(folder / f"{name}.jsonl"), "name": name} for name in ("cats", "dogs")]
    tree["prompts"]["held_out"] = sets
    tree["held_out_rewards"] = JUDGES
    tree["checkpoint"]["best"] = "jpeg"
    return tree | more


@pytest.mark.slow
def test_each_set_has_its_curves_and_one_reward_decides(pipeline, tmp_path, capsys):
    tree = settings(pipeline, tmp_path)
    tree["train"]["iterations"] = 2
    run = tmp_path / "run"
    assert runs.flowrl("train", runs.write(tree, tmp_path), "--folder", run) == 0
    first, last = runs.lines(run)[0], runs.lines(run)[-1]
    for line in (first, last):
        assert line["held_out/cats"] == pytest.approx(line["data_set/cats/all"])
        assert line["data_set/cats/cats"] == line["held_out/cats"] != line["held_out/all"]
        assert line["data_set/dogs/jpeg"] == line["held_out/jpeg"]
        assert "data_set/dogs/cats" not in line and "data_set/cats/jpeg" not in line
        mean = (line["data_set/cats/all"] + line["data_set/dogs/all"]) / 2
        assert line["held_out/all"] == pytest.approx(mean)
    assert all(math.isfinite(last[f"held_out_gain_error/{n}"]) for n in ("all", "cats"))
    page = (run / "report.html").read_text()
    assert "dogs/jpeg" in page and "cats/cats" in page
    highest = max(runs.lines(run), key=lambda line: line.get("held_out/jpeg", -math.inf))
    assert flowrl.TrainedRun.open(run).best.iteration == highest["iteration"]
    capsys.readouterr()
    assert runs.flowrl("evaluate", run, "--alone") == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("cats: ") and "4 samples" in line for line in shown)
    assert any(line.startswith("  dogs: no scores") for line in shown), shown
    other = str(tmp_path / "prompts.jsonl")
    assert runs.flowrl("evaluate", run, "--alone", "--prompts", other) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("jpeg: ") and "8 samples" in line for line in shown)
    found = flowrl.TrainedRun.open(run).evaluate(prompts=["a cat"], samples=2)
    assert all(math.isfinite(found.metrics[name]) for name in ("all", "cats", "jpeg"))


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(pipeline, tmp_path):
    tree = settings(pipeline, tmp_path)
    tree["train"] |= {"iterations": 2, "updates": 2, "self_test": "off"}
    tree["prompts"]["held_out"][0]["limit"] = tree["prompts"]["held_out"][1]["limit"] = 1
    runs.check_resumed_bits(tree, tmp_path)
    whole, broken = (runs.lines(tmp_path / name)[-1] for name in ("whole", "broken"))
    names = [n for n in whole if n.startswith(("held_out", "data_set/"))]
    assert "data_set/dogs/jpeg" in names and "held_out_std/all" in names
    assert [whole[n] for n in names] == [broken[n] for n in names]


def test_a_reward_of_sets_scores_their_rows_alone():
    seen: list[list[str]] = []

    class Length:
        def __call__(self, samples: Samples) -> torch.Tensor:
            seen.append(list(samples.prompts))
            return torch.tensor([float(len(text)) for text in samples.prompts])

    reward = OfSets(Length(), "length", ("b",))
    meta = [{"data_set": "a"}, {"data_set": "b"}, {}, {"data_set": "b"}]
    samples = Samples(["x", "y", "z", "w"], ["p", "pp", "ppp", "pppp"], torch.arange(4), meta)
    values, applies = reward(samples)
    assert values.nan_to_num(-1).tolist() == [-1, 2, -1, 4]
    assert applies.tolist() == [False, True, False, True]
    assert seen == [["pp", "pppp"]]
    nowhere = OfSets(Length(), "length", ("c",))(samples)
    assert nowhere.values.isnan().all() and not nowhere.applies.any() and len(seen) == 1


def of(pipeline: Path, folder: Path, **more: Any) -> RunSettings:
    return run_from(settings(pipeline, folder, **more), "test")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"held_out_rewards": [{"name": "jpeg", "sets": "birds"}]},
     "held_out_rewards: jpeg: sets has 'birds', but the data sets of a list in "
     "prompts.held_out are cats, dogs"),
    ({"rewards": [{"name": "brightness", "sets": "cats"}]},
     "rewards: brightness: sets belongs to held_out_rewards"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_sets_that_are_not_there_are_refused(tmp_path, change, sentence):
    with pytest.raises(UserError, match=sentence):
        of(tmp_path, tmp_path, **change)
    tree = settings(tmp_path, tmp_path)
    tree["prompts"]["held_out"] = str(tmp_path / "cats.jsonl")
    with pytest.raises(UserError, match=r"sets has 'cats', but .* are none"):
        run_from(tree, "test")


def test_an_evaluation_has_a_prompt_of_each_set_that_has_rewards(pipeline, tmp_path):
    """Before weights load, and with the number that is enough."""
    tree = settings(pipeline, tmp_path)

    def start(samples: int, *limits: int) -> None:
        tree["evaluate"] |= {"samples": samples, "per_prompt": 2}
        for data_set, limit in zip(tree["prompts"]["held_out"], limits, strict=False):
            data_set["limit"] = limit
        check_start(run_from(tree, "test"))

    advice(
        "evaluate.samples: the {} prompts of an evaluation include none of {}, which {} scores: "
        "set evaluate.samples: {}",
        lambda: start(2),
        lambda: start(4),
    )
    with pytest.raises(UserError, match=r"the 1 prompts .* dogs.* evaluate\.samples: 4$") as told:
        start(2)
    assert str(told.value) in refusals(run_from(tree, "test")), "plan says it too"
    rows = [{"prompt": f"{number} cats"} for number in range(9)]
    (tmp_path / "cats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    advice("include none of {}, which {} scores: set", lambda: start(6), lambda: start(6, 2))
    with pytest.raises(UserError, match="samples: 12, or `limit` the others to as many prompts"):
        start(6, 9)
    start(12)


def test_the_reward_of_a_set_is_no_judge_if_it_is_trained_on(tmp_path):
    run = of(tmp_path, tmp_path)
    assert judges(run) == ("jpeg",) and run.held_out_rewards[1].sets == ("cats",)
    assert run_from(json.loads(run.model_dump_json(by_alias=True)), "again") == run
