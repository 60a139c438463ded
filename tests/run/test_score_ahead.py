"""Rewards score while more is drawn. Concurrency is counted, not timed."""

import threading
from concurrent.futures import Future
from contextlib import closing

import pytest
import torch

from flowrl.run.alarms import Alarms
from flowrl.run.checkpoint import Progress
from flowrl.run.score_ahead import ScoreAhead
from flowrl.run.train import iterate
from rewards import Samples, Scores
from samplers import FlowSDE, Fork, Latents, Sampling, roll
from tests.support import runs
from tests.support.tiny import gaussian_velocity

TEMPFLOW = {"name": "temp_flow", "steps": 4, "roots": 2, "branch": 2, "clip": 0.2}
SIGMAS = (1.0, 0.75, 0.5, 0.25, 0.0)


def samples(rollout) -> Samples:
    return Samples([str(rollout)], ("",), torch.zeros(1, dtype=torch.long))


def scores(shown: Samples) -> Scores:
    values = torch.full((1, 1), float(shown.media[0]), dtype=torch.float64)
    return Scores(values, torch.ones(1, 1, dtype=torch.bool), ("length",))


def test_a_reward_scores_while_the_next_rollout_is_drawn():
    drawn, asked, at_once = threading.Event(), threading.Event(), 0

    def slow(shown: Samples) -> Scores:
        nonlocal at_once
        asked.set()
        at_once += threading.current_thread() is not threading.main_thread()
        assert drawn.wait(30)  # if the next one waited for this score, it would never come
        return scores(shown)

    with closing(ScoreAhead(samples, slow)) as ahead:
        ahead.on_rollout(0)
        assert asked.wait(30)
        drawn.set()  # the model goes on
        ahead.on_rollout(1)
        assert len(ahead.media([0, 1, 2])) == 3
        assert [float(s.values) for s in ahead.scores()] == [0, 1, 2]
    assert at_once == 2  # the last one had nothing to wait beside


def test_one_rollout_needs_no_thread_and_errors_come_through():
    def fails(shown: Samples) -> Scores:
        raise RuntimeError("no paper")

    with closing(ScoreAhead(samples, scores)) as ahead:
        ahead.media([5])
        assert float(ahead.scores()[0].values) == 5
        assert ahead._pool is None
    with (
        pytest.raises(RuntimeError, match="no paper"),
        closing(ScoreAhead(samples, fails)) as ahead,
    ):
        ahead.on_rollout(0)
        ahead.scores()


def test_every_rollout_but_the_last_is_heard_of_when_it_is_drawn():
    plans = Fork(FlowSDE(0.7), branch=2, roots=2)(SIGMAS, 0, 0)
    heard = []
    found = roll(
        plans,
        gaussian_velocity,
        Latents((2,)),
        [0, 1],
        seed=0,
        iteration=0,
        sampling=Sampling(on_rollout=heard.append),
    )
    assert len(found) == len(plans) > 2
    assert [each.index for each in heard] == [each.index for each in found[:-1]]


def test_a_run_that_scores_ahead_ends_with_the_same_bits(pipeline, tmp_path, monkeypatch):
    def trained() -> tuple[list[torch.Tensor], int]:
        heard = 0
        real = ScoreAhead.on_rollout

        def on_rollout(self, rollout):
            nonlocal heard
            heard += 1
            real(self, rollout)

        monkeypatch.setattr(ScoreAhead, "on_rollout", on_rollout)
        kept = runs.session(pipeline, tmp_path, TEMPFLOW, lr=1e-3)
        iterate(kept, Progress(), Alarms())
        monkeypatch.setattr(ScoreAhead, "on_rollout", real)
        return [p.detach().clone() for p in kept.learner.policies.parameters.values()], heard

    ahead, heard = trained()
    monkeypatch.setattr(ScoreAhead, "_submit", lambda self, samples: _at_once(self.score(samples)))
    after, _ = trained()
    assert heard > 1
    assert all(torch.equal(a, b) for a, b in zip(ahead, after, strict=True))


def _at_once(scores: Scores) -> Future:
    done: Future[Scores] = Future()
    done.set_result(scores)
    return done
