"""Rewards behind a server are asked for a slice of the samples while the next one is drawn."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch

from flowrl.iteration.features import overlap
from flowrl.iteration.features.overlap import ScoreAhead, ScoreSlices
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from flowrl.session.waiting import asks_server
from rewards import Reward, Samples, score_all
from samplers import FlowSDE, Tree
from samplers.completions import Completions, Segments
from samplers.slices import draw_slices, draws_per_slice
from tests.support import runs, text_runs, tiny_lm
from tests.support.iterations import collect, iterate

TWO = [{"name": "brightness"}, {"name": "colour", "weight": 0.5}]
BRANCH = {"name": "branch_grpo", "steps": 3, "at": [0, 1]}


@dataclass
class Asked:
    """A reward that notes its calls, and may wait for a server."""

    reward: Reward
    waits: bool = True
    before: Callable[[], object] = lambda: None
    calls: list[tuple[int, bool]] = field(default_factory=list)  # samples; in the main thread

    def __call__(self, samples: Samples) -> torch.Tensor:
        self.before()
        main = threading.current_thread() is threading.main_thread()
        self.calls.append((len(samples.prompts), main))
        return self.reward(samples)


def opened(pipeline, folder, recipe, waits, rows=4, before=lambda: None):
    settings = runs.tree(pipeline, folder, recipe, lr=1e-2, rows_per_call=rows)
    settings["rewards"], settings["prompts"]["per_iteration"] = TWO, 4
    kept = runs.opened(settings, folder)
    first, second = kept.rewards
    rewards = {
        first: Asked(kept.rewards[first], False),
        second: Asked(kept.rewards[second], waits, before),
    }
    return replace(kept, rewards=rewards), rewards[second]


def test_slices_end_where_calls_end_at_every_level():
    sigmas = (1.0, 0.75, 0.5, 0.0)
    (tree,) = Tree(FlowSDE(0.7), at=(0, 1), branch=2, roots=3)(sigmas, 0, 0)
    assert tree.states == (3, 6, 12, 12)
    assert draws_per_slice(tree, 4) == 4 and draws_per_slice(tree, 3) == 1
    cuts = [(piece.first, piece.draws) for piece in draw_slices(tree, [5, 6, 7, 8, 9], 6)]
    assert cuts == [(0, (5, 6)), (2, (7, 8)), (4, (9,))]
    for decoded, each in ((24, 2), (16, 4), (18, 6)):  # samples that are decoded in a call
        slices = list(draw_slices(tree, range(9), 6, decoded))
        assert [piece.first for piece in slices] == list(range(0, 9, each))
    levels = [0.0] * 9
    assert draws_per_slice(Completions(6)(levels, 0, 0)[0], 4) == 2
    for other in (Completions(6, greedy=True), Segments(2, 2, (4,))):
        (plan,) = other(levels, 0, 0)
        assert draws_per_slice(plan, 1) is None and len(list(draw_slices(plan, [1, 2], 1))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [runs.FLOW_GRPO, runs.NFT, BRANCH], ids=lambda r: r["name"])
def test_slices_change_no_bit(pipeline, tmp_path, recipe):
    def trained(waits: bool):
        kept, asked = opened(pipeline, tmp_path, recipe, waits, rows=2)
        metrics = iterate(kept, Progress()).metrics
        same = {name: value for name, value in metrics.items() if "seconds" not in name}
        return kept, asked.calls, same

    (sliced, calls, metrics), (whole, once, expected) = trained(True), trained(False)
    assert [main for _, main in calls] == [False] * len(calls) and len(calls) > 1
    assert len(once) == 1 and sum(n for n, _ in calls) == once[0][0]
    assert runs.same_weights(sliced, whole) and metrics == pytest.approx(
        expected, nan_ok=True, rel=0
    )


def test_a_server_is_asked_while_the_next_slice_is_drawn(pipeline, tmp_path):
    drawn = threading.Event()
    wait = lambda: drawn.wait(60) or pytest.fail("the next slice waited for this score")
    kept, asked = opened(pipeline, tmp_path, runs.FLOW_GRPO, True, before=wait)
    real, calls = kept.learner.policy.decode, []

    def decode(*words, **named):
        calls.append(len(words[0]))
        if len(calls) == 2:  # the second slice is there, and the first one's score is awaited
            assert not asked.calls
            drawn.set()
        return real(*words, **named)

    kept.learner.policy.decode = decode
    collect(kept, 0)
    assert calls == [4] * 4 and [n for n, _ in asked.calls] == [4] * 4


def test_texts_are_drawn_in_slices_with_the_same_bits(tmp_path):
    def drawn(waits: bool):
        settings = text_runs.tree(
            tiny_lm.write(tmp_path / "model"), tmp_path, text_runs.GRPO, rows_per_call=4
        )
        kept = runs.opened(settings, tmp_path)
        ((name, reward),) = kept.rewards.items()
        asked = Asked(reward, waits)
        return collect(replace(kept, rewards={name: asked}), 0), asked.calls

    (sliced, calls), (whole, once) = drawn(True), drawn(False)
    assert len(calls) > 1 == len(once)
    assert sliced.samples.media == whole.samples.media
    for mine, theirs in zip(sliced.rows, whole.rows, strict=True):
        assert torch.equal(mine.prompt, theirs.prompt) and torch.equal(mine.ids, theirs.ids)
        assert torch.equal(mine.advantage, theirs.advantage)
        assert torch.equal(mine.old.logp, theirs.old.logp)


def test_composite_rewards_wait_if_all_their_parts_do():
    @dataclass
    class Both:
        parts: dict[str, Reward]

        def __call__(self, samples: Samples) -> torch.Tensor:
            return torch.zeros(len(samples.prompts))

    server, here = Asked(len), Asked(len, False)
    assert asks_server(Both({"a": server, "b": Both({"c": server})}))
    assert not asks_server(Both({"a": server, "b": here})) and not asks_server(Both({}))


def test_an_error_of_a_server_is_raised_with_its_reward(tmp_path):
    def fails() -> None:
        raise RuntimeError("no paper")

    rewards = {
        "here": Asked(lambda s: [1.0] * len(s.prompts), False),
        "far": Asked(len, True, fails),
    }
    decode = lambda part: Samples([part], ("",), torch.zeros(1, dtype=torch.long))
    with (
        pytest.raises(RuntimeError, match="no paper") as error,
        closing(ScoreSlices(decode, rewards, score_all)) as slices,
    ):
        for part in ("a", "b"):
            slices.slices.on_rollout(part)
        slices.scores(slices.media(["ab"]))
    assert "far" in str(error.value.__notes__)


def on_a_gpu(monkeypatch) -> list[str]:
    """Let a run on the CPU score as one on a GPU does; its streams and events are noted."""
    noted: list[str] = []

    class Noted:
        def __init__(self, *words) -> None:
            self.name = "stream" if words else "event"

        def record(self) -> None:
            noted.append("record")

        def wait_event(self, _: object) -> None:
            noted.append("wait")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, Noted)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(Session, "scores_in_turn", False)
    monkeypatch.setattr(overlap, "ScoreSlices", partial(on_device, "cuda"))
    return noted


def on_device(device: str, decode, rewards, score, *_: str) -> ScoreSlices:
    return ScoreSlices(decode, rewards, score, device)


@pytest.mark.slow
def test_on_a_gpu_local_rewards_score_slices_in_a_stream_with_the_same_bits(
    pipeline, tmp_path, monkeypatch
):
    def trained():
        kept, asked = opened(pipeline, tmp_path, runs.FLOW_GRPO, False)
        metrics = iterate(kept, Progress()).metrics
        same = {name: value for name, value in metrics.items() if "seconds" not in name}
        return kept, asked.calls, same

    noted = on_a_gpu(monkeypatch)
    ahead, calls, metrics = trained()
    assert calls == [(4, False)] * 4 and noted.count("wait") == noted.count("record") == 8
    monkeypatch.setattr(ScoreAhead, "_submit", inline)
    after, inlined, expected = trained()
    assert [n for n, _ in inlined] == [4] * 4 and all(main for _, main in inlined)
    assert runs.same_weights(ahead, after)
    assert metrics == pytest.approx(expected, nan_ok=True, rel=0, abs=0)


def inline(self, rewards, samples, _: int) -> Future:
    done: Future = Future()
    done.set_result(self.score(rewards, samples))
    return done


def test_on_a_gpu_an_interruption_between_slices_leaves_no_thread(pipeline, tmp_path, monkeypatch):
    kept, _ = opened(pipeline, tmp_path, runs.FLOW_GRPO, False)
    on_a_gpu(monkeypatch)
    real, calls = kept.learner.policy.decode, []

    def decode(*words, **named):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*words, **named)

    kept.learner.policy.decode = decode
    with pytest.raises(KeyboardInterrupt):
        collect(kept, 0)
    assert not [t for t in threading.enumerate() if t.name.startswith("rewards")]


def test_on_a_gpu_an_error_of_a_local_reward_is_raised_with_its_name(
    pipeline, tmp_path, monkeypatch
):
    def fails() -> None:
        raise RuntimeError("no paper")

    kept, _ = opened(pipeline, tmp_path, runs.FLOW_GRPO, False, before=fails)
    on_a_gpu(monkeypatch)
    with pytest.raises(RuntimeError, match="no paper") as error:
        collect(kept, 0)
    assert "colour" in str(error.value.__notes__)
