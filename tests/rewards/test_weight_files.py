"""Every reader of a reward's weights says what is wrong with a file, in one sentence."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification, BertModel

import rewards
from rewards.catalogue import hps, safety, sequence_classifier
from rewards.fitted.folder import FittedFolder
from rewards.perception import weight_files
from rewards.perception.embedding import complete
from rewards.perception.pickled_module import tensors_of
from rewards.perception.weight_files import (
    safetensors_header,
    stored_in,
    tensor_shapes,
    weights_of_file,
)
from tests.test_contents import PAGE, POINTER

TINY = BertConfig(
    vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
)


def cut(whole: Path) -> bytes:
    return whole.read_bytes()[:-40]


DAMAGED: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "pointer": (lambda _: POINTER, "is a pointer of Git LFS, without the data: run `git lfs pull`"),
    "page": (lambda _: PAGE, "is an HTML page, not the file that the page is about: download"),
    "message": (
        lambda _: b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
        "is the error message of a storage service: download the file again",
    ),
    "gzip": (lambda _: b"\x1f\x8b\x08" + bytes(90), "is compressed by gzip: decompress it"),
    "nothing": (lambda _: b"", "is empty: download it again"),
    "cut off": (cut, "(download it again|cannot be loaded: )"),
}


def safetensors(folder: Path) -> Path:
    save_file({"a": torch.zeros(40)}, folder / "a.safetensors")
    return folder / "a.safetensors"


def torch_file(folder: Path) -> Path:
    torch.save({"state_dict": {"a": torch.zeros(40)}}, folder / "a.pth")
    return folder / "a.pth"


def pickled(folder: Path) -> Path:
    torch.save(torch.nn.Linear(8, 8), folder / "whole.pth")
    return folder / "whole.pth"


def model(folder: Path) -> Path:
    BertModel(TINY).save_pretrained(folder)
    return folder / "model.safetensors"


def older_model(folder: Path) -> Path:
    made = BertModel(TINY)
    made.config.save_pretrained(folder)
    torch.save(made.state_dict(), folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def shards(folder: Path) -> Path:
    BertModel(TINY).save_pretrained(folder, max_shard_size=400)
    return sorted(folder.glob("model-*.safetensors"))[1]


def classifier(folder: Path) -> Path:
    BertForSequenceClassification(TINY).save_pretrained(folder)
    return folder / "model.safetensors"


def head(folder: Path) -> Path:
    from rewards.fitted.folder import fitted_path

    for file in fitted_path("flowrl/demo/shapes-taste").iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder / "head.safetensors"


READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "safetensors": (safetensors, lambda file: weights_of_file("it", file)),
    "a torch file": (torch_file, lambda file: weights_of_file("it", file, "state_dict")),
    "whatever is stored": (torch_file, lambda file: stored_in("it", file)),
    "a pickled module": (pickled, lambda file: tensors_of("it", file)),
    "hps": (torch_file, lambda file: hps.weights_of("v2.1", str(file))),
    "a safety checker": (model, lambda file: safety.checker_weights(str(file.parent))),
    "a model": (model, lambda file: complete(BertModel.from_pretrained, str(file.parent))),
    "an older model": (
        older_model,
        lambda file: complete(BertModel.from_pretrained, str(file.parent)),
    ),
    "a model in parts": (
        shards,
        lambda file: complete(BertModel.from_pretrained, str(file.parent)),
    ),
    "a classifier": (classifier, lambda file: sequence_classifier.load(str(file.parent))),
    "a fitted head": (head, lambda file: FittedFolder.read(file.parent)),
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_of_weights_is_one_sentence(
    reader: str, damage: str, tmp_path: Path
) -> None:
    made, read = READERS[reader]
    file = made(tmp_path)
    content, words = DAMAGED[damage]
    file.write_bytes(content(file))
    with pytest.raises(ValueError, match=words) as told:
        read(file)
    said = str(told.value)
    assert "\n" not in said and str(tmp_path) in said and said.count(": it is") <= 1, said


def test_a_header_is_not_read_beyond_its_limit(tmp_path: Path, monkeypatch) -> None:
    """A header of spaces up to the limit is read; the file with one byte more is told by name."""
    monkeypatch.setattr(weight_files, "MOST_HEADER", 10_000)
    file = safetensors(tmp_path)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + length], content[8 + length :]
    for size, whole in ((10_000, True), (10_008, False)):
        file.write_bytes(size.to_bytes(8, "little") + header.ljust(size) + rest)
        if whole:
            assert weights_of_file("it", file).keys() == tensor_shapes(file).keys() == {"a"}
            continue
        assert safetensors_header(file) is None
        with pytest.raises(ValueError, match="has a header of 10008 bytes, more than 10000"):
            weights_of_file("it", file)


def test_a_torch_file_of_the_older_form_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.pth"
    torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    assert weights_of_file("it", file)["a"].tolist() == [1, 1]


def test_weights_beside_those_that_are_read_may_be_pointers(tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(POINTER)
    assert complete(BertModel.from_pretrained, str(tmp_path)).config.hidden_size == 4


READING = {"torch.load", "load_file", "load_model", "safe_open"}


def test_no_reward_reads_weights_past_the_checks() -> None:
    """Each file that calls a reader of weights itself asks what the file is before."""
    root = Path(rewards.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in READING:
                found.add(path.relative_to(root).as_posix())
            if isinstance(node, ast.keyword) and node.arg == "output_loading_info":
                found.add(path.relative_to(root).as_posix())
    assert found == {
        "perception/weight_files.py",
        "perception/pickled_module.py",
        "perception/embedding.py",
    }
