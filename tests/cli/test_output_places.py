"""Places that nothing can be written to, for every command that writes: one sentence that names the
place and the way out, before weights load."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowrl.cli.new import _write as write_new
from flowrl.cli.out_folder import out_folder
from flowrl.errors import UserError
from flowrl.evaluation.outputs import check_output_file, make_output_folder
from flowrl.paths import new_numbered
from flowrl.run.start import reserve
from flowrl.settings import RunSettings
from flowrl.settings.read import run_from
from flowrl.whole_file import copy_folder
from tests.support import fuzz, runs
from tests.support.disks import mounted
from tests.support.rights import rights_hold
from tests.support.runs import flowrl
from tests.support.warm import small


@contextmanager
def locked(folder: Path, mode: int) -> Iterator[None]:
    """The folder with rights that hold, also for root."""
    folder.chmod(mode)
    try:
        with rights_hold():
            yield
    finally:
        folder.chmod(0o755)


def read_only(folder: Path) -> Path:
    folder.chmod(0o555)
    return folder / "x"


def itself_read_only(folder: Path) -> Path:
    (folder / "inside").mkdir()
    (folder / "inside").chmod(0o555)
    return folder / "inside"


def hidden(folder: Path) -> Path:
    folder.chmod(0)
    return folder / "x"


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("kept")
    return folder / "file" / "x"


def at_a_file(folder: Path) -> Path:
    (folder / "file").write_text("kept")
    return folder / "file"


def link_to_nothing(folder: Path) -> Path:
    (folder / "link").symlink_to("nowhere/at/all")
    return folder / "link"


def looped(folder: Path) -> Path:
    (folder / "link").symlink_to("link")
    return folder / "link"


CONDITIONS: dict[str, Callable[[Path], Path]] = {
    "read only": read_only,
    "itself read only": itself_read_only,
    "hidden": hidden,
    "below a file": below_a_file,
    "at a file": at_a_file,
    "a link to nothing": link_to_nothing,
    "a link to itself": looped,
    "a long name": lambda folder: folder / ("n" * 300),
    "a long path": lambda folder: folder.joinpath(*["n" * 200] * 25),
    "NUL": lambda folder: folder / "a\0b",
}
WAYS = ("choose another", "choose a shorter", "choose a new", "give a f", "change its rights")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> RunSettings:
    return run_from(small(pipeline, tmp_path_factory.mktemp("settings")), "test")


DOORS: dict[str, Callable[[Path, RunSettings], object]] = {
    "evaluate-rewards, score, fit-reward": lambda place, _: make_output_folder(place),
    "sample, export, convert, vote": lambda place, _: out_folder(place),
    "evaluate, report, compare, suites": lambda place, _: check_output_file(place, begins=b"{"),
    "new": lambda place, _: write_new(place, {"run.yaml": "a"}),
    "a numbered folder": lambda place, _: new_numbered(place, "x"),
    "train": lambda place, run: reserve(run, place, "x"),
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("door", DOORS)
def test_a_place_that_cannot_be_written_is_one_sentence(
    door: str, condition: str, tmp_path: Path, settings: RunSettings
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    try:
        place = CONDITIONS[condition](folder)
        with rights_hold(), pytest.raises((UserError, OSError)) as caught:
            DOORS[door](place, settings)
    finally:
        folder.chmod(0o755)
    said = sentence_of(caught.value)
    fuzz.one_sentence(said, most=6000)
    assert any(way in said for way in WAYS), said
    kept = folder / "file"
    assert not kept.exists() or kept.read_text() == "kept"


def sentence_of(error: BaseException) -> str:
    """What the command line prints of it; AssertionError where that would be a trace."""
    from flowrl.cli.app import _of_the_disk

    if isinstance(error, UserError):
        return str(error)
    assert isinstance(error, OSError)
    said = _of_the_disk(error)
    assert said is not None, repr(error)
    return said


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> Path:
    place = tmp_path_factory.mktemp("finished")
    tree = small(pipeline, place)
    tree["train"]["iterations"] = 1
    assert flowrl("train", runs.write(tree, place), "--folder", place / "run") == 0
    return place / "run"


PAIRS = "configs/preferences/pairs.jsonl"
CLIP = "{name: clip, model: flowrl/demo/shapes-clip}"
COMMANDS: dict[str, Callable[[Path, Path], tuple[str | Path, ...]]] = {
    "new": lambda _, out: ("new", out),
    "import": lambda _, out: (
        "import",
        "trl grpo --model_name_or_path m/m --dataset_name d/d --reward_funcs accuracy_reward",
        *("--of", "trl==1.16.0", "--devices", "1", "--out", out),
    ),
    "train": lambda run, out: ("train", run / "run.yaml", "--folder", out),
    "sample": lambda run, out: ("sample", run, "a red circle", "--out", out),
    "evaluate": lambda run, out: ("evaluate", run, "--out", out),
    "report": lambda run, out: ("report", run, "--out", out),
    "compare": lambda run, out: ("compare", run, run, "--out", out),
    "export": lambda run, out: ("export", run, "--out", out),
    "plan": lambda run, out: ("plan", run / "run.yaml", "--svg", out),
    "vote": lambda run, out: ("vote", run, "--out", out),
    "fit-reward": lambda _, out: ("fit-reward", PAIRS, "--features", CLIP, "--out", out),
    "evaluate-rewards": lambda _, out: (
        "evaluate-rewards",
        *(PAIRS, "--rewards", "brightness", "--out", out),
    ),
    "score": lambda run, out: (
        "score",
        *("configs/preferences", "--rewards", "brightness", "--out", out),
    ),
    "drill": lambda run, out: ("drill", run, "--yes", "--out", out),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_it_before_weights_load(
    command: str,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_models(*_: object) -> None:
        raise AssertionError("weights load")

    for module in ("flowrl.cli.given_model", "flowrl.cli.vote"):
        monkeypatch.setattr(f"{module}.load_models", load_models)
    folder = tmp_path / "folder"
    folder.mkdir()
    with locked(folder, 0o555):
        assert flowrl(*COMMANDS[command](finished, folder / "x")) == 2
    said = capsys.readouterr().err
    assert "permission denied: change its rights, or choose another place" in said
    assert "Traceback" not in said and not [*folder.iterdir()]


def test_a_drawing_takes_no_other_file_s_place(finished: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    assert flowrl("plan", finished / "run.yaml", "--svg", tmp_path / "notes.txt") == 2
    assert "is nothing that this command writes" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "kept"


def test_a_copy_on_a_full_disk_is_the_disk_s_error(tmp_path: Path) -> None:
    (tmp_path / "source" / "inner").mkdir(parents=True)
    (tmp_path / "source" / "inner" / "a").write_bytes(bytes(2**20))
    with mounted(tmp_path / "disk", "size=64k") as disk, pytest.raises(OSError) as caught:
        copy_folder(tmp_path / "source", disk / "copy")
    assert "no space left on device: make room" in sentence_of(caught.value)


def test_a_folder_of_a_command_may_have_a_line_end_in_its_name(tmp_path: Path) -> None:
    assert out_folder(tmp_path / "a\nb").is_dir()
    assert os.listdir(tmp_path) == ["a\nb"]
