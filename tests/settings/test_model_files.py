"""Files of models, checked before anything loads."""

import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from diffusers import guiders
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from transformers import AutoModelForCausalLM

from flowrl.cli.given_model import is_pipeline
from flowrl.models.model_index import read_index
from flowrl.settings import LanguageSettings, PipelineSettings
from flowrl.settings.checks.machine import (
    check_hub,
    check_language,
    check_model,
    check_pipeline,
)
from flowrl.settings.checks.model_files import NO_MODEL
from tests.support import tiny_lm
from tests.support.advice import advice
from tests.support.hub.cache import cache


@pytest.fixture
def copied(pipeline: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pipeline, tmp_path / "pipe"))


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_lm.write(tmp_path_factory.mktemp("lm"))


def again(source: Path, folder: Path) -> Callable[[], None]:
    """Downloads a pipeline's files again, and checks them."""

    def followed() -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        check_pipeline(str(folder))

    return followed


def test_no_guider_is_taken_for_a_network() -> None:
    """A guider's folder has a guider_config.json, and neither a config.json nor weights."""
    kinds = [
        name
        for name, kind in vars(guiders).items()
        if isinstance(kind, type) and issubclass(kind, guiders.ClassifierFreeGuidance.__base__)
    ]
    assert len(kinds) > 5 and all(NO_MODEL.search(kind) for kind in kinds)


def test_files_that_are_not_a_models_are_downloaded_again(pipeline: Path, copied: Path) -> None:
    def refused() -> None:
        check_pipeline(str(copied))

    (copied / "model_index.json").write_text("[]")
    advice(
        "{}: {} does not hold a JSON object: download it again", refused, again(pipeline, copied)
    )
    (copied / "scheduler" / "scheduler_config.json").write_text("{}")
    advice("model.pipeline: {} is empty: download it again", refused, again(pipeline, copied))
    (copied / "transformer" / "config.json").write_text("{}")
    advice(
        "model.pipeline: {} names no class (_class_name): download it again",
        refused,
        again(pipeline, copied),
    )
    for file in (copied / "tokenizer").glob("*"):
        if file.name not in ("tokenizer_config.json", "special_tokens_map.json"):
            file.unlink()
    advice(
        "has no vocabulary ({} or the like): download it again", refused, again(pipeline, copied)
    )


def test_the_folder_of_the_library_is_given(pipeline: Path, language: Path) -> None:
    advice(
        "model.pipeline: {} has no {}; give a diffusers folder",
        lambda: check_pipeline(str(language)),
        lambda: check_pipeline(str(pipeline)),
    )
    advice(
        "{}: {} has no {}; give a {} folder",
        lambda: check_language(str(pipeline), None),
        lambda: check_language(str(language), None),
    )


def test_weights_of_a_variant_are_saved_as_the_message_says(
    copied: Path, language: Path, tmp_path: Path
) -> None:
    """Into the same folder, which has the plain names then, or into a new one."""
    text = Path(shutil.copytree(language, tmp_path / "lm"))
    for file in [*copied.rglob("*.safetensors"), *text.rglob("*.safetensors")]:
        file.rename(file.with_suffix(".fp16.safetensors"))

    def saved_pipeline() -> None:
        parts = {"text_encoder_3": None, "tokenizer_3": None}  # which this pipeline never had
        pipe = DiffusionPipeline.from_pretrained(copied, variant="fp16", **parts)
        for folder in (copied, tmp_path / "new"):
            pipe.save_pretrained(folder)
            check_pipeline(str(folder))

    def saved_language_model() -> None:
        AutoModelForCausalLM.from_pretrained(text, variant="fp16").save_pretrained(text)
        check_language(str(text), None)

    advice(
        "{}: {} has only weights of the variant {}: load the model with variant={}, and save it "
        "with `save_pretrained`",
        lambda: check_pipeline(str(copied)),
        saved_pipeline,
    )
    advice(
        "{}: {} has only weights of the variant {}: load the model with variant={}, and save it "
        "with `save_pretrained`",
        lambda: check_language(str(text), None),
        saved_language_model,
    )


def test_a_single_file_is_read_where_the_message_says(
    copied: Path, language: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GGUF file has settings of its own; other files stay with the folder that has them."""
    installed = "flowrl.settings.model.quantization.find_spec"
    monkeypatch.setattr(installed, lambda _: object())
    small = tmp_path / "quantized" / "small.gguf"
    small.parent.mkdir()
    small.write_bytes(b"GGUF\x03" + bytes(27))
    lora = {"rank": 2}
    advice(
        "{}: {} is a single file; give a folder in {}' format, as written by `save_pretrained`{}",
        lambda: check_model(PipelineSettings(pipeline=str(small))),
        lambda: check_model(
            PipelineSettings.model_validate(
                {
                    "pipeline": str(copied),
                    "lora": lora,
                    "quantization": {"backend": "gguf", "file": str(small)},
                }
            )
        ),
    )
    with pytest.raises(ValueError, match=r"set model.language: (.*) and model.gguf_file: (.*)"):
        check_model(LanguageSettings(language=str(small)))
    advice(
        "{}: {} is a single file; give a folder in {}' format, as written by `save_pretrained`{}",
        lambda: check_model(LanguageSettings(language=str(small))),
        lambda: check_model(
            LanguageSettings(language=str(small.parent), gguf_file=small.name),
        ),
    )
    for name in ("model.safetensors", "model.bin", "model.ckpt"):
        shutil.copy(language / "model.safetensors", tmp_path / name)
        advice(
            "{}: {} is a single file; give a folder in {}' format",
            lambda name=name: check_model(LanguageSettings(language=str(tmp_path / name))),
            lambda: check_model(LanguageSettings(language=str(language))),
        )


@pytest.mark.parametrize("form", ["gguf", "bin", "ckpt", "pt", "safetensors"])
@pytest.mark.parametrize("door", [check_pipeline, is_pipeline, read_index])
def test_a_file_is_none_of_the_hubs_names_and_convert_is_advised_for_what_it_converts(
    door: Callable[[str], object], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`d/model.gguf` could be a hub name, and no door asks the hub for a file that is here."""
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    Path(f"d/model.{form}").write_bytes(b"x")
    with pytest.raises(ValueError, match="is a single file; give a folder") as told:
        door(f"d/model.{form}")
    assert ("flowrl convert" in str(told.value)) == (form == "safetensors")


def test_a_model_is_downloaded_into_the_hubs_cache(
    pipeline: Path, language: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `hf download` leaves there, on a machine without a network."""

    def unreachable(url: str, timeout: float) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for source, name, settings in (
        (pipeline, "owner/images", PipelineSettings(pipeline="owner/images")),
        (language, "owner/texts", LanguageSettings(language="owner/texts")),
    ):

        def downloaded(source: Path = source, name: str = name, settings=settings) -> None:
            cache(source, tmp_path, name)
            check_hub(settings)

        advice(
            "is neither a folder nor in the hub's cache, and the hub cannot be reached ({}); run "
            "`hf download {}` where there is a network",
            lambda settings=settings: check_hub(settings),
            downloaded,
        )
