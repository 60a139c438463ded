"""Rewards score while more is drawn. Concurrency is counted, not timed."""

import threading
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from flowrl.iteration.features.overlap import ScoreAhead
from flowrl.session.progress import Progress
from flowrl.session.waiting import may_overlap
from rewards import Reward, Samples, Scores, score_all
from rewards.catalogue.ensemble import Ensemble
from samplers import FlowSDE, Fork, Latents, Sampling, roll
from tests.support import runs
from tests.support.iterations import iterate
from tests.support.tiny import gaussian_velocity

TEMPFLOW = {"name": "temp_flow", "steps": 4, "roots": 2, "branch": 2, "clip": 0.2}
SIGMAS = (1.0, 0.75, 0.5, 0.25, 0.0)
LENGTH = {"length": lambda shown: [float(shown.media[0])]}


def samples(rollout) -> Samples:
    return Samples([str(rollout)], ("",), torch.zeros(1, dtype=torch.long))


def scores(_: object, shown: Samples) -> Scores:
    values = torch.full((1, 1), float(shown.media[0]), dtype=torch.float64)
    return Scores(values, torch.ones(1, 1, dtype=torch.bool), ("length",))


def test_a_reward_scores_while_the_next_rollout_is_drawn():
    drawn, asked, at_once = threading.Event(), threading.Event(), 0

    def slow(_: object, shown: Samples) -> Scores:
        nonlocal at_once
        asked.set()
        at_once += threading.current_thread() is not threading.main_thread()
        assert drawn.wait(30)  # if the next one waited for this score, it would never come
        return scores(_, shown)

    with closing(ScoreAhead(samples, LENGTH, slow)) as ahead:
        ahead.on_rollout(0)
        assert asked.wait(30)
        drawn.set()  # the model goes on
        ahead.on_rollout(1)
        assert len(ahead.media([0, 1, 2])) == 3
        assert [float(s.values) for s in ahead.scores()] == [0, 1, 2]
    assert at_once == 2  # the last one had nothing to wait beside


def test_one_rollout_needs_no_thread_and_errors_come_through():
    def fails(_: object, shown: Samples) -> Scores:
        raise RuntimeError("no paper")

    with closing(ScoreAhead(samples, LENGTH, scores)) as ahead:
        ahead.media([5])
        assert float(ahead.scores()[0].values) == 5
        assert not ahead._begun
    with (
        pytest.raises(RuntimeError, match="no paper"),
        closing(ScoreAhead(samples, LENGTH, fails)) as ahead,
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


@pytest.mark.slow
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
        iterate(kept, Progress())
        monkeypatch.setattr(ScoreAhead, "on_rollout", real)
        return [p.detach().clone() for p in kept.learner.policies.parameters.values()], heard

    ahead, heard = trained()
    at_once = lambda self, rewards, shown, _: _done(self.score(rewards, shown))
    monkeypatch.setattr(ScoreAhead, "_submit", at_once)
    after, _ = trained()
    assert heard > 1
    assert all(torch.equal(a, b) for a, b in zip(ahead, after, strict=True))


def _done(scores: Scores) -> Future:
    done: Future[Scores] = Future()
    done.set_result(scores)
    return done


@dataclass(frozen=True)
class Server:
    """A reward that may be called in several threads: `call` is what it does."""

    call: Reward
    waits: ClassVar[bool] = True
    concurrent: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> list[float]:
        return self.call(samples)


def test_a_concurrent_reward_is_called_for_two_rollouts_at_once_and_others_are_not():
    both, local, active, most = threading.Barrier(2), [], 0, 0

    def meets(shown: Samples) -> list[float]:
        both.wait(30)  # in sequence the first call would wait for ever
        return [float(shown.media[0])]

    def alone(shown: Samples) -> list[float]:
        nonlocal active, most
        active, most = active + 1, max(most, active + 1)
        local.append(shown.media[0])
        active -= 1
        return [-float(shown.media[0])]

    rewards = {"here": alone, "server": Server(meets)}
    with closing(ScoreAhead(samples, rewards, score_all)) as ahead:
        for rollout in range(3):
            ahead.on_rollout(rollout)
        ahead.media(range(4))
        found = ahead.scores()
    assert [each.names for each in found] == [("here", "server")] * 4
    assert torch.cat([each.values for each in found]).tolist() == [[-i, i] for i in range(4)]
    assert local == ["0", "1", "2", "3"] and most == 1


def test_the_first_rollout_that_fails_decides_whoever_fails_first():
    later = threading.Event()

    def fails(shown: Samples) -> list[float]:
        if shown.media == ["1"]:
            assert later.wait(30)
        else:
            later.set()
        raise RuntimeError(f"no paper for {shown.media[0]}")

    rewards = {"server": Server(lambda s: [0.0] if s.media == ["0"] else fails(s))}
    with closing(ScoreAhead(samples, rewards, score_all)) as ahead:
        for rollout in range(4):
            ahead.on_rollout(rollout)
        with pytest.raises(RuntimeError, match="no paper for 1"):
            ahead.scores()


def test_an_interruption_cancels_the_calls_that_run_and_drops_those_that_wait():
    @dataclass
    class Waiting:
        asked: list[str]
        gone: threading.Event

        def ask(self, shown: Samples) -> list[float]:
            self.asked.append(shown.media[0])
            if not self.gone.wait(30):
                pytest.fail("nobody cancelled this call")
            raise RuntimeError("cancelled")

        def cancel(self) -> None:
            self.gone.set()

    @dataclass(frozen=True)
    class Remote:
        client: Waiting
        concurrent: ClassVar[bool] = True

        def __call__(self, samples: Samples) -> list[float]:
            return self.client.ask(samples)

    client = Waiting([], threading.Event())
    with (
        pytest.raises(KeyboardInterrupt),
        closing(ScoreAhead(samples, {"remote": Remote(client)}, score_all)) as ahead,
    ):
        for rollout in range(ScoreAhead.CALLS + 4):
            ahead.on_rollout(rollout)
        raise KeyboardInterrupt
    assert all(call.done() for call in ahead._begun)
    assert len(client.asked) <= ScoreAhead.CALLS
    assert not [t for t in threading.enumerate() if t.name.startswith("rewards")]


def test_a_composite_reward_overlaps_if_it_and_all_its_parts_may():
    server, here = Server(len), lambda s: [0.0]
    assert may_overlap(server) and may_overlap(Ensemble((server, server), "mean", 1.0))
    assert not may_overlap(here) and not may_overlap(Ensemble((server, here), "mean", 1.0))
