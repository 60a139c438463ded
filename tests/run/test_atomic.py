"""Folders that are whole or not there, the best so far, and a reader that goes away."""

import errno
import os
import shutil
import socket
import stat
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flowrl.cli import app
from flowrl.errors import FolderInUse, UserError
from flowrl.models.diffusers.call.rows import encoding_cache
from flowrl.run.save import checkpoint
from flowrl.session import atomic
from flowrl.session.atomic import write_folder
from flowrl.session.progress import Progress
from tests.support import runs
from tests.support.advice import advice
from tests.support.disks import mounted
from tests.support.warm import small


def test_what_torch_and_safetensors_say_of_a_full_disk_is_one_sentence(tmp_path):
    with mounted(tmp_path / "disk", "size=4m") as disk:
        fill(disk)


def fill(disk: Path) -> None:
    write_folder(disk / "kept", lambda folder: (folder / "a").write_text("old"), listed=True)
    big = torch.zeros(2_000_000)
    writers = (
        lambda folder: torch.save(big, folder / "a"),
        lambda folder: save_file({"a": big}, folder / "a"),
        lambda folder: (folder / "a").write_bytes(bytes(8_000_000)),
    )
    for write in writers:
        with pytest.raises(UserError, match=r"kept could not be written: the disk is full"):
            write_folder(disk / "kept", write, listed=True)
        assert [path.name for path in disk.iterdir()] == ["kept"]
        assert (disk / "kept" / "a").read_text() == "old"
        assert atomic.damage(disk / "kept") is None


def test_files_are_on_the_disk_before_their_folder_has_its_name(tmp_path, monkeypatch):
    done, place = [], tmp_path / "000001"
    fsync, rename = atomic.to_disk, Path.rename
    monkeypatch.setattr(atomic, "to_disk", lambda p: (done.append(f"sync {p.name}"), fsync(p)))
    monkeypatch.setattr(
        Path, "rename", lambda a, b: (done.append(f"{a.name} -> {b.name}"), rename(a, b))[1]
    )
    write_folder(place, lambda folder: (folder / "weights").write_text("1"))
    tail = [".000001.tmp -> 000001", f"sync {tmp_path.name}"]
    assert done == ["sync weights", "sync .000001.tmp", *tail]
    done.clear()
    write_folder(place, lambda folder: (folder / "weights").write_text("2"))
    assert done[-3:] == ["000001 -> .000001.old", *tail]
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    def fails(folder: Path) -> None:
        (folder / "weights").write_text("2")
        raise OSError(errno.EIO, "broken disk")

    write_folder(tmp_path / "a", lambda folder: (folder / "weights").write_text("1"))
    with pytest.raises(UserError, match="broken disk"):
        write_folder(tmp_path / "a", fails)
    assert (tmp_path / "a" / "weights").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_base_without_a_score_is_not_the_best_for_ever(pipeline, tmp_path):
    kept = runs.session(pipeline, tmp_path, runs.FLOW_GRPO)
    progress = Progress()
    for iteration, score in ((0, float("nan")), (1, 0.2), (2, float("nan")), (3, 0.1)):
        progress.iteration = iteration
        checkpoint.keep_best(kept.learner, kept.folder, progress, score)
    assert progress.best == 0.2 and progress.best_iteration == 1


def test_whoever_stops_reading_is_not_told_of_it(monkeypatch, capfd):
    for words in (["--help"], ["recipes"], ["schema"]):
        reader, writer = os.pipe()
        os.close(reader)
        with monkeypatch.context() as closed, os.fdopen(writer, "w") as pipe:
            closed.setattr(sys, "stdout", pipe)
            with pytest.raises(SystemExit) as end:
                app.main(words)
            assert end.value.code == 141
    assert capfd.readouterr().err == ""


LACKING = [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS]


def without_locks(monkeypatch, code: int) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(atomic.fcntl, "flock", flock)


@pytest.mark.parametrize("code", LACKING)
def test_without_locks_the_lock_file_names_process_and_host(tmp_path, monkeypatch, code):
    """NFS without its lock service, Lustre without -o flock."""
    without_locks(monkeypatch, code)
    said: list[str] = []
    with atomic.held(tmp_path, said.append) as before:
        name = (tmp_path / ".lock").read_text()
        assert before is None and name == f"process {os.getpid()} on {socket.gethostname()}"
        assert len(said) == 1 and "has no locks" in said[0]
    assert (tmp_path / ".lock").read_text() == ""
    refused = {  # it lives, so that --wait waits for it; nobody knows, so that nothing waits
        "process 1 on " + socket.gethostname(): FolderInUse,
        "process 999999 on elsewhere": UserError,
    }
    for owner, kind in refused.items():
        (tmp_path / ".lock").write_text(owner)
        with (
            pytest.raises(UserError, match="if that process is gone, remove the file") as told,
            atomic.held(tmp_path, said.append),
        ):
            pass
        assert type(told.value) is kind
        assert (tmp_path / ".lock").read_text() == owner
    gone = f"process 999999999 on {socket.gethostname()}"
    (tmp_path / ".lock").write_text(gone)
    with atomic.held(tmp_path, said.append) as before:
        assert before == gone


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_folders_that_cannot_be_synced_are_written_all_the_same(tmp_path, monkeypatch, code):
    """FUSE and object stores."""
    fsync = os.fsync

    def of_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(handle)

    monkeypatch.setattr(atomic.os, "fsync", of_files)
    write_folder(tmp_path / "a", lambda folder: (folder / "weights").write_text("1"), listed=True)
    assert atomic.damage(tmp_path / "a") is None
    said: list[str] = []
    with atomic.held(tmp_path, said.append):
        assert len(said) == 1 and "cannot sync folders" in said[0]


@pytest.mark.parametrize(
    ("name", "found"), [("samples", "file"), ("adapter", "file"), ("metrics.jsonl", "folder")]
)
def test_a_file_where_a_folder_belongs_is_refused_before_training(tmp_path, name, found):
    (tmp_path / name).touch() if found == "file" else (tmp_path / name).mkdir()

    def held() -> None:
        with atomic.held(tmp_path):
            pass

    def moved() -> None:
        assert (tmp_path / name).exists()
        (tmp_path / name).rename(tmp_path / "elsewhere")
        held()

    advice("{} is a {}, but a run writes a {} there: move it away", held, moved)


def test_a_broken_disk_is_no_file_system_without_sync(tmp_path, monkeypatch):
    def broken(_: int) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(atomic.os, "fsync", broken)
    with pytest.raises(UserError, match="broken disk"):
        write_folder(tmp_path / "a", lambda folder: (folder / "weights").write_text("1"))


@pytest.mark.slow
@pytest.mark.parametrize("code", LACKING)
def test_a_run_trains_and_resumes_without_locks_and_sync(
    pipeline, tmp_path, monkeypatch, capsys, code
):
    def fsync(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    without_locks(monkeypatch, code)
    monkeypatch.setattr(atomic.os, "fsync", fsync)
    config = runs.write(small(pipeline, tmp_path), tmp_path)
    words = ("--train.iterations", "1")
    assert runs.flowrl("train", config, "--folder", tmp_path / "run", *words) == 0
    assert runs.flowrl("train", "--resume", tmp_path / "run", "--train.iterations", "2") == 0
    errors = capsys.readouterr().err
    assert errors.count("has no locks") == 2 and errors.count("cannot sync folders") == 2


@pytest.mark.parametrize("code", LACKING)
def test_encodings_find_a_folder_without_locks(tmp_path, monkeypatch, code):
    without_locks(monkeypatch, code)
    monkeypatch.setattr(encoding_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    folder, file = encoding_cache.new_folder()
    assert (folder / encoding_cache.LOCK).exists()
    file.close()
    shutil.rmtree(folder)


PLANTED = ["best", "checkpoints", "samples", ".lock", "metrics.jsonl", "adapter", "run.yaml"]
INSIDE = ["best/000007", "checkpoints/000009", "checkpoints/000001/state.json", "report/a.json"]


@pytest.fixture(scope="module")
def trained(pipeline, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("linked")
    config = runs.write(small(pipeline, place), place)
    words = ("--train.iterations", "1")
    assert runs.flowrl("train", config, "--folder", place / "run", *words) == 0
    return place / "run"


@pytest.mark.quick_cases("run.yaml", "metrics.jsonl", "checkpoints/000001/state.json", ".lock")
@pytest.mark.parametrize("name", [*PLANTED, *INSIDE])
def test_links_in_a_run_folder_are_refused_and_nothing_outside_is_touched(
    trained, tmp_path, capsys, name
):
    run, outside = tmp_path / "run", tmp_path / "outside"
    runs.copied_run(trained, run)
    (outside / "000007").mkdir(parents=True)
    (outside / "000007" / "file").write_text("mine")
    (outside / "file").write_text("mine")
    place, folder = run / name, "." not in Path(name).name[1:] and name != ".lock"
    if name == "run.yaml":
        shutil.copy(place, outside / "file")
    before = {path: path.read_bytes() for path in outside.rglob("file")}
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(outside if folder else outside / "file")
    assert runs.flowrl("train", "--resume", run, "--train.iterations", "2") == 2
    said = capsys.readouterr().err
    assert f"{place} is a link" in said and said.count("\n") == 1
    assert {path: path.read_bytes() for path in outside.rglob("file")} == before


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "checkpoints/000001/state.json"])
def test_pipes_in_a_run_folder_are_refused(trained, tmp_path, capsys, name):
    run = tmp_path / "run"
    runs.copied_run(trained, run)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert runs.flowrl("train", "--resume", run, "--train.iterations", "2") == 2
    assert "is not a plain file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_folder_may_itself_be_reached_by_a_link_and_trackers_have_links(trained, tmp_path):
    runs.copied_run(trained, tmp_path / "run")
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    (tmp_path / "run" / "wandb").mkdir()
    (tmp_path / "run" / "wandb" / "latest-run").symlink_to(tmp_path)
    words = ("--train.iterations", "2")
    assert runs.flowrl("train", "--resume", tmp_path / "latest", *words) == 0
