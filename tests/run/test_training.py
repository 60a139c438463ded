"""An iteration in one process: whose weights sample, what an optimizer step means, what is kept."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.iteration import minibatches as assignment
from flowrl.iteration import update
from flowrl.iteration.credit import handle_failures
from flowrl.losses.base import Counts, Entries, reduced
from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.learner import Learner
from flowrl.session.progress import Progress
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings.read import run_from
from rewards import Scores
from tests.support import iterations, runs
from tests.support.iterations import Collected, collect, iterate

AWM = {"name": "awm", "steps": 6, "group": 4, "levels_per_sample": 2}


def session(
    pipeline: Path, folder: Path, recipe: dict, guidance: dict | None = None, **train: object
) -> Session:
    tree = runs.tree(pipeline, folder, recipe, **train)
    tree["model"]["guidance"] = guidance or {}
    run = run_from(tree, "test")
    return open_session(run, folder, open_accelerator(run, folder))


@torch.no_grad()
def move(kept: Session, by: float = 0.3) -> None:
    """The trained weights, and only they, go somewhere else."""
    rng = torch.Generator().manual_seed(1)
    for parameter in kept.learner.policies.parameters.values():
        parameter.add_(by * torch.randn(parameter.shape, generator=rng))


def gradients(kept: Session) -> list[Tensor]:
    found = [p.grad for p in kept.learner.policies.parameters.values()]
    assert all(grad is not None for grad in found)
    return [grad.clone() for grad in found]


def of_all_rows(kept: Session, experience: Collected) -> list[Tensor]:
    """The gradient of the mean loss over all unmasked entries of the iteration."""
    total, count = torch.zeros(()), 0
    for rows in experience.rows:
        entries, mask = iterations.chunk_loss(kept.learner, experience, rows)
        total, count = total + entries.value[mask].sum(), count + int(mask.sum())
    (total / count).backward()
    found = gradients(kept)
    kept.learner.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("updates", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_updates_share_out_the_mean_over_all_unmasked_rows(
    pipeline, tmp_path, monkeypatch, updates
):
    kept = session(pipeline, tmp_path, runs.NFT, rows_per_call=3, updates=updates)
    move(kept)
    experience = collect(kept, 0)
    for place, rows in enumerate(experience.rows):
        rows.mask[place : 3 + place] = False  # unequal counts in chunks and in updates
    want, found = of_all_rows(kept, experience), []

    def step(learner: Learner, progress: Progress, tally: update.Tally) -> float:
        found.append(gradients(kept))
        learner.optimizer.zero_grad()
        return 1.0

    monkeypatch.setattr(update, "optimizer_step", step)
    iterations.update(kept.learner, experience, Progress())
    shares = [assignment.share_of(kept.learner, experience, 0, number) for number in range(updates)]
    counts = [sum(int(chunk.mask.sum()) for chunk in share) for share in shares]
    assert len(found) == updates and sum(counts) == sum(int(r.mask.sum()) for r in experience.rows)
    for i, grad in enumerate(want):
        mean = sum(n * one[i] for n, one in zip(counts, found, strict=True)) / sum(counts)
        torch.testing.assert_close(mean, grad, atol=1e-6, rtol=1e-3)


def test_rows_of_any_length_weigh_the_same_where_the_loss_says_so():
    value = torch.tensor([[1.0, 3.0, 100.0], [5.0, 100.0, 100.0], [100.0, 100.0, 100.0]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    counts = Counts.of([mask, mask])  # as many rows and tokens again in another chunk
    sums = {"rows": (2.0 + 5.0) / 4, "tokens": 9.0 / 6, "sequences": 9.0 / 4, 10: 9.0 / 40}
    for kind, want in sums.items():
        assert reduced(Entries(value, kind, {}), mask, counts) == pytest.approx(want)
        both = reduced(Entries(value, kind, {}, value), mask, counts)
        assert both == pytest.approx(want + 9.0 / 6), "a further term is a mean over tokens"


def test_a_named_behaviour_samples_and_is_the_old_policy(pipeline, tmp_path):
    kept = session(pipeline, tmp_path, runs.NFT)
    before = collect(kept, 0).samples.media
    move(kept)
    experience = collect(kept, 0)
    assert torch.equal(experience.samples.media, before)
    entries, _ = iterations.chunk_loss(kept.learner, experience, experience.rows[0])
    assert (entries.metrics["moved"] > 0).all()


def test_later_updates_compare_with_the_weights_that_sampled(pipeline, tmp_path):
    kept = session(pipeline, tmp_path, AWM, updates=2)
    metrics = iterate(kept, Progress()).metrics
    assert metrics["ratio_max"] > 1.0 + 1e-4 or metrics["ratio_min"] < 1.0 - 1e-4


@pytest.mark.slow
def test_training_has_its_own_guidance(pipeline, tmp_path):
    kept = session(pipeline, tmp_path, runs.NFT, guidance={"sample": 3.0, "train": 1.0})
    experience = collect(kept, 0)
    texts = list(experience.samples.prompts[:: runs.NFT["group"]])
    shape = kept.learner.policy.shape(runs.NFT["steps"])
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    sigma = torch.full((2,), experience.rows[0].sigma[0].item())
    row = torch.arange(2)
    with torch.no_grad():
        got = experience.policy(x, sigma, row)
        said = {
            guidance: kept.learner.policy.bind(
                kept.learner.policy.encode(texts), steps=runs.NFT["steps"], guidance=guidance
            )(x, sigma, row)
            for guidance in (1.0, 3.0)
        }
    assert torch.equal(got, said[1.0])
    assert not torch.allclose(got, said[3.0], atol=1e-4)


def test_one_group_without_a_score_is_enough_to_raise():
    values = torch.zeros(8, 1)
    scores = Scores(values, torch.arange(8)[:, None] < 4, ("shapes",))
    with pytest.raises(UserError, match="1 of 2 groups have no score"):
        handle_failures(scores, torch.tensor([True, False]), skip=False)
    handle_failures(scores, torch.tensor([True, False]), skip=True)
    with pytest.raises(UserError, match="no group of this iteration"):
        handle_failures(scores, torch.tensor([False, False]), skip=True)


def test_a_checkpoint_brings_everything_back_and_the_newest_are_kept(pipeline, tmp_path, capsys):
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    first, second = (session(pipeline, folder, runs.FLOW_GRPO) for folder in folders)
    progress, alarms, other = Progress(), Alarms(), Alarms()
    for _ in range(3):
        alarms.watch(iterate(first, progress).metrics, progress.iteration)
        checkpoint.save_checkpoint(first, progress, alarms)
    newest = checkpoint.newest(folders[0])
    assert newest is not None
    assert sorted(folder.name for folder in newest.parent.iterdir()) == ["000002", "000003"]
    found = checkpoint.restore(second, newest, other)
    assert found == progress and other.state() == alarms.state() and len(other.recent) == 3
    iterate(first, progress)
    iterate(second, found)
    assert runs.same_weights(first, second)
    state = json.loads((newest / "state.json").read_text())
    for change in (
        {"alarms": state["alarms"] | {"evidence": {"image/edges": [0.0] * 12}}},
        {"call_sizes": None},
    ):
        kept = {name: value for name, value in (state | change).items() if value is not None}
        (newest / "state.json").write_text(json.dumps(kept))
        with pytest.raises(UserError, match="before commit 26ca889, which still reads it"):
            checkpoint.restore(second, newest, Alarms())
    state["alarms"] = {"history": [], "best": 0.5, "raised": ["reward"], "flat": {}}
    (newest / "state.json").write_text(json.dumps(state))
    fresh = Alarms()
    checkpoint.restore(second, newest, fresh)
    assert fresh.state() == Alarms().state()
    assert capsys.readouterr().out.count("from an older version; alarms start over") == 1


def test_the_best_is_the_highest_so_far(pipeline, tmp_path):
    kept = session(pipeline, tmp_path, runs.FLOW_GRPO)
    progress = Progress()
    for iteration, score, best in ((1, 0.5, 1), (2, 0.4, 1), (3, 0.6, 3), (4, 0.6, 3)):
        progress.iteration = iteration
        assert checkpoint.keep_best(kept.learner, kept.folder, progress, score) == (
            best == iteration
        )
        folders = [folder.name for folder in (tmp_path / "best").iterdir()]
        assert f"{best:06d}" in folders and progress.best_iteration == best
        checkpoint.drop_other_best(tmp_path, progress)  # as a checkpoint does that knows of it
        assert [folder.name for folder in (tmp_path / "best").iterdir()] == [f"{best:06d}"]
