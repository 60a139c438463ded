"""Files of a hub data set that unpack to more than anybody meant, refused before they are."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pytest
from pyarrow import parquet

from flowrl.errors import UserError
from flowrl.prompts import unpacked
from flowrl.prompts.files import read_rows
from flowrl.prompts.source import DataSource
from tests.support import fuzz
from tests.support.advice import advice

SIZE = 20 * 2**20  # of nothing, above the bound of the test
BOUND = 2**20


def bytes_of(content: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(content) and None


def zipped(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", bytes(SIZE))


def tar_of(size: int) -> bytes:
    store = io.BytesIO()
    with tarfile.open(fileobj=store, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = size
        archive.addfile(member, io.BytesIO(bytes(size)))
    return store.getvalue()


def sparse(file: Path) -> None:
    """A terabyte of nothing, as GNU's tar stores it: a header alone."""
    member = tarfile.TarInfo("a.txt")
    member.size = 2**40
    file.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def equal_texts(file: Path) -> None:
    """The header of this file counts its text once."""
    indices = pyarrow.array([0] * 100, pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x" * 300_000]))
    parquet.write_table(pyarrow.table({"prompt": column}), file, compression="zstd")


PACKED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "gzip": ("a.jsonl.gz", bytes_of(gzip.compress(bytes(SIZE)))),
    "bzip2": ("a.jsonl.bz2", bytes_of(bz2.compress(bytes(SIZE)))),
    "xz": ("a.jsonl.xz", bytes_of(lzma.compress(bytes(SIZE)))),
    "zip": ("a.zip", zipped),
    "tar in gzip": ("a.tar.gz", bytes_of(gzip.compress(tar_of(SIZE)))),
    "sparse tar": ("a.tar", sparse),
    "equal texts of parquet": ("a.parquet", equal_texts),
}


HUB = "hf://datasets/owner/name@1a2b/"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub data set whose files are those of a folder; `datasets` has unpacked none of it."""

    builder_of_folder = datasets.load_dataset_builder

    def builder(name: str, *_: Any, **settings: Any) -> Any:
        if name != "owner/name":
            return builder_of_folder(name, **settings)
        files = {"train": [HUB + file.name for file in sorted(tmp_path.iterdir())]}
        config = SimpleNamespace(data_files=files)
        return SimpleNamespace(config=config, cache_dir=str(tmp_path / "not there"))

    def load(*_: object, **__: object) -> datasets.Dataset:
        return datasets.Dataset.from_list([{"prompt": "unpacked"}])

    def download(_: object, places: list[str]) -> list[str]:
        return [str(tmp_path / place.removeprefix(HUB)) for place in places]

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets.DownloadManager, "download", download)
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(unpacked, "ALWAYS", BOUND)
    return tmp_path


@pytest.mark.parametrize("form", PACKED)
def test_a_small_file_with_large_contents_is_refused_and_the_setting_lets_it_pass(
    form: str, hub: Path
) -> None:
    name, put = PACKED[form]
    put(hub / name)
    assert (hub / name).stat().st_size < 2**18
    with fuzz.watched(), pytest.raises(UserError) as caught:
        read_rows(DataSource("owner/name"), "prompts.train")
    said = str(caught.value)
    fuzz.one_sentence(said)
    assert said.startswith("prompts.train: owner/name: its ")
    if form != "sparse tar":  # a terabyte of which the archive has nothing
        allowed = advice(
            "its {} MiB unpack to more than {} GiB: if that is right, set unpacked to the GiB",
            lambda: read_rows(DataSource("owner/name"), "prompts.train"),
            lambda: read_rows(DataSource("owner/name", unpacked=1.0), "prompts.train"),
        )
        assert allowed.rows[0]["prompt"] == "unpacked"


@pytest.mark.parametrize(
    "content", [b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"7z\xbc\xaf\x27\x1c"]
)
def test_a_form_that_cannot_be_counted_is_read_once_unpacked(
    content: bytes, hub: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (hub / "a.jsonl.zst").write_bytes(content + bytes(9))
    folder = tmp_path_factory.mktemp("unpacked")  # where the user unpacks what is downloaded
    (folder / "a.jsonl").write_text('{"prompt": "by hand"}\n')
    rows = advice(
        "cannot be known before it is unpacked: download the data set, unpack it, and give the",
        lambda: read_rows(DataSource("owner/name"), "prompts.train"),
        lambda: read_rows(DataSource(str(folder)), "prompts.train").rows,
    )
    assert rows == [{"prompt": "by hand"}]


def test_a_damaged_archive_is_downloaded_again(hub: Path) -> None:
    whole = gzip.compress(b"a" * 1000)
    (hub / "a.jsonl.gz").write_bytes(whole[:-9])

    def followed() -> object:
        (hub / "a.jsonl.gz").write_bytes(whole)
        return read_rows(DataSource("owner/name"), "prompts.train").rows

    assert advice(
        "{} is damaged ({}): download it again",
        lambda: read_rows(DataSource("owner/name"), "prompts.train"),
        followed,
    ) == [{"prompt": "unpacked"}]


def test_texts_that_shrink_as_texts_do_are_read(hub: Path) -> None:
    lines = "".join(f'{{"prompt": "a {n} of {n * n}"}}\n' for n in range(100_000)).encode()
    (hub / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    assert len(lines) > BOUND
    assert read_rows(DataSource("owner/name"), "prompts.train").rows[0]["prompt"] == "unpacked"
