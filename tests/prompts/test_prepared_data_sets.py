"""Hub data sets that are on this machine alone: prepared by `datasets` in a cache of its own, whose
files may be gone, damaged, locked or in a place that cannot be written; or only downloaded. Each
fault is one sentence that names the file and what helps; the ways out are tried."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import huggingface_hub
import pytest

from flowrl.errors import UserError
from flowrl.prompts import DataSource, PromptSet
from tests.support import fuzz
from tests.support.vanishing import Looks, fails, looking

NAME, COMMIT, ROWS = "owner/name", "0" * 40, 40
AGAIN = "remove the folder {}, and the next start makes it again from the hub"


class Cached(NamedTuple):
    root: Path  # of the cache of `datasets`
    prepared: Path  # the folder of the data set
    inside: Path  # its Arrow file and its description
    table: Path  # from which it was made

    @property
    def arrow(self) -> Path:
        return self.inside / "name-train.arrow"

    @property
    def info(self) -> Path:
        return self.inside / "dataset_info.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `datasets` prepares it, beside its table."""
    folder = tmp_path_factory.mktemp("made")
    table = folder / "train.jsonl"
    table.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(ROWS)))
    files = {"train": str(table)}
    builder = datasets.load_dataset_builder("json", data_files=files, cache_dir=str(folder / "c"))
    builder.download_and_prepare()
    Path(builder.cache_dir).rename(folder / "prepared")
    (folder / "prepared" / "json-train.arrow").rename(folder / "prepared" / "name-train.arrow")
    info = json.loads((folder / "prepared" / "dataset_info.json").read_text())
    info["dataset_name"] = "name"
    (folder / "prepared" / "dataset_info.json").write_text(json.dumps(info))
    return folder


@pytest.fixture
def cached(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cached:
    """The data set as an earlier start has prepared it, on a machine without a network."""
    root = tmp_path / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", root)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    inside = root / "owner___name" / "default" / "0.0.0" / "abcdef"
    inside.parent.mkdir(parents=True)
    shutil.copytree(made / "prepared", inside)
    return Cached(root, root / "owner___name", inside, made / "train.jsonl")


def read(**settings: Any) -> PromptSet:
    return PromptSet.of(DataSource(source=NAME, **settings), "prompts.train")


def refusal(**settings: Any) -> str:
    with pytest.raises(UserError) as refused:
        read(**settings)
    said = str(refused.value)
    fuzz.one_sentence(said, 700)
    assert said.startswith("prompts.train: owner/name cannot be read")
    return said


def cut(file: Path, end: int) -> None:
    file.write_bytes(file.read_bytes()[:end])


DAMAGES: dict[str, tuple[Callable[[Cached], None], str]] = {
    "the table gone": (lambda c: c.arrow.unlink(), "has no Arrow file of the split train"),
    "the table cut": (lambda c: cut(c.arrow, -200), "name-train.arrow is damaged"),
    "the table's begin": (lambda c: cut(c.arrow, 100), "name-train.arrow is damaged"),
    "the table empty": (lambda c: cut(c.arrow, 0), "name-train.arrow is damaged"),
    "a table of zeros": (lambda c: _zeros(c.arrow), "name-train.arrow is damaged"),
    "no table": (lambda c: _text(c.arrow, "<html>"), "name-train.arrow is damaged"),
    "the description gone": (lambda c: c.info.unlink(), "dataset_info.json is gone"),
    "the description cut": (lambda c: cut(c.info, 40), "dataset_info.json is damaged"),
    "the description empty": (lambda c: cut(c.info, 0), "dataset_info.json is damaged"),
    "another description": (lambda c: _text(c.info, "[]"), "dataset_info.json is damaged"),
}  # fmt: skip


def _zeros(file: Path) -> None:
    file.write_bytes(bytes(500))


def _text(file: Path, text: str) -> None:
    file.write_text(text)


def test_a_prepared_data_set_is_read(cached: Cached) -> None:
    assert len(read()) == ROWS


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_with_the_folder_to_remove(damage: str, cached: Cached) -> None:
    do, words = DAMAGES[damage]
    do(cached)
    said = refusal()
    assert words in said and said.endswith(AGAIN.format(cached.prepared)), said
    assert "hf download" not in said, "another download would not replace it"


def test_an_error_of_the_user_s_is_none_of_the_cache_s(cached: Cached) -> None:
    assert "Unknown split" in (said := refusal(split="nowhere")) and "remove" not in said


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("file", ["arrow", "info"])
def test_files_that_cannot_be_read_are_named(number: int, file: str, cached: Cached) -> None:
    """Locked, or on a disk that fails; libraries in C would not be stopped by rights as root."""
    at: Path = getattr(cached, file)
    if file == "arrow":
        cut(at, 100)  # which makes its reader in C fail before
    with looking(Looks(at, fails(number), at=1, lasting=True)):
        said = refusal()
    assert f"{at}, in the cache of `datasets`: {os.strerror(number).lower()}" in said, said


def downloaded(cached: Cached, **files: str) -> Path:
    """The data set as `hf download` leaves it; `datasets` has prepared nothing."""
    shutil.rmtree(cached.root)
    folder = Path(huggingface_hub.constants.HF_HUB_CACHE) / "datasets--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    shutil.copy(cached.table, snapshot / "train.jsonl")
    for name, text in files.items():
        (snapshot / name.replace("_", ".")).write_text(text)
    return snapshot


def test_a_download_is_read_without_a_network_as_its_advice_says(cached: Cached) -> None:
    shutil.rmtree(cached.root)
    assert "run `hf download --repo-type dataset owner/name` on a machine with" in refusal()
    cached.root.mkdir()
    snapshot = downloaded(cached)
    assert len(read()) == ROWS and len(read(revision=COMMIT)) == ROWS
    assert "run `hf download" in refusal(revision="1" * 40), "another revision than that"
    assert not cached.root.exists(), "it is read from the download alone"
    (snapshot / "train.jsonl").unlink()
    refusal()


@pytest.mark.parametrize("revision", ["v1", "1" * 40])
def test_the_command_downloads_the_revision_that_is_asked_for(
    revision: str, cached: Cached
) -> None:
    """The main branch is there already: the plain command would fetch it again, in vain."""
    main = downloaded(cached)
    command = f"run `hf download --repo-type dataset owner/name --revision {revision}` on a machine"
    assert command in refusal(revision=revision)
    shutil.copytree(main, main.with_name("1" * 40))
    if revision == "v1":  # the hub's client notes the commit of a name, and no commit's own
        (main.parents[1] / "refs" / revision).write_text("1" * 40)
    assert len(read(revision=revision)) == ROWS
    shutil.rmtree(main)
    assert len(read(revision=revision)) == ROWS, "nothing of the main branch is read"


@pytest.mark.parametrize("place", ["/etc/passwd", "../../outside.jsonl", "http://x.test/a.jsonl"])
def test_a_download_names_no_files_but_its_own(place: str, cached: Cached) -> None:
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {place}\n---\n"
    downloaded(cached, README_md=card)
    assert f"it names {place}, which is no file of its own" in refusal()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_cache_that_cannot_be_written_is_named(
    number: int, cached: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a data set is prepared for the first time."""
    shutil.rmtree(cached.root)

    def prepares(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(cached.prepared / "default"))

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr("flowrl.prompts.files._check_hub", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", prepares)
    said = refusal()
    folder = f"{cached.prepared / 'default'}, in the cache of `datasets`: "
    assert folder + os.strerror(number).lower() in said and "hf download" not in said, said
    assert said.endswith("or set HF_DATASETS_CACHE to another folder")
