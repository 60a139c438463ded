"""Merged adapters: the same numbers to rounding, weights back to the bit, no density stored."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from flowrl.errors import UserError
from flowrl.iteration.ratio_check import noise_floor
from flowrl.models import merged
from flowrl.models.merged import MergedAdapters
from flowrl.run.evaluate.evaluate import evaluate_held_out
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from flowrl.settings.read import check_plan, run_from
from tests.support import runs
from tests.support.iterations import collect, update

MIX = {"name": "mix_grpo", "steps": 4, "group": 4, "window": 2, "every": 1, "clip": 0.2}


def adapted(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=6, target_modules=["0", "2"]), model)
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(p, std=0.1)
    return model


def bits(model: nn.Module) -> list[Any]:
    """Values, memory and switches of all weights."""
    flags = [m._disable_adapters for m in model.modules() if "_disable_adapters" in vars(m)]
    return [(p.data_ptr(), p.detach().clone().flatten().tolist()) for p in model.parameters()] + [
        flags,
        [p.requires_grad for p in model.parameters()],
    ]


def moved(session: Session) -> None:
    """Give the adapters values that change every velocity."""
    draws = torch.Generator().manual_seed(1)
    for name, p in session.learner.policies.parameters.items():
        if ".lora_B." in name:
            p.data = (0.2 * torch.randn(p.shape, generator=draws)).to(p.dtype)
    session.learner.policies.publish()


def session(
    pipeline: Path, folder: Path, merge: str, recipe: dict[str, Any] = MIX, **train: object
) -> Session:
    tree = runs.tree(pipeline, folder, recipe, **train)
    tree["model"]["lora"] |= {"merge": merge}
    made = runs.opened(tree, folder)
    moved(made)
    return made


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_merged_layer_computes_the_adapters_sum_and_gives_its_weight_back(dtype: torch.dtype):
    model, x = adapted(dtype), torch.randn(5, 8, dtype=dtype)
    kept, before, plain = MergedAdapters.of({"m": model}, "evaluation"), bits(model), model(x)
    with kept.evaluation():
        with kept.merged():  # nested: nothing more
            inside = model(x)
        assert torch.equal(model(x), inside)
        assert bits(model) != before
    assert bits(model) == before
    rounding = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(inside, plain, rtol=rounding, atol=rounding)
    assert (model[0].base_layer(x) - model[0](x)).abs().max() > 0.1


def test_weights_come_back_after_an_exception_and_follow_the_adapters():
    model, x = adapted(), torch.ones(1, 8)
    kept, before = MergedAdapters.of({"m": model}, "untrained"), bits(model)
    with pytest.raises(RuntimeError, match="reward"), kept.sampling() as aside:
        assert aside is not None
        with aside():
            raise RuntimeError("reward")
    assert bits(model) == before
    seen = []
    for factor in (1.0, 3.0):  # an optimizer step between two iterations
        with torch.no_grad():
            model[2].lora_B["default"].weight.mul_(factor)
        for context in (kept.evaluation, kept.evaluation):
            with context():
                seen.append(model(x))
        with kept.sampling() as aside, aside():
            seen.append(model(x))
        torch.testing.assert_close(seen[-1], model(x))
    assert not torch.allclose(seen[0], seen[-1])
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2])


def test_adapters_that_are_off_stay_off_and_none_merges_nothing():
    model, x = adapted(), torch.ones(1, 8)
    for layer in (model[0], model[2]):
        layer._disable_adapters = True
    base = model(x)
    with MergedAdapters.of({"m": model}, "evaluation").evaluation():
        assert torch.equal(model(x), base)
    none = MergedAdapters.of({"m": model}, "none")
    with none.evaluation(), none.sampling() as aside:
        assert aside is None
    conv = nn.Sequential(nn.Conv1d(2, 2, 1))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"]), conv)
    with pytest.raises(UserError, match="of kind Conv1d cannot be merged"):
        MergedAdapters.of({"m": conv}, "evaluation")


@pytest.mark.slow
def test_only_steps_without_a_density_are_merged(pipeline, tmp_path, monkeypatch):
    """With merged weights that are wrong on purpose: no stored density knows of them."""
    plain = collect(session(pipeline, tmp_path, "none"), 1)
    kept = session(pipeline, tmp_path, "untrained")
    close = collect(kept, 1)
    monkeypatch.setattr(merged, "_summed", lambda layer: layer.get_base_layer().weight * 0.5)
    far = collect(kept, 1)  # the second window: one step without noise before it
    for experience in (plain, close, far):
        assert noise_floor(kept.learner, experience) < 1e-5
    images = [each.samples.media for each in (plain, close, far)]
    torch.testing.assert_close(images[1], images[0], rtol=0, atol=1e-4)
    assert (images[2] - images[0]).abs().max() > 1e-2, "so untrained steps were merged"


def test_samples_that_are_merged_whole_have_their_old_densities_recomputed(
    pipeline, tmp_path, monkeypatch
):
    kept = session(pipeline, tmp_path, "sampling", recompute_old=True)
    monkeypatch.setattr(merged, "_summed", lambda layer: layer.get_base_layer().weight * 0.5)
    experience = collect(kept, 1)
    assert noise_floor(kept.learner, experience) > 1e-4, "sampled by other weights"
    metrics = update(kept.learner, experience, Progress()).metrics
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1


def test_merged_matching_samples_train_at_ratio_one(pipeline, tmp_path):
    kept = session(pipeline, tmp_path, "untrained", runs.NFT)
    collect(kept, 0)  # its first call proves the pipeline
    layer = next(iter(kept.learner.merging.layers))
    calls: list[bool] = []
    layer.lora_A["default"].register_forward_pre_hook(lambda *_: calls.append(True))
    experience = collect(kept, 0)
    assert not calls, "every step of sampling is merged"
    assert noise_floor(kept.learner, experience) is None
    assert update(kept.learner, experience, Progress()).metrics["skipped"] == 0
    assert calls


@pytest.mark.slow
def test_evaluations_are_merged_and_score_the_same(pipeline, tmp_path):
    scores, calls = [], [0, 0]
    for k, merge in enumerate(("none", "evaluation")):
        kept = session(pipeline, tmp_path, merge)
        layers = [m for m in kept.learner.policy.pipe.transformer.modules() if "lora_A" in dir(m)]
        layer, found = layers[0], calls

        def count(*_: object, k: int = k, found: list[int] = found) -> None:
            found[k] += 1

        layer.lora_A["default"].register_forward_pre_hook(count)
        held_out = kept.held_out
        assert held_out is not None
        scores.append(evaluate_held_out(kept.learner, held_out, kept.judges).metrics)
    assert calls[0] > 0 == calls[1]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)


def test_settings_that_cannot_be_merged_are_refused(pipeline, tmp_path):
    tree = runs.tree(pipeline, tmp_path, MIX)
    tree["model"]["lora"] |= {"merge": "sampling"}
    with pytest.raises(UserError, match=r"set train\.recompute_old: true, or merge: untrained"):
        check_plan(run_from(tree, "test"))
    tree["train"]["recompute_old"] = True
    check_plan(run_from(tree, "test"))
    tree["recipe"] = {"name": "draft", "steps": 4}
    with pytest.raises(UserError, match="rebuilds its samples with gradients"):
        check_plan(run_from(tree, "test"))
    tree = runs.tree(pipeline, tmp_path, MIX)
    tree["model"] |= {"lora": {"merge": "evaluation"}, "offload_experts": True}
    with pytest.raises(UserError, match=r"incompatible with lora\.merge"):
        run_from(tree, "test")
