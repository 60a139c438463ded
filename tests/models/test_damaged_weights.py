"""Damaged files of models, adapters and teachers: one sentence that names the file and the way on,
before anything loads, for every member and every damage of its form."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.errors import UserError
from flowrl.models.before_weights import check_before_weights
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.saved_weights import load_saved, tensors_and_settings
from flowrl.settings import PipelineSettings
from flowrl.settings.checks.machine import check_model
from flowrl.settings.checks.model_files import check_saved
from flowrl.settings.read import run_from
from rewards.perception.gguf_files import gguf_damage
from rewards.perception.weight_files import damage_of, stored_in
from tests.support import fuzz, runs, text_runs, tiny_lm
from tests.support.advice import advice
from tests.support.damages import ANY, HEADERS, MISFITS, TEXTS, TORCH, parts, put

WAYS = ("again", "load other weights", "put the file in its place", "give a", "unpack it")


@pytest.fixture(scope="module")
def sources(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole folders, by what they are."""
    place = tmp_path_factory.mktemp("whole")
    adapter = place / "adapter"
    adapter.mkdir()
    halves = {f"a.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    save_file(halves, adapter / "a.safetensors")
    (adapter / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 2}')
    older = Path(shutil.copytree(adapter, place / "older"))
    (older / "a.safetensors").unlink()
    torch.save({"a": torch.ones(40), "b": {"c": torch.ones(3)}}, older / "adapter_model.bin")
    language = tiny_lm.write(place / "lm")
    return {"pipeline": pipeline, "language": language, "adapter": adapter, "older": older}


def plan_pipeline(folder: Path) -> None:
    tree = runs.tree(folder, folder.parent, dict(runs.NFT))
    check_model(PipelineSettings(pipeline=str(folder)))
    check_before_weights(run_from(tree, "run"))


def plan_language(folder: Path) -> None:
    run = run_from(text_runs.tree(folder, folder.parent, dict(text_runs.GRPO)), "run")
    check_model(run.model)
    check_before_weights(run)


def saved(folder: Path) -> None:
    check_saved(folder, "the weights")


# whole folder, the file to damage, the check before anything loads, damages
MEMBERS: dict[str, tuple[str, str, Callable[[Path], None], dict[str, Any]]] = {
    "denoiser": (
        "pipeline",
        "transformer/diffusion_pytorch_model.safetensors",
        plan_pipeline,
        ANY | HEADERS | MISFITS,
    ),
    "encoder": (
        "pipeline",
        "text_encoder/model.safetensors",
        plan_pipeline,
        ANY
        | HEADERS
        | {n: d for n, d in MISFITS.items() if n in ("another shape", "whole numbers")},
    ),
    "decoder": (
        "pipeline",
        "vae/diffusion_pytorch_model.safetensors",
        plan_pipeline,
        ANY | HEADERS | MISFITS,
    ),
    "index": ("pipeline", "model_index.json", plan_pipeline, TEXTS),
    "configuration": ("pipeline", "transformer/config.json", plan_pipeline, TEXTS),
    "scheduler": ("pipeline", "scheduler/scheduler_config.json", plan_pipeline, TEXTS),
    "tokenizer": ("pipeline", "tokenizer/tokenizer_config.json", plan_pipeline, TEXTS),
    "language model": (
        "language",
        "model.safetensors",
        plan_language,
        ANY
        | HEADERS
        | {n: d for n, d in MISFITS.items() if n in ("another shape", "whole numbers")},
    ),
    "its configuration": (
        "language",
        "config.json",
        plan_language,
        TEXTS,
    ),
    "its tokenizer": ("language", "tokenizer.json", plan_language, TEXTS),
    "its generation": ("language", "generation_config.json", plan_language, TEXTS),
    "adapter": (
        "adapter",
        "a.safetensors",
        saved,
        ANY | HEADERS | {n: d for n, d in MISFITS.items() if n != "another shape"},
    ),
    "peft's form": ("older", "adapter_model.bin", saved, ANY | TORCH),
    "its settings": (
        "adapter",
        "adapter_config.json",
        saved,
        TEXTS,
    ),
}


def cases() -> Iterator[Any]:
    for member, (_, _, _, damages) in MEMBERS.items():
        for damage in damages:
            if member == "peft's form" and damage in ("a part less", "code", "repeats a number"):
                continue  # the archive is whole: its reader finds them, below
            yield pytest.param(member, damage, id=f"{member}, {damage}")


@pytest.mark.parametrize(("member", "damage"), list(cases()))
def test_a_damaged_file_is_one_sentence_before_anything_loads(
    member: str, damage: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    source, name, check, damages = MEMBERS[member]
    folder = Path(shutil.copytree(sources[source], tmp_path / "x"))
    damages[damage](folder / name)
    with fuzz.watched(), pytest.raises(UserError) as caught:
        check(folder)
    said = str(caught.value)
    fuzz.one_sentence(said, 900)
    assert str(folder) in said and any(way in said for way in WAYS), said


def test_whole_folders_are_taken(sources: dict[str, Path], tmp_path: Path) -> None:
    for name in sources:
        shutil.copytree(sources[name], tmp_path / name)
    plan_pipeline(tmp_path / "pipeline")
    plan_language(tmp_path / "language")
    saved(tmp_path / "adapter")
    saved(tmp_path / "older")


@pytest.mark.parametrize("damage", [*ANY, *TORCH])
def test_a_damaged_torch_file_is_read_as_one_sentence_within_bounds(
    damage: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.pt"
    torch.save({"a": torch.ones(4000), "b": {"c": [torch.ones(3)]}}, file)
    assert stored_in("it", file)["b"]["c"][0].tolist() == [1, 1, 1]
    {**ANY, **TORCH}[damage](file)
    with fuzz.watched(), pytest.raises(ValueError) as caught:
        stored_in("it", file)
    said = str(caught.value)
    assert str(file) in said and any(way in said for way in WAYS), said


SHARD = "diffusion_pytorch_model-0000{}-of-00002.safetensors"
INDEX = "diffusion_pytorch_model.safetensors.index.json"


def sharded(folder: Path) -> Path:
    """A pipeline whose denoiser is two shards with an index."""
    part = folder / "transformer"
    (file,) = part.glob("*.safetensors")
    tensors = load_file(file)
    names = sorted(tensors)
    listed = {name: SHARD.format(1 + i % 2) for i, name in enumerate(names)}
    for shard in set(listed.values()):
        inside = {name: tensors[name] for name in names if listed[name] == shard}
        save_file(inside, part / shard, metadata={"format": "pt"})
    file.unlink()
    (part / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))
    return part


def _listed(part: Path, change: Callable[[dict[str, str]], object]) -> None:
    tree = json.loads((part / INDEX).read_text())
    change(tree["weight_map"])
    (part / INDEX).write_text(json.dumps(tree))


SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard less": (lambda p: (p / SHARD.format(2)).unlink(), "lacks .*00002-of-00002"),
    "a shard more": (
        lambda p: shutil.copy(p / SHARD.format(1), p / SHARD.format(7)),
        "00007-of-00002.* does not name: remove it",
    ),
    "no index": (lambda p: (p / INDEX).unlink(), "but no .*index.json"),
    "an absent file": (
        lambda p: _listed(p, lambda m: m.update({next(iter(m)): "other.safetensors"})),
        "lacks other.safetensors",
    ),
    "a file elsewhere": (
        lambda p: _listed(p, lambda m: m.update({next(iter(m)): "../../etc/passwd"})),
        "is no file beside it",
    ),
    "another shard's tensor": (
        lambda p: _listed(p, lambda m: m.update({min(m): SHARD.format(2)})),
        "00002-of-00002.safetensors lacks .*, which .* says is in it",
    ),
    "no map": (lambda p: (p / INDEX).write_text("{}"), "names no weights"),
    "a nested index": (lambda p: (p / INDEX).write_text("[" * 99_999), "cannot be read"),
    "a shard cut off": (
        lambda p: (p / SHARD.format(1)).write_bytes((p / SHARD.format(1)).read_bytes()[:-4]),
        "has .* bytes instead of",
    ),
}


@pytest.mark.parametrize("damage", SHARDS)
def test_shards_and_their_index_fit_together(damage: str, pipeline: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pipeline, tmp_path / "x"))
    part = sharded(folder)
    check_model(PipelineSettings(pipeline=str(folder)))
    harm, words = SHARDS[damage]
    harm(part)
    with pytest.raises(UserError, match=words) as caught:
        check_model(PipelineSettings(pipeline=str(folder)))
    assert str(part) in str(caught.value)


def test_a_shard_that_no_index_names_is_removed_or_the_folder_fetched_again(
    pipeline: Path, tmp_path: Path
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "x"
    sharded(Path(shutil.copytree(pipeline, whole)))
    part = sharded(Path(shutil.copytree(pipeline, folder)))

    def fetched() -> None:
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)

    for followed in ((part / SHARD.format(7)).unlink, fetched):
        shutil.copy(part / SHARD.format(1), part / SHARD.format(7))
        advice(
            "{} has {}, which {} does not name: remove it if it is another model's, or download "
            "the folder again",
            lambda: check_model(PipelineSettings(pipeline=str(folder))),
            lambda followed=followed: (
                followed(),
                check_model(PipelineSettings(pipeline=str(folder))),
            ),
        )


def test_an_end_of_zeros_is_a_download_that_was_not_finished(tmp_path: Path) -> None:
    """A file of its full size, whose last eighth was never written."""
    file, numbers = tmp_path / "a.safetensors", 2**24
    header = {"a": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}}
    put(file, header, b"\x01" * 2**20)
    begin = file.stat().st_size - 2**20
    with file.open("r+b") as opened:
        opened.truncate(begin + 4 * numbers)
    assert "ends in zeros, as a download that was not finished" in damage_of(file)
    with file.open("r+b") as opened:
        opened.seek(begin + 4 * numbers - 2**16)
        opened.write(b"\x01" * 2**16)
    assert damage_of(file) == ""


def gguf(shape: tuple[int, ...] = (32, 2), *, data: int = 256, kind: int = 0) -> bytes:
    """A GGUF file with one setting of each form and one tensor."""

    def text(value: str) -> bytes:
        return len(value).to_bytes(8, "little") + value.encode()

    def number(value: int, size: int = 4) -> bytes:
        return value.to_bytes(size, "little")

    settings = [
        text("general.architecture") + number(8) + text("llama"),
        text("n") + number(4) + number(7),
        text("list") + number(9) + number(8) + number(2, 8) + text("a") + text("bc"),
        text("numbers") + number(9) + number(6) + number(3, 8) + bytes(12),
    ]
    tensor = text("a") + number(len(shape)) + b"".join(number(n, 8) for n in shape)
    head = b"GGUF" + number(3) + number(1, 8) + number(len(settings), 8) + b"".join(settings)
    head += tensor + number(kind) + number(0, 8)
    return head + bytes(-len(head) % 32) + bytes(data)


def test_a_gguf_file_says_how_long_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    whole = gguf()
    file.write_bytes(whole)
    assert damage_of(file) == ""
    file.write_bytes(gguf(data=64 * 34 // 32, kind=8))  # of blocks of 32 numbers in 34 bytes
    assert damage_of(file) == ""
    for cut in (whole[:-1], whole[:100], whole[:20], whole[:3], bytes(300), b"GGUF" + b"\xff" * 90):
        file.write_bytes(cut)
        with fuzz.watched():
            assert "download it again" in damage_of(file)
    with file.open("wb") as opened:
        opened.write(gguf(shape=(2**60, 2**60)))
    with file.open("rb") as opened:
        assert "instead of at least" in gguf_damage(opened, file.stat().st_size)


def test_an_adapters_settings_in_its_metadata_are_read_within_bounds(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    for text in ("[" * 100_000, "[]", "{", "nan"):
        save_file({"a": torch.ones(2)}, file, metadata={"about": text})
        with pytest.raises(UserError, match=r"it: .*a\.safetensors .*load other weights"):
            tensors_and_settings(file, "about", "it")
    save_file({"a": torch.ones(2)}, file, metadata={"about": '{"r": 2}'})
    assert tensors_and_settings(file, "about", "it")[1] == {"r": 2}


def test_what_a_library_raises_for_weights_is_a_sentence(tmp_path: Path) -> None:
    def fails() -> None:
        raise RuntimeError("size mismatch for a:\n copying a param")

    with pytest.raises(UserError, match=r"it: .* does not fit this model, .*load other weights"):
        load_saved(tmp_path, "it", fails)

    def exhausted() -> None:
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError):
        load_saved(tmp_path, "it", exhausted)


def test_a_header_without_tensors_beside_whole_files_is_one(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(0)}, file)
    header, data = parts(file)
    put(file, header, data)
    assert damage_of(file) == ""


@pytest.mark.parametrize(
    ("file", "entry", "value"),
    [
        ("tokenizer_config.json", "model_max_length", "many"),
        ("tokenizer_config.json", "model_max_length", [64]),
        ("generation_config.json", "eos_token_id", "</s>"),
        ("generation_config.json", "eos_token_id", [1, 2.5]),
        ("tokenizer.json", "model", {"type": "none that is known"}),
        ("tokenizer.json", "pre_tokenizer", 7),
    ],
)
def test_words_in_place_of_numbers_are_one_sentence(
    file: str, entry: str, value: object, sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sources["language"], tmp_path / "lm"))
    content = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps({**content, entry: value}))
    for read in (CausalPolicy.without_weights, _loaded):
        with pytest.raises(UserError, match="download"):
            read(str(folder))


def _loaded(folder: str) -> CausalPolicy:
    return CausalPolicy.load(folder, dtype=torch.float32, device=torch.device("cpu"))
