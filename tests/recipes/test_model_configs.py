"""configs/models: each is read, planned offline, and run on a tiny pipeline of its class."""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import diffusers
import models_page
import pytest
import torch
import yaml

import flowrl
from flowrl.estimate import memory
from flowrl.estimate.time import duration
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.traits import checks
from flowrl.models.public_configs import PUBLIC_MODELS
from flowrl.paths import CONFIGS_FOLDER, PROJECT, own_runs, run_file
from flowrl.settings.checks.machine import check_kind, check_pipeline
from flowrl.settings.file.inherit import merged
from flowrl.settings.read import dump, read_run
from tests.support.tiny_modular import MODULAR, MODULAR_CALLS
from tests.support.tiny_pipelines import NAMED
from tests.support.tiny_pipelines_video import wan
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import LTX23, VIDEO_SPECIALS
from tests.support.zoo.pipelines import Special, tiny

pytestmark = pytest.mark.long  # `make quick` leaves out what drives models

torch.set_num_threads(1)
PATHS = {path.stem: path for path in sorted(models_page.CONFIGS.glob("*.yaml"))}
WANTED = {
    "sd35_medium", "sd35_large", "flux1_dev", "flux1_schnell", "flux1_kontext", "flux2_klein",
    "flux2_klein_distilled", "flux2_dev_quantized", "qwen_image_quantized",
    "qwen_image", "qwen_image_edit", "z_image", "z_image_turbo", "sdxl", "sd15", "sana",
    "wan21_1b", "wan21_14b", "wan22_a14b", "wan22_5b", "hunyuan_video15", "ltx_video", "ltx2",
    "ltx2_3", "cogvideox_5b", "anima", "flux3_klein", "ltx25",
    "minimax_h3",
}  # fmt: skip
CHEAP = ("sd35_medium", "wan21_1b")


def test_every_model_has_its_file_and_its_public_sizes():
    assert PATHS.keys() == WANTED
    names = dict(own_runs())
    for stem, path in PATHS.items():
        assert names[f"models/{stem}"] == path == run_file(f"models/{stem}")
        assert models_page.from_table(path), stem


@pytest.mark.parametrize("stem", PATHS)
def test_a_file_is_sourced_and_plans(stem):
    """It says where its numbers are from, has guidance of both kinds, and its plan is possible."""
    path = PATHS[stem]
    lines, said = path.read_text().splitlines(), " ".join(models_page.comments(path))
    assert max(map(len, lines)) <= 110
    assert ("arXiv:" in said and "Numbers:" in said) or "ours" in said.lower(), said
    run = read_run(path)
    algorithm = run.algorithm()
    assert run.model.height and run.model.width and run.model.guidance and run.evaluate.steps
    for iteration in (0, run.train.iterations - 1):
        assert algorithm.plan(run.levels(algorithm.steps), iteration, run.train.seed)
    assert run.train.updates <= run.prompts.per_iteration * algorithm.group
    check_kind(run, algorithm)
    check_pipeline(run.model.pipeline)
    assert getattr(diffusers, PUBLIC_MODELS[run.model.pipeline].pipeline or "")
    assert run.model.lora is not None  # every pipeline can save adapters


@pytest.mark.slow
@pytest.mark.parametrize("stem", CHEAP)
def test_the_page_has_the_memory_of_plan(stem):
    text = models_page.PAGE.read_text()
    line = next(line for line in text.splitlines() if f"[models/{stem}]" in line)
    run = read_run(PATHS[stem])
    for cell in (*models_page.settings(PATHS[stem], run), *models_page.memory_cells(run)):
        assert f" {cell} " in line, (cell, line)


@pytest.mark.slow
def test_the_page_is_what_the_script_writes(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert models_page.PAGE.read_text() == models_page.page()


def test_a_time_near_a_hundred_seconds_is_a_plain_number():
    assert [duration(seconds) for seconds in (99.4, 99.7, 100.2)] == ["99 s", "100 s", "100 s"]


def test_an_edited_image_is_tokens_too():
    """Kontext's denoiser sees the image of a megapixel beside its own 32 x 32 tokens."""
    kontext, dev = (read_run(PATHS[stem]) for stem in ("flux1_kontext", "flux1_dev"))
    sizes = [memory.sizes.of(run.model, 6) for run in (kontext, dev)]
    assert [size.tokens for size in sizes if size is not None] == [1024 + 4096, 1024]


def expanding() -> Any:
    """Wan 2.2 of 5B gives its denoiser a timestep per token."""
    pipe = wan()
    pipe.register_to_config(expand_timesteps=True)
    return pipe


def distilled() -> Any:
    """Klein of few steps has no guidance."""
    made = zoo("Flux2KleinPipeline")
    made.pipe.register_to_config(is_distilled=True)
    return made


def zoo(name: str, parts: Mapping[str, Special] = VIDEO_SPECIALS) -> Any:
    return tiny(getattr(diffusers, name), {**SPECIALS, **parts}, SIZES)


FAMILY = {
    "sd35_medium": "SD3", "sd35_large": "SD3", "flux1_dev": "FLUX.1", "flux1_schnell": "FLUX.1",
    "flux1_kontext": "FLUX.1-Kontext", "qwen_image": "Qwen-Image",
    "qwen_image_quantized": "Qwen-Image", "flux2_dev_quantized": "FLUX.2",
    "qwen_image_edit": "Qwen-Image-Edit", "z_image": "Z-Image", "z_image_turbo": "Z-Image",
    "sdxl": "SDXL", "sd15": "SD1.5", "sana": "Sana", "wan21_1b": "Wan 2.1", "wan21_14b": "Wan 2.1",
    "wan22_a14b": "Wan 2.2", "ltx_video": "LTX-Video", "cogvideox_5b": "CogVideoX",
}  # fmt: skip
IN_BLOCKS = {
    "anima": "anima", "flux3_klein": "flux3", "ltx25": "ltx25", "minimax_h3": "minimax_h3",
}  # fmt: skip
OTHERS: dict[str, Callable[[], Any]] = {
    "flux2_klein": partial(zoo, "Flux2KleinPipeline"),
    "flux2_klein_distilled": distilled,
    "hunyuan_video15": partial(zoo, "HunyuanVideo15Pipeline"),
    "ltx2": partial(zoo, "LTX2Pipeline"),
    "ltx2_3": partial(zoo, "LTX2Pipeline", LTX23),
}


# pipelines with a part, or with short prompts, that no file keeps
UNSAVED = ("qwen_image_edit", "hunyuan_video15")


def built(stem: str) -> tuple[Any, dict[str, Any]]:
    """A tiny pipeline of the configuration's class, and the arguments of its call."""
    if stem == "wan22_5b":
        return expanding(), dict(NAMED["Wan 2.1"].call)
    if stem in IN_BLOCKS:
        return MODULAR[IN_BLOCKS[stem]](), dict(MODULAR_CALLS[IN_BLOCKS[stem]])
    if stem in FAMILY:
        family = NAMED[FAMILY[stem]]
        return family.build(), dict(family.call)
    made = OTHERS[stem]()
    if stem == "hunyuan_video15":  # 1000 tokens of text and 729 of an image cost minutes here
        made.pipe.tokenizer_max_length = made.pipe.tokenizer_2_max_length = 32
        made.pipe.vision_num_semantic_tokens = 4
    return made.pipe, dict(made.call)


@pytest.mark.slow
@pytest.mark.parametrize("stem", PATHS)
def test_a_configuration_runs_for_an_iteration_on_a_tiny_pipeline_of_its_class(
    stem, tmp_path, monkeypatch
):
    """Its own recipe, guidance, adapters, levels and savings; small are the model and the batch."""
    run = read_run(PATHS[stem])
    pipe, call = built(stem)
    assert type(pipe).__name__ == PUBLIC_MODELS[run.model.pipeline].pipeline
    if stem in UNSAVED:
        monkeypatch.setattr(checks, "from_pretrained", lambda *given: pipe)
    tree = dump(run)
    rows = [{"prompt": text} for text in ("a red ball", "a blue cube on the table")]
    if "edit" in stem or "kontext" in stem:
        columns.placeholder_images(["image"], 24, 20)["image"].save(tmp_path / "some.png")
        rows = [row | {"image": str(tmp_path / "some.png")} for row in rows]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = {name: call.pop(name, None) for name in ("height", "width")}
    extra = {key: value for key, value in tree["model"]["call"].items() if key not in call}
    extra.pop("num_frames", None)
    small = {
        "model": {**size, "call": extra | call, "dtype": "float32", "device": "cpu"},
        "recipe": {"group": 4, "steps": min(10, run.algorithm().steps)},
        "prompts": {"train": str(tmp_path / "prompts.jsonl"), "held_out": None, "per_iteration": 2},
        "rewards": [{"name": "brightness"}],
        "held_out_rewards": [],
        "train": {"iterations": 1, "rows_per_call": "auto"},
        "evaluate": {"height": None, "width": None},
        "track": {"panel": False},
    }
    tree = merged(tree, small)
    if run.recipe.modalities is not None:
        tree["recipe"]["modalities"] = {"video": ["brightness"], "audio": ["loudness"]}
        tree["rewards"].append({"name": "loudness"})
    tree["model"] = {key: value for key, value in tree["model"].items() if key != "pipeline"}
    model: Any = pipe
    if run.model.quantization is not None:  # weights are quantized as they are read
        pipe.save_pretrained(tmp_path / "pipe")
        model = str(tmp_path / "pipe")
        tree["model"]["quantization"] |= {"backend": "quanto"}  # bitsandbytes needs a GPU
    trained = flowrl.train(model, settings=tree, folder=tmp_path / "run")
    (line,) = [each for each in trained.metrics if each.get("iteration", 1) == 1][-1:]
    assert (tmp_path / "run" / ("pipeline" if run.model.lora is None else "adapter")).is_dir()
    assert line["loss/grad_norm"] > 0 if "loss/grad_norm" in line else line
    saved = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert "base" not in saved and saved["recipe"]["name"] == run.recipe.name


def test_pages_count_the_configurations_as_they_are() -> None:
    count = len([*(CONFIGS_FOLDER / "models").glob("*.yaml")])
    for page in ("README.md", "docs/choosing.md", "docs/index.md"):
        text = (PROJECT / page).read_text(encoding="utf-8")
        counts = re.findall(r"\[(\d+) configurations\]\((?:docs/)?models\.md\)", text)
        assert [*map(int, counts)] == [count], page
