"""DoRA (arXiv:2402.09353): a start that changes nothing, by hand, files, and what refuses it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel  # type: ignore[attr-defined]
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from flowrl.cli.model_card import adapter_lines
from flowrl.errors import UserError
from flowrl.models.adapters import ADAPTER
from flowrl.models.diffusers.lora.given_adapters import merge_adapters
from flowrl.models.diffusers.lora.lora import LORA_FILE
from flowrl.models.diffusers.lora.lora_formats import read_adapter
from flowrl.models.diffusers.lora.teacher_weights import teacher_weights
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.merged import MergedAdapters
from flowrl.models.own.lora import add_own_lora
from flowrl.run.start import start
from flowrl.session.learner import load_policy
from flowrl.settings.model.adapters import FrozenAdapter
from flowrl.settings.read import run_from
from tests.models.test_lora_everywhere import built, velocity
from tests.support import runs, text_runs, tiny_lm
from tests.support.advice import advice
from tests.support.tiny_pipelines import NAMED

CPU = torch.device("cpu")


def sd3() -> PipelinePolicy:
    return PipelinePolicy(NAMED["SD3"].build(), call=NAMED["SD3"].call)


def pixart() -> PipelinePolicy:
    return built("PixArtSigmaPipeline")


def step(made: PipelinePolicy) -> None:
    """An optimizer step of a loss on the velocity."""
    optimizer = torch.optim.AdamW(made.trainable().values(), lr=0.05)
    velocity(made, gradient=True).square().mean().backward()
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("build", [sd3, pixart])
def test_adapters_train_and_come_back(build: Any, tmp_path: Path) -> None:
    """By the pipeline's own method, and by peft's files."""
    made = build()
    base = velocity(made)
    made.add_lora(rank=2, alpha=6, targets=None, seed=0, dora=True)
    torch.testing.assert_close(velocity(made), base, atol=1e-6, rtol=1e-6)
    lengths = {n: p.detach().clone() for n, p in made.trainable().items() if "magnitude" in n}
    step(made)
    moved = [n for n, p in made.trainable().items() if n in lengths and not p.equal(lengths[n])]
    assert moved and len(lengths) == sum(".lora_A." in name for name in made.trainable())
    want = velocity(made)
    assert not torch.allclose(want, base, atol=1e-4)

    made.save(tmp_path)
    again = build()
    again.add_lora(rank=2, alpha=6, targets=None, seed=1, dora=True)
    again.load_weights(tmp_path)
    assert torch.equal(velocity(again), want)
    begun = build()
    begun.begin_from(str(tmp_path))
    assert torch.equal(velocity(begun), want)
    assert begun.trainable().keys() == made.trainable().keys()
    merged = build()
    merge_adapters(merged.pipe, [FrozenAdapter(path=str(tmp_path))])
    torch.testing.assert_close(velocity(merged), want, atol=1e-4, rtol=1e-3)

    plain = build()
    files = [path.name for path in tmp_path.iterdir()]
    lines = adapter_lines(type(plain.pipe), list(plain.roots()), None, files, str(tmp_path))
    exec("\n".join(lines), {"pipe": plain.pipe})  # as a run prints them
    torch.testing.assert_close(velocity(plain), want, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="divides by the lengths of the base's rows"):
        read_adapter(tmp_path / LORA_FILE)


def layer(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_adapter_changes_nothing(dtype: torch.dtype) -> None:
    """Lengths in the weights' own bfloat16 would change rows by up to 0.4 %."""
    model, x = layer(dtype), torch.randn(3, 8).to(dtype)
    want = model(x)
    add_own_lora(model, [], rank=2, alpha=4, targets=None, seed=0, dora=True)
    assert torch.equal(model(x), want)


def test_the_weight_by_hand() -> None:
    """m (W + s B A) / |W + s B A|, in a call and merged."""
    model, x = layer(torch.float64), torch.randn(3, 8).double()
    linear: Any = model[0]
    weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
    one = nn.Sequential(model[0])
    add_own_lora(one, [], rank=2, alpha=6, targets=None, seed=0, dora=True)
    draws = torch.Generator().manual_seed(1)
    for name, p in one.named_parameters():
        if ".lora_" in name:
            p.data += torch.randn(p.shape, generator=draws)
    adapted: Any = one[0]
    a, b = (side[ADAPTER].weight.detach() for side in (adapted.lora_A, adapted.lora_B))
    length = adapted.lora_magnitude_vector[ADAPTER].weight.detach()
    summed = weight + 3 * b.double() @ a.double()
    want = x @ (length[:, None] * summed / summed.norm(dim=1, keepdim=True)).T + bias
    torch.testing.assert_close(adapted(x), want, atol=1e-5, rtol=1e-5)
    with MergedAdapters.of({"": one}, "evaluation").evaluation():
        assert adapted.disable_adapters
        torch.testing.assert_close(adapted(x), want, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_run_and_its_export(tmp_path: Path) -> None:
    """In bfloat16, whose adapters stay in float32; the whole model loads without adapters."""
    settings = runs.tree(runs.write_pipeline(tmp_path / "p"), tmp_path, runs.FLOW_GRPO)
    settings["model"] |= {"lora": {"rank": 2, "alpha": 4, "dora": True}, "dtype": "bfloat16"}
    settings["train"] |= {"iterations": 1}
    settings["evaluate"] = {"every": 1, "steps": 2, "samples": 2, "per_prompt": 1}
    result = start(run_from(settings, "test"), "dora", tmp_path / "run")
    assert result.done
    assert runs.flowrl("export", tmp_path / "run", "--merged", "--out", tmp_path / "out") == 0
    merged, base = (
        SD3Transformer2DModel.from_pretrained(folder, subfolder="transformer")
        for folder in (tmp_path / "out" / "merged", tmp_path / "p")
    )
    pairs = zip(merged.parameters(), base.bfloat16().parameters(), strict=True)
    assert sum(not torch.equal(a.bfloat16(), b) for a, b in pairs) > 10
    folder = tmp_path / "run" / "adapter"
    advice(
        "DoRA has no counterpart in kohya's tools, and ComfyUI divides by the lengths of the "
        "base's rows instead of the changed ones: export with --formats diffusers, or the whole "
        "model with --merged",
        lambda: read_adapter(folder / LORA_FILE),
        lambda: PipelinePolicy.load(
            str(tmp_path / "p"), dtype=torch.float32, device="cpu", call={}
        ).load_weights(tmp_path / "out"),
    )
    student: Any = load_policy(
        run_from(settings | {"model": settings["model"] | {"lora": None}}, "test"), CPU
    )
    weights = advice(
        "{} has adapters of DoRA, whose change of a weight is no product: write the whole model "
        "with `flowrl export --merged`, and name that with model.lora: null",
        lambda: teacher_weights(student, folder, "train.teachers, 1"),
        lambda: teacher_weights(student, tmp_path / "out" / "merged", "train.teachers, 1"),
    )
    assert any(not torch.equal(weights[name], p) for name, p in student.trainable().items())


def test_a_text_run_begins_from_pefts_file(tmp_path: Path) -> None:
    source = tiny_lm.write(tmp_path / "lm")
    torch.manual_seed(0)
    config = LoraConfig(
        r=3, lora_alpha=5, init_lora_weights=False, target_modules=["q_proj"], use_dora=True
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(source), config)
    model.save_pretrained(str(tmp_path / "given"))
    tree = text_runs.tree(source, tmp_path, {"name": "text_grpo", "group": 2, "length": 4})
    tree["model"]["lora"] = {"from": str(tmp_path / "given")}
    policy: Any = load_policy(run_from(tree, "test"), CPU)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(policy.model(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"lora": {"dora": True, "dtype": "bfloat16"}}, "rounded to bfloat16"),
        ({"lora": {"dora": True, "from": "x"}}, "have their own rank, alpha, targets and dora"),
    ],
)
def test_settings_that_exclude_dora(tmp_path: Path, model: Any, why: str) -> None:
    settings = runs.tree(tmp_path, tmp_path, runs.FLOW_GRPO)
    settings["model"] |= model
    with pytest.raises(UserError, match=why):
        run_from(settings, "test")


def test_a_server_and_teachers_refuse_dora(tmp_path: Path) -> None:
    tree = text_runs.tree(tmp_path, tmp_path, {"name": "text_grpo", "group": 2, "length": 4})
    tree["model"] |= {
        "lora": {"dora": True},
        "server": {"url": "http://127.0.0.1:1/v1", "model": "m"},
    }
    with pytest.raises(UserError, match=r"lora.dora: servers load adapters of products alone"):
        run_from(tree, "test")
