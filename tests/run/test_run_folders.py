"""Damaged run folders: a sentence, never a traceback, and nothing lost without a word."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.errors import NotFiniteError, UserError
from flowrl.run.save import checkpoint
from flowrl.run.show.lines import Lines
from flowrl.run.watch.alarms import Alarms
from flowrl.session import atomic
from flowrl.session import start_record as origin
from flowrl.session.progress import Progress
from flowrl.session.record import cut_back
from flowrl.session.session import Session
from flowrl.settings.read import run_of
from tests.support import fuzz, runs
from tests.support.runs import flowrl, lines
from tests.support.warm import small


@pytest.fixture(scope="module")
def finished(tmp_path_factory, pipeline) -> Path:
    place = tmp_path_factory.mktemp("finished")
    tree = small(pipeline, place)
    tree["train"]["iterations"] = 2
    assert flowrl("train", runs.write(tree, place), "--folder", place / "run") == 0
    return place / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    runs.copied_run(finished, tmp_path / "run")
    return tmp_path / "run"


def lists(folder: Path, text: str) -> None:
    (max((folder / "checkpoints").iterdir()) / "files.json").write_text(text)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "lock": (lambda run: (run / ".lock").write_bytes(b"\xff\xfe\n\x00x"), "removed the stale lock"),
    "empty list": (lambda run: lists(run, "[]"), "files.json is not a list of files"),
    "no sums": (
        lambda run: lists(run, '{"state.json": 3}'),
        "has no size and checksum for state.json",
    ),
    "nested": (lambda run: lists(run, "[" * 100_000), "files.json is not readable"),
    "superscript": (lambda run: (run / "checkpoints" / "0²").mkdir(), "resuming after iteration 2"),
    "not UTF-8": (
        lambda run: (run / "metrics.jsonl").write_bytes(
            b"\xff\xfe\n" + (run / "metrics.jsonl").read_bytes()
        ),
        "line 1 is damaged",
    ),
    "no iteration": (
        lambda run: (run / "metrics.jsonl").write_text(
            '{"reward": 1}\n' + (run / "metrics.jsonl").read_text()
        ),
        "line 1 is damaged",
    ),
}


QUICK = ("nested", "not UTF-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in DAMAGES]
)
def test_a_damaged_folder_is_resumed_with_a_sentence(run, capsys, name):
    harm, words = DAMAGES[name]
    harm(run)
    assert flowrl("train", "--resume", run) == 0
    shown = capsys.readouterr()
    assert words in shown.out + shown.err and "Traceback" not in shown.err
    assert [line["iteration"] for line in lines(run)] == [0, 1, 2]


def test_a_torn_line_loses_no_line_behind_it(tmp_path):
    warnings: list[str] = []
    written = ['{"iteration": 0}', '{"itera', "[1]", "null", '{"iteration": true}']
    written += ['{"iteration": 3}', '{"iteration": 4}', '{"iter']
    (tmp_path / "metrics.jsonl").write_text("\n".join(written))
    cut_back(tmp_path, 3, warnings.append)
    assert [line["iteration"] for line in lines(tmp_path)] == [0, 3]
    *damaged, missing = warnings
    assert [w.partition(" is damaged")[0].rpartition(", ")[2] for w in damaged] == [
        f"line {k}" for k in (2, 3, 4, 5)
    ]
    assert "has no line for iterations 1 to 2, of the 3" in missing


@pytest.mark.slow
def test_damage_of_the_best_weights_is_said(run, capsys):
    (best,) = (run / "best").iterdir()
    file = next(best.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert flowrl("train", "--resume", run, "--train.iterations", "3") == 0
    assert f"{best} is damaged ({file.name} has" in capsys.readouterr().err
    assert [path.name for path in (run / "best").iterdir()] == ["000003"]
    assert atomic.damage(run / "best" / "000003") is None


def test_the_older_best_stays_until_a_checkpoint_knows_of_the_new_one(
    pipeline, tmp_path, monkeypatch
):
    """Killed in between, a run came back to a checkpoint whose best weights were gone."""
    kept = runs.session(pipeline, tmp_path, runs.NFT)
    progress = Progress()
    checkpoint.keep_best(kept.learner, kept.folder, progress, 0.1)
    checkpoint.save_checkpoint(kept, progress, Alarms())
    progress.iteration = 1
    assert checkpoint.keep_best(kept.learner, kept.folder, progress, 0.2)
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["000000", "000001"]
    saved = json.loads((tmp_path / "checkpoints" / "000000" / "state.json").read_text())
    old = Progress(**saved["progress"])
    checkpoint.check_best(tmp_path, old, pytest.fail)
    assert old.best == 0.1
    checkpoint.save_checkpoint(kept, progress, Alarms())
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["000001"]
    shutil.copytree(tmp_path / "best" / "000001", tmp_path / "best" / "000007")
    checkpoint.drop_other_best(tmp_path, progress)  # as a resume does: a later one is done again
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["000001"]


VALUES = (
    None,
    0,
    -1,
    2.5,
    1e400,
    float("nan"),
    "",
    "x",
    [],
    {},
    [[]],
    True,
    10**30,
    [1, 2],
    {"a": 1},
)
METRICS = dict.fromkeys(("reward", "reward_std", "grad_norm", "seconds"), 0.5)
NAMES = ("0²", "9" * 30, "000009", "-1", "1.5", ".000003.tmp", "000001.old", "é", "x")


def damage_folder(folder: Path, rng: random.Random) -> None:
    """Change files of a run: their bytes, what they are, or values inside; half of the checkpoints
    get their sums again, so that what is in their files is read."""
    for _ in range(rng.randint(1, 3)):
        files = [p for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink()]
        path, how = rng.choice(files), rng.randrange(10)
        if how < 5:
            path.write_bytes(fuzz.damaged(path.read_bytes(), rng))
        elif how == 5:
            path.unlink()
            if rng.random() < 0.5:
                path.mkdir()
            elif rng.random() < 0.3:
                path.symlink_to(path.name)
        elif how == 6:
            where = rng.choice([folder, folder / "checkpoints", folder / "best"]) / rng.choice(
                NAMES
            )
            if not where.exists():
                where.write_text("[]") if rng.random() < 0.5 else where.mkdir()
        else:
            change_value(rng.choice(sorted(folder.glob("checkpoints/*/state.json")) or [path]), rng)
    if rng.random() < 0.5:
        for kept in folder.glob("checkpoints/0*"):
            if kept.is_dir() and not (kept / atomic.CONTENTS).is_dir():
                (kept / atomic.CONTENTS).unlink(missing_ok=True)  # it may be a link to itself
                (kept / atomic.CONTENTS).write_text(json.dumps(atomic.sums(kept)))


def change_value(path: Path, rng: random.Random) -> None:
    try:
        tree = json.loads(path.read_bytes())
        places = list(fuzz.nodes(tree))
    except (ValueError, OSError, AttributeError, TypeError):
        return
    if places:
        node, key = rng.choice(places)
        node[key] = rng.choice(VALUES)
        path.write_text(json.dumps(tree))


def read_folder(folder: Path, kept: Session) -> None:
    """Read all that a resume reads, in its order, and use what it found."""
    said: list[str] = []
    with atomic.held(folder):
        run, done, alarms = run_of(folder), -1, Alarms()
        newest = checkpoint.newest(folder, said.append)
        if newest is not None:
            said += origin.changes(run, folder, newest, 1)
            atomic.sweep(folder / "checkpoints")
            progress = checkpoint.restore(kept, newest, alarms)
            checkpoint.check_best(folder, progress, said.append)
            done = progress.iteration
        cut_back(folder, done, said.append)
        if newest is not None:
            checkpoint.drop_other_best(folder, progress)
            alarms.watch(dict.fromkeys((*METRICS, *(alarms.recent or [{}])[0]), 0.1), 1)
            alarms.compare(dict.fromkeys(alarms.base, 0.2), done + 1)
            alarms.constant(METRICS)
            Lines(kept.terminal, run.train.iterations).iteration(
                done + 1, METRICS, progress.seconds
            )
    for text in said:
        fuzz.one_sentence(text)


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(60, id="quick"), fuzz.SLOW])  # a folder a case
def test_a_damaged_folder_is_read_or_one_sentence(finished, count, tmp_path):
    kept = runs.session_of(run_of(finished), tmp_path / "session")
    folder = tmp_path / "run"

    def check(rng: random.Random) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        runs.copied_run(finished, folder)
        damage_folder(folder, rng)
        try:
            read_folder(folder, replace(kept, folder=folder))
        except (UserError, NotFiniteError) as error:
            fuzz.one_sentence(str(error))

    fuzz.cases(count, check)
