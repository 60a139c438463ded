"""Advice of messages on adapters, sizes, quantized bases and savings is followed: the next start or
load is not refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM

from flowrl.cli.given_model import policy_of
from flowrl.models import savings
from flowrl.models.before_weights import check_before_weights
from flowrl.models.merged import MergedAdapters
from flowrl.session.learner import load_policy
from flowrl.settings import RunSettings
from flowrl.settings.read import run_from
from tests.run.test_own_runs import tree
from tests.support import runs, text_runs, tiny_lm, tiny_pipelines_video
from tests.support.advice import advice
from tests.support.tiny_pipelines import NAMED

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_lm.write(tmp_path_factory.mktemp("lm"))


def text_model(lm: Path, folder: Path, **model: Any) -> dict[str, Any]:
    settings = text_runs.tree(lm, folder, text_runs.GRPO)
    settings["model"] |= model
    return settings


def started(settings: dict[str, Any]) -> object:
    """The checks of a start that read no weights."""
    run = run_from(settings, "test")
    check_before_weights(run)
    return run


def test_an_adapter_of_several_ranks_is_merged_first(lm: Path, tmp_path: Path) -> None:
    base: Any = AutoModelForCausalLM.from_pretrained(lm)
    config = LoraConfig(r=2, rank_pattern={"q_proj": 4}, target_modules=["q_proj", "v_proj"])
    adapted: Any = get_peft_model(base, config)
    for name, p in adapted.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(p, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[2, 3, 4]])
    wanted = adapted(input_ids=ids).logits

    def followed() -> Any:
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
        tiny_lm.tokenizer().save_pretrained(tmp_path / "merged")
        settings = text_model(tmp_path / "merged", tmp_path, lora={"rank": 2})
        return load_policy(run_from(settings, "test"), CPU)

    start = {"from": str(tmp_path / "adapter")}
    policy = advice(
        "{}: {} is not a plain LoRA of one rank, or trains other modules too: merge it into the "
        "model, and train new adapters",
        lambda: load_policy(run_from(text_model(lm, tmp_path, lora=start), "test"), CPU),
        followed,
    )
    torch.testing.assert_close(policy.model(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture
def kinds(lm: Path, pipeline: Path, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Settings of runs of a language model, of one's own model, and of a pipeline."""
    return {
        "texts": text_model(lm, tmp_path),
        "own": tree(tmp_path),
        "pipeline": runs.tree(pipeline, tmp_path, runs.FLOW_GRPO),
    }


def with_and_without(settings: dict[str, Any]) -> tuple[RunSettings, RunSettings]:
    """The run with adapters, and the run of all weights."""
    with_lora, without = (
        run_from(settings | {"model": settings["model"] | {"lora": lora}}, "test")
        for lora in ({"rank": 2}, None)
    )
    return with_lora, without


@pytest.mark.parametrize("kind", ["texts", "own"])
def test_saved_adapters_need_a_model_with_adapters(
    kinds: dict[str, dict[str, Any]], tmp_path: Path, kind: str
) -> None:
    """As `flowrl sample RUN --weights FOLDER` loads them."""
    with_lora, without = with_and_without(kinds[kind])
    load_policy(with_lora, CPU).save(tmp_path / "adapter")
    policy = advice(
        "{} holds an adapter, but the model has none: set model.lora",
        lambda: policy_of(without, tmp_path, str(tmp_path / "adapter")),
        lambda: policy_of(with_lora, tmp_path, str(tmp_path / "adapter")),
    )
    assert policy is not None


@pytest.mark.parametrize("kind", ["texts", "own", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_saved_full_weights_need_a_model_without_adapters(
    kinds: dict[str, dict[str, Any]], tmp_path: Path, kind: str
) -> None:
    with_lora, without = with_and_without(kinds[kind])
    load_policy(without, CPU).save(tmp_path / "whole")
    policy = advice(
        "{} holds full weights, but the model has adapters: set model.lora: null",
        lambda: policy_of(with_lora, tmp_path, str(tmp_path / "whole")),
        lambda: policy_of(without, tmp_path, str(tmp_path / "whole")),
    )
    assert policy is not None


def test_layers_that_cannot_be_merged_stay_apart() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"]), model)
    merging = advice(
        "model.lora.merge: a layer of kind {} cannot be merged with its adapter; set "
        "model.lora.merge: none",
        lambda: MergedAdapters.of({"m": model}, "evaluation"),
        lambda: MergedAdapters.of({"m": model}, "none"),
    )
    with merging.evaluation():
        assert model(torch.ones(1, 2, 3)).shape == (1, 2, 3)


def test_a_size_that_a_pipeline_does_not_take_is_left_out(pipeline: Path, tmp_path: Path) -> None:
    settings = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)

    def begun(size: dict[str, int]) -> object:
        return started(settings | {"evaluate": settings["evaluate"] | size})

    advice(
        "evaluate.{}: {} takes no {}: leave it out",
        lambda: begun({"num_frames": 5}),
        lambda: begun({}),
    )


def test_a_server_stops_at_texts_of_one_token(lm: Path, tmp_path: Path) -> None:
    server = {"url": "http://127.0.0.1:1/v1", "model": "a", "sync": "none"}

    def begun(stop: str) -> object:
        return started(text_model(lm, tmp_path, server=server, stop=[stop]))

    advice(
        "model.stop: {} has several tokens in this tokenizer, but a server ends completions at "
        "single tokens: choose a text with a single token",
        lambda: begun("ab"),
        lambda: begun("j"),
    )


def test_two_experts_are_quantized_as_they_load(tmp_path: Path) -> None:
    """Refused before weights load, and whether the file is there or not."""
    tiny_pipelines_video.wan(2).save_pretrained(tmp_path / "wan")
    settings = runs.tree(tmp_path / "wan", tmp_path, runs.FLOW_GRPO)

    def begun(quantization: dict[str, Any]) -> object:
        settings["model"]["quantization"] = quantization
        return started(settings)

    advice(
        "{}.file: the pipeline has {}, and a file holds one of them: choose another backend",
        lambda: begun({"backend": "gguf", "file": "a.gguf"}),
        lambda: begun({"backend": "quanto", "bits": 8}),
    )


def test_files_of_quantized_weights_train_adapters(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A denoiser whose own files are quantized, as published ones of 4 bits."""
    plain = SD3Transformer2DModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def quantized(cls: type, *args: Any, **named: Any) -> Any:
        model = plain(cls, *args, **named)
        model.hf_quantizer = object()
        return model

    monkeypatch.setattr(SD3Transformer2DModel, "from_pretrained", classmethod(quantized))

    def opened(lora: dict[str, Any] | None) -> Any:
        settings = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
        settings["model"]["lora"] = lora
        return load_policy(run_from(settings, "test"), CPU)

    policy = advice(
        "model.lora: null trains all weights, and those of {} are quantized: set model.lora",
        lambda: opened(None),
        lambda: opened({"rank": 2}),
    )
    assert all(".lora_" in name for name in policy.trainable())


def checkpointed(pipeline: Path, folder: Path, **train: Any) -> object:
    return started(runs.tree(pipeline, folder, runs.FLOW_GRPO, **train))


def test_a_denoiser_without_checkpoints_takes_fewer_rows(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SD3Transformer2DModel, "_supports_gradient_checkpointing", False)
    advice(
        "train.gradient_checkpointing: {} does not support it; leave it out, and lower "
        "train.rows_per_call instead",
        lambda: checkpointed(pipeline, tmp_path, gradient_checkpointing=True),
        lambda: checkpointed(pipeline, tmp_path, rows_per_call=1),
    )


def test_a_language_model_without_checkpoints_takes_fewer_rows(
    lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(savings, "GradientCheckpointingLayer", nn.Bilinear)

    def opened(**train: Any) -> object:
        settings = text_runs.tree(lm, tmp_path, text_runs.GRPO, **train)
        return runs.opened(settings, tmp_path)

    advice(
        "train.gradient_checkpointing: {} does not support it; leave it out, and lower "
        "train.rows_per_call instead",
        lambda: opened(gradient_checkpointing=True),
        lambda: opened(rows_per_call=1),
    )


@pytest.mark.parametrize("backend", ["sage", "_sage_qk_int8_pv_fp8_cuda"])
def test_attention_with_a_gradient_is_native(tmp_path: Path, backend: str) -> None:
    tiny_pipelines_video.wan().save_pretrained(tmp_path / "wan")

    def begun(name: str) -> object:
        settings = runs.tree(tmp_path / "wan", tmp_path, runs.FLOW_GRPO)
        settings["model"]["attention"] = name
        return started(settings)

    advice(
        "model.attention: {} has no backward pass, so attention would have no gradient; use "
        "flash, flex, xformers or native",
        lambda: begun(backend),
        lambda: begun("native"),
    )


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny SD1.5, whose attention diffusers does not dispatch."""
    folder = tmp_path_factory.mktemp("sd15")
    NAMED["SD1.5"].build().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("backend", ["native", "sage"])
def test_attention_that_is_not_dispatched_is_left_as_it_is(
    unet: Path, tmp_path: Path, backend: str
) -> None:
    """Another backend is no way out here: it would be refused next."""

    def begun(**model: Any) -> object:
        settings = runs.tree(unet, tmp_path, runs.FLOW_GRPO)
        settings["model"] |= model
        return started(settings)

    advice(
        "model.attention: the attention of {} is not dispatched by diffusers; leave it out",
        lambda: begun(attention=backend),
        begun,
    )


def test_what_a_decoder_or_denoiser_lacks_is_left_out(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(AutoencoderKL, "enable_tiling", lacking)
    monkeypatch.setattr(savings, "outer_lists", lambda denoiser: [])
    monkeypatch.setattr(SD3Transformer2DModel, "_repeated_blocks", None)

    def begun(**model: Any) -> object:
        settings = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
        settings["model"] |= model
        return started(settings)

    advice(
        "model.vae.{}: {} does not support it; leave it out",
        lambda: begun(vae={"tiling": True, "slicing": True}),
        lambda: begun(vae={"slicing": True}),
    )
    advice(
        "model.compile: {} has no repeated blocks; leave it out",
        lambda: begun(compile=True),
        begun,
    )
