"""Training on prompts of several sizes: calls, credit, gradients, interruptions, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowrl.credit.advantages import ScaleSteps
from flowrl.credit.values import Context, Credit
from flowrl.errors import UserError
from flowrl.iteration.minibatches import share_of
from flowrl.iteration.ratio_check import noise_floor
from flowrl.iteration.tally import Tally
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.sizes.mixed_batch import refuse_mixed
from flowrl.prompts import PromptSet
from flowrl.run.watch.size_check import check_rows_of, check_sizes
from flowrl.session.learner import load_policy
from flowrl.session.session import Session
from flowrl.settings.read import run_from
from flowrl.settings.sections.data import DataSet
from samplers import Chain, FlowSDE, Latents, roll
from samplers.mixed import MixedRollout, scales_by_step
from tests.support import runs, tiny_pipelines
from tests.support.advice import advice
from tests.support.credit_context import context_of as context_with
from tests.support.iterations import Collected, add_gradients, collect
from tests.support.tiny import gaussian_velocity

SIZES: list[dict[str, Any]] = [{"height": 16, "width": 12}, {}, {"height": 12}, {"width": 12}]
NFT = runs.NFT | {"levels_per_sample": 1}


def settings(
    pipeline: Path, folder: Path, recipe: dict[str, Any], sizes: Any = SIZES, **train: Any
) -> dict[str, Any]:
    """A run whose prompts have these sizes; all four are drawn in each iteration."""
    return runs.sized(runs.tree(pipeline, folder, recipe, **train), sizes)


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose schedule and packed latents depend on the size (FLUX.1)."""
    folder = tmp_path_factory.mktemp("flux")
    tiny_pipelines.flux().save_pretrained(folder)
    return folder


def gradients(kept: Session, part: Collected) -> dict[str, torch.Tensor]:
    """Gradients of the sum, not the mean, of the loss over an experience's rows."""
    learner = kept.learner
    share = share_of(learner, part, 0, 0)
    learner.policies.forget_gradients()
    add_gradients(learner, part, share, frozenset(), Tally(), None)
    rows = sum(int(chunk.mask.sum()) for chunk in share)
    found = {n: p.grad for n, p in learner.policies.parameters.items() if p.grad is not None}
    return {name: rows * grad.clone() for name, grad in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [runs.FLOW_GRPO, pytest.param(NFT, marks=pytest.mark.slow)],
    ids=["flow_grpo", "nft"],
)
def test_gradients_are_the_sum_of_each_sizes_own(recipe, shifted, tmp_path):
    """And the first ratio is 1; calls hold rows of one size."""
    kept = runs.opened(settings(shifted, tmp_path, recipe), tmp_path)
    for parameter in kept.learner.policies.parameters.values():
        parameter.data.normal_(std=0.05)  # adapters that do something
    made = collect(kept, 0)
    rollout = kept_rollout(made)
    assert sorted(map(len, rollout.indices)) == [1, 1, 2] and kept.several_sizes
    floor = noise_floor(kept.learner, made)
    assert floor is None or floor < 1e-5
    whole = gradients(kept, made)
    prompts = [kept.prompts.draw(0, 4, 0).rows[i] for i in range(4)]
    advantages, mask = made.first.credit  # type: ignore[union-attr]
    sums = {name: torch.zeros_like(value) for name, value in whole.items()}
    for part, own in enumerate(rollout.by_size):
        here = [prompts[at] for at in rollout.indices[part]]
        batch: Any = kept.learner.policy.open(*kept.prompts.take(here), 4)
        assert isinstance(batch, MediaBatch)
        some = rollout.samples(part)
        rows = kept.algorithm.likelihood.rows(own, advantages[some], mask[some])
        alone = replace(made, rows=tuple(rows), draws=own.draws, policy=batch.policy)
        for name, value in gradients(kept, alone).items():
            sums[name] += value
    for name, value in whole.items():
        torch.testing.assert_close(sums[name], value, rtol=1e-3, atol=1e-5)
    assert max(float(value.abs().max()) for value in whole.values()) > 1e-3


def kept_rollout(made: Collected) -> MixedRollout:
    assert made.first is not None
    rollout = made.first.part.rollout
    assert isinstance(rollout, MixedRollout)
    return rollout


@pytest.mark.slow
def test_smaller_calls_and_units_change_only_rounding(shifted, tmp_path):
    """And rows are dealt to the same optimizer steps, whatever the rows beside them."""
    found = []
    for i, (rows, unit) in enumerate([("auto", None), (2, None), ("auto", 3)]):
        folder = tmp_path / str(i)
        folder.mkdir()
        tree = settings(shifted, folder, runs.FLOW_GRPO, updates=2, rows_per_call=rows)
        kept = runs.opened({**tree, "workers": {"unit": unit}}, folder)
        made = collect(kept, 0)
        share = [c for s in (0, 1) for c in share_of(kept.learner, made, 0, s)]
        assert max(len(c.index) for c in share) <= (2 if rows == 2 else 4)
        found.append((made.scores.values, gradients(kept, made)))
    for scores, each in found[1:]:
        torch.testing.assert_close(scores, found[0][0], rtol=1e-5, atol=1e-6)
        for name, value in each.items():
            torch.testing.assert_close(value, found[0][1][name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_run_of_several_sizes_resumes_to_the_bit(pipeline, tmp_path, capsys):
    """The whole run: proofs by size, evaluation, pages."""
    runs.check_resumed_bits(settings(pipeline, tmp_path, runs.FLOW_GRPO), tmp_path)
    said = capsys.readouterr().out
    assert "height 16, width 12: " in said and "height 16, width 16: " in said
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "Evaluations are unlike training: steps 2 instead of 4." in page
    assert any("held_out/brightness" in line for line in runs.lines(tmp_path / "whole"))
    out = tmp_path / "samples"
    words = ("a red ball", "a blue cube on the table", "--count", "1", "--out", out)
    assert runs.flowrl("sample", tmp_path / "whole", *words) == 0
    assert [Image.open(out / f"{i:03d}.png").size for i in (0, 1)] == [(12, 16), (16, 16)]
    scores = tmp_path / "scores.jsonl"
    given = ("--alone", "--samples", "4", "--per-prompt", "1", "--out", scores)
    assert runs.flowrl("evaluate", tmp_path / "whole", *given) == 0
    assert len(scores.read_text().splitlines()) == 4
    assert runs.flowrl("plan", tmp_path / "tiny.yaml") == 0
    said = capsys.readouterr().out
    assert "height 16, width 12 (25%)" in said and "as the run (25%)" in said


def test_credit_weighs_steps_by_each_samples_own_levels():
    """FLUX's levels depend on the size, and TempFlow's weights on the levels."""
    parts = []
    for k, sigmas in enumerate([(1.0, 0.8, 0.4, 0.0), (1.0, 0.6, 0.2, 0.0)]):
        plan = Chain(FlowSDE(0.7), 2)(sigmas, 0, 0)
        latents = Latents((2 + k,))
        parts += roll(plan, gaussian_velocity, latents, [5 + k], seed=0, iteration=0)
    mixed = MixedRollout(tuple(parts), ((1,), (0,)), (6, 5))
    credit = Credit(torch.ones(4, 3, 1).double(), torch.ones(4, 3, 1).bool())
    context = context_with(mixed.columns, torch.ones(1), steps=scales_by_step(mixed))
    weighed = ScaleSteps("std")(credit, context).value
    for part, rows in ((1, slice(0, 2)), (0, slice(2, 4))):
        own = ScaleSteps("std")(credit, Context(parts[part].columns, torch.ones(1))).value
        assert torch.equal(weighed[rows], own[:2])
    assert not torch.equal(weighed[0], weighed[2])


def test_a_batch_of_two_sizes_is_refused_where_one_is_needed(pipeline, tmp_path):
    tree = settings(pipeline, tmp_path, runs.FLOW_GRPO)
    prompts = PromptSet.read(tree["prompts"]["train"], "prompt", "prompts.train")
    check_rows_of(run_from(tree, "test"), "train", prompts)
    for more, name in (
        ({"budget": {"flat": "resample"}}, "budget.flat: resample"),
        ({"budget": {"replay": 4}}, "budget.replay"),
        ({"recipe": {"name": "potential_tree", "steps": 4, "at": [0]}}, "intermediate"),
    ):
        with pytest.raises(UserError, match=f"{name}.* needs prompts of one size"):
            check_rows_of(run_from({**tree, **more}, "test"), "train", prompts)


@pytest.mark.slow
def test_prompts_of_several_sizes_are_no_batch_of_one(pipeline, tmp_path):
    """What reads a batch of one size is met with rows that are left, or without their columns."""
    tree = settings(pipeline, tmp_path, runs.FLOW_GRPO)
    policy = load_policy(run_from(tree, "test"), torch.device("cpu"))
    file = tree["prompts"]["train"]

    def opened(**columns: Any) -> None:
        prompts = DataSet(source=file, **columns).read("prompt", "prompts.train")
        texts, meta = prompts.take(range(len(prompts)))
        refuse_mixed(policy.open(texts, meta, 4), "model.rewriter")

    advice(
        "{} needs prompts of one size, but their rows have several: choose rows with `where`, or "
        "leave the columns that set sizes out with `keep`",
        opened,
        lambda: (opened(keep=["prompt"]), opened(where={"height": 12})),
    )


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ({"height": 18}, "height 18 is not a multiple of 4, as the model's latents need: use 16"),
        ({"width": 36}, "width 36 is above the model's longest side of 32 pixels"),
    ],
)
def test_impossible_sizes_are_refused_before_weights_load(size, reason, pipeline, tmp_path, capsys):
    config = runs.write(settings(pipeline, tmp_path, runs.FLOW_GRPO, [{}, {}, size, {}]), tmp_path)
    assert runs.flowrl("train", config, "--folder", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert f"prompts.jsonl, line 3: {reason}" in said and not (tmp_path / "run").exists()
    assert runs.flowrl("plan", config) == 1 or reason in capsys.readouterr().out


def test_frames_are_checked_too(tmp_path):
    folder = tmp_path / "wan"
    tiny_pipelines.NAMED["Wan 2.1"].build().save_pretrained(folder)
    tree = runs.tree(folder, tmp_path, runs.FLOW_GRPO)
    row = {"prompt": "a", "num_frames": 4}
    with pytest.raises(UserError, match=r"4 frames are not 1 more than a multiple of 2.* use 3 or"):
        check_sizes(run_from(tree, "test"), PromptSet(("a",), (row,)))
