"""Runs of the flow of points, a model of one's own: recipes, resumes, sizes of calls, commands."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, load_model, save_model

import flowrl
from examples.own.points import TARGET, Points, tilted
from flowrl.errors import UserError
from flowrl.recipes import RECIPES, TEXT_RECIPES
from flowrl.settings.read import check_run, run_from
from tests.recipes import test_recipes as bandit
from tests.support import runs

EXAMPLES = Path(__file__).parents[2] / "examples" / "own"
OWN, REWARD = (f"{EXAMPLES}/points.py:{name}" for name in ("Points", "Closeness"))
GRPO = {"name": "flow_grpo", "steps": 4, "group": 4, "kl": 0.1}


def tree(folder: Path, recipe: dict = GRPO, lora: int | None = None, **train) -> dict:
    prompts = folder / "prompts.txt"
    prompts.write_text("a point\na point on the left\na point on the right\n")
    rewards: list[Any] = [REWARD]
    if recipe["name"] == "gardo":  # compares with further rewards
        rewards += [{"name": REWARD, "label": label, "weight": 0} for label in ("again", "far")]
        recipe = recipe | {"auxiliary": ["again"], "distance": "far"}
    return {
        "recipe": recipe,
        "model": {"own": OWN, "lora": lora, "device": "cpu"},
        "prompts": {"train": str(prompts), "held_out": str(prompts), "per_iteration": 3},
        "rewards": rewards,
        "train": {"iterations": 2, "lr": 1e-2, "rows_per_call": 512, **train},
        "evaluate": {"every": 4, "steps": 3, "samples": 6, "per_prompt": 2},
        "checkpoint": {"every": 1},
        "track": {"images": 2},
    }


def trained(folder: Path, settings: dict) -> flowrl.TrainedRun:
    folder.mkdir(exist_ok=True)
    return flowrl.train(settings=settings, folder=folder / "run")


def weights(run: flowrl.TrainedRun) -> dict[str, torch.Tensor]:
    assert run.weights is not None
    return load_file(next(run.weights.glob("*.safetensors")))


SMALL = {"steps": 4, "group": 4}
KINDS = [
    {"name": "flow_grpo", **SMALL},
    {"name": "branch_grpo", "steps": 4, "at": [0, 1]},
    {"name": "awm", "levels_per_sample": 2, **SMALL},
    {"name": "dpo", **SMALL},
    {"name": "draft", "steps": 4},
]
ALL = [{"name": name} for name in sorted(RECIPES.keys() - TEXT_RECIPES - {"opd"})]
EVERY_RECIPE = [*KINDS, *(pytest.param(each, marks=pytest.mark.slow) for each in ALL)]


@pytest.mark.parametrize(
    "recipe", EVERY_RECIPE, ids=lambda recipe: "-".join(map(str, recipe.values()))
)
def test_rows_scored_by_the_policy_that_drew_them_have_ratio_1(recipe, tmp_path, capsys):
    settings = tree(tmp_path, recipe, iterations=1)
    run = trained(tmp_path, settings | {"prompts": settings["prompts"] | {"held_out": None}})
    said = capsys.readouterr().out
    exact = (
        "recomputed, largest difference 0.0e+00",
        "on the same rows, ratio 1",
        "with gradients",
    )
    assert any(line in said for line in exact)
    assert run.metrics[-1]["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("lora", [None, 2])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(lora, tmp_path):
    whole = trained(tmp_path / "whole", tree(tmp_path, lora=lora, iterations=2))
    part = trained(tmp_path / "part", tree(tmp_path, lora=lora, iterations=1))
    resumed = flowrl.train(resume=part.folder, iterations=2)
    one, two = weights(whole), weights(resumed)
    assert all(torch.equal(one[name], two[name]) for name in one)
    small = trained(tmp_path / "small", tree(tmp_path, lora=lora, iterations=2, rows_per_call=5))
    three = weights(small)
    assert max(float((one[n] - three[n]).abs().max()) for n in one) < 1e-5
    assert max(float((one[n] - weights_at_start(n, lora)).abs().max()) for n in one) > 1e-3


def weights_at_start(name: str, lora: int | None) -> torch.Tensor:
    """All weights of the network; of an adapter zeros, which its B begins at."""
    if lora is not None:
        return torch.zeros(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Points().state_dict()[name]


def test_a_resume_with_a_changed_model_says_so(tmp_path, capsys):
    source = tmp_path / "mine.py"
    source.write_text((EXAMPLES / "points.py").read_text())
    save_model(Points(), str(tmp_path / "w.safetensors"))
    settings = tree(tmp_path, iterations=1)
    settings["model"] |= {"own": f"{source}:Points", "weights": str(tmp_path / "w.safetensors")}
    run = trained(tmp_path, settings)
    source.write_text(source.read_text() + "\n# another line\n")
    flowrl.train(resume=run.folder, iterations=2)
    assert f"the source {source}" in capsys.readouterr().out
    save_model(runs_another(), str(tmp_path / "w.safetensors"))
    with pytest.raises(UserError, match=r"the base model .* is not the one"):
        flowrl.train(resume=run.folder, iterations=3)


def runs_another() -> Points:
    model = Points()
    torch.nn.init.ones_(model.network[0].weight)
    return model


def test_from_python_by_class_by_module_and_by_name(tmp_path):
    live = runs_another()
    live.train()
    before = {name: w.clone() for name, w in live.state_dict().items()}
    common: dict[str, Any] = {
        "rewards": [REWARD], "prompts": ["a point"], "recipe": GRPO, "iterations": 1, "lora": 2,
        "settings": {"prompts": {"per_iteration": 1}}, "lr": 1e-3,
    }  # fmt: skip
    (tmp_path / "plain.py").write_text(PLAIN)
    plain = runs.imported(tmp_path / "plain.py").Plain()
    with pytest.raises(UserError, match="Points takes arguments"):
        flowrl.train(live, **common, folder=tmp_path / "a")
    kept = flowrl.train(plain, **common, folder=tmp_path / "b")
    assert kept.settings.model.weights == str(tmp_path / "b" / "given" / "weights.safetensors")
    made = kept.sample(["a point"], count=3).media
    assert made.shape == (3, 2)
    drawn = flowrl.sample(live, "a point", plan=flowrl_ode(), steps=3)[0].samples
    assert drawn is not None and drawn.kind == "tensor" and live.training
    assert all(torch.equal(before[n], w) for n, w in live.state_dict().items())


PLAIN = """
from examples.own.points import TARGET, Points, tilted


class Plain(Points):
    def __init__(self):
        super().__init__(width=8)
"""


def flowrl_ode():
    from samplers import Ode

    return Ode(2)


EXAMPLE_FILES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLE_FILES)
def test_each_example_runs_and_draws_its_samples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ("--train.iterations", "1", "--evaluate.samples", "4", "--folder", tmp_path / "run")
    assert runs.flowrl("train", EXAMPLES / name, *few) == 0
    with Image.open(tmp_path / "run" / "samples" / "after.png") as page:
        assert len(page.convert("RGB").getcolors(2**24) or []) > 20
    record = next((tmp_path / "run" / "report").glob("evaluation-*.json"))
    assert json.loads(record.read_text())["kind"] == "image"


@pytest.mark.slow
def test_reward_weighted_matching_finds_the_exact_optimum(tmp_path):
    """Samples of `tilt` have the moments of p(x) exp(r(x) / beta), in closed form.

    The base is 0.45 away in reward and 0.26 in height; 20 Euler steps are 0.05 off by themselves.
    """
    weights, centres, spread = tilted(0.25)
    away = (centres - torch.tensor(TARGET).double()).square().sum(1) + 2 * spread**2
    wanted = [-(weights * away).sum() / 2, weights @ centres[:, 1], centres[:, 0].abs().mean()]
    found = []
    for seed in range(3):
        settings = tree(tmp_path, {"name": f"{EXAMPLES}/points.py:tilt"})
        settings |= {"track": {"images": 0, "training": 0}, "checkpoint": {"every": 60}}
        (one := tmp_path / "one.txt").write_text("a point\n")
        settings["prompts"] = {"train": str(one), "per_iteration": 1}
        settings["train"] = LEARNING | {"seed": seed}
        run = trained(tmp_path / str(seed), settings)
        media = run.sample(["a point"], count=4096, steps=20, seed=seed).media.double()
        r = -(media - torch.tensor(TARGET)).square().sum(1) / 2
        found.append(torch.stack([r.mean(), media[:, 1].mean(), media[:, 0].abs().mean()]))
    means = torch.stack(found)
    error = 4.30 * means.std(0) / 3**0.5  # of a 95 % interval over three seeds
    assert ((means.mean(0) - torch.stack(wanted)).abs() < error + 0.03).all(), (means, wanted)


BASE = -0.9425  # of the reward, in closed form: -((1 + 0.8^2) + 2 * 0.35^2) / 2
SETTINGS = {
    **{
        name: settings | {"group": 64}
        for name, settings in bandit.SMALL.items()
        if "group" in settings
    },
    "g2rpo": bandit.SMALL["g2rpo"],
    "srpo": {"steps": 6, "words": None},  # a reward without words has no opposite
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", *(each["name"] for each in ALL)])
def test_every_recipe_goes_from_the_known_reward_to_the_known_optimum(name, tmp_path):
    """Of a reward without an anchor the optimum is 0, with every sample at the target.

    In 40 iterations each recipe goes more than a third of the way, most of them nine tenths."""
    recipe = {"name": name, **SETTINGS.get(name, bandit.SMALL.get(name, {"steps": 6}))}
    settings = tree(tmp_path, GRPO if name == "none" else json.loads(json.dumps(recipe)))
    (one := tmp_path / "one.txt").write_text("a point\n")
    settings["prompts"] = {"train": str(one), "per_iteration": 1 if "group" in recipe else 16}
    lr, iterations = (1e-9, 1) if name == "none" else (3e-3, 40)
    settings["train"] = {"iterations": iterations, "lr": lr, "rows_per_call": 4096, "alarms": "off"}
    settings |= {"track": {"images": 0, "training": 0}, "checkpoint": {"every": 1000}}
    run = trained(tmp_path, {k: v for k, v in settings.items() if k != "evaluate"})
    media = run.sample(["a point"], count=4096, steps=50, seed=0).media.double()
    reward = float(-(media - torch.tensor(TARGET)).square().sum(1).mean() / 2)
    if name == "none":
        assert abs(reward - BASE) < 0.04  # of 4096 samples, and of 50 Euler steps
    else:
        assert reward > 0.65 * BASE and media[:, 1].mean() > 0.2, (reward, media.mean(0))


LEARNING = {
    "iterations": 60, "lr": 3e-3, "updates": 4, "rows_per_call": 4096,
    "schedule": {"name": "linear"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_commands_of_a_run(tmp_path, capsys):
    run = trained(tmp_path, tree(tmp_path, lora=2, iterations=1))
    assert (
        runs.flowrl("sample", run.folder, "a point", "--count", "3", "--out", tmp_path / "s") == 0
    )
    assert np.load(tmp_path / "s" / "samples.npy").shape == (3, 2)
    assert (tmp_path / "s" / "grid.png").is_file() and (tmp_path / "s" / "002.png").is_file()
    assert runs.flowrl("evaluate", run.folder, "--samples", "6") == 0
    assert "Closeness: -" in capsys.readouterr().out
    assert runs.flowrl("export", run.folder, "--merged", "--out", tmp_path / "e") == 0
    merged, policy = Points(), Points()
    load_model(merged, str(tmp_path / "e" / "merged" / "model.safetensors"))
    load_model(policy, str(merged_by_hand(run, tmp_path)))
    x, s = torch.randn(5, 2), torch.full((5,), 0.5)
    assert torch.allclose(merged(x, s, s[:, None]), policy(x, s, s[:, None]), atol=1e-6)
    assert (run.folder / "report.html").is_file()
    assert runs.flowrl("plan", run.folder / "run.yaml") == 0
    said = capsys.readouterr().out
    assert "memory: about" in said and "time" not in said
    model = ("--model", OWN, "--steps", "3")
    assert runs.flowrl("sample", "a point", *model, "--out", tmp_path / "m") == 0


def merged_by_hand(run: flowrl.TrainedRun, folder: Path) -> Path:
    """W + alpha / rank B A, from the adapter's own file."""
    assert run.weights is not None
    adapter, base = load_file(run.weights / "adapter_model.safetensors"), Points()
    config = json.loads((run.weights / "adapter_config.json").read_text())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = Points()
    with torch.no_grad():
        for name, module in base.named_modules():
            a = adapter.get(f"base_model.model.{name}.lora_A.weight")
            if a is not None:
                b = adapter[f"base_model.model.{name}.lora_B.weight"]
                module.weight += config["lora_alpha"] / config["r"] * b @ a
    save_model(base, str(folder / "hand.safetensors"))
    return folder / "hand.safetensors"


MODEL = {"own": OWN}
REFUSED = [
    ({"model": {"own": "points"}}, "your own model must be FILE.py:NAME"),
    ({"model": {"own": f"{EXAMPLES}/points.py:Point"}}, "did you mean 'Points'"),
    ({"model": {"own": {"name": OWN, "depth": 3}}}, "no setting 'depth'"),
    ({"model": {"own": {"name": OWN, "width": "wide"}}}, "width"),
    ({"model": MODEL | {"pipeline": "x/y"}}, "set either pipeline"),
    ({"model": MODEL | {"guidance": 4.5}}, "guidance is a setting of pipeline models"),
    ({"model": MODEL | {"stop": ["."]}}, "stop is a setting of language models"),
    ({"model": {"pipeline": "x/y", "weights": "w"}}, "weights is a setting of own models"),
    ({"model": MODEL | {"weights": "none.safetensors"}}, "there is no file none.safetensors"),
    ({"recipe": {"name": "text_grpo"}}, "is for model.language, but the run has model.own"),
    ({"evaluate": {"guidance": 2.0}}, "evaluate.guidance is a setting of pipelines"),
    ({"train": {"gradient_checkpointing": True}}, "torch.utils.checkpoint in its forward"),
    ({"teachers": {"folders": {"a": "x"}}, "recipe": {"name": "opd"}}, "teachers: their weights"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[s for _, s in REFUSED])
def test_settings_without_a_part_in_the_model_are_refused(change, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        check_run(run_from(tree(tmp_path) | change, "test"))


def test_a_reward_of_images_is_refused_before_the_first_iteration(tmp_path):
    with pytest.raises(
        UserError, match="'brightness' scores images or videos; it was given tensors"
    ):
        trained(tmp_path, tree(tmp_path) | {"rewards": ["brightness"]})


def test_weights_of_another_model_are_refused(tmp_path):
    save_model(Points(width=8), str(tmp_path / "w.safetensors"))
    settings = tree(tmp_path)
    settings["model"]["weights"] = str(tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"does not fit Points: .*size mismatch"):
        trained(tmp_path, settings)
