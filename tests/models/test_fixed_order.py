"""Equal weights have equal bytes, in whatever order a process writes the metadata."""

import json
from itertools import permutations
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowrl.models.fixed_order import fix_order

METADATA = {"format": "pt", "lora": json.dumps({"r": 4, "é": '"\\'}), "a": "é\n", "z": ""}


def written(folder: Path, order: tuple[str, ...]) -> bytes:
    """A file whose header has the metadata in this order."""
    folder.mkdir()
    file = folder / "x.safetensors"
    save_file({"b": torch.arange(6.0), "a": torch.ones(2, 3)}, file, metadata=METADATA)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = {name: METADATA[name] for name in order}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
    assert len(text) == length
    file.write_bytes(content[:8] + text + content[8 + length :])
    fix_order(folder)
    kept = load_file(file)
    assert kept["b"].tolist() == [0, 1, 2, 3, 4, 5] and kept["a"].sum() == 6
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == METADATA
    return file.read_bytes()


def test_metadata_have_one_order(tmp_path):
    orders = permutations(METADATA)
    assert len({written(tmp_path / str(i), order) for i, order in enumerate(orders)}) == 1


def test_files_without_metadata_stay_as_they_are(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, file)
    before = file.read_bytes()
    fix_order(tmp_path)
    assert file.read_bytes() == before
