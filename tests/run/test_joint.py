"""A language model and an image model that learn together: one tree, one credit, two updates."""

import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowrl.errors import UserError
from flowrl.iteration.features.joint import neighbours
from flowrl.iteration.minibatches import share_of
from flowrl.iteration.ratio_check import noise_floor
from flowrl.iteration.tally import Tally
from flowrl.paths import PROJECT
from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from flowrl.settings.read import check_plan, run_from
from rewards.types import Samples
from tests.support.iterations import add_gradients, collect, iterate
from tests.support.runs import opened


def tree(**changes: Any) -> dict[str, Any]:
    """The demo's settings, smaller."""
    settings = yaml.safe_load((PROJECT / "configs" / "demo_joint.yaml").read_text())
    settings["recipe"]["image"] = {
        **{"name": "flow_grpo", "steps": 3, "group": 2, "clip": 0.2, "kl": 0.0},
        **changes.pop("image", {}),
    }
    settings["recipe"]["text"] |= changes.pop("text", {})
    settings["recipe"] |= changes.pop("recipe", {})
    settings["model"]["device"] = "cpu"
    settings["prompts"]["per_iteration"] = 3
    settings["train"] = {"iterations": 4, "lr": 1e-3, "rewriter_lr": 1e-3}
    settings["evaluate"] = {"every": 4, "samples": 8, "per_prompt": 2, "steps": 3}
    for section, values in changes.items():
        settings[section] = settings.get(section, {}) | values
    return settings


def bright(samples: Samples) -> list[float]:
    """A score of the pixels, which misses every fifth image."""
    means = [float(image.double().mean()) for image in samples.media]
    return [math.nan if int(mean * 1e6) % 5 == 0 else mean for mean in means]


def square(samples: Samples) -> list[float]:
    return [float(image.double().square().mean()) * 3 for image in samples.media]


def with_two_rewards(session: Session) -> Session:
    return replace(session, rewards={"shapes.graded": bright, "shapes.strict": square})


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def spread(values: Sequence[float], correction: int) -> float:
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - correction))


@pytest.mark.quick_cases("shared")
@pytest.mark.parametrize("credit", ["tree", "shared"])
def test_credit_of_a_collect_equals_plain_loops(tmp_path, credit):  # noqa: PLR0915
    session = with_two_rewards(opened(tree(recipe={"credit": credit}, text={"group": 6}), tmp_path))
    made = collect(session, 0)
    assert made.before is not None and made.first is not None and made.before.first is not None
    texts, size, group = made.before.samples.media, 2, 6
    order, equal = neighbours(list(texts), group)
    assert max(equal) > 1 and min(equal) == 1  # unequal numbers of images per rewriting
    scored = made.scores.scored.all(1).tolist()
    assert not all(scored)
    total = [0.5 * float(a) + 0.5 * float(b) for a, b in made.scores.values.double()]
    of_text = [i for i in order for _ in range(size)]  # the rewriting of each image
    for i, prompt in enumerate(made.samples.prompts):  # rewards read the run's prompt
        assert prompt == made.before.samples.prompts[of_text[i]]

    def same(i: int) -> list[int]:
        """Scored images that are compared with image i."""
        if credit == "shared":
            alike = [j for j in range(len(of_text)) if of_text[j] // group == of_text[i] // group]
        else:
            alike = images_of(of_text[i])
        return [j for j in alike if scored[j]]

    def images_of(text: int) -> list[int]:
        """Images of this rewriting, or of one of the same prompt with the same words."""
        near = [t for t in range(len(texts)) if t // group == text // group]
        near = [t for t in near if texts[t] == texts[text]]
        return [j for j in range(len(of_text)) if of_text[j] in near]

    known = [total[i] for i in range(len(total)) if scored[i]]
    std = spread(known, 0)  # Flow-GRPO divides by the batch's
    images = [
        (total[i] - mean([total[j] for j in same(i)])) / (std + 1e-4) if scored[i] else 0.0
        for i in range(len(total))
    ]
    alone = [len(same(i)) < 2 for i in range(len(total))]
    images = [0.0 if one else max(-5.0, min(5.0, a)) for one, a in zip(alone, images, strict=True)]
    advantages, mask = made.first.credit
    for i, expected in enumerate(images):
        assert bool(mask[i].any()) == scored[i]
        assert float(advantages[i].abs().max() if scored[i] else 0) == pytest.approx(abs(expected))
        if scored[i]:
            assert float(advantages[i][mask[i]][0]) == pytest.approx(expected, abs=1e-9)

    def value_of(t: int) -> float | None:
        """The sum of each reward's mean over the images that it scored, as of any node."""
        columns = [
            [float(made.scores.values[j, r]) for j in images_of(t) if made.scores.scored[j, r]]
            for r in range(2)
        ]
        return 0.5 * mean(columns[0]) + 0.5 * mean(columns[1]) if all(columns) else None

    found, there = made.before.first.credit
    for t in range(len(texts)):
        own = [j for j in images_of(t) if scored[j]]
        assert bool(there[t].any()) == bool(own)
        if not own:
            continue
        if credit == "shared":
            expected = mean([images[j] for j in own])
        else:
            near = [u for u in range(len(texts)) if u // group == t // group]
            values = {u: v for u in near if (v := value_of(u)) is not None}
            std_of_group = spread([*values.values()], 1)
            expected = (values[t] - mean([*values.values()])) / (std_of_group + 1e-4)
        assert float(found[t, 0]) == pytest.approx(expected, abs=1e-7)


@pytest.mark.slow
def test_a_tree_of_images_below_each_rewriting(tmp_path):
    """The value of a rewriting is the mean of all leaves of its images' tree."""
    image = {"name": "branch_grpo", "steps": 4, "roots": 1, "branch": 2, "at": [1, 2]}
    settings = tree()
    settings["recipe"]["image"] = image
    session = opened(settings, tmp_path)
    made = collect(replace(session, rewards={"a": square, "b": square}), 0)
    assert made.before is not None and made.first is not None
    size = made.first.part.rollout.columns.group
    order, _ = neighbours(list(made.before.samples.media), 4)
    by_draw = made.scores.values[:, 0].view(-1, size)
    distinct = {}
    for draw, text in enumerate(order):
        key = text // 4, made.before.samples.media[text]
        distinct.setdefault(key, []).append(by_draw[draw])
    for text in order:
        key = text // 4, made.before.samples.media[text]
        expected = float(torch.stack(distinct[key]).double().mean())
        assert float(made.before.scores.values[text, 0]) == pytest.approx(expected)


def test_the_first_ratio_is_1_for_both(tmp_path):
    session = opened(tree(), tmp_path)
    made = collect(session, 0)
    for learner, part in zip(session.learner.chain, made.chain, strict=True):
        floor = noise_floor(learner, part)
        assert floor is not None and floor < 1e-5


def gradients(session: Session) -> dict[str, dict[str, torch.Tensor]]:
    made, found = collect(session, 0), {}
    for learner, part in zip(session.learner.chain, made.chain, strict=True):
        if not learner.learns:
            continue
        add_gradients(learner, part, share_of(learner, part, 0, 0), frozenset(), Tally(), None)
        found[learner.name] = {
            name: p.grad.clone()
            for name, p in learner.policies.parameters.items()
            if p.grad is not None
        }
    return found


@pytest.mark.slow
def test_gradients_of_a_side_are_the_same_when_the_other_is_frozen(tmp_path):
    both = gradients(opened(tree(), tmp_path / "both"))
    text = gradients(opened(tree(recipe={"train": "text"}), tmp_path / "text"))
    image = gradients(opened(tree(recipe={"train": "image"}), tmp_path / "image"))
    assert (list(both), list(text), list(image)) == (["rewriter", ""], ["rewriter"], [""])
    for side, alone in (("rewriter", text), ("", image)):
        assert any(bool(g.abs().max() > 0) for g in both[side].values())
        assert both[side].keys() == alone[side].keys()
        assert all(torch.equal(g, alone[side][name]) for name, g in both[side].items())


@pytest.mark.slow
def test_the_weight_scales_the_image_models_gradient(tmp_path):
    one = gradients(opened(tree(), tmp_path / "one"))
    half = gradients(opened(tree(recipe={"weight": 0.5}), tmp_path / "half"))
    assert all(torch.equal(0.5 * g, half[""][name]) for name, g in one[""].items())
    assert all(torch.equal(g, half["rewriter"][name]) for name, g in one["rewriter"].items())


def weights(session: Session) -> dict[str, torch.Tensor]:
    return {
        f"{each.name} {name}": p.detach().clone()
        for each in session.learner.chain
        for name, p in each.policies.parameters.items()
    }


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path):
    settings = tree(text={"kl": 0.05}, image={"kl": 0.05}, evaluate={"average": 0.9})
    whole, progress = opened(settings, tmp_path / "whole"), Progress()
    for _ in range(3):
        iterate(whole, progress)
    first, progress = opened(settings, tmp_path / "first"), Progress()
    first.folder.mkdir()
    iterate(first, progress)
    checkpoint.save_checkpoint(first, progress, Alarms())
    first.writer.wait()
    second = opened(settings, tmp_path / "second")
    saved = tmp_path / "first" / "checkpoints" / "000001"
    progress = checkpoint.restore(second, saved, Alarms())
    for _ in range(2):
        iterate(second, progress)
    expected, found = weights(whole), weights(second)
    moved = weights(opened(settings, tmp_path / "start"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(p, found[name]) for name, p in expected.items())
    for side in ("rewriter", ""):
        own = [name for name in moved if name.startswith(f"{side} ")]
        assert any(not torch.equal(moved[name], found[name]) for name in own)
    for one, two in zip(whole.learner.chain, second.learner.chain, strict=True):
        pairs = zip(one.policies.named(), two.policies.named(), strict=True)
        assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)  # averages too


@pytest.mark.slow
def test_evaluations_are_the_fewest(tmp_path):
    """Equal rewritings are encoded once, and images with one noise share their trunk."""
    image = {"name": "flow_grpo_fast", "steps": 4, "window": 2}
    session = opened(tree(image=image, text={"group": 8}), tmp_path)
    encoded, encode = [], session.learner.policy.encode
    session.learner.policy.encode = lambda texts, meta=(): (
        encoded.append(texts) or encode(texts, meta)
    )
    made = collect(session, 0)
    assert made.before is not None
    distinct = {(i // 8, text) for i, text in enumerate(made.before.samples.media)}
    assert len(distinct) < 3 * 8
    assert [len(texts) for texts in encoded] == [len(distinct)]
    assert made.metrics["count/sampling"] == 3 * 8 * 2 * 4  # prompts, rewritings, images, steps
    settings = tree(image={"name": "mix_grpo", "steps": 4, "window": 2, "every": 1})
    settings["recipe"]["image"].pop("kl")
    made = collect(opened(settings, tmp_path / "shared"), 0)
    # the window is at the first two steps: one state of both images before it
    assert made.metrics["count/sampling"] == 3 * 4 * (1 + 2 * 3)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


SMALL = (
    *("--train.iterations", "4", "--prompts.per-iteration", "5", "--checkpoint.every", "1"),
    *("--evaluate.samples", "8", "--evaluate.every", "4", "--track.images", "0"),
    *("--track.training", "0", "--track.panel", "false", "--model.device", "cpu"),
)


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "000004" / "policies.safetensors")


@pytest.mark.slow
def test_a_killed_run_and_two_processes_end_as_an_unbroken_one(tmp_path):
    """To the bit after SIGKILL, to rounding with two processes."""
    one, killed, two = (tmp_path / name for name in ("one", "killed", "two"))
    train = ("flowrl", "train", "demo_joint", *SMALL, "--folder")
    subprocess.run(command(*train, str(one)), check=True, cwd=PROJECT)
    process = subprocess.Popen(command(*train, str(killed)), cwd=PROJECT)
    while not (killed / "checkpoints" / "000002").is_dir():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    assert process.wait() == -9
    subprocess.run(command("flowrl", "train", "--resume", str(killed)), check=True, cwd=PROJECT)
    expected, found = saved_weights(one), saved_weights(killed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    launch = ("accelerate.commands.launch", "--config_file", "configs/accelerate/ddp_cpu_2.yaml")
    subprocess.run(command(*launch, "-m", *train, str(two)), check=True, cwd=PROJECT)
    other = saved_weights(two)
    gap = max(float((weight - other[name]).abs().max()) for name, weight in expected.items())
    assert any(name.startswith("current/rewriter.") for name in expected)
    assert gap < 2e-4  # four steps of 3e-4 and 1e-3


REFUSED = {
    "two recipes": (
        {"recipe": {"text": {"name": "flow_grpo"}}},
        "flow_grpo is a recipe for images",
    ),
    "nested": ({"recipe": {"image": "joint"}}, "neither of which can be joint"),
    "unknown": ({"recipe": {"text": "text_grpp"}}, "text_grpp"),
    "misspelt": (
        {"recipe": {"text": {"name": "text_grpo", "groop": 2}}},
        "text.groop: 'groop' is not known; did you mean 'group'?",
    ),
    "tracker": ({"recipe": {"text": "text_stream"}}, "a tracker of prompts"),
    "part": ({"recipe": {"loss": "surrogate"}}, "set text.loss or image.loss"),
    "budget": ({"budget": {"flat": "drop"}}, "budget does not support two models"),
    "template": ({"model": {"rewriter": {"language": "x", "template": "no"}}}, "needs {prompt}"),
    "no rewriter": ({"model": {"rewriter": None}}, "the recipe joint need each other"),
    "updates": ({"train": {"updates": 99}}, "more optimizer steps than"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_sentences(case):
    changes, words = REFUSED[case]
    settings = tree()
    for section, values in changes.items():
        settings[section] = settings.get(section, {}) | values
    with pytest.raises(UserError) as told:
        check_plan(run_from(settings, "run.yaml"))
    assert words in str(told.value) and "\n" not in str(told.value)


def test_an_ordinary_recipe_has_no_rewriter():
    settings = tree()
    settings["recipe"] = {"name": "flow_grpo"}
    with pytest.raises(UserError, match="the recipe joint need each other"):
        run_from(settings, "run.yaml")
