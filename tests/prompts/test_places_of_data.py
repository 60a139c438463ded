"""What a folder of prompts of a strange run leads to: by links, and by descriptions that `datasets`
follows. Each has a harmless twin, and the user's own folders may name what they like."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowrl.errors import UserError
from flowrl.prompts import files as reader
from flowrl.prompts.source import DataSource
from rewards.rights import Limits, Right, limited


def described(where: str, name: str = "README.md", key: str = "data_files") -> Callable:
    def put(data: Path, port: int) -> None:
        place = where.format(out=data.parents[1] / "outside", port=port)
        config = json.dumps([{"config_name": "default", key: place}])
        fence = "---\n" if name.endswith(".md") else ""
        (data / name).write_text(f"{fence}configs: {config}\n{fence}")

    return put


def file_link(data: Path, _: int) -> None:
    (data / "more.jsonl").symlink_to(data.parents[1] / "outside/rows.jsonl")


def folder_link(data: Path, _: int) -> None:
    (data / "more").symlink_to(data.parents[1] / "outside")


def pattern_through_a_link(data: Path, port: int) -> None:
    folder_link(data, port)
    described("more/*.jsonl")(data, port)


LEADING_OUT: dict[str, tuple[Right, Callable[[Path, int], None]]] = {
    "a link to a file": (Right.FILES, file_link),
    "a link to a folder": (Right.FILES, folder_link),
    "a pattern through a link": (Right.FILES, pattern_through_a_link),
    "a whole path": (Right.FILES, described("{out}/rows.jsonl")),
    "the folder above": (Right.FILES, described("../../outside/rows.jsonl")),
    "a folder": (Right.FILES, described("{out}", key="data_dir")),
    "the other description": (Right.FILES, described("{out}/rows.jsonl", ".huggingface.yaml")),
    "an address": (Right.NETWORK, described("http://127.0.0.1:{port}/rows.jsonl")),
    "another repository": (Right.NETWORK, described("hf://datasets/owner/name/rows.jsonl")),
    "a file by an address": (Right.NETWORK, described("file://{out}/rows.jsonl")),
    "an archive": (Right.NETWORK, described("zip://rows.jsonl::http://127.0.0.1:{port}/a.zip")),
}
TWINS: dict[str, Callable[[Path, int], object]] = {
    "nothing": lambda data, _: None,
    "a file of its own": described("train.jsonl"),
    "its own description": described("*.jsonl", ".huggingface.yaml"),
    "a link within": lambda data, _: (data / "b.jsonl").symlink_to(data / "train.jsonl"),
    "a page without settings": lambda data, _: (data / "README.md").write_text("# Prompts\n"),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for folder in ("run/data", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run/data/train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "outside/rows.jsonl").write_text('{"prompt": "canary"}\n')
    return tmp_path / "run"


def read(run: Path) -> set[str]:
    rows = reader.read_rows(DataSource(str(run / "data")), "prompts.train").rows
    return {str(row["prompt"]) for row in rows}


@pytest.mark.parametrize("name", LEADING_OUT)
def test_a_strange_folder_leads_to_nothing_outside(name: str, run: Path) -> None:
    right, put = LEADING_OUT[name]
    others = frozenset(Right) - {right}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        put(run / "data", listener.getsockname()[1])
        with (
            limited(Limits(run, others)),
            pytest.raises(UserError, match=f"prompts.train: .* needs the right to {right}"),
        ):
            read(run)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("name", TWINS)
def test_a_folder_that_names_its_own_files_is_read(name: str, run: Path) -> None:
    TWINS[name](run / "data", 9)
    with limited(Limits(run)):
        assert read(run) == {"a"}


@pytest.mark.parametrize("granted", [None, Right.FILES])
def test_what_the_user_grants_is_read(granted: Right | None, run: Path) -> None:
    described("{out}/rows.jsonl")(run / "data", 9)
    with limited(None if granted is None else Limits(run, frozenset({granted}))):
        assert read(run) == {"canary"}


@pytest.mark.parametrize("name", ["data.py", "an address"])
def test_what_datasets_cannot_read_is_a_sentence(name: str, run: Path) -> None:
    if name == "data.py":  # a script of older versions, which is never run
        (run / "data/data.py").write_text("raise SystemExit\n")
    else:
        described("http://127.0.0.1:9/rows.jsonl")(run / "data", 9)
    with pytest.raises(UserError, match=r"prompts.train: .* cannot be read: "):
        read(run)


@pytest.mark.parametrize("file", ["/etc/passwd", "file:///etc/passwd", "zip://a::/etc/b.zip"])
def test_a_data_set_of_the_hub_names_no_file_of_this_machine(file: str) -> None:
    """In a run of the user's too: the hub's files are somebody else's."""

    def builder(*files: str) -> SimpleNamespace:
        return SimpleNamespace(config=SimpleNamespace(data_files={"train": list(files)}))

    own = "hf://datasets/owner/name@1a2b/rows.jsonl"
    reader._check_on_hub(builder(own), "prompts.train")
    with pytest.raises(ValueError, match="which is no file of its own"):
        reader._check_on_hub(builder(own, file), "prompts.train")


def test_a_data_set_of_the_hub_names_no_address_without_the_right(tmp_path: Path) -> None:
    config = SimpleNamespace(data_files={"train": ["http://127.0.0.1:9/rows.jsonl"]})
    with limited(Limits(tmp_path)), pytest.raises(UserError, match="needs the right to network"):
        reader._check_on_hub(SimpleNamespace(config=config), "prompts.train")
