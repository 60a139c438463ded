"""Gradient methods in whole runs: gradients, refusals, resumed runs and processes."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl.errors import UserError
from flowrl.estimate.time import iteration_work
from flowrl.iteration.features.reward_gradient import GRADED_SAMPLES
from flowrl.iteration.minibatches import share_of
from flowrl.iteration.tally import Tally
from flowrl.run.evaluate.gradient_proof import prove_gradients
from flowrl.session.progress import Progress
from flowrl.settings.read import check_plan, run_from
from rewards.types import MediaForm
from tests.support import process_runs, runs, tiny_pipelines_video
from tests.support.iterations import add_gradients, collect, iterate

SMALL: dict[str, dict[str, Any]] = {
    "refl": {"first": 0.5, "form": "linear", "scale": 1.0},
    "draft": {"last": 2, "kl": 0.1},
    "draft_lv": {},
    "srpo": {"words": ["good", "bad"], "levels": [0.3, 0.9]},
    "leap_align": {"form": "linear"},
    "flow_bp": {"active": 2, "bridge": 0.5, "form": "linear", "kl": 0.1},
    "flow_bp_lagrange": {"form": "linear"},
}


def settings(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "steps": 3, "group": 2, **SMALL[name], **more}


def each(*quick: str) -> list[Any]:
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in SMALL]


def gradients(session: Any) -> dict[str, torch.Tensor]:
    """Those of the first optimizer step."""
    experience = collect(session, 0)
    share = share_of(session.learner, experience, 0, 0)
    add_gradients(session.learner, experience, share, frozenset(), Tally(), None)
    parameters = session.learner.policies.parameters
    return {n: p.grad.detach().clone() for n, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("name", each("draft"))
def test_a_gradient_method_trains_and_counts_its_work(pipeline, tmp_path, name):
    kept = runs.session(pipeline, tmp_path, settings(name), lr=1e-3, self_test="off")
    metrics = [iterate(kept, progress).metrics for progress in [Progress()] for _ in range(2)]
    for found in metrics:
        assert math.isfinite(found["loss"]) and found["grad_norm"] > 0 and found["skipped"] == 0
    rows = {"draft_lv": 2, "srpo": 2}.get(name, 1)
    assert metrics[0]["count/decoded_graded"] == 4 * rows  # two prompts, two samples each
    # two steps twice each for the path, and once each for the anchor
    several = {"draft": 4 + 2, "leap_align": 4, "flow_bp": 4 + 2, "flow_bp_lagrange": 6}
    graded = 4 * several.get(name, rows)
    assert metrics[0]["count/training"] == graded
    # states of shortcuts are known
    assert metrics[0]["count/frozen"] == {"draft": 4 * 4, "flow_bp": 4 * 2}.get(name, 0)
    work = iteration_work(kept.run)
    assert (work.training, work.frozen) == (graded, metrics[0]["count/frozen"])
    if name in ("leap_align", "flow_bp_lagrange"):
        assert 0 < metrics[0]["through/weight"] <= 1 / (2 * (0.1 if name == "leap_align" else 0.2))
    if name in ("draft", "flow_bp"):  # the path of fresh weights ends at the sample that was scored
        assert metrics[0]["through/score"] == pytest.approx(metrics[0]["reward"], abs=1e-5)
        assert metrics[0]["kl"] == 0 < metrics[1]["kl"]


@pytest.mark.parametrize("name", each())
def test_rows_per_call_do_not_change_the_gradient(pipeline, tmp_path, name):
    found = []
    for rows in (1, 3, 64):
        tree = runs.tree(pipeline, tmp_path, settings(name), rows_per_call=rows)
        tree["model"]["dtype"] = "float64"
        found.append(gradients(runs.opened(tree, tmp_path)))
    for other in found[1:]:
        for key, value in found[0].items():
            torch.testing.assert_close(other[key], value, rtol=1e-6, atol=1e-9)


def test_the_gradient_of_a_run_is_that_of_finite_differences(pipeline, tmp_path):
    """Of the mean reward of the samples that a run draws, in one direction of the weights."""
    tree = runs.tree(pipeline, tmp_path, settings("draft", last=3, kl=0.0))
    tree["model"]["dtype"] = "float64"
    kept = runs.opened(tree, tmp_path)
    found = gradients(kept)
    parameters = kept.learner.policies.parameters
    ends = []
    for way in (1e-2, -1e-2):
        with torch.no_grad():
            for name, p in parameters.items():
                p.add_(way * found[name] / _norm(found))
        part = collect(kept, 0)
        ends.append(float(part.scores.values.mean()))
        with torch.no_grad():
            for name, p in parameters.items():
                p.sub_(way * found[name] / _norm(found))
    assert (ends[1] - ends[0]) / 2e-2 == pytest.approx(_norm(found), rel=0.02)


def _norm(found: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in found.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_resumed_run_ends_with_the_same_bits(pipeline, tmp_path, name):
    tree = runs.tree(pipeline, tmp_path, settings(name), iterations=2, updates=2, self_test="off")
    runs.check_resumed_bits(tree, tmp_path)


@pytest.mark.slow
def test_two_processes_do_what_one_does(pipeline, tmp_path):
    """Two draws for the first process and one for the second; one process in small chunks."""
    jobs: dict[str, process_runs.Job] = {}
    for name in SMALL:
        tree = runs.tree(pipeline, tmp_path, settings(name), updates=2, lr=1e-3, self_test="off")
        tree["model"]["dtype"], tree["prompts"]["per_iteration"] = "float64", 3
        jobs[name] = {"settings": tree, "iterations": 2}
    process_runs.check_two_as_one(jobs, tmp_path, apart_below=1e-8)


def test_a_sample_without_a_score_is_left_out(pipeline, tmp_path):
    kept = runs.session(pipeline, tmp_path, settings("refl"), self_test="off")
    experience = collect(kept, 0)
    (rows,) = experience.rows
    for mask in (torch.tensor([True, False, True, True]), torch.zeros(4, dtype=torch.bool)):
        masked = replace(experience, rows=(replace(rows, mask=mask[:, None]),))
        share, tally = share_of(kept.learner, masked, 0, 0), Tally()
        experience.table[GRADED_SAMPLES].path.decoded[0] = 0
        add_gradients(kept.learner, masked, share, frozenset(), tally, None)
        assert experience.table[GRADED_SAMPLES].path.decoded[0] == int(mask.sum())
        tally.settle()
        assert tally.counts.get("loss", 0) == int(mask.sum())


@pytest.mark.slow
def test_a_reward_that_breaks_stops_the_run_as_in_other_methods(pipeline, tmp_path):
    """Three optimizer steps in a row without a finite gradient."""
    kept = runs.session(pipeline, tmp_path, settings("refl"), updates=3, self_test="off")
    reward = kept.rewards["brightness"]

    class Broken:
        def __call__(self, samples):
            return reward(samples)

        def differentiable(self, media, samples):
            return reward.differentiable(media, samples) * torch.nan

    kept.rewards["brightness"] = Broken()
    with pytest.raises(UserError, match="no finite gradient in three consecutive optimizer steps"):
        iterate(kept, Progress())


def test_the_proof_names_the_decoder_and_the_rewards(pipeline, tmp_path):
    kept = runs.session(pipeline, tmp_path, settings("draft"))
    decoder, reward = prove_gradients(kept, MediaForm("image"))
    assert decoder.startswith(
        "decoder with gradients: its gradient agrees with finite differences to 0."
    )
    assert "brightness with gradients: rank correlation 1.0000" in reward


@pytest.mark.slow
def test_a_video_model_is_trained_through_its_decoder(tmp_path):
    tiny_pipelines_video.wan().save_pretrained(tmp_path / "wan")
    tree = runs.tree(tmp_path / "wan", tmp_path, settings("draft", last=1, kl=0.0), lr=1e-3)
    tree["model"]["call"] = {"height": 16, "width": 16, "num_frames": 5}
    tree["model"]["vae"] = {"slicing": True}
    kept = runs.opened(tree, tmp_path)
    decoder, reward = prove_gradients(kept, MediaForm("video"))
    assert "agrees with finite differences" in decoder and "brightness with gradients" in reward
    found = iterate(kept, Progress()).metrics
    assert found["grad_norm"] > 0 and math.isfinite(found["loss"])
    assert found["count/decoded_graded"] == 4


REFUSED = [
    ({"rewards": [{"name": "brightness"}, {"name": "jpeg"}]}, "reward jpeg: it offers no gradient"),
    ({"rewards": [{"name": "brightness"}, {"name": "jpeg"}]}, "brightness has a gradient"),
    ({"rewards": [{"name": "remote", "url": "http://127.0.0.1:1"}]}, "remote: it offers no grad"),
    ({"rewards": [{"name": "shapes", "kind": "strict"}]}, "it offers no gradient"),
    ({"budget": {"flat": "drop"}}, "budget.flat: draft uses the gradient"),
    ({"budget": {"subset": 2}}, "budget.subset"),
    ({"model": {"offload": True}}, "model.offload: draft needs the decoder"),
    ({"model": {"dtype": "float16"}}, "use bfloat16 or float32"),
    ({"steer": {"iterations": [0, 2]}}, "steered samples are not the policy's own"),
    ({"recipe": {"last": 4}}, "does not fit 3 steps"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_what_makes_no_sense_is_refused_before_any_weights(tmp_path, change, sentence):
    tree = runs.tree(tmp_path / "none", tmp_path, settings("draft"))
    for place, value in change.items():
        inner = tree.get(place)
        tree[place] = {**inner, **value} if isinstance(inner, dict) else value
    with pytest.raises(UserError, match=sentence):
        check_plan(run_from(tree, "test"))


def test_a_language_model_is_refused(tmp_path):
    tree = runs.tree(tmp_path / "none", tmp_path, settings("draft"))
    tree["model"] = {"language": str(tmp_path / "none")}
    with pytest.raises(UserError, match="recipe draft is for model"):
        check_plan(run_from(tree, "test"))


def test_a_users_reward_without_a_gradient_is_named(pipeline, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def grey(samples):\n    return samples.media.flatten(1).mean(1)\n")
    tree = runs.tree(pipeline, tmp_path, settings("draft"))
    tree["rewards"] = [{"name": "brightness"}, {"name": f"{own}:grey"}]
    with pytest.raises(UserError, match="grey: it offers no gradient"):
        list(prove_gradients(runs.opened(tree, tmp_path), MediaForm("image")))
