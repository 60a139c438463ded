"""Runs that ask: resumed and replayed to the bit, and on two processes."""

import json
from pathlib import Path

import pytest
import yaml

from flowrl.drill.same_end import differences
from tests.support import process_runs, runs
from tests.votes.test_asking import RUN

pytestmark = pytest.mark.slow
ASK = {"votes": 4, "person": "simulated", "port": 0, "budget": 10}


def written(folder: Path, **changes) -> Path:
    tree = {
        **RUN,
        "prompts": {**RUN["prompts"], "held_out": "configs/prompts/shapes_held_out.jsonl"},
        "held_out_rewards": ["flowrl/demo/taste.py:large"],
        "train": {"iterations": 4, "lr": 3e-4},
        "evaluate": {"every": 2, "steps": 2, "samples": 4},
        "checkpoint": {"every": 1, "keep": 9},
        "track": {"images": 0},
        "ask": ASK,
    }
    tree["model"] = {**tree["model"], "call": {"max_sequence_length": 1}}
    file = folder / "ask.yaml"
    file.write_text(yaml.safe_dump({**tree, **changes}))
    return file


def asked(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "ask" / "used.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("asked")
    assert runs.flowrl("train", written(place), "--folder", place / "run") == 0
    return place / "run"


def test_it_asks_within_its_budget_and_each_line_names_its_version(whole):
    lines = [json.loads(text) for text in (whole / "metrics.jsonl").read_text().splitlines()][1:]
    assert [line["ask/votes"] for line in lines] == [4, 8, 10, 10]
    assert [line["ask/version"] for line in lines] == [1, 2, 3, 3]
    assert len({line["ask/digest"] for line in lines}) == 3
    assert len(list((whole / "ask" / "versions").iterdir())) == 3
    assert [len(line["votes"]) for line in asked(whole)] == [4, 4, 2]


def test_a_resumed_run_and_a_replay_end_at_the_same_bits(whole, tmp_path):
    file = written(tmp_path)
    part = tmp_path / "part"
    assert runs.flowrl("train", file, "--folder", part, "--train.iterations", "2") == 0
    assert runs.flowrl("train", "--resume", part, "--train.iterations", "4") == 0
    assert not differences(whole, part)
    again = written(tmp_path, ask={**ASK, "replay": str(whole), "person": "page"})
    assert runs.flowrl("train", again, "--folder", tmp_path / "replayed") == 0
    assert not differences(whole, tmp_path / "replayed")
    assert asked(tmp_path / "replayed") == asked(whole)


def test_votes_that_are_not_waited_for_are_replayed_and_resumed(tmp_path):
    """Which votes have arrived by an iteration is chance; the recorded ones are used again. A
    replay that goes on after the recorded iterations asks for itself."""
    ask = ASK | {"wait": False, "choose": "uncertain", "votes": 8, "budget": 24}
    file = written(tmp_path, ask=ask)
    assert runs.flowrl("train", file, "--folder", tmp_path / "run") == 0
    lines = asked(tmp_path / "run")
    assert [len(line["asked"]["rows"]) for line in lines if line["asked"]] == [8, 8, 8]
    assert sum(len(line["votes"]) for line in lines) > 0
    again = written(tmp_path, ask=ask | {"replay": str(tmp_path / "run")})
    part = ("train", again, "--folder", tmp_path / "part", "--train.iterations", "2")
    assert runs.flowrl(*part) == 0
    assert runs.flowrl("train", "--resume", tmp_path / "part", "--train.iterations", "4") == 0
    assert not differences(tmp_path / "run", tmp_path / "part")
    short = ("--folder", tmp_path / "short", "--train.iterations", "2")
    assert runs.flowrl("train", written(tmp_path, ask=ask), *short) == 0
    longer = written(tmp_path, ask=ask | {"replay": str(tmp_path / "short")})
    assert runs.flowrl("train", longer, "--folder", tmp_path / "longer") == 0
    assert asked(tmp_path / "longer")[:2] == asked(tmp_path / "short")


def test_two_processes_ask_the_same_people_the_same(whole, tmp_path):
    words = ("train", written(tmp_path), "--folder", tmp_path / "two")
    done = process_runs.launch(process_runs.DDP, "-m", "flowrl", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["asked"] for line in asked(tmp_path / "two")] == [
        line["asked"] for line in asked(whole)
    ]
    last = [json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in
            (whole, tmp_path / "two")]  # fmt: skip
    assert last[0]["ask/votes"] == last[1]["ask/votes"] == 10
    assert last[1]["held_out/large"] == pytest.approx(last[0]["held_out/large"], abs=0.02)
