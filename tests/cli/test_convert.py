"""`flowrl convert`: single files in the names of original code become folders, and folders such
files, to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (  # type: ignore[attr-defined]
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.cli import single_file
from flowrl.cli.convert import Convert, convert_file
from flowrl.errors import UserError
from flowrl.settings.checks.machine import check_pipeline
from tests.support.advice import advice
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
    out = convert_file(Convert(file, folder.parent / "out", folder))
    pipe = ZImagePipeline.from_pretrained(out, local_files_only=True)
    found = pipe.transformer.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_single_file_becomes_a_folder_as_its_message_says(folder: Path) -> None:
    """The command stands in the message."""
    file, _ = single(folder)
    with pytest.raises(UserError) as told:
        check_pipeline(str(file))
    _, command, *words = str(told.value).split("`")[3].split()
    assert command == "convert" and words == [str(file), *["--config", "FOLDER", "--out", "NEW"]]

    def converted() -> None:
        convert_file(Convert(file, folder.parent / "new", folder))
        check_pipeline(str(folder.parent / "new"))

    advice(
        "is a single file; give a folder in {}' format, as written by `save_pretrained`",
        lambda: check_pipeline(str(file)),
        converted,
    )


def test_what_does_not_fit_is_a_sentence(folder: Path) -> None:
    file, out = folder.parent / "two.safetensors", folder.parent / "out"
    (folder.parent / "no.safetensors").write_bytes(b"x")
    save_file({"a.weight": torch.zeros(2)}, file)
    for given, why in (
        (Convert(folder.parent / "no.safetensors", out, folder), "is (no|not a) safetensors file"),
        (Convert(file, out, folder.parent / "nowhere"), "--config: there is no folder"),
        (Convert(file, out, folder), "ZImageTransformer2DModel"),
        (Convert(file, out), "needs --config"),
        (Convert(folder, out, folder), "is a folder, which needs no --config"),
        (Convert(folder, out), "is no name of a safetensors file"),
        (Convert(folder, out / "one.safetensors"), "there is no folder"),
        (Convert(folder / "vae", folder.parent / "one.safetensors"), "model_index.json"),
    ):
        with pytest.raises(UserError, match=why):
            convert_file(given)
        assert not out.exists()


def with_other_weights(pipe: Any) -> dict[str, dict[str, Tensor]]:
    """Draw the weights of all denoisers, which constructors leave at 0 and 1 here and there."""
    draws = torch.Generator().manual_seed(0)
    denoisers = {name: vars(pipe).get(name) for name in ("transformer", "transformer_2")}
    states = {}
    for name, denoiser in denoisers.items():
        if denoiser is not None:
            for p in denoiser.parameters():
                p.data = torch.randn(p.shape, generator=draws).to(p.dtype)
            states[name] = denoiser.state_dict()
    return states


@pytest.mark.quick_cases("SD3", "Wan 2.2")
@pytest.mark.parametrize(
    "family",
    ["SD3", "FLUX.2", "Wan 2.1 image to video", "Wan 2.2", "Z-Image", "LTX-Video", "Qwen-Image"],
)
def test_a_folder_becomes_a_file_and_the_file_that_folder(family: str, tmp_path: Path) -> None:
    pipe = NAMED[family].build()
    states = with_other_weights(pipe)
    pipe.save_pretrained(tmp_path / "base")
    out = convert_file(Convert(tmp_path / "base", tmp_path / "one.safetensors"))
    for (name, state), file in zip(
        states.items(), (out, tmp_path / "one_2.safetensors"), strict=False
    ):
        kind = type(getattr(pipe, name))
        place = {"config": str(tmp_path / "base"), "subfolder": name}
        read = kind.from_single_file(str(file), local_files_only=True, **place).state_dict()
        assert all(torch.equal(read[key], weight) for key, weight in state.items())
        if family != "Qwen-Image":  # published in diffusers' names
            assert load_file(file).keys() != state.keys()


def test_a_folder_needs_no_config_and_its_file_a_new_name(tmp_path: Path) -> None:
    folder, file = tmp_path / "base", tmp_path / "one.safetensors"
    NAMED["SD3"].build().save_pretrained(folder)
    advice(
        "convert: {} is a folder, which needs no --config: leave it out",
        lambda: convert_file(Convert(folder, file, folder)),
        lambda: convert_file(Convert(folder, file)),
    )
    advice(
        "convert: {} exists: name another file, or remove it",
        lambda: convert_file(Convert(folder, file)),
        lambda: [
            convert_file(Convert(folder, tmp_path / "other.safetensors")),
            file.unlink(),
            convert_file(Convert(folder, file)),
        ],
    )


def test_what_does_not_fit_is_mended_as_the_message_says(tmp_path: Path) -> None:
    folder, file = tmp_path / "base", tmp_path / "one.safetensors"
    NAMED["SD3"].build().save_pretrained(folder)
    (tmp_path / "words.txt").write_text("no weights")

    def to_file(source: Path, out: Path) -> Path:
        file.unlink(missing_ok=True)
        return convert_file(Convert(source, out))

    advice(
        "is no name of a safetensors file, which {} becomes: end it with .safetensors",
        lambda: to_file(folder, tmp_path / "one"),
        lambda: to_file(folder, file),
    )
    advice(
        "convert: --out: there is no folder {}: make it first",
        lambda: to_file(folder, tmp_path / "new" / "one.safetensors"),
        lambda: [
            (tmp_path / "new").mkdir(),
            to_file(folder, tmp_path / "new" / "one.safetensors"),
        ],
    )
    (tmp_path / "bare").mkdir()
    index = (folder / "model_index.json").read_text()
    (tmp_path / "bare" / "model_index.json").write_text(index)
    advice(
        "convert: {} has no folder of a denoiser: name a pipeline's folder",
        lambda: to_file(tmp_path / "bare", file),
        lambda: to_file(folder, file),
    )
    advice(
        "convert: {} is no safetensors file: name one",
        lambda: convert_file(Convert(tmp_path / "words.txt", tmp_path / "out", folder)),
        lambda: convert_file(Convert(file, tmp_path / "out", folder)),
    )
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert index["text_encoder_3"] == [None, None], "a folder without T5 stays one"


def test_so_does_one_with_norms_and_a_second_attention(tmp_path: Path) -> None:
    """SD3.5's additions."""
    pipe = NAMED["SD3"].build()
    shape = {k: v for k, v in pipe.transformer.config.items() if not k.startswith("_")}
    shape |= {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}
    pipe.transformer = SD3Transformer2DModel(**shape)
    with_other_weights(pipe)
    pipe.save_pretrained(tmp_path / "base")
    out = convert_file(Convert(tmp_path / "base", tmp_path / "one.safetensors"))
    assert {"joint_blocks.0.x_block.attn2.ln_k.weight"} < load_file(out).keys()


def test_of_two_files_both_are_written_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NAMED["Wan 2.2"].build().save_pretrained(tmp_path / "base")
    given, second = Convert(tmp_path / "base", tmp_path / "one.safetensors"), "one_2.safetensors"
    (tmp_path / second).write_text("mine")
    with pytest.raises(UserError, match=r"one_2\.safetensors exists"):
        convert_file(given)
    assert (tmp_path / second).read_text() == "mine" and not given.out.exists()
    (tmp_path / second).unlink()
    answers = iter([iter(()), iter(["a weight has other values"])])
    monkeypatch.setattr(single_file, "_differing", lambda *_: next(answers))
    with pytest.raises(UserError, match="does not read back"):
        convert_file(given)
    assert not given.out.exists() and not (tmp_path / second).exists()


def test_a_damaged_folder_is_a_sentence(folder: Path) -> None:
    weights = next((folder / "transformer").glob("*.safetensors"))
    for content in (weights.read_bytes()[:-9], b"", b"<html>"):
        weights.write_bytes(content)
        with pytest.raises(UserError, match=rf"convert: .*{weights.parent.name}"):
            convert_file(Convert(folder, folder.parent / "one.safetensors"))
        assert not (folder.parent / "one.safetensors").exists()


@pytest.mark.slow  # diffusers reads FLUX.1 at its published width alone
def test_flux_at_its_own_width(tmp_path: Path) -> None:
    pipe = NAMED["FLUX.1"].build()
    config = {**pipe.transformer.config, "attention_head_dim": 128, "num_attention_heads": 24}
    config |= {"num_layers": 1, "num_single_layers": 1, "axes_dims_rope": (16, 56, 56)}
    pipe.transformer = FluxTransformer2DModel.from_config(config).to(torch.bfloat16)
    states = with_other_weights(pipe)
    pipe.save_pretrained(tmp_path / "base")
    out = convert_file(Convert(tmp_path / "base", tmp_path / "one.safetensors"))
    assert {weight.dtype for weight in load_file(out).values()} == {torch.bfloat16}
    assert sum(w.numel() for w in load_file(out).values()) == sum(
        w.numel() for w in states["transformer"].values()
    )


def test_a_file_that_is_not_read_back_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two halves of the last modulation in the wrong order, and a width that diffusers' reader
    does not expect."""
    for family in ("SD3", "FLUX.1", "Sana"):
        pipe = NAMED[family].build()
        with_other_weights(pipe)
        pipe.save_pretrained(tmp_path / family)
    monkeypatch.setattr(single_file, "_SWAPPED", ())
    for family, why in (
        ("SD3", r"norm_out\.linear\.weight has other values"),
        ("FLUX.1", "split_sizes"),
        ("Sana", "names of SanaTransformer2DModel's weights .* not known"),
    ):
        with pytest.raises(UserError, match=why):
            convert_file(Convert(tmp_path / family, tmp_path / "one.safetensors"))
        assert not (tmp_path / "one.safetensors").exists()


def test_the_right_kind_of_file_and_of_place_is_named(folder: Path) -> None:
    file, _ = single(folder)
    other = folder.parent / "notes.txt"
    other.write_text("no weights")
    read = advice(
        "is no safetensors file: name one",
        lambda: convert_file(Convert(other, folder.parent / "a", folder)),
        lambda: convert_file(Convert(file, folder.parent / "a", folder)),
    )
    assert (read / "model_index.json").is_file()
    for out in ("b", "b.bin"):
        written = advice(
            "is no name of a safetensors file, which {} becomes: end it with .safetensors",
            lambda name=out: convert_file(Convert(folder, folder.parent / name)),
            lambda name=out: convert_file(Convert(folder, folder.parent / f"{name}.safetensors")),
        )
        assert load_file(written)

    def made() -> Path:
        (folder.parent / "new").mkdir()
        return convert_file(Convert(folder, folder.parent / "new" / "one.safetensors"))

    assert load_file(
        advice(
            "convert: --out: there is no folder {}: make it first",
            lambda: convert_file(Convert(folder, folder.parent / "new" / "one.safetensors")),
            made,
        )
    )


@pytest.mark.parametrize("turned", ["into a file", "into a folder"])
def test_a_folder_without_a_denoiser_is_no_pipelines_folder(folder: Path, turned: str) -> None:
    file, _ = single(folder)
    lacking = folder.parent / "lacking"
    lacking.mkdir()
    (lacking / "model_index.json").write_bytes((folder / "model_index.json").read_bytes())

    def converted(pipeline: Path) -> Path:
        if turned == "into a file":
            return convert_file(Convert(pipeline, folder.parent / "two.safetensors"))
        return convert_file(Convert(file, folder.parent / "two", pipeline))

    advice(
        "has no folder of a denoiser: name a pipeline's folder",
        lambda: converted(lacking),
        lambda: converted(folder),
    )


def test_weights_in_another_form_are_saved_as_safetensors_first(tmp_path: Path) -> None:
    pipe = NAMED["Z-Image"].build()
    pipe.save_pretrained(tmp_path / "base", safe_serialization=False)

    def saved() -> Path:
        ZImagePipeline.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "safe")
        return convert_file(Convert(tmp_path / "safe", tmp_path / "one.safetensors"))

    written = advice(
        "has no safetensors files: save its pipeline with them",
        lambda: convert_file(Convert(tmp_path / "base", tmp_path / "one.safetensors")),
        saved,
    )
    assert load_file(written)


def test_a_model_whose_original_names_are_not_known_is_shared_as_a_folder(tmp_path: Path) -> None:
    pipe = NAMED["Sana"].build()
    pipe.save_pretrained(tmp_path / "base")
    read = advice(
        "weights in its original code are not known, only those of {}: share the folder, which",
        lambda: convert_file(Convert(tmp_path / "base", tmp_path / "one.safetensors")),
        lambda: type(pipe).from_pretrained(tmp_path / "base"),
    )
    states = (made.transformer.state_dict() for made in (pipe, read))
    one, other = states
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_of_two_denoisers_diffusers_writes_the_folder(tmp_path: Path) -> None:
    pipe = NAMED["Wan 2.2"].build()
    states = with_other_weights(pipe)
    pipe.save_pretrained(tmp_path / "base")
    file = convert_file(Convert(tmp_path / "base", tmp_path / "one.safetensors"))

    def by_diffusers() -> Path:
        first = type(pipe.transformer).from_single_file(
            str(file), config=str(tmp_path / "base"), subfolder="transformer", local_files_only=True
        )
        whole = type(pipe).from_pretrained(tmp_path / "base", transformer=first)
        whole.save_pretrained(tmp_path / "out")
        return tmp_path / "out"

    out = advice(
        "denoisers, and a file is read as the only one: write its folder with diffusers",
        lambda: convert_file(Convert(file, tmp_path / "new", tmp_path / "base")),
        by_diffusers,
    )
    read = type(pipe).from_pretrained(out)
    for name, state in states.items():
        found = getattr(read, name).state_dict()
        assert all(torch.equal(found[key], weight) for key, weight in state.items())
