"""`flowrl new --model` and `plan` for sixty checkpoints, whose index a local hub serves."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from flowrl.cli.families import family_of
from flowrl.cli.new import New, write_new_run
from flowrl.errors import UserError
from flowrl.models import model_index
from flowrl.models.description import describe, has_weights, unknown_because
from flowrl.models.model_index import fetch_unknown, read_index
from flowrl.settings import PipelineSettings, RunSettings
from flowrl.settings.model.quantization import Quantization
from flowrl.settings.read import check_plan, read_run
from tests.support import fuzz
from tests.support.hub.repositories import FAULTS, Hub, files, serving, table
from tests.support.runs import flowrl

FAST = (
    "black-forest-labs/FLUX.1-Krea-dev", "Qwen/Qwen-Image-Edit-2509", "krea/Krea-2-Turbo",
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "stabilityai/sdxl-turbo",
    "black-forest-labs/FLUX.1-Fill-dev",
)  # fmt: skip
# configurations that sample and evaluate with less guidance than their cards, as their sources do
CHOSEN = {
    "black-forest-labs/FLUX.2-klein-base-9B": 1.0,
    "black-forest-labs/FLUX.2-dev": 4.0,
    "stabilityai/stable-diffusion-3-medium-diffusers": 1.0,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": 5.0,
    "stabilityai/stable-diffusion-2-1": 5.0,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 4.5,
}
# what no file of the checkpoint says: the class's default is written, and named a guess
GUESSED = {
    "black-forest-labs/FLUX.1-Canny-dev": 3.5,
    "black-forest-labs/FLUX.1-Depth-dev": 3.5,
    "SimianLuo/LCM_Dreamshaper_v7": 8.5,
    "lodestones/Chroma1-HD": 5.0,
    "baidu/ERNIE-Image-Turbo": 4.0,
    "hunyuanvideo-community/HunyuanImage-2.1-Distilled-Diffusers": None,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    made = Hub({name: files(row) for name, row in table().items()})
    with serving(made) as url:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
        # quantization needs a package that no CPU has
        monkeypatch.setattr(Quantization, "check", lambda _: None)
        yield made


def begun(name: str, folder: Path) -> RunSettings:
    write_new_run(New(folder, model=name))
    return read_run(folder / "run.yaml")


def columns(folder: Path) -> list[str]:
    """Columns of the prompts besides the texts; each has an image."""
    rows = folder / "prompts.jsonl"
    if not rows.is_file():
        assert (folder / "prompts.txt").is_file()
        return []
    first = json.loads(rows.read_text(encoding="utf-8").splitlines()[0])
    assert all((folder / place).is_file() for name, place in first.items() if name != "prompt")
    return [name for name in first if name != "prompt"]


@pytest.mark.quick_cases("Krea-dev", "Qwen-Image-Edit-2509", "sdxl-turbo")
@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in table()]
)
def test_a_checkpoint_gets_the_settings_of_its_family(
    name: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, folder = table()[name], tmp_path / "run"
    run = begun(name, folder)
    assert isinstance(run.model, PipelineSettings)
    assert run.model.pipeline == name and run.model.lora is not None
    check_plan(run)
    said = capsys.readouterr().out
    assert sorted(columns(folder)) == sorted(row.get("images", []))
    scale = run.evaluation_guidance
    if row["guidance"] == "none":
        assert scale in ("none", 1.0, None) or name in GUESSED, scale
    elif row["guidance"] != "own" and name not in CHOSEN and name not in GUESSED:
        assert scale == row["guidance"]
    assert scale == (CHOSEN | GUESSED).get(name, scale)
    if hub.asked:  # a name that flowrl has no configuration of
        assert "guesses, to compare with the model's card: guidance " in said
        assert f"{run.evaluation_steps} steps in evaluations" in said
    before = len(hub.asked)
    read_index(name)
    known = before == 0
    assert known or len(hub.asked) == before, "what the cache has is not asked for again"


@pytest.mark.slow
def test_a_plan_knows_the_memory_of_a_sibling(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun("black-forest-labs/FLUX.1-Krea-dev", tmp_path / "run")
    shutil.rmtree(tmp_path / "cache")
    flowrl("plan", tmp_path / "run" / "run.yaml")
    said = capsys.readouterr().out
    assert "GiB" in said and "memory: unknown" not in said
    assert "text_encoder" in said, "a part without a configuration is unknown, not left out"


def test_what_is_unknown_is_fetched_once(hub: Hub) -> None:
    """Weights are counted from the configuration; of parts without one the number is unknown."""
    m = PipelineSettings(pipeline="black-forest-labs/FLUX.1-Krea-dev")
    assert describe(m) is None and fetch_unknown(m) == ""
    asked, found = len(hub.asked), describe(m)
    assert found is not None and fetch_unknown(m) == "" and len(hub.asked) == asked
    assert 11.8e9 < sum(p.numel() for p in found.first.parameters()) < 12e9
    assert found.counts == {"vae": None, "text_encoder": None, "text_encoder_2": None}
    other = PipelineSettings(pipeline="me/missing")
    assert fetch_unknown(other).startswith("nothing is known of me/missing: the hub has no me/miss")


def test_what_the_hub_refuses_is_a_sentence(hub: Hub, tmp_path: Path) -> None:
    sibling = table()["black-forest-labs/FLUX.1-Krea-dev"]
    hub.repositories = {"me/gated": files(sibling), "me/text": {"config.json": "{}"}}
    hub.gated = ("me/gated",)
    for name, why in (
        ("me/gated", r"is gated: accept its licence on the hub, and log in \(hf auth login\)"),
        ("me/missing", r"the hub has no me/missing: check the name, or log in"),
        (
            "me/text",
            r"has neither model_index.json nor modular_model_index.json.* --text of `flowrl new`",
        ),
    ):
        with pytest.raises(UserError, match=why):
            begun(name, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_silent_hub_leaves_guesses(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow, and answers that end too early: within the limit, and said."""
    monkeypatch.setattr(model_index, "INDEX_SECONDS", 1.0)
    sibling = files(table()["black-forest-labs/FLUX.1-Krea-dev"])
    hub.repositories = {"me/slow": sibling, "me/cut": sibling}
    hub.slow, hub.cut = ("me/slow",), ("me/cut",)
    for name in ("me/slow", "me/cut"):
        start = time.monotonic()
        begun(name, tmp_path / name)
        assert time.monotonic() - start < 5
        said = capsys.readouterr().out
        assert f"{name} is assumed to be a diffusers pipeline, and nothing is known of it" in said
        assert "guesses, to compare with the model's card: guidance 1" in said


INDEX, CONFIG = "model_index.json", "transformer/config.json"
SCHEDULER = "scheduler/scheduler_config.json"
BROKEN = "me/broken"
LICENCE = "accept its licence on the hub, and log in"
DAMAGED = "{file} .*(download it again|hf download .*--force-download)"
ASSUMED = "me/broken is assumed to be a diffusers pipeline, and nothing is known of it, since the "
# by fault: how `new` refuses, or begins what it guesses with
REFUSED = {
    "gated": f"me/broken is gated: {LICENCE}",
    "private": "the hub has no me/broken: check the name, or log in if it is private",
    "no right": rf"the hub refuses me/broken \(403\): {LICENCE}",
    **dict.fromkeys(("half", "a list", "no text", "empty"), DAMAGED),
}
TOLD = {
    "too many": "hub has had too many requests",
    "in trouble": "hub is in trouble (503)",
    "slow": "hub did not answer within 1 s",
    "drops": "hub did not answer within 1 s",
    "closed": "hub cannot be read (",
    "cut": "hub cannot be read (",
    "a page": "hub cannot be read (",
}
LACKS = {
    INDEX: "has neither model_index.json nor modular_model_index.json: it is no diffusers pipeline",
    CONFIG: "has no transformer/config.json, although its model_index.json names that part",
}


@pytest.fixture
def broken(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr(model_index, "INDEX_SECONDS", 1.0)
    hub.repositories = {BROKEN: files(table()["black-forest-labs/FLUX.1-Krea-dev"])}
    return hub


def test_every_fault_of_the_hub_is_judged() -> None:
    assert sorted([*REFUSED, *TOLD, "missing"]) == sorted(FAULTS)


def said_by_plan(m: PipelineSettings) -> str:
    try:
        return fetch_unknown(m)
    except UserError as error:  # of a file that is here, and damaged
        return str(error)


SHORT = ("cut", "half", "missing", "too many", "gated")


@pytest.mark.quick_cases("cut", "half")
@pytest.mark.parametrize(
    ("fault", "file"),
    [
        pytest.param(fault, file, marks=[pytest.mark.slow] * (file != CONFIG or fault not in SHORT))
        for fault in FAULTS
        for file in (INDEX, CONFIG, SCHEDULER)
    ],
)
def test_a_file_that_the_hub_spoils_is_a_sentence(
    fault: str, file: str, broken: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One sentence within the limit, by `new` and by `plan`, and no other of the hub's client. The
    next time, when the hub is well or the advice has been followed, the model is known."""
    broken.broken = {BROKEN: (file, fault)}
    m, start = PipelineSettings(pipeline=BROKEN), time.monotonic()
    if (why := LACKS.get(file) if fault == "missing" else REFUSED.get(fault)) is not None:
        why = why.format(file=file)
        with pytest.raises(UserError, match=why) as refused:
            begun(BROKEN, tmp_path / "run")
        fuzz.one_sentence(str(refused.value), 500)
        assert not (tmp_path / "run").exists()
        if file != SCHEDULER or fault in ("gated", "private", "no right"):
            assert re.search(why, said_by_plan(m))
    else:
        begun(BROKEN, tmp_path / "run")
        said = capfd.readouterr()
        if fault == "missing":  # a scheduler without settings has its class's
            assert "its index names FluxPipeline" in said.out
        else:
            assert f"{ASSUMED}{TOLD[fault]}" in said.out
            assert TOLD[fault] in fetch_unknown(m) and describe(m) is None
            assert "on this machine; `hf download me/broken` downloads it" in unknown_because(m)
        assert said.err == ""
    assert time.monotonic() - start < 10
    broken.release.set()
    broken.broken = {}
    if REFUSED.get(fault) == DAMAGED:
        huggingface_hub.hf_hub_download(BROKEN, file, force_download=True)
    elif fault == "missing":
        return  # known to be missing until its authors change the repository
    begun(BROKEN, tmp_path / "well")
    assert "its index names FluxPipeline" in capfd.readouterr().out
    assert not has_weights(m)


def test_a_local_folder_of_a_family_has_its_settings(tmp_path: Path) -> None:
    """Its index is read where it lies, so that a copy of a checkpoint is known by any name."""
    folder = tmp_path / "mine"
    for place, text in files(table()["Qwen/Qwen-Image-Edit-2511"]).items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text, encoding="utf-8")
    index = read_index(str(folder))
    assert index.kind == "QwenImageEditPlusPipeline" and index.denoiser["zero_cond_t"]
    family = family_of(index)
    assert family is not None and family.file == "configs/models/qwen_image_edit.yaml"
