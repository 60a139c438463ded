"""The text demo: its world, its shipped model, and that training makes it add."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrl.demo.sums import Addition, problems, questions
from flowrl.errors import UserError
from flowrl.paths import PROJECT, find
from flowrl.run.evaluate.evaluate import evaluate_held_out
from flowrl.run.save import checkpoint
from flowrl.session.progress import Progress
from flowrl.session.session import open_accelerator, open_session
from flowrl.settings.read import check_run, dump, read_run, run_from
from scripts import demo_text
from scripts.demo_models.pretrain_sums import accuracy, asked
from tests.support.iterations import iterate
from tests.support.runs import environment

FOLDER = PROJECT / "flowrl" / "demo" / "sums-lm"


def opened(folder, **changes):
    tree = dump(read_run(PROJECT / "configs" / "text_demo.yaml"))
    tree["model"]["device"] = "cpu"
    for section, values in changes.items():
        tree[section] |= values
    run = run_from(tree, "test")
    check_run(run)
    return open_session(run, folder, open_accelerator(run, folder))


def test_careless_writers_forget_the_carry_and_nothing_else():
    assert (Addition(37, 45).answer, Addition(37, 45).careless) == ("82", "72")
    assert (Addition(99, 99).answer, Addition(99, 99).careless) == ("198", "188")
    assert Addition(12, 34).careless == Addition(12, 34).answer == "46"


def test_splits_are_apart_and_files_hold_them():
    splits = {name: problems(name) for name in ("train", "held_out", "test")}
    assert sum(map(len, splits.values())) == 90 * 90
    assert all(Addition(s.b, s.a).split == name for name, sums in splits.items() for s in sums)
    for name, sums in splits.items():
        known = {s.prompt: s.answer for s in sums}
        file = PROJECT / "configs" / "prompts" / f"sums_{name}.jsonl"
        rows = [json.loads(line) for line in file.open()]
        assert all(known[row["prompt"]] == row["answer"] for row in rows)
        assert (
            len({row["prompt"] for row in rows}) == len(rows) == (2000 if name == "train" else 400)
        )


def test_questions_are_split_too_and_files_hold_them():
    held, train = ({s.question: s.answer for s in questions(n)} for n in ("held_out", "train"))
    assert len(held) + len(train) == 144 and not held.keys() & train.keys()
    assert set(held) == {" + ".join(reversed(q.split(" + "))) for q in held}
    for name, known in (("held_out", held), ("train", train)):
        file = PROJECT / "configs" / "prompts" / f"questions_{name}.jsonl"
        assert {(r := json.loads(line))["prompt"]: r["answer"] for line in file.open()} == known


def test_a_package_is_a_place_for_a_model_and_a_missing_one_is_said():
    assert find("package:flowrl/demo/sums-lm") == FOLDER
    for missing in ("package:no_such_models", "package:", "package:no-name/part"):
        with pytest.raises(UserError, match="is not installed"):
            find(missing)


def test_the_demo_shows_samples_of_all_over_the_file(tmp_path):
    rows = [{"prompt": f"{i} + 1", "before": "Well, ", "after": str(i + 1)} for i in range(9)]
    page = tmp_path / "page.jsonl"
    page.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = demo_text.shown(page, 3)
    assert [line.split()[0] for line in lines] == ["0", "3", "6"]
    assert lines[1] == "    3 + 1   'Well, ' -> '4'" and len(demo_text.shown(page, 99)) == 9


def test_the_shipped_model_is_small_and_adds_imperfectly():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 2e6
    words = AutoTokenizer.from_pretrained(FOLDER)
    lm = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    assert words.decode(words("37+45=82").input_ids) == "37+45=82"
    sums = problems("held_out")
    easy = accuracy(lm, words, asked([s for s in sums if not s.carries]))
    hard = accuracy(lm, words, asked([s for s in sums if s.carries]))
    assert min(easy) > 0.95 and max(hard) < 0.5
    ids = torch.tensor([words("37+45=").input_ids])
    assert words.decode(lm.generate(ids, max_new_tokens=5)[0], skip_special_tokens=True) in (
        "37+45=82", "37+45=72",
    )  # fmt: skip


@pytest.mark.slow
def test_a_few_iterations_raise_held_out_accuracy_and_plain_transformers_agrees(tmp_path):
    """A quarter of the demo: at least 10 of the 20 points that the whole of it must bring."""
    train = {"iterations": 40, "lr": 3e-4}
    session = opened(tmp_path, train=train, evaluate={"samples": 400, "per_prompt": 1})
    before = evaluate_held_out(session.learner, session.held_out, session.judges)
    progress = Progress()
    for _ in range(10):
        iterate(session, progress)
    after = evaluate_held_out(session.learner, session.held_out, session.judges)
    assert 0.55 < before.metrics["exact_answer"] < 0.78
    assert after.metrics["exact_answer"] > before.metrics["exact_answer"] + 0.1
    checkpoint.export(session.learner, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    sums = [Addition(*map(int, p.rstrip("=").split("+"))) for p in after.samples.prompts]
    expected = accuracy(plain, words, asked(sums))[1]  # the mean probability of the right answer
    assert abs(expected - after.metrics["exact_answer"]) < 3 * 0.5 / 400**0.5


@pytest.mark.slow
def test_pre_training_runs(tmp_path):
    command = [sys.executable, "-m", "scripts.demo_models.pretrain_sums", "--quick"]
    command += ["--out", str(tmp_path / "lm"), "--prompts", str(tmp_path / "prompts")]
    subprocess.run(command, check=True, cwd=PROJECT, env=environment(), capture_output=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "lm").config.vocab_size == 14
    files = [f"sums_{name}.jsonl" for name in ("train", "held_out", "test")]
    for name in (*files, "questions_train.jsonl", "questions_held_out.jsonl"):
        made = (tmp_path / "prompts" / name).read_bytes()
        assert made == (PROJECT / "configs" / "prompts" / name).read_bytes()
