"""What messages about models, rewards and prompts from Python advise is done, and is accepted."""

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from peft import LoraConfig
from safetensors.torch import save_model
from transformers import AutoTokenizer, LlamaForCausalLM

import flowrl
from flowrl.api.adapters import lora_section
from flowrl.api.given import Given
from flowrl.api.models import model_settings
from flowrl.settings.read import dump
from tests.api.test_api_live import OwnPipeline
from tests.run.test_own_runs import tree
from tests.support import tiny_lm
from tests.support.advice import advice
from tests.support.tiny_pipelines_image import flux, live
from tests.support.tiny_pipelines_unet import sd15

TEXT = {"name": "text_grpo", "length": 3, "group": 2}


def named(model: Any, files: Path, tokenizer: Any = None) -> dict[str, Any]:
    """The settings of `model:` of a live model, whose files are written into a new folder."""
    files.mkdir(exist_ok=True)
    return model_settings(model, tokenizer, "nft" if tokenizer is None else TEXT, files)


def imported(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of a file that a user imports from the folder of a script."""
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    return __import__(name)


def test_layers_of_adapters_are_named_in_a_list() -> None:
    section = advice(
        "lora: peft.LoraConfig(target_modules={}): name the layers in a list, such as",
        lambda: lora_section(LoraConfig(target_modules="all-linear")),
        lambda: lora_section(LoraConfig(target_modules=["to_q", "to_k"])),
    )
    assert sorted(section["targets"]) == ["to_k", "to_q"]
    assert lora_section(LoraConfig())["targets"] is None


def test_a_part_of_a_pipeline_is_passed_in_its_pipeline(pipeline: Path, tmp_path: Path) -> None:
    part = SD3Transformer2DModel.from_pretrained(pipeline / "transformer")
    settings = advice(
        "{}: {} is a part of a pipeline: pass the whole pipeline, such as",
        lambda: named(part, tmp_path),
        lambda: named(live(pipeline), tmp_path),
    )
    assert settings["pipeline"] == str(pipeline)


WIDE = """
from examples.own.points import Points

class Wide(Points):
    def __init__(self, width: int) -> None:
        super().__init__(width)
"""


@pytest.mark.slow
def test_a_model_with_arguments_is_passed_by_its_file_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = imported(tmp_path, "wide_points", WIDE, monkeypatch).Wide(8)
    weights = tmp_path / "weights.safetensors"
    settings = tree(tmp_path, iterations=1)
    rest = {key: value for key, value in settings.items() if key != "model"}

    def listed() -> flowrl.Run:
        save_model(model, str(weights))
        own = {"name": f"{tmp_path}/wide_points.py:Wide", "width": 8}
        return flowrl.train(
            {"own": own, "weights": str(weights)}, settings=rest, folder=tmp_path / "run"
        )

    run = advice(
        "{}: {} takes arguments ({}), which a run file must list: save its weights with",
        lambda: flowrl.train(model, settings=rest, folder=tmp_path / "refused"),
        listed,
    )
    assert run.done


def test_a_class_of_a_script_is_put_into_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from examples.own.points import Points\n\nclass Mine(Points):\n    pass\n"
    script = types.ModuleType("__main__")
    exec(code, vars(script))  # as a script or a notebook defines a class
    settings = advice(
        "{}: {} is not in a file that a later start could import: put it into its own file, and "
        "import it from there",
        lambda: named(script.Mine, tmp_path),
        lambda: named(imported(tmp_path, "my_points", code, monkeypatch).Mine, tmp_path),
    )
    assert settings == {"own": f"{tmp_path}/my_points.py:Mine"}


def test_adapters_of_a_pipeline_are_merged_and_removed(pipeline: Path, tmp_path: Path) -> None:
    pipe = live(pipeline)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    name = "transformer_blocks.0.attn.to_q"
    layer = pipe.transformer.get_submodule(name)
    x = torch.randn(1, layer.in_features)
    before = layer(x).detach()

    def merged() -> dict[str, Any]:
        pipe.fuse_lora()
        pipe.unload_lora_weights()
        return named(pipe, tmp_path)

    settings = advice(
        "{}: the pipeline has adapters: merge them with pipe.fuse_lora(), then remove them with",
        lambda: named(pipe, tmp_path),
        merged,
    )
    again = live(Path(settings["pipeline"])).transformer.get_submodule(name)
    assert torch.allclose(again(x), before, atol=1e-5)


def doubled(module: Any, *_: Any) -> None:
    module.doubled = True


class OwnProcessor(AttnProcessor2_0):
    """A processor of a user's own."""


def with_freeu(pipe: Any) -> Callable[[], None]:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    return pipe.disable_freeu


def with_processor(pipe: Any) -> Callable[[], None]:
    pipe.unet.set_attn_processor(OwnProcessor())
    return lambda: pipe.unet.set_attn_processor(AttnProcessor2_0())


def with_backend(pipe: Any) -> Callable[[], None]:
    pipe.transformer.set_attention_backend("_native_math")
    return pipe.transformer.reset_attention_backend


def with_ip_adapter(pipe: Any) -> Callable[[], None]:
    """An adapter for prompts that are images, with random weights."""
    width, weights = pipe.unet.config.cross_attention_dim, {}
    for number, name in enumerate(pipe.unet.attn_processors):
        if name.endswith("attn2.processor"):
            to_k = pipe.unet.get_submodule(name.removesuffix(".processor")).to_k
            for layer in ("to_k_ip", "to_v_ip"):
                weights[f"{number}.{layer}.weight"] = torch.randn_like(to_k.weight)
    projection = {
        "proj.weight": torch.randn(4 * width, 8),
        "proj.bias": torch.zeros(4 * width),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    pipe.load_ip_adapter({"image_proj": projection, "ip_adapter": weights}, "", "", None)
    return pipe.unload_ip_adapter


def with_hook(pipe: Any) -> Callable[[], None]:
    return pipe.unet.mid_block.register_forward_hook(doubled).remove


@pytest.mark.parametrize(
    "add", [with_freeu, with_processor, with_backend, with_ip_adapter, with_hook]
)
def test_what_files_cannot_hold_is_removed(tmp_path: Path, add: Any) -> None:
    pipe = flux() if add is with_backend else sd15()
    remove = add(pipe)
    advice(
        "{}: a run trains a copy that is loaded from files, which do not contain all parts of this "
        "pipeline ({}): take the pipeline as from_pretrained loads it, or undo what was changed",
        lambda: named(pipe, tmp_path),
        lambda: (remove(), named(pipe, tmp_path)),
    )


def test_a_replaced_method_of_a_pipeline_is_restored(pipeline: Path, tmp_path: Path) -> None:
    pipe = live(pipeline)
    pipe.encode_prompt = functools.partial(pipe.encode_prompt, num_images_per_prompt=1)
    advice(
        "{}: {} of this pipeline has been replaced, and a run trains a copy with {}'s own: restore "
        "it",
        lambda: named(pipe, tmp_path),
        lambda: (delattr(pipe, "encode_prompt"), named(pipe, tmp_path)),
    )


def test_a_pipeline_of_diffusers_takes_the_place_of_a_users_own(
    pipeline: Path, tmp_path: Path
) -> None:
    pipe = live(pipeline)
    advice(
        "{}: {} of {} is not a class of diffusers, and a run trains a copy that is loaded from "
        "files, which do not contain its code: pass a pipeline of one of diffusers' classes",
        lambda: named(OwnPipeline(**pipe.components), tmp_path),
        lambda: named(type(pipe)(**pipe.components), tmp_path),
    )


def test_a_language_model_is_passed_with_its_tokenizer(tmp_path: Path) -> None:
    source = tiny_lm.write(tmp_path / "lm")
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = LlamaForCausalLM.from_pretrained(source)
    settings = advice(
        "{}: a live language model needs its tokenizer: pass tokenizer=",
        lambda: named(model, tmp_path),
        lambda: named(model, tmp_path, tokenizer),
    )
    assert settings["language"] == str(source)


@pytest.mark.slow
def test_offloaded_weights_are_read_from_the_models_folder(pipeline: Path, tmp_path: Path) -> None:
    pipe = live(pipeline)
    cpu_offload(pipe.transformer, torch.device("cpu"))
    rest = {"recipe": "nft", "rewards": "brightness", "prompts": ["a"]}
    plan = advice(
        "{}: weights of {} are offloaded and cannot be read; pass the model's folder or hub name, "
        "and settings={'model': {'offload': ",
        lambda: flowrl.Run(model=pipe, **rest).plan(),
        lambda: flowrl.Run(
            model=str(pipeline), settings={"model": {"offload": True}}, **rest
        ).plan(),
    )
    assert not plan.refusals


def test_a_quantized_model_is_named_by_its_folder(pipeline: Path, tmp_path: Path) -> None:
    """bitsandbytes quantizes on a GPU alone: the mark that transformers leaves is set by hand."""
    pipe = live(pipeline)
    pipe.transformer.hf_quantizer = object()
    rest = {"recipe": "nft", "rewards": "brightness", "prompts": ["a"]}
    fewer_bits = {"model": {"quantization": {"backend": "bitsandbytes", "bits": 4}}}
    run, _ = advice(
        "{}: {} is quantized, and a run reads its model from files: pass the folder or hub name "
        "instead, and settings=",
        lambda: Given(model=pipe, **rest).start(tmp_path),
        lambda: Given(model=str(pipeline), **rest, settings=fewer_bits).start(tmp_path),
    )
    assert dump(run)["model"]["quantization"]["bits"] == 4
