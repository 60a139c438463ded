"""What is refused before weights load: a model's own files, and images in prompt rows."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowrl.errors import UserError
from flowrl.models import image_check
from flowrl.models.description import describe
from flowrl.models.diffusers.call.inputs.columns import GivenForm, extras
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.image_check import check_images
from flowrl.models.language.policy import CausalPolicy
from flowrl.paths import find
from flowrl.prompts import PromptSet
from flowrl.prompts.prompt_set import PromptRow
from flowrl.run.watch.start_check import check_start, refusals
from flowrl.settings import LanguageSettings, PipelineSettings
from flowrl.settings.checks.machine import check_model
from flowrl.settings.read import override, read_run, run_from
from tests.support import runs, tiny_lm
from tests.support.advice import advice

CPU = torch.device("cpu")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n"


@pytest.fixture
def copied(pipeline: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pipeline, tmp_path / "pipe"))


def weights(folder: Path, part: str) -> Path:
    return next((folder / part).glob("*.safetensors"))


def load(folder: Path) -> PipelinePolicy:
    return PipelinePolicy.load(str(folder), dtype=torch.float32, device=CPU, call={})


def shards(folder: Path) -> None:
    file = weights(folder, "transformer")
    part = "diffusion_pytorch_model-0000{}-of-00002.safetensors"
    names = sorted(load_file(file))
    listed = {name: part.format(1 + (i % 2)) for i, name in enumerate(names)}
    file.rename(file.with_name(part.format(1)))
    index = file.with_name("diffusion_pytorch_model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": listed}))


def cut(folder: Path) -> None:
    file = weights(folder, "vae")
    file.write_bytes(file.read_bytes()[:-9])


def variant(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        file.rename(file.with_suffix(".fp16.safetensors"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (variant, "has only weights of the variant fp16: load the model with variant='fp16'"),
        (shards, "transformer lacks diffusion_pytorch_model-00002-of-00002.safetensors"),
        (cut, r"has \d+ bytes instead of \d+: download it again"),
        (lambda p: weights(p, "vae").unlink(), "vae has no weights"),
        (lambda p: weights(p, "text_encoder").write_text(POINTER), "is a pointer of Git LFS"),
        (lambda p: weights(p, "text_encoder").write_bytes(b"\x09"), "is not a safetensors file"),
        (lambda p: (p / "vae/config.json").write_text("{"), "vae/config.json cannot be read"),
        (lambda p: (p / "model_index.json").write_text("{"), "model_index.json cannot be read"),
        (lambda p: (p / "model_index.json").write_text("[]"), "does not hold a JSON object"),
    ],
)
def test_a_pipelines_damaged_files_are_named_before_any_weights(copied, damage, sentence):
    check_model(PipelineSettings(pipeline=str(copied)))
    damage(copied)
    with pytest.raises(UserError, match=sentence):
        check_model(PipelineSettings(pipeline=str(copied)))


@pytest.mark.parametrize("name", [["mine", "Mine"], "NoSuchPipeline"])
def test_an_estimate_names_an_unknown_class(copied: Path, name: Any) -> None:
    index = json.loads((copied / "model_index.json").read_text())
    (copied / "model_index.json").write_text(json.dumps(index | {"_class_name": name}))
    with pytest.raises(UserError, match=r"must name a class of diffusers|has no NoSuchPipeline"):
        describe(PipelineSettings(pipeline=str(copied)))


def without_one(folder: Path, part: str, name: str) -> str:
    file = weights(folder, part)
    state = load_file(file)
    found = next(key for key in state if name in key)
    save_file({k: v for k, v in state.items() if k != found}, file, metadata={"format": "pt"})
    return found


@pytest.mark.parametrize(
    ("part", "name"),
    [("text_encoder", "q_proj.weight"), ("transformer", "to_q.weight"), ("vae", "decoder.")],
)
def test_missing_weights_of_a_component_are_not_random_numbers(copied, part, name):
    missing = without_one(copied, part, name)
    with pytest.raises(UserError, match=rf"lack weights of \w+, which would be random: {missing}"):
        load(copied)


def test_missing_weights_of_a_language_model_are_not_random_numbers(tmp_path: Path) -> None:
    source = tiny_lm.write(tmp_path / "lm")
    CausalPolicy.load(str(source), dtype=torch.float32, device=CPU)
    missing = without_one(source, ".", "q_proj.weight")
    with pytest.raises(UserError, match=f"would be random: {missing}"):
        CausalPolicy.load(str(source), dtype=torch.float32, device=CPU)
    assert AutoModelForCausalLM.from_pretrained(source) is not None, "transformers accepts it"


def test_weights_of_another_model_are_replaced_by_the_models_own(
    copied: Path, tmp_path: Path
) -> None:
    file = weights(copied, "transformer")
    right, state = file.read_bytes(), load_file(file)
    name = next(key for key in state if key.endswith("proj_out.weight"))
    save_file(state | {name: state[name].repeat(2, 1)}, file, metadata={"format": "pt"})
    run = run_from(runs.tree(copied, tmp_path, runs.FLOW_GRPO), "test")
    advice(
        "it belongs to another model; download the folder again",
        lambda: check_start(run),
        lambda: (file.write_bytes(right), check_start(run)),
    )


def test_a_configuration_of_no_class_is_replaced_by_the_models_own(
    copied: Path, tmp_path: Path
) -> None:
    file = copied / "transformer" / "config.json"
    right = file.read_text()
    file.write_text(json.dumps(json.loads(right) | {"_class_name": "NoSuchTransformer"}))
    run = run_from(runs.tree(copied, tmp_path, runs.FLOW_GRPO), "test")
    advice(
        "/config.json names no class of diffusers {} (_class_name): download it again",
        lambda: check_start(run),
        lambda: (file.write_text(right), check_start(run)),
    )


def test_other_errors_while_loading_are_sentences(copied: Path) -> None:
    shutil.rmtree(copied / "scheduler")
    with pytest.raises(UserError, match=f"model.pipeline: {copied} cannot be loaded: .*scheduler"):
        load(copied)


def rows(folder: Path, *images: Any) -> Path:
    file = folder / "rows.jsonl"
    listed = [{"prompt": "make it red"} | ({} if i is None else {"image": i}) for i in images]
    file.write_text("".join(json.dumps(row) + "\n" for row in listed))
    return file


@pytest.fixture
def picture(tmp_path: Path) -> str:
    pixels = torch.randint(0, 256, (8, 8, 3), generator=torch.Generator().manual_seed(0))
    Image.fromarray(pixels.byte().numpy()).save(tmp_path / "fine.png")
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty.png").touch()
    (tmp_path / "cut.png").write_bytes((tmp_path / "fine.png").read_bytes()[:150])
    return str(tmp_path / "fine.png")


@pytest.mark.quick_cases("xywh", "None-line", "nosuch")
@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ("nosuch.png", "line 2, image: nosuch.png: no such file"),
        ("text.png", "line 2, image: .*text.png: not a PNG, JPEG or WebP image"),
        ("empty.png", "line 2, image: .*empty.png: an empty file"),
        ("cut.png", "line 2, image: .*cut.png: not a readable image"),
        ("fine.png#xywh=0,0,9,9", "line 2, image: .*lies outside the image of 8 x 8"),
        (["fine.png", "text.png"], "line 2, image: .*text.png"),
        (None, "line 2 has no image, but other prompts do"),
    ],
)
def test_images_of_prompts_are_read_before_weights(tmp_path, picture, second, sentence):
    file = rows(tmp_path, "fine.png", second)
    edits = read_run(find("configs/demo_edit.yaml"))
    for place in ("train", "held_out"):
        run = override(edits, [f"--prompts.{place}", str(file)])
        with pytest.raises(UserError, match=sentence):
            check_start(run)
        assert any("line 2" in point for point in refusals(run))


NO_FILE = "no file: expected a path, or {bytes, path}"
CELLS: dict[str, tuple[Any, str]] = {
    "no bytes": ({"bytes": b"", "path": None}, "bytes: an empty file"),
    "no bytes of a name": ({"bytes": b"", "path": "fine.png"}, "fine.png: an empty file"),
    "neither bytes nor a path": ({"bytes": None, "path": None}, NO_FILE),
    "another mapping": ({"url": "fine.png"}, NO_FILE),
    "a number": (7, NO_FILE),
    "what pandas has for nothing": (float("nan"), NO_FILE),
    "one of several": (["fine.png", {"bytes": None, "path": None}], NO_FILE),
    "an address": ("https://example.org/a.png", "an address, and images are read from files: "),
    "an image as a text": ("data:image/png;base64,AAAA", "an image written as a text: decode it"),
}


@pytest.mark.parametrize("case", CELLS)
def test_a_cell_without_an_image_is_refused_before_weights_in_the_models_words(
    case: str, tmp_path: Path, picture: str
) -> None:
    cell, says = CELLS[case]
    cell = [picture, *cell[1:]] if isinstance(cell, list) else cell
    meta = tuple(PromptRow({"image": each}, f"rows, {i}") for i, each in enumerate([picture, cell]))
    model = PipelineSettings(pipeline="flowrl/demo/edits-kontext")
    with pytest.raises(UserError) as before:
        check_images(model, PromptSet(("a", "b"), meta))
    with pytest.raises(UserError) as later:
        extras(meta, ["image"], GivenForm())
    assert says in str(before.value)
    assert str(before.value).startswith("rows, 1, image: ") and str(later.value).endswith(
        str(before.value).removeprefix("rows, 1, image: ")
    )


def test_a_whole_image_in_place_of_a_path_is_not_printed(tmp_path: Path) -> None:
    meta = (PromptRow({"image": f"data:image/png;base64,{'A' * 5000}"}, "rows, 1"),)
    with pytest.raises(UserError) as refused:
        check_images(
            PipelineSettings(pipeline="flowrl/demo/edits-kontext"), PromptSet(("a",), meta)
        )
    assert len(str(refused.value)) < 500


def test_of_many_images_the_header_is_read(tmp_path, picture, monkeypatch):
    monkeypatch.setattr(image_check, "DECODED", 1)
    model = PipelineSettings(pipeline="flowrl/demo/edits-kontext")

    def check(*images: str) -> None:
        check_images(model, PromptSet.read(str(rows(tmp_path, *images)), "prompt", "test"))

    check("fine.png", "cut.png")  # its header is whole
    with pytest.raises(UserError, match=r"text\.png: not a PNG"):
        check("fine.png", "text.png")
    with pytest.raises(UserError, match=r"cut\.png: not a readable"):
        check("cut.png", "fine.png")


def test_images_that_the_model_does_not_take_are_the_rewards(tmp_path: Path) -> None:
    prompts = PromptSet.read(str(rows(tmp_path, "nosuch.png")), "prompt", "test")
    check_images(PipelineSettings(pipeline="flowrl/demo/shapes-sd3"), prompts)
    check_images(LanguageSettings(language="flowrl/demo/sums-lm"), prompts)


def test_a_pipeline_reads_parquets_form_of_an_image() -> None:
    file = io.BytesIO()
    Image.new("RGB", (2, 2), (255, 0, 0)).save(file, "PNG")
    cell = {"bytes": file.getvalue(), "path": "a.png"}
    first, second = extras([{"image": cell}, {"image": dict(cell)}], ["image"], GivenForm())
    assert first["image"].getpixel((0, 0)) == (255, 0, 0)
    assert first["image"] is second["image"], "rows are grouped by the object"
    with pytest.raises(UserError, match=r"image: a\.png: not a PNG"):
        extras([{"image": {"bytes": b"hello", "path": "a.png"}}], ["image"], GivenForm())
    with pytest.raises(UserError, match=r"expected a path, or \{bytes"):
        extras([{"image": {"href": "a.png"}}], ["image"], GivenForm())
