"""Rows that nothing can win are found before they are drawn, and the same ones in every process,
worker and resume."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from flowrl.errors import UserError
from flowrl.models.image_check import ImageRows
from flowrl.run.save import checkpoint
from flowrl.session import row_checks
from flowrl.session.row_answers import read_lines
from flowrl.session.row_checks import RECORD, with_rows_checked
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings.read import run_from
from rewards.perception.files import check_image_file
from rewards.sandbox import run as sandbox
from tests.support import process_runs, runs, text_runs
from tests.support.runs import flowrl

RIGHT, WRONG = "def f(a):\n    return a + 1\n", "def f(a):\n    return a\n"
TEST = "assert f(1) == 2 and f(4) == 5"


def program(name: str, reference: str | None) -> dict[str, Any]:
    return {"prompt": f"{name} :", "tests": [TEST], "reference": reference}


PROGRAMS = [program(name, RIGHT if i % 3 else WRONG) for i, name in enumerate("abcdef")]
LOST = {"a :", "d :"}
ANSWERS = [
    {"prompt": "a :", "answer": "7"},
    {"prompt": "b :", "answer": "$$"},
    {"prompt": "c :", "answer": "12:00"},
    {"prompt": "d :", "answer": None},
    {"prompt": "e :", "answer": r"\frac{1"},
]
NUMBER = {"name": "exact_answer", "find": "last_number"}
CODE = {"name": "code_tests", "kind": "strict", "seconds": 2}


def config(
    model: Path, folder: Path, rows: Sequence[dict[str, Any]], reward: Any, **prompts: Any
) -> Path:
    tree = text_runs.tree(model, folder, text_runs.GRPO | {"group": 2}, iterations=2)
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree["prompts"] = {"train": str(file), "per_iteration": 2} | prompts
    tree["rewards"] = [reward]
    tree["train"]["on_failure"] = "skip_group"  # of rows without an answer
    del tree["evaluate"]
    return runs.write(tree, folder)


def opened(config: Path, folder: Path, begun: bool = False) -> Session:
    run = run_from(yaml.safe_load(config.read_text()), "test")
    folder.mkdir(exist_ok=True)
    return with_rows_checked(open_session(run, folder, open_accelerator(run, folder)), begun)


def drawn(session: Session, iterations: int) -> list[str]:
    """The prompts that a run draws."""
    found: list[str] = []
    for k in range(iterations):
        draws = session.prompts.draw(k, session.draw_count, session.run.train.seed)
        found += session.prompts.take(session.winnable(k, draws).rows)[0]
    return found


REWARDS_OF_ANSWERS = {
    "math_answer": ({"name": "math_answer", "find": "boxed"}, {"b :", "e :"}),
    "exact_answer": (NUMBER, {"b :", "c :", "e :"}),
    "by_row": (
        {"name": "by_row", "column": "prompt", "otherwise": 0, "rewards": {"b :": "math_answer"}},
        {"b :"},
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param("math_answer", marks=pytest.mark.slow), "exact_answer", "by_row"]
)
def test_all_answers_are_asked_before_the_first_iteration(model, tmp_path, kind, capsys):
    reward, lost = REWARDS_OF_ANSWERS[kind]
    rows = [{"prompt": f"{i} :", "answer": str(i)} for i in range(400)] + ANSWERS  # beyond any N
    file = config(model, tmp_path, rows, reward)
    with pytest.raises(UserError) as refused:
        opened(file, tmp_path / "a")
    text = str(refused.value)
    assert f"nothing can win {len(lost)} of 405 rows" in text and "line 402 ('b :')" in text
    assert "--prompts.unwinnable leave_out" in text
    session = opened(config(model, tmp_path, rows, reward, unwinnable="leave_out"), tmp_path / "b")
    every = drawn(session, 405)
    assert set(every) == {row["prompt"] for row in rows} - lost
    assert max(map(every.count, every)) - min(map(every.count, every)) <= 1  # each in turn
    assert "are left out" in capsys.readouterr().out


@pytest.mark.slow
def test_what_the_refusal_advises_works_on_the_command_line(model, tmp_path, capsys):
    file = config(model, tmp_path, ANSWERS, NUMBER, per_iteration=5)  # each row, also twice
    assert flowrl("train", file, "--folder", tmp_path / "run") == 2
    assert "nothing can win 3 of 5 rows" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    option = ("--prompts.unwinnable", "leave_out")
    assert flowrl("train", file, "--folder", tmp_path / "run", *option) == 0
    capsys.readouterr()
    assert flowrl("train", "--resume", tmp_path / "run", "--train.iterations", "3") == 0
    out, error = capsys.readouterr()
    assert "nothing can win" not in out + error  # it is recorded
    assert [line["left_out"] for line in read_lines(tmp_path / "run" / RECORD)] == [[1, 2, 4]]
    assert flowrl("train", file, "--folder", tmp_path / "kept", "--prompts.unwinnable", "keep") == 0
    assert "they are kept" in capsys.readouterr().err


@pytest.mark.slow
def test_programs_are_tried_before_their_row_is_drawn(model, tmp_path, monkeypatch, capsys):
    file = config(model, tmp_path, PROGRAMS, CODE)
    with pytest.raises(UserError, match="nothing can win 2 of 6 rows"):
        opened(file, tmp_path / "a")
    monkeypatch.setattr(row_checks, "FIRST", 0)  # none is tried at the start
    session = opened(file, tmp_path / "b")  # a run does not end for a row that it finds later
    every = drawn(session, 12)
    assert len(every) == 24 and not set(every) & LOST
    assert capsys.readouterr().err.count("nothing can win") == 2
    for k in range(12):
        assert len(set(drawn(session, k + 1)[-2:])) == 2  # no row twice in an iteration
    monkeypatch.setattr(sandbox, "run_tests", None)  # answers are kept: no program runs again
    again = opened(file, tmp_path / "b", begun=True)
    assert drawn(again, 12) == every
    other = opened(config(model, tmp_path, PROGRAMS, CODE), tmp_path / "c")  # for other runs too
    assert drawn(other, 12) == every


def test_the_run_s_own_record_has_the_last_word(model, tmp_path, monkeypatch):
    """Another machine may be too slow for a reference: the draws stay as they were."""
    monkeypatch.setattr(row_checks, "FIRST", 0)
    file = config(model, tmp_path, PROGRAMS, CODE)
    every = drawn(opened(file, tmp_path / "run"), 12)
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(sandbox, "run_tests", lambda *_: ([False], True, {}))
    assert drawn(opened(file, tmp_path / "run", begun=True), 12) == every


def test_a_run_that_was_begun_before_keeps_its_rows(model, tmp_path, capsys):
    file = config(model, tmp_path, ANSWERS, NUMBER, per_iteration=5)
    option = ("--prompts.unwinnable", "keep")
    assert flowrl("train", file, "--folder", tmp_path / "run", *option) == 0
    session = opened(file, tmp_path / "run", begun=True)
    assert set(drawn(session, 5)) == {row["prompt"] for row in ANSWERS}
    assert "they are kept, as when the run was begun" in capsys.readouterr().err
    assert checkpoint.newest(tmp_path / "run") is not None


def test_held_out_rows_are_said_and_stay(model, tmp_path, capsys):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in ANSWERS))
    file = config(model, tmp_path, ANSWERS[:1], NUMBER, per_iteration=1, held_out=str(held_out))
    session = opened(file, tmp_path / "run")
    assert session.held_out is not None and len(session.held_out) == 5
    assert not session.held_out.left_out
    error = capsys.readouterr().err
    assert error.count("prompts.held_out: nothing can win 3 of 5 rows") == 1
    assert "held_out.jsonl, line 2 ('b :')" in error and "they are kept" in error


def test_a_cut_line_of_the_record_is_asked_again(model, tmp_path, monkeypatch):
    monkeypatch.setattr(row_checks, "FIRST", 0)
    file = config(model, tmp_path, PROGRAMS, CODE)
    every = drawn(opened(file, tmp_path / "run"), 12)
    record = tmp_path / "run" / RECORD
    record.write_bytes(record.read_bytes()[:-9])
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "elsewhere"))
    assert drawn(opened(file, tmp_path / "run", begun=True), 12) == every
    assert [*read_lines(record)][-1]["answer"] in ("yes", "no")


def test_when_every_row_of_an_iteration_is_lost_the_rows_stay(model, tmp_path, monkeypatch):
    monkeypatch.setattr(row_checks, "FIRST", 0)
    rows = [program(name, WRONG) for name in "abc"]
    session = opened(config(model, tmp_path, rows, CODE), tmp_path / "run")
    assert set(drawn(session, 3)) == {"a :", "b :", "c :"}
    with pytest.raises(UserError, match="nothing can win 2 of 2 rows"):
        opened(config(model, tmp_path, [ANSWERS[1]] * 2, NUMBER), tmp_path / "refused")
    with pytest.raises(UserError, match="no row is left"):
        opened(
            config(model, tmp_path, [ANSWERS[1]] * 2, "math_answer", unwinnable="leave_out"),
            tmp_path / "none",
        )


def test_images_beyond_those_decoded_at_the_start_are_decoded_before_their_row(tmp_path):
    for name in ("whole.png", "cut.png"):
        Image.effect_noise((32, 32), 60.0).convert("RGB").save(tmp_path / name)
    cut = tmp_path / "cut.png"
    cut.write_bytes(cut.read_bytes()[:900])
    check_image_file(cut)  # its header is whole
    rows = [{"image": str(tmp_path / name)} for name in ("whole.png", "cut.png")]
    rows += [{"image": {"bytes": cut.read_bytes(), "path": None}}, {"image": None}]
    told, asked = ImageRows(("image",)), [""] * len(rows)
    assert [one.answer for one in told.winnable(asked, rows)] == ["yes", "no", "no", "yes"]
    keys = told.answer_keys(asked, rows)
    assert keys[3] is None and len(set(keys)) == 4
    cut.write_bytes((tmp_path / "whole.png").read_bytes())  # a repaired file is asked again
    assert told.answer_keys(asked, rows)[1] != keys[1]


def test_a_row_without_a_reward_is_one_sentence(model, tmp_path):
    reward = {"name": "by_row", "column": "prompt", "rewards": {"a :": "exact_answer"}}
    with pytest.raises(UserError, match=r"^reward by_row: .*row 2 .*add one, or set"):
        opened(config(model, tmp_path, ANSWERS, reward), tmp_path / "run")


@pytest.mark.parametrize("mode", ["refuse", "leave_out"])
def test_plan_asks_all_rows(model, tmp_path, capsys, mode):
    file = config(model, tmp_path, PROGRAMS, CODE, unwinnable=mode)
    assert flowrl("plan", file, "--check-rows") == (mode == "refuse")
    out = capsys.readouterr().out
    assert "4 rows can be won, 2 cannot, and of 0 there is no reference" in out
    assert out.count("cannot be won: ") == 2 and "line 4 ('d :')" in out
    assert ("before training: prompts.train: nothing can win" in out) == (mode == "refuse")


SEEN = '''
import os
from pathlib import Path


def seen(samples):
    """The length of each text; the prompts are written down."""
    with (Path(__file__).parent / f"seen-{os.getpid()}.txt").open("a") as out:
        out.writelines(f"{prompt}\\n" for prompt in samples.prompts)
    return [float(len(text)) for text in samples.media]
'''


def watched(model: Path, folder: Path, **more: Any) -> Path:
    """A run of programs whose prompts are written down; none is tried at the start."""
    folder.mkdir()
    file = config(model, folder, [*PROGRAMS, program("g", RIGHT), program("h", None)], CODE)
    tree = yaml.safe_load(file.read_text())
    (folder / "seen.py").write_text(SEEN)
    tree["rewards"] = [CODE | {"weight": 0.0}, {"name": f"{folder / 'seen.py'}:seen"}]
    tree["train"] |= {"iterations": 6, "self_test": "off"}
    tree["checkpoint"] = {"every": 1, "keep": 6}
    return runs.write(tree | more, folder)


def seen_by(folder: Path) -> list[str]:
    return sorted(
        line for file in folder.glob("seen-*.txt") for line in file.read_text().splitlines()
    )


@pytest.mark.slow
def test_processes_lags_and_a_resume_leave_out_the_same_rows(model, tmp_path, monkeypatch):
    monkeypatch.setattr(row_checks, "FIRST", 0)
    monkeypatch.setattr(row_checks, "cache_folder", lambda: tmp_path / "none")
    whole = watched(model, tmp_path / "whole")
    assert flowrl("train", whole, "--folder", tmp_path / "whole" / "run") == 0
    every = seen_by(tmp_path / "whole")
    assert every and not set(every) & LOST

    broken = watched(model, tmp_path / "broken")
    folder = tmp_path / "broken" / "run"
    assert flowrl("train", broken, "--folder", folder, "--train.iterations", "3") == 0
    assert flowrl("train", "--resume", folder, "--train.iterations", "6") == 0
    assert seen_by(tmp_path / "broken") == every
    assert same_files(tmp_path / "whole" / "run", folder)

    late = watched(model, tmp_path / "late", workers={"lag": 1})
    assert flowrl("train", late, "--folder", tmp_path / "late" / "run") == 0
    assert set(seen_by(tmp_path / "late")) <= set(every)

    two = watched(model, tmp_path / "two")
    words = ("-m", "flowrl", "train", two, "--folder", tmp_path / "two" / "run")
    launched = process_runs.launch(process_runs.DDP, *words, "--prompts.unwinnable", "leave_out")
    assert launched.returncode == 0, launched.stdout
    assert seen_by(tmp_path / "two") == every


def same_files(a: Path, b: Path) -> bool:
    first, second = (load_file(run / "model" / "model.safetensors") for run in (a, b))
    return all(torch.equal(first[name], second[name]) for name in first)
