"""NaN and infinity stop a run, whatever they appear in, and reach no file that is kept."""

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flowrl.algorithm import Decay
from flowrl.errors import NotFiniteError, UserError
from flowrl.iteration import update
from flowrl.iteration.tally import Tally
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.call.results import decoder
from flowrl.run.save import checkpoint
from flowrl.run.train import begin
from flowrl.run.watch.alarms import Alarms
from flowrl.session import atomic
from flowrl.session.finite import first_not_finite
from flowrl.session.learner import Learner
from flowrl.session.progress import Progress
from samplers import Rollout
from tests.support import runs
from tests.support.iterations import iterate
from tests.support.runs import flowrl, lines
from tests.support.warm import small

LATE = """
import torch

calls = 0


def late(samples):
    '''NaN from the third call on: the self-test and the base's evaluation pass.'''
    global calls
    calls += 1
    scores = samples.media.flatten(1).mean(1)
    return scores if calls <= {good} else torch.full_like(scores, torch.nan)
"""


def stopped(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The sentence of a run that ends with exit code 3."""
    assert flowrl("train", *map(str, words)) == 3
    error = capsys.readouterr().err
    sentence = error[error.index("flowrl: ") :]
    assert sentence.count("\n") == 1 and "Traceback" not in error
    return sentence


def exported(folder) -> list[Tensor]:
    """All weights below a run's folder."""
    return [w for path in folder.rglob("*.safetensors") for w in runs.load_file(path).values()]


def test_the_learning_rate_is_finite(pipeline, tmp_path, capsys):
    for lr in (math.inf, math.nan):
        config = runs.write(runs.tree(pipeline, tmp_path, runs.NFT, lr=lr), tmp_path)
        assert flowrl("train", config, "--folder", tmp_path / "run") == 2
        assert "train.lr" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_a_learning_rate_above_one_is_refused(pipeline, tmp_path, capsys):
    config = runs.write(runs.tree(pipeline, tmp_path, runs.NFT, lr=1e30), tmp_path)
    assert flowrl("train", config, "--folder", tmp_path / "run") == 2
    assert "train.lr: input should be less than or equal to 1, not 1e+30" in capsys.readouterr().err


def harm(monkeypatch: pytest.MonkeyPatch, iteration: int, factor: float) -> None:
    """Multiply the weights in the optimizer step of an iteration."""
    step, taken = update.optimizer_step, []

    def harmed(learner: Learner, progress: Progress, tally: Tally) -> float:
        norm = step(learner, progress, tally)
        taken.append(norm)
        if len(taken) == iteration:
            with torch.no_grad():
                for weight in learner.policies.parameters.values():
                    weight.mul_(factor)
        return norm

    monkeypatch.setattr(update, "optimizer_step", harmed)


@pytest.mark.slow
def test_the_newest_checkpoint_stays_finite(pipeline, tmp_path, capsys, monkeypatch):
    """Weights that overflow in the second iteration reach neither a checkpoint nor an export."""
    harm(monkeypatch, 2, math.inf)
    settings = runs.tree(pipeline, tmp_path, runs.NFT, iterations=3)
    settings["checkpoint"]["every"] = 1
    folder = tmp_path / "run"
    sentence = stopped(capsys, runs.write(settings, tmp_path), "--folder", folder)
    assert "after iteration 2 is not finite" in sentence
    assert "Checkpoint 000001 is intact" in sentence
    assert all(bool(weight.isfinite().all()) for weight in exported(folder))


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_what_is_not_finite_is_not_written_into_a_checkpoint(pipeline, tmp_path, part):
    kept = runs.session(pipeline, tmp_path, runs.NFT)
    progress, alarms = Progress(), Alarms()
    iterate(kept, progress)
    checkpoint.save_checkpoint(kept, progress, alarms)
    weight = next(iter(kept.learner.policies.parameters.values()))
    with torch.no_grad():
        moment = kept.learner.optimizer.state[weight]["exp_avg"]
        (weight if part == "weights" else moment).view(-1)[0] = torch.inf
    progress.iteration = 2
    with pytest.raises(UserError, match="of checkpoint 2, which was not written, is not finite"):
        checkpoint.save_checkpoint(kept, progress, alarms)
    newest = checkpoint.newest(tmp_path)
    assert newest is not None and newest.name == "000001"


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_huge_weights_are_not_exported(pipeline, tmp_path, capsys, monkeypatch, iterations):
    """Weights of 1e30 are finite, what they generate is not: seen before it is scored or saved."""
    harm(monkeypatch, 1, 1e30)
    settings = runs.tree(pipeline, tmp_path, runs.NFT, iterations=iterations)
    settings["evaluate"]["every"] = settings["checkpoint"]["every"] = 5
    folder = tmp_path / "run"
    sentence = stopped(capsys, runs.write(settings, tmp_path), "--folder", folder)
    found = "samples" in sentence and "not finite" in sentence
    assert found or "its decoder vae outputs NaN or infinity" in sentence
    assert str(folder / "best") in sentence
    assert not (folder / "adapter").exists()
    assert [path.name for path in (folder / "best").iterdir()] == ["000000"]
    weights = exported(folder)
    assert weights and all(bool(weight.isfinite().all()) for weight in weights)


@pytest.mark.slow
@pytest.mark.parametrize(("good", "begun"), [(2, False), (3, True)])
def test_a_reward_that_scores_no_held_out_sample(pipeline, tmp_path, capsys, good, begun):
    """`good` calls are scored: two of the self-test or of the base's evaluation."""
    (tmp_path / "own.py").write_text(LATE.format(good=good if begun else 0))
    settings = runs.tree(pipeline, tmp_path, runs.NFT, iterations=2, self_test="off")
    settings["held_out_rewards"] = [{"name": f"{tmp_path / 'own.py'}:late", "label": "late"}]
    if begun:  # the base's evaluation is the first call
        (tmp_path / "own.py").write_text(LATE.format(good=1))
    folder = tmp_path / "run"
    sentence = stopped(capsys, runs.write(settings, tmp_path), "--folder", folder)
    assert "held-out score late" in sentence and "none of the 8 samples" in sentence
    assert not (folder / "adapter").exists()
    best = folder / "best"
    assert [p.name for p in best.glob("[0-9]*")] == (["000000"] if begun else [])
    assert len(lines(folder)) == 2 if begun else not (folder / "metrics.jsonl").exists()


@pytest.mark.slow
def test_samples_are_checked_before_a_reward_sees_them(pipeline, tmp_path, capsys, monkeypatch):
    """A reward would answer with NaN or an error, and be blamed."""
    media = MediaBatch.media

    def harmed(self: MediaBatch, rollout: Rollout) -> Tensor:
        images = media(self, rollout)
        if rollout.iteration == 1:
            images[-1, 0, 0, 0] = torch.nan
        return images

    monkeypatch.setattr(MediaBatch, "media", harmed)
    config = runs.write(runs.tree(pipeline, tmp_path, runs.NFT), tmp_path)
    sentence = stopped(capsys, config, "--folder", tmp_path / "run")
    assert "samples of iteration 2" in sentence and "reward" not in sentence
    assert "Checkpoint 000001 is intact" in sentence


def test_latents_are_checked_where_the_decoder_hides_them(pipeline, tmp_path, monkeypatch):
    kept = runs.session(pipeline, tmp_path, runs.NFT)
    monkeypatch.setattr(MediaBatch, "media", lambda self, rollout: torch.zeros(8, 3, 16, 16))
    rollouts = MediaBatch.rollouts

    def harmed(self: MediaBatch, *given: object, **more: object) -> list[Rollout]:
        made = rollouts(self, *given, **more)
        made[0].x0[-1, 0, 0, 0] = torch.inf
        return made

    monkeypatch.setattr(MediaBatch, "rollouts", harmed)
    with pytest.raises(UserError, match="latents of the samples of iteration 1 are not finite"):
        iterate(kept, Progress())


@pytest.mark.slow
def test_an_average_that_is_not_finite(pipeline, tmp_path, monkeypatch):
    settings = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    settings["evaluate"]["average"] = 0.9
    kept = runs.opened(settings, tmp_path)
    progress = Progress()
    iterate(kept, progress)
    monkeypatch.setattr(Decay, "__call__", lambda *_: math.nan)
    with pytest.raises(UserError, match="average evaluation after iteration 2 is not finite"):
        iterate(kept, progress)


def test_weights_that_are_not_finite_are_named_after_the_step(pipeline, tmp_path, monkeypatch):
    kept = runs.session(pipeline, tmp_path, runs.NFT)
    name, weight = list(kept.learner.policies.parameters.items())[-1]
    step = update.optimizer_step

    def harmed(*given: object) -> float:
        norm = step(*given)
        with torch.no_grad():
            weight.view(-1)[0] = torch.inf
        return norm

    monkeypatch.setattr(update, "optimizer_step", harmed)
    with pytest.raises(UserError) as stop:
        iterate(kept, Progress())
    assert f"the weight {name} after iteration 1 is not finite" in str(stop.value)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_although_its_gradient_is(pipeline, tmp_path, monkeypatch):
    kept = runs.session(pipeline, tmp_path, runs.NFT)
    add = update.Tally.add

    def harmed(self, name, values, mask):
        add(self, name, values * math.inf if name == "loss" else values, mask)

    monkeypatch.setattr(update.Tally, "add", harmed)
    with pytest.raises(UserError, match="the loss of iteration 1 is not finite"):
        iterate(kept, Progress())


def test_no_file_is_written_of_weights_that_are_not_finite(pipeline, tmp_path):
    """Masters of float32 may be finite where float16 has no such number."""
    settings = runs.tree(pipeline, tmp_path, runs.NFT)
    settings["model"] |= {"dtype": "bfloat16", "lora": None}
    kept = runs.opened(settings, tmp_path)
    with torch.no_grad():
        next(iter(kept.learner.policies.network.values())).view(-1)[3] = torch.inf
    with pytest.raises(UserError, match="is not finite"):
        checkpoint.export(kept.learner, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_checkpoint_with_weights_that_are_not_finite_is_not_restored(pipeline, tmp_path, capsys):
    folder = tmp_path / "run"
    tree = small(pipeline, tmp_path)
    assert flowrl("train", runs.write(tree, tmp_path), "--folder", folder) == 0
    newest = checkpoint.newest(folder)
    assert newest is not None
    file = newest / "policies.safetensors"
    weights = runs.load_file(file)
    next(iter(weights.values())).view(-1)[0] = torch.nan
    save_file(weights, file)
    (newest / atomic.CONTENTS).write_text(runs.json.dumps(atomic.sums(newest)))
    assert flowrl("train", "--resume", folder) == 2, "a restart would find the same file"
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert "not finite" in sentence and str(newest) in sentence
    assert "whole one before it" in sentence and "is intact" not in sentence


@pytest.mark.slow
def test_begin_keeps_the_base(pipeline, tmp_path):
    """The control: nothing here stops a healthy run."""
    kept = runs.session(pipeline, tmp_path, runs.NFT)
    progress = begin(kept, None, cache=False).progress
    iterate(kept, progress)
    assert progress.iteration == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_tensor_that_is_not_finite_is_named(value):
    bad = torch.tensor([1.0, value, -2.0])
    named = [("one", torch.ones(2)), ("none", torch.ones(0)), ("two", bad), ("three", bad)]
    assert first_not_finite(named) == "two" and first_not_finite(named[:2]) is None


def test_a_verdict_that_waited_is_read_once_with_the_norm(monkeypatch):
    """On a GPU a decoder that runs in the update is not waited for by itself."""
    seen = []

    def refuse():
        seen.append("refused")
        raise NotFiniteError("the decoder")

    waiting = [(torch.tensor(2.0), refuse), (torch.tensor(math.nan), refuse)]
    monkeypatch.setattr(decoder, "_unread", waiting)
    late = decoder.late_verdicts()
    norm, *spreads = Tally().settle(torch.tensor(2.5), *late.spreads)
    with pytest.raises(NotFiniteError, match="the decoder"):
        late.judge(spreads)
    assert seen == ["refused"] and norm == 2.5 and not decoder.late_verdicts().spreads
