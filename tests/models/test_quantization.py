"""Frozen bases of fewer bits: products and gradients, adapters, bytes, refusals."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn

import flowrl
from flowrl.errors import UserError
from flowrl.estimate import memory
from flowrl.session.learner import load_policy
from flowrl.settings.checks.machine import check_model
from flowrl.settings.read import run_from
from tests.support import runs, text_runs, tiny_lm

CPU = torch.device("cpu")
INSTALLED = {
    name: pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")
    for name, module in (
        ("bitsandbytes", "bitsandbytes"), ("gguf", "gguf"), ("quanto", "optimum"),
        ("torchao", "torchao"),
    )
}  # fmt: skip


def written_gguf(pipeline: Path, file: Path) -> Path:
    """The denoiser's weights as GGUF, linear layers in 8 bits where their sizes allow it."""
    import gguf

    eight = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(str(file), "sd3")
    whole = SD3Transformer2DModel.from_pretrained(pipeline, subfolder="transformer")
    for name, weight in whole.state_dict().items():
        if name.endswith("weight") and weight.ndim == 2 and weight.shape[1] % 32 == 0:
            small = gguf.quants.quantize(weight.numpy(), eight)
            writer.add_tensor(name, small, raw_dtype=eight)
        else:
            writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def tree(pipeline: Path, tmp_path: Path, quantization: Any, **model: Any) -> dict[str, Any]:
    made = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    return made | {"model": made["model"] | {"quantization": quantization} | model}


def settings(backend: str, pipeline: Path, tmp_path: Path) -> dict[str, Any]:
    if backend == "gguf":
        return {"backend": "gguf", "file": str(written_gguf(pipeline, tmp_path / "small.gguf"))}
    return {"backend": backend, "bits": 8}


def dense(layer: Any) -> Tensor:
    """The weight that a quantized layer stands for."""
    weight = layer.weight
    if type(weight).__name__ == "GGUFParameter":
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

        return dequantize_gguf_tensor(weight).detach().float()
    return weight.dequantize().detach().clone()


def bases(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers without their adapters, by name."""
    return {
        name.replace(".base_layer", ""): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    }


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=INSTALLED[name]) for name in ("gguf", "quanto", "torchao")]
)
def test_products_and_gradients_are_those_of_the_rounded_weights(
    backend: str, pipeline: Path, tmp_path: Path
) -> None:
    run = run_from(tree(pipeline, tmp_path, settings(backend, pipeline, tmp_path), lora=4), "test")
    made: Any = load_policy(run, CPU)
    quantized = made.denoisers[0]
    plain: Any = load_policy(run_from(tree(pipeline, tmp_path, None, lora=4), "test"), CPU)
    network = plain.denoisers[0]
    original = {name: layer.weight.clone() for name, layer in bases(network).items()}
    for name, layer in bases(quantized).items():
        bases(network)[name].weight.data = dense(layer)
    moved = [n for n, x in bases(network).items() if not torch.equal(x.weight, original[n])]
    assert len(moved) > 5  # GGUF's blocks of 32 do not fit all layers of a tiny network

    found = []
    for model, policy in ((quantized, made), (network, plain)):
        for name, p in policy.trainable().items():
            if ".lora_B." in name:
                p.data.fill_(0.01)
        draws = torch.Generator().manual_seed(0)
        c = model.config
        out = model(
            torch.randn(2, c.in_channels, 8, 8, generator=draws),
            timestep=torch.full((2,), 500.0),
            encoder_hidden_states=torch.randn(2, 5, c.joint_attention_dim, generator=draws),
            pooled_projections=torch.randn(2, c.pooled_projection_dim, generator=draws),
        ).sample
        out.pow(2).mean().backward()
        gradients = {n: p.grad for n, p in policy.trainable().items()}
        found.append((out.detach(), gradients))
    (out, gradients), (expected, wanted) = found
    assert torch.allclose(out, expected, rtol=1e-4, atol=1e-5)
    assert set(gradients) == set(wanted)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-3, atol=1e-6), name


@pytest.mark.slow
@INSTALLED["quanto"]
def test_a_run_has_ratio_1_and_its_adapter_fits_the_plain_pipeline(
    pipeline: Path, tmp_path: Path
) -> None:
    run = run_from(tree(pipeline, tmp_path, {"backend": "quanto", "bits": 8}, lora=4), "test")
    result = flowrl.train(
        settings=run.model_dump(mode="json", by_alias=True), folder=tmp_path / "run"
    )
    first = result.metrics[1] if "ratio" not in result.metrics[0] else result.metrics[0]
    assert first["ratio"] == pytest.approx(1, abs=1e-6)
    lacks = ("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor")
    pipe = StableDiffusion3Pipeline.from_pretrained(pipeline, **dict.fromkeys(lacks))
    pipe.load_lora_weights(str(tmp_path / "run" / "adapter"))
    assert any(".lora_" in name for name, _ in pipe.transformer.named_parameters())


@INSTALLED["quanto"]
def test_the_plan_counts_the_bytes_of_quantized_layers(pipeline: Path, tmp_path: Path) -> None:
    run = run_from(tree(pipeline, tmp_path, {"backend": "quanto", "bits": 8}, lora=4), "test")
    found = memory.estimate(run)
    assert found is not None
    made: Any = load_policy(run, CPU)
    held = 0
    for layer in made.denoisers[0].modules():
        for name, weight in layer.named_parameters(recurse=False):
            if ".lora_" in name or type(layer).__module__.startswith("peft"):
                continue
            parts = [weight._data, weight._scale] if "QBytes" in type(weight).__name__ else [weight]
            held += sum(part.nbytes for part in parts)
    lora = sum(p.nbytes for p in made.trainable().values())
    assert found.parts["trained model"] == pytest.approx(held - lora, rel=0.1)


@INSTALLED["bitsandbytes"]
@pytest.mark.parametrize("bits", [4, 8])
def test_a_language_model_of_fewer_bits_has_gradients_of_its_rounded_weights(
    bits: int, tmp_path: Path
) -> None:
    from bitsandbytes.functional import dequantize_4bit

    source = tmp_path / "lm"
    tiny_lm.llama(width=64).save_pretrained(source)
    tiny_lm.tokenizer().save_pretrained(source)
    given = text_runs.tree(source, tmp_path, {"name": "text_grpo", "group": 2, "length": 4})
    given["model"] |= {"dtype": "bfloat16", "lora": 4}
    plain: Any = load_policy(run_from(given, "test"), CPU)
    given["model"]["quantization"] = {"backend": "bitsandbytes", "bits": bits}
    made: Any = load_policy(run_from(given, "test"), CPU)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        made.model(ids)  # which packs weights of 4 bits for the CPU, if it may
    for name, layer in bases(made.model).items():
        if bits == 4 and "lm_head" not in name:
            weight: Any = layer.weight
            whole = dequantize_4bit(weight.data, weight.quant_state)
            bases(plain.model)[name].weight.data = whole.to(torch.bfloat16)
    found = []
    for policy in (made, plain):
        for name, p in policy.trainable().items():
            if ".lora_B." in name:
                p.data.fill_(0.01)
        out = policy.model(ids).logits.float()
        out.pow(2).mean().backward()
        found.append((out.detach(), [p.grad for p in policy.trainable().values()]))
    tolerance = 0.05 if bits == 4 else 0.1  # of bfloat16, and of rows rounded to 8 bits
    (out, gradients), (expected, wanted) = found
    assert (out - expected).norm() < tolerance * expected.norm()
    for gradient, other in zip(gradients, wanted, strict=True):
        assert (gradient - other).norm() <= 3 * tolerance * other.norm()


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"backend": "quanto"}, {}, "quanto needs 4 or 8"),
    ({"backend": "gguf"}, {}, "needs the .gguf file"),
    ({"backend": "quanto", "bits": 8, "file": "a.gguf"}, {}, "leave it out"),
    ({"backend": "gguf", "file": "a.gguf", "bits": 4}, {}, "a GGUF file has its own"),
    ({"backend": "gguf", "file": "a.gguf", "components": ["vae"]}, {}, "a file alone"),
    ({"backend": "quanto", "bits": 8}, {"lora": None}, "train adapters"),
    ({"backend": "quanto", "bits": 8}, {"lora": {"merge": "evaluation"}}, "cannot be summed"),
    ({"backend": "quanto", "bits": 8}, {"adapters": ["x.safetensors"]}, "excludes adapters"),
    (
        {"backend": "quanto", "bits": 8, "components": ["text_encoder"]},
        {"offload": True},
        "stay on their device",
    ),
]


@pytest.mark.parametrize(("quantization", "model", "said"), REFUSED)
def test_what_excludes_quantization_is_refused(
    quantization: dict[str, Any], model: dict[str, Any], said: str, pipeline: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        run_from(tree(pipeline, tmp_path, quantization, **model), "test")


def test_files_and_packages_that_are_missing_are_named(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = {"backend": "gguf", "file": "absent.gguf"}
    run = run_from(tree(pipeline, tmp_path, absent), "test")
    with pytest.raises(UserError, match=r"no file absent\.gguf"):
        check_model(run.model)
    monkeypatch.setattr("flowrl.settings.model.quantization.find_spec", lambda name: None)
    run = run_from(tree(pipeline, tmp_path, {"backend": "torchao", "bits": 8}), "test")
    with pytest.raises(UserError, match="pip install torchao"):
        check_model(run.model)


@INSTALLED["quanto"]
def test_components_arguments_and_live_models_are_checked(pipeline: Path, tmp_path: Path) -> None:
    eight = {"backend": "quanto", "bits": 8}
    for more, said in (
        ({"components": ["unet_2"]}, "no model unet_2"),
        ({"arguments": {"group": 3}}, "takes no group"),
    ):
        with pytest.raises(UserError, match=said):
            load_policy(run_from(tree(pipeline, tmp_path, eight | more), "test"), CPU)
    made: Any = load_policy(run_from(tree(pipeline, tmp_path, eight), "test"), CPU)
    with pytest.raises(UserError, match="is quantized"):
        flowrl.train(model=made.pipe, recipe="flow_grpo", prompts=["a"], rewards="brightness")
    with pytest.raises(UserError, match=r"are quantized: set model\.lora"):
        made.train_all()
