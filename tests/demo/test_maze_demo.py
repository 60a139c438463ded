"""The demo of several turns: its world, its shipped model, and a few iterations of GiGPO."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl.demo import maze
from flowrl.paths import PROJECT
from flowrl.session.progress import Progress
from flowrl.session.session import open_accelerator, open_session
from flowrl.settings.read import check_run, dump, read_run, run_from
from rewards import Samples
from tests.support.iterations import collect, iterate
from tests.support.runs import environment

FOLDER = PROJECT / "flowrl" / "demo" / "maze-lm"


def opened(folder, monkeypatch, **train):
    monkeypatch.chdir(PROJECT)  # the environment's file is named from there
    tree = dump(read_run(PROJECT / "configs" / "maze_demo.yaml"))
    tree["model"]["device"] = "cpu"
    tree["train"] |= train
    run = run_from(tree, "test")
    check_run(run)
    return open_session(run, folder, open_accelerator(run, folder))


def test_walls_and_borders_keep_one_where_one_is():
    assert [maze.move("C", move) for move in "nesw"] == ["C", "D", "C", "B"]
    assert [maze.move("M", move) for move in "nesw"] == ["H", "N", "M", "L"]
    assert maze.move("E", "e") == "E" and maze.move("F", "w") == "F"
    assert maze.walk("C", "sweird? wws!s") == "K"
    reach = {"A"}
    for _ in range(25):
        reach |= {maze.move(cell, move) for cell in reach for move in maze.MOVES}
    assert reach == set(maze.CELLS), "there is a way to every cell"


def test_the_environment_says_where_one_is_and_ends_at_the_goal():
    assert maze.reply("CH:", {}, ["s"]) == {"reply": "C", "state": "CH:"}
    assert maze.reply("CH:", {}, ["w"]) == {"reply": "B", "state": "B"}
    assert maze.reply("AG:", {}, ["s", "e"]) is None
    texts = ["sFe", "sF", "eBsBwA"]
    samples = Samples(texts, ["AG:"] * 3, torch.zeros(3, dtype=torch.long))
    assert maze.reached(samples) == [1.0, 0.0, 0.0] and maze.reached(maze.examples()) == [1.0, 0.0]


def test_prompts_are_split_and_files_hold_them():
    train, held = maze.prompts("train"), maze.prompts("held_out")
    assert len({*train, *held}) == 600 and not {*train} & {*held}
    for name, prompts in (("train", train), ("held_out", held)):
        file = PROJECT / "configs" / "prompts" / f"maze_{name}.jsonl"
        assert [json.loads(line)["prompt"] for line in file.open()] == prompts


@pytest.mark.slow
def test_moves_are_compared_with_those_from_the_same_cell(tmp_path, monkeypatch):
    session = opened(tmp_path, monkeypatch, lr=1e-3)
    progress = Progress()
    rewards = [iterate(session, progress).metrics["reward"] for _ in range(2)]
    assert 0.3 < sum(rewards) / 2 < 0.8, "the shipped model finds about half of the goals"
    experience = collect(session, 2)
    assert experience.metrics["text/met"] > 0.5 and experience.metrics["text/turns"] > 4
    (rows,) = experience.rows
    assert bool((rows.advantage[rows.mask] != 0).any())
    each = [rows.advantage[i][rows.mask[i]].unique() for i in range(len(rows.ids))]
    assert sum(len(values) > 1 for values in each) > len(each) / 2, "turns differ"


@pytest.mark.slow
def test_the_demo_learns_its_way(tmp_path, monkeypatch):
    session = opened(tmp_path, monkeypatch)
    progress = Progress()
    rewards = [iterate(session, progress).metrics["reward"] for _ in range(40)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.12, rewards


@pytest.mark.slow
def test_pre_training_runs(tmp_path):
    command = [sys.executable, "scripts/demo_models/pretrain_maze.py", "--quick"]
    command += ["--out", str(tmp_path / "lm"), "--prompts", str(tmp_path / "prompts")]
    subprocess.run(command, check=True, cwd=PROJECT, env=environment(), capture_output=True)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    shipped = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert made.config.vocab_size == shipped.config.vocab_size == 32
    for name in ("maze_train.jsonl", "maze_held_out.jsonl"):
        written = (tmp_path / "prompts" / name).read_bytes()
        assert written == (PROJECT / "configs" / "prompts" / name).read_bytes()
