"""`flowrl convert`: single files in the names of original code become folders, to the bit."""

from pathlib import Path

import pytest
import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel  # type: ignore[attr-defined]
from safetensors.torch import save_file
from torch import Tensor

from flowrl.cli.convert import Convert, convert_file
from flowrl.errors import UserError
from tests.support.tiny_pipelines import NAMED

RENAMED = {
    "all_final_layer.2-1.": "final_layer.",
    "all_x_embedder.2-1.": "x_embedder.",
    "attention.to_out.0": "attention.out",
    "attention.norm_k": "attention.k_norm",
    "attention.norm_q": "attention.q_norm",
}


def original(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Z-Image's weights with the names of its original code."""
    made = {}
    for name, weight in state.items():
        if ".attention.to_k." in name or ".attention.to_v." in name:
            continue
        if ".attention.to_q." in name:
            weight = torch.cat([state[name.replace("to_q", f"to_{x}")] for x in "qkv"])
            name = name.replace("to_q", "qkv")
        for own, theirs in RENAMED.items():
            name = name.replace(own, theirs)
        made[name] = weight.contiguous()
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    NAMED["Z-Image"].build().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def single(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A file of other weights, and these by diffusers' names."""
    model = ZImageTransformer2DModel.from_pretrained(folder, subfolder="transformer")
    draws = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=draws)
    state = model.state_dict()
    file = folder.parent / "one.safetensors"
    save_file(original(state), file)
    return file, state


def test_a_denoisers_file_becomes_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file, state = single(folder)
    out = convert_file(Convert(file, folder, folder.parent / "out"))
    pipe = ZImagePipeline.from_pretrained(out, local_files_only=True)
    found = pipe.transformer.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_what_does_not_fit_is_a_sentence(folder: Path) -> None:
    file, out = folder.parent / "two.safetensors", folder.parent / "out"
    (folder.parent / "no.safetensors").write_bytes(b"x")
    save_file({"a.weight": torch.zeros(2)}, file)
    for given, why in (
        (Convert(folder.parent / "no.safetensors", folder, out), "is (no|not a) safetensors file"),
        (Convert(file, folder.parent / "nowhere", out), "--config: there is no folder"),
        (Convert(file, folder, out), "ZImageTransformer2DModel"),
    ):
        with pytest.raises(UserError, match=why):
            convert_file(given)
        assert not out.exists()
