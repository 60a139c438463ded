"""Nineteen defects that trainers of this kind were found to have: here each is impossible.

The first thirteen; the others are in test_peer_defects_more.py.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.algorithm import Algorithm
from flowrl.cli.given_model import policy_of
from flowrl.credit.advantages import Estimator, Standardize
from flowrl.errors import UserError
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.prompts import PromptSet
from flowrl.run.evaluate.evaluate import Trial, draw_trial, evaluate_held_out
from flowrl.run.save import checkpoint
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from flowrl.session.signals import Interrupt
from flowrl.settings.read import override, read_run
from samplers import Latents, Ode, roll
from tests.support import runs
from tests.support.iterations import collect, iterate
from tests.support.runs import flowrl, lines
from tests.support.tiny import gaussian_velocity
from tests.support.warm import agree, small

OWN = """
import torch
calls = 0

def holes(samples):  # the first sample of every call has no score
    scores = samples.media.flatten(1).mean(1)
    scores[0] = torch.nan
    return scores

def none(samples):
    return [torch.nan] * len(samples.prompts)

def raises(samples):
    global calls
    calls += 1
    if calls > 3:
        raise RuntimeError("out of order")
    return samples.media.flatten(1).mean(1)
"""


def with_own(pipeline: Path, folder: Path, name: str) -> dict:
    (folder / "own.py").write_text(OWN)
    reward = [{"name": f"{folder / 'own.py'}:{name}"}]
    return small(pipeline, folder) | {"rewards": reward, "held_out_rewards": [{"name": "jpeg"}]}


def values(session: Session) -> list[Tensor]:
    return [p.detach().clone() for p in session.learner.policies.parameters.values()]


@pytest.mark.slow
def test_01_two_iterations_and_two_more_are_four(pipeline, tmp_path, monkeypatch):
    config = runs.write(small(pipeline, tmp_path), tmp_path)
    assert flowrl("train", config, "--folder", tmp_path / "whole") == 0
    signals = iter([None, None, 15])  # at the start, after one iteration, after two
    with monkeypatch.context() as interrupted:
        interrupted.setattr(Interrupt, "pending", lambda *_: next(signals))
        assert flowrl("train", config, "--folder", tmp_path / "broken") == 143
    assert [line["iteration"] for line in lines(tmp_path / "broken")] == [0, 1, 2]
    assert flowrl("train", "--resume", tmp_path / "broken") == 0
    agree(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.quick_cases("nft")
@pytest.mark.parametrize("recipe", ["flow_grpo", "nft"])
def test_02_the_policys_own_loss_is_logged_beside_the_whole(pipeline, tmp_path, recipe):
    weight = 0.5
    own = {"name": recipe, "steps": 3, "group": 2, "kl": weight}
    kept, progress = runs.session(pipeline, tmp_path, own, updates=2, lr=0.05), Progress()
    for _ in range(2):
        metrics = iterate(kept, progress).metrics
    assert metrics["kl"] > 1e-9
    whole = metrics["policy_loss"] + weight * metrics["kl"]
    assert metrics["loss"] == pytest.approx(whole, rel=1e-5, abs=1e-12)
    assert metrics["loss"] != metrics["policy_loss"]


def test_03_what_is_encoded_follows_the_files_content(pipeline, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a red ball"}\n')
    stat = file.stat()
    before = PromptSet.read(str(file), "prompt", "prompts.train")
    file.write_text('{"prompt": "a red cat!"}\n')  # of the same size, at the same time
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = PromptSet.read(str(file), "prompt", "prompts.train")
    assert before.texts == ("a red ball",) and after.texts == ("a red cat!",)

    folder = runs.write_pipeline(tmp_path / "pipeline")
    settings = small(folder, tmp_path)
    first = runs.opened(settings, tmp_path).learner.policy.encode(["a red ball"]).calls()[0][0]
    encoder = folder / "text_encoder" / "model.safetensors"
    stat, weights = encoder.stat(), load_file(encoder)
    save_file({k: v * 1.5 for k, v in weights.items()}, encoder, metadata={"format": "pt"})
    os.utime(encoder, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = runs.opened(settings, tmp_path).learner.policy.encode(["a red ball"]).calls()[0][0]
    assert first.shape == second.shape and not torch.equal(first, second)


def test_04_the_same_prompt_drawn_twice_is_two_groups(pipeline, tmp_path):
    kept = runs.session(pipeline, tmp_path, runs.FLOW_GRPO)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a red ball"}\n')
    kept = runs.session_of(kept.run, tmp_path)
    experience = collect(kept, 0)
    assert experience.samples.prompts == ["a red ball"] * 8
    assert experience.samples.group.tolist() == [0] * 4 + [1] * 4
    assert experience.draws == (0, 1)
    first, second = experience.samples.media.split(4)
    assert not torch.equal(first, second)
    credit = experience.rows[0].advantage[:, 0].view(2, 4)
    assert credit.mean(1).abs().max() < 1e-5 and credit.abs().max() > 0.1


def test_05_ids_beyond_what_a_float_tells_apart():
    one = 2**24
    assert float(torch.tensor([one + 1], dtype=torch.float32)) == one
    draws = PromptSet(("a", "b"), ({}, {})).draw(one // 2, 2, 0)
    assert draws.ids == (one, one + 1)
    plans = Ode(2)([1.0, 0.5, 0.0], 0, 0)
    (rollout,) = roll(plans, gaussian_velocity, Latents((3,)), draws.ids, seed=0, iteration=0)
    assert len({tuple(row) for row in rollout.x0.tolist()}) == 4
    assert rollout.draws == draws.ids and rollout.prompt.dtype == torch.int64


def test_06_a_score_that_is_not_a_number_spoils_nothing(pipeline, tmp_path):
    kept = runs.opened(with_own(pipeline, tmp_path, "holes"), tmp_path)
    before, progress = values(kept), Progress()
    for _ in range(2):
        metrics = iterate(kept, progress).metrics
        assert metrics["unscored"] == 1 and metrics["skipped"] == 0
    after = values(kept)
    assert all(bool(weight.isfinite().all()) for weight in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    rows = collect(kept, 2).rows[0]
    assert rows.mask[:, 0].tolist() == [False, True, True, True] and not rows.advantage[0].any()


@pytest.mark.quick_cases("none")
@pytest.mark.parametrize("reward", ["raises", "none"])
def test_07_a_reward_that_fails_stops_the_run_and_never_trains_on_zeros(
    pipeline, tmp_path, capsys, reward
):
    tree = with_own(pipeline, tmp_path, reward)
    tree["train"]["self_test"] = "off"
    tree["evaluate"]["trained"] = False  # whose calls would count
    folder = tmp_path / "run"
    assert flowrl("train", runs.write(tree, tmp_path), "--folder", folder) == 3
    said = capsys.readouterr().err
    assert f"reward {reward} " in said and said.count("flowrl: ") == 1
    done = {"raises": 3, "none": 0}[reward]
    assert [line["iteration"] for line in lines(folder)] == list(range(done + 1))
    assert all(line["reward"] != 0 for line in lines(folder)[1:])


@pytest.mark.slow
def test_08_the_command_line_is_heard(pipeline, tmp_path, capsys):
    config = runs.write(small(pipeline, tmp_path), tmp_path)
    words = ["--train.lr", "0.5", "--recipe.group", "6", "--evaluate.average", "None"]
    run = override(read_run(config), words)
    assert (run.train.lr, run.recipe.group, run.evaluate.average) == (0.5, 6, None)
    assert flowrl("train", config, *words[:4], "--train.iteratoins", "1") == 2
    assert "did you mean --train.iterations?" in capsys.readouterr().err
    folder = tmp_path / "run"
    assert flowrl("train", config, "--folder", folder, "--train.iterations", "1", *words[:4]) == 0
    assert lines(folder)[-1]["lr"] == 0.5 and read_run(folder / "run.yaml").recipe.group == 6


def test_09_a_misspelt_setting_is_refused_at_every_depth(pipeline, tmp_path, capsys):
    for place, slip, right in (
        ((), "trian", "train"),
        (("train",), "learning_rates", "lr"),
        (("recipe",), "grup", "group"),
        (("model", "lora"), "rnak", "rank"),
        (("evaluate",), "sampels", "samples"),
    ):
        tree = small(pipeline, tmp_path)
        inner = tree
        for key in place:
            inner = inner[key]
        inner[slip] = 1
        assert flowrl("train", runs.write(tree, tmp_path), "--folder", tmp_path / "run") == 2
        said = capsys.readouterr().err
        assert slip in said and (f"did you mean '{right}'" in said or f"{right}" in said)
        assert not (tmp_path / "run").exists()


def test_10_a_policy_gradient_without_noise_is_refused(pipeline, tmp_path, capsys):
    with pytest.raises(UserError, match="noisy, trained steps, but this plan is deterministic"):
        Algorithm(4, Ode(4), Estimator((Standardize("group"),)), Transition(), Surrogate(0.2, 0.2))
    tree = small(pipeline, tmp_path) | {"recipe": runs.FLOW_GRPO | {"eta": 0.0}}
    assert flowrl("train", runs.write(tree, tmp_path), "--folder", tmp_path / "run") == 2
    assert "eta" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_11_the_adapter_paints_the_same_in_plain_diffusers(pipeline, tmp_path):
    kept = runs.opened(small(pipeline, tmp_path), tmp_path)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in kept.learner.policies.parameters.values():
            p.add_(0.3 * torch.randn(p.shape, generator=rng))
    checkpoint.export(kept.learner, tmp_path / "adapter", "current")
    trial = Trial(kept.held_out, (0, 1), 1, 4, 7)
    ours = draw_trial(kept.learner.policy, trial).samples.media
    empty = ("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor")
    plain = StableDiffusion3Pipeline.from_pretrained(pipeline, **dict.fromkeys(empty))
    plain.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 4, "guidance_scale": 1.0, "output_type": "pt"}
    call |= {
        "prompt": list(kept.held_out.texts[:2]),
        "latents": trial.noise(kept.learner.policy.shape(4)),
    }
    untrained = plain(**call).images
    plain.load_lora_weights(tmp_path / "adapter")
    torch.testing.assert_close(plain(**call).images, ours, atol=1e-6, rtol=1e-5)
    assert (untrained - ours).abs().max() > 1e-3


def test_12_float32_is_float32_everywhere(pipeline, tmp_path, monkeypatch):
    kept = runs.opened(small(pipeline, tmp_path), tmp_path)
    seen: dict[str, set[torch.dtype]] = {}

    def look(module: nn.Module, args: tuple, named: dict, out: object) -> None:
        assert not torch.is_autocast_enabled("cpu")
        found = seen.setdefault(type(module).__name__, set())
        parts = (*args, *named.values(), *(out if isinstance(out, tuple) else (out,)))
        found |= {t.dtype for t in parts if isinstance(t, Tensor) and t.is_floating_point()}

    for component in kept.learner.policy.pipe.components.values():
        if isinstance(component, nn.Module):
            for module in component.modules():
                module.register_forward_hook(look, with_kwargs=True)
    iterate(kept, Progress())
    assert evaluate_held_out(kept.learner, kept.held_out, kept.judges) is not None
    assert {"SD3Transformer2DModel", "Decoder"} <= seen.keys() and len(seen) > 9
    assert set().union(*seen.values()) == {torch.float32}, seen
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as a launcher's settings may say
    AcceleratorState._reset_state(True)
    try:
        with pytest.raises(UserError, match=r'mixed_precision: "no" .*model\.dtype: bfloat16'):
            runs.opened(small(pipeline, tmp_path), tmp_path)
    finally:
        AcceleratorState._reset_state(True)


@pytest.mark.slow
def test_13_raw_and_averaged_weights_and_all_counters_are_saved(pipeline, tmp_path):
    folder = tmp_path / "run"
    assert flowrl("train", runs.write(small(pipeline, tmp_path), tmp_path), "--folder", folder) == 0
    saved = load_file(folder / "checkpoints" / "000004" / "policies.safetensors")
    assert {name.split("/")[0] for name in saved} == {"current", "evaluation", "trailing"}
    run = read_run(folder / "run.yaml")
    for name, which in (("adapter", "evaluation"), ("adapter_raw", "current")):
        for key, p in policy_of(run, folder, str(folder / name)).trainable().items():
            assert torch.equal(p.detach(), saved[f"{which}/{key}"]), (name, key)
    assert any(not torch.equal(saved[k], saved[k.replace("current", "evaluation")])
               for k in saved if k.startswith("current/"))  # fmt: skip
    state = json.loads((folder / "checkpoints" / "000003" / "state.json").read_text())["progress"]
    assert (state["iteration"], state["optimizer_steps"]) == (3, 6)
    assert state["best_iteration"] is not None and state["seconds"] > 0
