"""A file that is not what its name says: every reader of a user's file says what it is, and how to
get the right one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save_file

from flowrl.errors import UserError
from flowrl.evaluation.folders import caption_beside, find_items
from flowrl.evaluation.preferences import ReadOptions, load_preferences
from flowrl.evaluation.sources import Source, read_media
from flowrl.paths import PROJECT
from flowrl.prompts import DataSource, PromptSet
from flowrl.run.watch.start_check import check_start, refusals
from flowrl.settings import LanguageSettings, OwnSettings, PipelineSettings
from flowrl.settings.checks.machine import check_model
from flowrl.settings.file.strict_yaml import read_yaml
from flowrl.settings.read import run_from
from rewards.load import check_reward
from rewards.perception.contents import unlike_its_name
from rewards.perception.files import open_image_cell, open_image_file
from rewards.perception.references import read_references
from tests.support import runs, tiny_lm

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1320\n"
PAGE = (
    b"<!doctype html>\n<html class=''>\n<head>\n<title>data at main</title></head>\n"
    b"<body>\n<h1>Files</h1>\n</body>\n</html>\n"
)
STAND_INS = {
    "pointer": (POINTER, "is a pointer of Git LFS, without the data: run `git lfs pull`"),
    "page": (PAGE, "is an HTML page, not the file that the page is about: download"),
}


def prompts(file: Path) -> object:
    return PromptSet.of(DataSource(str(file), "prompt"), "prompts.train")


def folder_of_prompts(file: Path) -> object:
    return PromptSet.of(DataSource(str(file.parent), "prompt"), "prompts.train")


def preferences(file: Path) -> object:
    return load_preferences(file, ReadOptions())


def table_of_images(file: Path) -> object:
    Image.new("RGB", (4, 4)).save(file.parent / "a.png")
    return find_items(file.parent, None, "auto")


def caption(file: Path) -> object:
    Image.new("RGB", (4, 4)).save(file.with_suffix(".png"))
    return caption_beside(file.with_suffix(".png"), file.parent)


def sample(file: Path) -> object:
    """As `flowrl score`, `evaluate-rewards` and given samples read media."""
    read = read_media([Source(file.name, file)])
    if read.broken:
        raise UserError(str(read.broken[file.name]))
    return read.media


def sample_of_bytes(file: Path) -> object:
    read = read_media([Source(file.name, data=file.read_bytes())])
    if read.broken:
        raise UserError(str(read.broken[file.name]))
    return read.media


def reference(file: Path) -> object:
    with pytest.warns(UserWarning) as told:
        read_references("face:", [str(file)])
    raise UserError(str(told[0].message))


def own_weights(file: Path) -> object:
    points = PROJECT / "examples" / "own" / "points.py"
    return check_model(
        OwnSettings.model_validate({"own": f"{points}:Points", "weights": str(file)})
    )


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "prompts.txt": ("p.txt", prompts),
    "prompts.jsonl": ("p.jsonl", prompts),
    "prompts.json": ("p.json", prompts),
    "prompts.csv": ("p.csv", prompts),
    "prompts.tsv": ("p.tsv", prompts),
    "prompts.parquet": ("p.parquet", prompts),
    "a folder of prompts, parquet": ("p.parquet", folder_of_prompts),
    "a folder of prompts, jsonl": ("p.jsonl", folder_of_prompts),
    "preferences.jsonl": ("p.jsonl", preferences),
    "preferences.json": ("p.json", preferences),
    "preferences.csv": ("p.csv", preferences),
    "preferences.tsv": ("p.tsv", preferences),
    "preferences.parquet": ("p.parquet", preferences),
    "a table beside images": ("prompts.jsonl", table_of_images),
    "a caption beside an image": ("p.txt", caption),
    "an image to score": ("p.png", sample),
    "the bytes of an image to score": ("p.png", sample_of_bytes),
    "a video to score": ("p.mp4", sample),
    "the bytes of a video to score": ("p.mp4", sample_of_bytes),
    "an image of a prompt": ("p.jpg", lambda file: open_image_file(file)),
    "the bytes of an image": ("p.jpg", lambda file: open_image_cell(file.read_bytes())),
    "an image of a reward": ("p.webp", reference),
    "a run": ("run.yaml", read_yaml),
    "a reward": ("mine.py", lambda file: check_reward(f"{file}:score", {})),
    "weights of one's own model": ("own.safetensors", own_weights),
}


def kept_from(read: Callable[[Path], object], file: Path) -> str:
    with pytest.raises((UserError, ValueError)) as told:
        read(file)
    return str(told.value)


@pytest.mark.parametrize("what", STAND_INS)
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_says_what_a_file_is(reader: str, what: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    content, words = STAND_INS[what]
    file = tmp_path / "folder" / name
    file.parent.mkdir()
    file.write_bytes(content)
    said = kept_from(read, file)
    assert words in said and "\n" not in said and said.count(str(file)) <= 1, said


MODEL_FILES = {
    "the index": "model_index.json",
    "a configuration": "transformer/config.json",
    "weights": "vae/diffusion_pytorch_model.safetensors",
    "a scheduler's settings": "scheduler/scheduler_config.json",
    "a tokenizer": "tokenizer/tokenizer.json",
}


@pytest.mark.parametrize("what", STAND_INS)
@pytest.mark.parametrize("part", MODEL_FILES)
def test_a_file_of_a_pipeline_says_what_it_is(
    part: str, what: str, pipeline: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pipeline, tmp_path / "pipe"))
    content, words = STAND_INS[what]
    file = folder / MODEL_FILES[part]
    assert file.is_file(), sorted(folder.rglob("*"))
    file.write_bytes(content)
    said = kept_from(lambda f: check_model(PipelineSettings(pipeline=str(f))), folder)
    assert words in said and file.name in said


@pytest.mark.parametrize("what", STAND_INS)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
             "generation_config.json", "chat_template.jinja"],
)  # fmt: skip
def test_a_file_of_a_language_model_says_what_it_is(name: str, what: str, tmp_path: Path) -> None:
    folder = tiny_lm.write(tmp_path / "lm")
    content, words = STAND_INS[what]
    (folder / name).write_bytes(content)
    said = kept_from(lambda f: check_model(LanguageSettings(language=str(f))), folder)
    assert words in said and name in said


@pytest.mark.parametrize("what", STAND_INS)
@pytest.mark.parametrize("place", ["lora", "adapters"])
def test_an_adapter_says_what_it_is(place: str, what: str, pipeline: Path, tmp_path: Path) -> None:
    content, words = STAND_INS[what]
    file = tmp_path / "pytorch_lora_weights.safetensors"
    file.write_bytes(content)
    settings = runs.tree(pipeline, tmp_path, runs.NFT, self_test="off")
    settings["model"][place] = {"from": str(file)} if place == "lora" else [str(file)]
    run = run_from(settings, "test")
    for checked in (check_start, lambda run: check_model(run.model)):
        said = kept_from(lambda _, checked=checked: checked(run), file)
        assert words in said, said
    assert any(words in point for point in refusals(run))


FORMS = {
    "gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "is compressed by gzip: decompress it"),
    "zip": (b"PK\x03\x04\x14\x00\x00\x00", "is a zip archive"),
    "parquet": (b"PAR1\x15\x04\x15\x10", "is a parquet file: give it the ending .parquet"),
}


@pytest.mark.parametrize("what", FORMS)
@pytest.mark.parametrize("reader", [r for r in READERS if "bytes" not in r])
def test_a_reader_says_which_form_a_file_has(reader: str, what: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    content, words = FORMS[what]
    if what == "parquet" and name.endswith(".parquet"):
        pytest.skip("it is what its name says")
    file = tmp_path / "folder" / name
    file.parent.mkdir()
    file.write_bytes(content * 40)
    assert words in kept_from(read, file)


def test_a_photo_of_a_phone_says_that_it_is_one(tmp_path: Path) -> None:
    file = tmp_path / "IMG_0001.jpg"
    file.write_bytes(b"\x00\x00\x00\x24ftypheic\x00\x00\x00\x00mif1heic" + bytes(64))
    for read in (sample, open_image_file):
        assert "is a HEIC image, as phones write: convert it" in kept_from(read, file)


def test_what_is_as_its_name_says_is_not_accused(tmp_path: Path, pipeline: Path) -> None:
    """Files of this project, and prompts that speak of pages and pointers."""
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.jpg")
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    torch.save({"a": torch.zeros(2)}, tmp_path / "a.bin")
    torch.save({"a": torch.zeros(2)}, tmp_path / "a.pth.tar")
    (tmp_path / "a.txt").write_text("explain <html> and <!doctype html>\nversion https\n")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "<!doctype html><html>"}) + "\n")
    (tmp_path / "a.py").write_text('"""<html>"""\n')
    (tmp_path / "a.csv").write_text("prompt\na cat\n")
    parquet.write_table(pyarrow.table({"prompt": ["a cat"]}), tmp_path / "a.parquet")
    files = [*tmp_path.iterdir(), *(f for f in pipeline.rglob("*") if f.is_file())]
    assert len(files) > 20
    for file in files:
        assert unlike_its_name(file.name, file.read_bytes()[:1024]) is None, file
