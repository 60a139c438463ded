"""Runs that cannot learn end, with the cause and a way out, before their second iteration; hard but
healthy ones go on without a word."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import flowrl
from flowrl.errors import UserError
from flowrl.iteration.learning_check import UpdateFacts, module_of
from flowrl.paths import PROJECT
from flowrl.recipes import RECIPES
from flowrl.run.watch.guidance_check import check_guidance
from flowrl.session.progress import Progress
from flowrl.settings.read import check_plan, check_rewards, read_run, run_from
from tests.run.test_own_runs import tree
from tests.support import every_recipe, frozen, runs, tiny_lm
from tests.support.advice import advice
from tests.support.iterations import iterate

FROZEN = frozen.__file__
IMAGE: dict[str, Any] = {
    "model": {"pipeline": "stabilityai/stable-diffusion-3.5-medium"},
    "prompts": {"train": "x.txt", "per_iteration": 8},
    "rewards": ["brightness"],
}
TEXT: dict[str, Any] = {
    "model": {"language": "some/model"},
    "prompts": {"train": "x.txt", "per_iteration": 8},
    "rewards": [{"name": "format", "kind": "number"}],
}
GRPO, NFT = "flow_grpo", "nft"
NAMES = ["standardize"]

# settings that say by themselves that nothing can be learned
BY_SETTINGS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (GRPO, {}, {"train": {"lr": 0}}, "train.lr"),
    (GRPO, {}, {"train": {"lr": 1e-14}}, "train.lr: at 1e-14, 100 optimizer steps"),
    (GRPO, {}, {"train": {"iterations": 10, "schedule": {"warmup": 10**9}}}, "warm-up of 1000000"),
    (GRPO, {}, {"train": {"max_grad_norm": 0}}, "max_grad_norm"),
    (GRPO, {}, {"evaluate": {"average": 0.99999999}}, "evaluate.average: after 100"),
    (GRPO, {}, {"model": {**IMAGE["model"], "lora": {"alpha": 0}}}, "lora.alpha"),
    (GRPO, {}, {"rewards": [{"name": "brightness", "weight": 0}]}, "add up to 0"),
    (GRPO, {"clip": 0}, {}, "clip range"),
    (GRPO, {"eta": 0}, {}, "adds no noise"),
    (GRPO, {"eta": 1e-30}, {}, "adds no noise"),
    (GRPO, {"group": 1}, {}, "a group of one"),
    (GRPO, {"advantage": [*NAMES, {"name": "clip", "at": 0}]}, {}, "Clip needs a bound above 0"),
    (GRPO, {"advantage": [*NAMES, {"name": "rescale", "to": 0}]}, {}, "Rescale needs ranges"),
    ("mix_grpo", {"window": 0}, {}, "a window of 0 steps"),
    ("flow_dppo", {"most": 0}, {}, "must be above 0"),
    ("flow_dppo", {"noisy": 0}, {}, "0 noisy steps"),
    ("euphonium", {"fraction": 0}, {}, "fraction of trained steps"),
    (NFT, {"beta": 0}, {}, "beta"),
    (NFT, {"levels_per_sample": 0}, {}, "levels_per_sample must be at least 1"),
    (NFT, {"loss": {"name": "nft", "advantage_max": 0}}, {}, "advantage_max above 0"),
    ("dpo", {"beta": 0}, {}, "beta must be above 0"),
    ("rwr", {"rate": 0}, {}, "rate is 0"),
    ("dgpo", {"beta": 0}, {}, "beta"),
    ("crd", {"beta": 0}, {}, "beta"),
    ("refl", {"scale": 0}, {}, "scale of a reward loss"),
    ("draft", {"last": 0}, {}, "last must be between"),
    ("flow_bp", {"active": 0}, {}, "active must be between"),
    ("text_grpo", {"temperature": 0}, {}, "at temperature 0 nothing is random"),
    ("text_grpo", {"temperature": 1e-6}, {}, "at temperature 1e-06 nothing is random"),
    ("text_grpo", {"top_p": 1e-6}, {}, "at top_p 1e-06 nothing is random"),
    ("text_grpo", {"min_p": 0.999}, {}, "at min_p 0.999 nothing is random"),
    ("text_grpo", {"top_k": 1}, {}, "at top_k 1 nothing is random"),
    ("text_sapo", {"positive": 0}, {}, "must be above 0"),
    ("text_cispo", {"high": 0}, {}, "CISPO's bounds"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "recipe", "sections", "words"), BY_SETTINGS)
def test_settings_that_freeze_learning_are_refused_before_weights(
    name: str, recipe: dict[str, Any], sections: dict[str, Any], words: str
) -> None:
    base = TEXT if name.startswith("text_") else IMAGE
    with pytest.raises(UserError) as told:
        run = run_from({**base, "recipe": {"name": name, **recipe}, **sections}, "test")
        check_plan(run)
        check_rewards(run)
    assert words in str(told.value)


# what only the first update shows: recipe, model, reward, train
HINGE = {"steps": 4, "group": 2}
BY_UPDATE: dict[str, tuple[dict[str, Any], str, str, dict[str, Any], str]] = {
    "refl above its bound": (
        {"name": "refl", **HINGE, "first": 0.5}, "Points", "PickScoreUnit", {},
        r"below recipe\.bound 2, and the samples score 20\.\d on average",
    ),
    "leap_align above its bound": (
        {"name": "leap_align", **HINGE}, "Points", "PickScoreUnit", {}, r"bound 0\.55",
    ),
    "flow_bp above its bound": (
        {"name": "flow_bp", **HINGE, "active": 2}, "Points", "PickScoreUnit", {}, r"bound 0\.55",
    ),
    "flow_bp_lagrange above its bound": (
        {"name": "flow_bp_lagrange", **HINGE}, "Points", "PickScoreUnit", {}, r"bound 0\.55",
    ),
    "draft as a hinge above its bound": (
        {"name": "draft", **HINGE, "form": "hinge", "bound": -50.0}, "Points", "Closeness", {},
        "bound -50",
    ),
    "draft_lv as a hinge": (
        {"name": "draft_lv", **HINGE, "form": "hinge", "bound": -50.0}, "Points", "Closeness", {},
        "form: linear",
    ),
    "a reward too small for Adam": (
        {"name": "draft", **HINGE}, "Points", "Dim", {}, "far below Adam's epsilon",
    ),
    "a scale too small for Adam": (
        {"name": "refl", **HINGE, "first": 0.5, "form": "linear", "scale": 1e-25}, "Points",
        "Closeness", {}, r"raise recipe\.scale",
    ),
    "a gradient clipped to nothing": (
        {"name": "flow_grpo", "steps": 4, "group": 4}, "Points", "Closeness",
        {"max_grad_norm": 1e-20}, r"train\.max_grad_norm 1e-20 shrinks",
    ),
    "a gradient clipped to almost nothing": (
        {"name": "flow_grpo", "steps": 4, "group": 4}, "Points", "Closeness",
        {"max_grad_norm": 1e-13}, r"train\.max_grad_norm 1e-13 shrinks",
    ),
    "a credit scaled to almost nothing": (
        {"name": "flow_grpo", "steps": 4, "group": 4, "kl": 0.0, "advantage": ["standardize",
         {"name": "rescale", "to": 1e-25}]}, "Points", "Closeness", {},
        r"scales in recipe\.advantage",
    ),
    "a clipped gradient of a matching loss": (
        {"name": "nft", "steps": 4, "group": 4}, "Points", "Closeness", {"max_grad_norm": 1e-22},
        r"train\.max_grad_norm",
    ),
    "weights that nothing reads": (
        {"name": "flow_grpo", "steps": 4, "group": 4, "kl": 0.0}, "Unused", "Closeness", {},
        "no trained weight takes part",
    ),
    "a detached model": (
        {"name": "flow_grpo", "steps": 4, "group": 4, "kl": 0.0}, "Detached", "Closeness", {},
        "no trained weight takes part",
    ),
    "a detached model of a matching loss": (
        {"name": "awm", "steps": 4, "group": 4, "levels_per_sample": 2}, "Detached", "Closeness",
        {}, "no trained weight takes part",
    ),
    "a model under no_grad": (
        {"name": "dpo", "steps": 4, "group": 4}, "NoGradient", "Closeness", {},
        "no trained weight takes part",
    ),
    "a branch times 0": (
        {"name": "flow_grpo", "steps": 4, "group": 4, "kl": 0.0}, "TimesZero", "Closeness", {},
        "reaches none of the trained weights",
    ),
    "a branch times 0 in a matching loss": (
        {"name": "nft", "steps": 4, "group": 4}, "TimesZero", "Closeness", {},
        "reaches none of the trained weights",
    ),
    "a rounded branch": (
        {"name": "crd", "steps": 4, "group": 4}, "Rounded", "Closeness", {},
        "reaches none of the trained weights",
    ),
    "a branch of 1e-22": (
        {"name": "flow_grpo", "steps": 4, "group": 4}, "Tiny", "Closeness", {},
        "far below Adam's epsilon",
    ),
    "dead units": (
        {"name": "flow_grpo", "steps": 4, "group": 4}, "Dead", "Closeness", {},
        "reaches none of the trained weights",
    ),
    "a loss times 0": (
        {"name": "flow_grpo", "steps": 4, "group": 4, "loss": f"{FROZEN}:Weightless"}, "Points",
        "Closeness", {}, "the loss Weightless does not depend on the policy",
    ),
    "a detached loss": (
        {"name": "flow_grpo", "steps": 4, "group": 4, "loss": f"{FROZEN}:Loose"}, "Points",
        "Closeness", {}, "the loss Loose does not depend on the policy",
    ),
    "a credit of 0": (
        {"name": "flow_grpo", "steps": 4, "group": 4, "advantage": ["standardize",
         f"{FROZEN}:Nothing"]}, "Points", "Closeness", {}, r"the credit of all \d+ rows is 0",
    ),
}  # fmt: skip


def points(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    recipe, model, reward, train, _ = BY_UPDATE[name]
    settings = tree(folder, recipe, **{"lr": 1e-3, "self_test": "off", **train})
    own = FROZEN if model != "Points" else str(PROJECT / "examples" / "own" / "points.py")
    settings["model"]["own"] = f"{own}:{model}"
    settings["rewards"] = [f"{FROZEN}:{reward}"]
    return settings | changes


@pytest.mark.parametrize("name", BY_UPDATE)
def test_settings_that_freeze_learning_end_the_run_after_its_first_update(
    name: str, tmp_path: Path
) -> None:
    kept = runs.opened(points(tmp_path, name), tmp_path)
    with pytest.raises(UserError, match=BY_UPDATE[name][-1]) as told:
        iterate(kept, Progress())
    assert "the run cannot learn: " in str(told.value)


def test_adapters_that_are_scaled_to_nothing_are_told(tmp_path: Path) -> None:
    settings = points(tmp_path, "a credit of 0")
    settings["recipe"] = {"name": "flow_grpo", **SMALL, "kl": 0.0}
    settings["model"]["lora"] = {"rank": 2, "alpha": 1e-20}
    kept = runs.opened(settings, tmp_path)
    with pytest.raises(UserError, match=r"raise model\.lora\.alpha, 1e-20, to about model\.lora"):
        iterate(kept, Progress())


def test_an_update_without_a_finite_gradient_is_told_at_once(tmp_path: Path, capsys: Any) -> None:
    settings = points(tmp_path, "a credit of 0")
    settings["recipe"] = {"name": "flow_grpo", **SMALL, "kl": 0.0}
    settings["model"]["own"] = f"{FROZEN}:Steep"
    settings["train"]["iterations"] = 1
    flowrl.train(settings=settings, folder=tmp_path / "run")
    assert "learning: no optimizer step was taken, since no gradient" in capsys.readouterr().out


@pytest.mark.parametrize(("cut", "told"), [("mask", True), ("train", False)])
def test_a_length_that_cuts_off_every_completion_is_named(
    cut: str, told: bool, tmp_path: Path, capsys: Any
) -> None:
    settings = {
        "recipe": {"name": "text_grpo", "length": 1, "group": 4, "kl": 0.0, "cut": cut},
        "model": {"language": str(PROJECT / "flowrl" / "demo" / "sums-lm"), "lora": None},
        "prompts": {
            "train": str(PROJECT / "configs" / "prompts" / "sums_train.jsonl"),
            "per_iteration": 2,
        },
        "rewards": ["exact_answer"],
        "train": {"iterations": 1},
    }
    flowrl.train(settings=settings, folder=tmp_path / "run")
    said = capsys.readouterr().out
    assert ("raise recipe.length, or set recipe.cut: train" in said) is told
    assert ("had no rows in its loss" in said) is told


SMALL = {"steps": 4, "group": 4}
HEALTHY: dict[str, dict[str, Any]] = {
    "the first four iterations are flat": {"rewards": [f"{FROZEN}:FlatAtFirst"]},
    "the first eight iterations are flat": {
        "rewards": [{"name": f"{FROZEN}:FlatAtFirst", "calls": 8}]
    },
    "flat first iterations of a matching loss": {
        "rewards": [f"{FROZEN}:FlatAtFirst"], "recipe": {"name": "nft", **SMALL}
    },
    "successes are rare": {"rewards": [f"{FROZEN}:Sparse"]},
    "some samples have no score": {"rewards": [f"{FROZEN}:Patchy"]},
    "a warm-up": {"train": {"schedule": {"warmup": 8}}},
    "a warm-up to a small rate": {"train": {"lr": 1e-5, "schedule": {"warmup": 6}}},
    "a linear schedule": {"train": {"schedule": {"name": "linear"}}},
    "a cosine schedule": {"train": {"schedule": {"name": "cosine"}}},
    "adapters": {"model": {"lora": {"rank": 2}}},
    "adapters of a matching loss": {
        "model": {"lora": {"rank": 1}}, "recipe": {"name": "awm", **SMALL, "levels_per_sample": 2}
    },
    "a small rate for all weights": {"train": {"lr": 3e-7}},
    "a tight bound on gradients": {"train": {"max_grad_norm": 1e-3}},
    "several updates and passes": {"train": {"updates": 2, "epochs": 2}},
    "pairs": {"recipe": {"name": "dpo", **SMALL}},
    "weights of 1 on average": {"recipe": {"name": "rwr", **SMALL}},
    "a reward's gradient": {"recipe": {"name": "draft", "steps": 4}},
    "a hinge with samples on both sides": {
        "recipe": {"name": "refl", "steps": 4, "group": 4, "first": 0.5, "bound": -0.5}
    },
    "a target": {"recipe": {"name": "refl", "steps": 4, "form": "target", "first": 0.5}},
    "a trust region": {"recipe": {"name": "flow_dppo", "steps": 4, "group": 4, "noisy": 1}},
    "an implicit reward": {"recipe": {"name": "crd", **SMALL}},
    "good and bad parts": {"recipe": {"name": "dgpo", **SMALL, "levels_per_sample": 2}},
    "samples of the start": {
        "recipe": {"name": f"{PROJECT / 'examples' / 'own' / 'points.py'}:tilt", **SMALL}
    },
    "an average that is evaluated": {"evaluate": {"average": 0.9}},
    "samples of older weights": {"workers": {"lag": 1}},
    "a KL penalty": {"recipe": {"name": "flow_grpo", **SMALL, "kl": 1.0}},
}  # fmt: skip
HARD = ("the first four iterations are flat", "adapters", "a hinge with samples on both sides")
HEALTHY_RUNS = [
    pytest.param(name, marks=() if name in HARD else pytest.mark.slow, id=name) for name in HEALTHY
]


@pytest.mark.parametrize("name", HEALTHY_RUNS)
def test_hard_but_healthy_runs_are_not_accused(name: str, tmp_path: Path, capsys: Any) -> None:
    recipe = HEALTHY[name].get("recipe", {"name": "flow_grpo", **SMALL, "clip": 0.2})
    settings = tree(tmp_path, recipe, iterations=10, lr=1e-3, self_test="off")
    for section, values in HEALTHY[name].items():
        both = isinstance(values, dict) and section != "recipe"
        settings[section] = {**settings.get(section, {}), **values} if both else values
    settings["prompts"].pop("held_out")
    run = flowrl.train(settings=settings, folder=tmp_path / "run")
    said = capsys.readouterr()
    assert [line["alarms"] for line in run.metrics if line["iteration"]] == [0.0] * 10, said.err
    assert "learning: " in said.out and "cannot learn" not in said.out + said.err


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(RECIPES)])
def test_no_preset_is_accused(
    name: str, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each trains as it comes, with a size for tiny models alone: its settings are not refused
    after the first update whose data had a signal, and no alarm says that nothing is learned."""
    language = tiny_lm.write(tmp_path / "lm")
    settings = every_recipe.settings(
        name, tmp_path, pipeline=pipeline, language=language, iterations=3, self_test="off"
    )
    settings["train"] |= {"alarms": "warn"}
    settings["evaluate"] = {"every": 3, "samples": 4}
    settings["track"] = {"images": 0}
    if name == "opd":  # a teacher that equals the student would rightly be accused
        folder = every_recipe.teacher(pipeline, tmp_path)
        (file,) = folder.glob("*.safetensors")
        save_file({key: value + 0.1 for key, value in load_file(file).items()}, file)
        settings["teachers"] = {"folders": {"all": str(folder)}}
    run = flowrl.train(settings=settings, folder=tmp_path / "run")
    said = capsys.readouterr()
    assert "learning: " in said.out, said.out
    assert "cannot learn" not in said.out + said.err
    assert "teaches nothing" not in said.err, said.err
    assert len([line for line in run.metrics if line["iteration"]]) == 3


def test_a_resumed_run_is_judged_again(tmp_path: Path, capsys: Any) -> None:
    settings = tree(tmp_path, {"name": "flow_grpo", **SMALL}, iterations=2)
    first = flowrl.train(settings=settings, folder=tmp_path / "run")
    capsys.readouterr()
    assert runs.flowrl("train", "--resume", first.folder, "--train.iterations", "3") == 0
    assert "rows have a gradient, which reaches" in capsys.readouterr().out
    frozen_now = ("--train.iterations", "4", "--train.max-grad-norm", "1e-20")
    assert runs.flowrl("train", "--resume", first.folder, *frozen_now) == 3
    assert "train.max_grad_norm 1e-20 shrinks" in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_whose_halves_are_both_0_is_told(pipeline: Path, tmp_path: Path) -> None:
    """The first step moves B alone, from A; with both at 0 neither can move."""
    settings = runs.tree(pipeline, tmp_path, runs.NFT, self_test="off")
    kept = runs.opened(settings, tmp_path)
    kept.learner.save(tmp_path / "start")
    (file,) = (tmp_path / "start").glob("*.safetensors")
    save_file({name: 0 * value for name, value in load_file(file).items()}, file)
    settings["model"]["lora"] = {"from": str(tmp_path / "start")}
    zero = runs.opened(settings, tmp_path)
    assert not any(bool(p.any()) for p in zero.learner.policies.parameters.values())
    with pytest.raises(UserError, match=r"both matrices of each are 0.*model\.lora\.from"):
        iterate(zero, Progress())


def test_a_merged_adapter_that_changes_nothing_is_refused(pipeline: Path, tmp_path: Path) -> None:
    """Released adapters have been seen whose B was never trained."""
    settings = runs.tree(pipeline, tmp_path, runs.NFT, self_test="off")
    runs.opened(settings, tmp_path).learner.save(tmp_path / "new")  # B is 0 before the first step
    (file,) = (tmp_path / "new").glob("*.safetensors")
    other = tmp_path / "trained.safetensors"
    with safe_open(file, "pt") as saved:
        save_file({k: v + 0.1 for k, v in load_file(file).items()}, other, saved.metadata())

    def opened(adapter: Path) -> object:
        model = settings["model"] | {"adapters": [str(adapter)]}
        return runs.opened(settings | {"model": model}, tmp_path)

    advice(
        "{}: {} changes nothing, since a matrix of each of its products is 0 (an adapter that was "
        "never trained); leave it out, or name another file",
        lambda: opened(file),
        lambda: opened(other),
    )


def test_a_pair_of_matrices_counts_as_one_module() -> None:
    """In the first step only B has a gradient."""
    names = ["a.to_q.lora_A.default.weight", "a.to_q.lora_B.default.weight", "b.weight", "b.bias"]
    every = [
        UpdateFacts(4, 4, 2, 2, {"a.to_q": (0.0, 0.0)}),
        UpdateFacts(4, 3, 1, 0, {"a.to_q": (2.0, 1e-3), "b": (0.0, 0.0)}),
    ]
    joined = UpdateFacts.joined(every)
    assert joined[:4] == (8, 7, 3, 2) and joined.reached == ["a.to_q"] and joined.moved == 1e-3
    assert {module_of(name) for name in names} == {"a.to_q", "b"}


PRESETS = sorted(p for p in (PROJECT / "configs").rglob("*.yaml") if p.parent.name != "accelerate")


def test_no_shipped_configuration_is_accused() -> None:
    """All configurations of papers, models and demos pass the checks that need no weights."""
    judged = 0
    for path in PRESETS:
        try:
            run = read_run(path)
        except UserError:  # a table of variants, not a run
            assert path.parent.name in ("compare", "alarms", "suites"), path
            continue
        check_plan(run)
        check_guidance(run)
        judged += 1
    assert judged >= 100
