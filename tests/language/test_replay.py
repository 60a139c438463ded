"""Replayed completions keep what they were: their tokens, who wrote which, and how far from the
start they were when they were drawn. Of several turns, with a KL off the reward, and with both."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.budget.spending import Rationed
from flowrl.budget.successes import Success
from flowrl.iteration import ratio_check
from flowrl.iteration import update as updating
from flowrl.losses.base import metric_values
from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from flowrl.session.session import SPENDING, Session
from tests.budget.test_budget_run import EVERYTHING, equal
from tests.language.test_kl_in_reward import NEAR, agree, by_hand, move, plus
from tests.support import environments, runs
from tests.support.iterations import Collected, collect, iterate

HEAT = {"temperature": 0.7}
TURNS = {"name": "text_grpo", "length": 24, "group": 4, "kl": 0.0, **HEAT}
KL = {"name": "text_reinforce", "length": 24, "group": 4, "baseline": False, **HEAT}
OFF = {"kl": 0.5, "kl_in": "reward"}
GROUP, PROMPTS = 4, 3


def settings(
    model: Path, folder: Path, recipe: dict[str, Any], budget: dict[str, Any], **train: Any
) -> dict[str, Any]:
    """Runs of several turns whose successes are rare."""
    folder.mkdir(exist_ok=True)
    tree = environments.tree(model, folder, recipe=recipe, **train)
    return tree | {"budget": budget}


def opened(
    model: Path, folder: Path, recipe: dict[str, Any], dtype: str = "float64", **budget: Any
) -> Session:
    tree = settings(model, folder, recipe, {"replay": 8, **budget})
    tree["model"]["dtype"] = dtype
    return runs.opened(tree, folder)


def stored(kept: Session) -> dict[int, Success]:
    assert isinstance(kept.table[SPENDING], Rationed)
    return {prompt: success for (prompt, _), success in kept.table[SPENDING].successes.kept.items()}


def nothing(samples) -> torch.Tensor:
    return torch.zeros(len(samples.prompts))


def replayed(kept: Session) -> tuple[Collected, dict[int, Success]]:
    """An iteration in which everything fails, and the success in each prompt's last row."""
    for iteration in range(8):
        collect(kept, iteration)
    failing = replace(kept, rewards=dict.fromkeys(kept.rewards, nothing))
    move(kept)
    found = stored(kept)
    experience = collect(failing, 8)
    drawn = [kept.prompts.texts.index(p) for p in experience.samples.prompts[::GROUP]]
    rows = {GROUP * place + GROUP - 1: found[p] for place, p in enumerate(drawn) if p in found}
    assert experience.metrics["budget/replayed"] == len(rows) > 0
    assert any(bool(success.pieces[".points.from_environment"].any()) for success in rows.values())
    return experience, rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(TURNS, marks=pytest.mark.slow), KL | OFF], ids=["turns", "turns and kl"]
)
def test_a_replayed_completion_is_told_what_it_was(model, tmp_path, recipe):
    kept = opened(model, tmp_path, recipe)
    experience, found = replayed(kept)
    (rows,) = experience.rows
    for row, success in found.items():
        pieces = success.pieces
        assert torch.equal(rows.ids[row], pieces[".ids"])
        assert torch.equal(rows.from_environment[row], pieces[".points.from_environment"])
        assert torch.equal(rows.old.logp[row], pieces[".logp"])
        assert rows.lengths[row] == pieces[".lengths"]
        assert torch.equal(rows.mask[row], rows.written[row])
        assert not (rows.mask & rows.from_environment)[row].any(), (
            "nothing that it was told is in the loss"
        )
        assert pieces[".logp"][pieces[".points.from_environment"]].eq(0).all()


@pytest.mark.slow
def test_in_half_precision_only_replayed_completions_keep_what_the_sampler_said(
    model, tmp_path, monkeypatch
):
    kept = opened(model, tmp_path, TURNS, dtype="bfloat16")
    experience, found = replayed(kept)
    (rows,) = experience.rows
    moved = kept.algorithm.likelihood.evaluate(experience.policy, rows).logp - rows.old.logp
    fresh = torch.tensor([row not in found for row in range(len(rows.ids))])
    assert moved[fresh].abs().max() > 0.005, "rounding moves what the sampler said"
    ratios = {}

    def listening(learner, experience, rows, equal):
        entries, mask = chunk_loss(learner, experience, rows, equal)
        pairs = zip(rows.ids.tolist(), metric_values(entries.metrics["ratio"]), mask, strict=True)
        ratios.update({tuple(ids): ratio[own] for ids, ratio, own in pairs})
        return entries, mask

    chunk_loss = updating.chunk_loss
    updating.update(kept.learner, experience, Progress(), loss=listening)
    for row, ids in enumerate(rows.ids.tolist()):
        ratio = ratios[tuple(ids)]
        assert bool(ratio.eq(1).all()) == (row not in found)
    assert len(found) < len(ratios)


@pytest.mark.slow
def test_its_turns_are_read_as_they_were_drawn(model, tmp_path):
    """Under the weights that drew it the ratio is 1; any other context of its turns would show."""
    kept = opened(model, tmp_path, TURNS)
    before = [p.detach().clone() for p in kept.learner.policies.parameters.values()]
    experience, found = replayed(kept)
    assert ratio_check.noise_floor(kept.learner, experience) > 0.1, "the weights have moved since"
    with torch.no_grad():
        for now, then in zip(kept.learner.policies.parameters.values(), before, strict=True):
            now.copy_(then)
    (rows,) = experience.rows
    says = kept.algorithm.likelihood.evaluate(experience.policy, rows).logp
    for row in found:
        torch.testing.assert_close(says[row], rows.old.logp[row], atol=NEAR, rtol=0)


@pytest.mark.slow
def test_its_divergence_is_that_of_the_policy_that_drew_it(model, tmp_path):
    """By hand: what is said now, less what has changed since, less what the start says."""
    kept = opened(model, tmp_path, KL | OFF)
    move(kept)
    experience, found = replayed(kept)
    (rows,) = experience.rows
    now = kept.algorithm.likelihood.evaluate(experience.policy, rows).logp.double().detach()
    apart, outcome = by_hand(kept, model, experience), torch.zeros(PROMPTS * GROUP).double()
    for row, success in found.items():
        since = (now[row] - success.pieces[".logp"])[rows.written[row]].tolist()
        assert max(map(abs, since)) > 0.1, "another policy drew it"
        apart[row] = [a - b for a, b in zip(apart[row], since, strict=True)]
        outcome[row] = success.scores[0]
    agree(experience, plus(outcome, apart))


@pytest.mark.slow
def test_metrics_are_of_what_was_drawn(model, tmp_path):
    """Replays are longer than what this policy writes, and no mean may show it."""
    kept = opened(model, tmp_path, TURNS)
    experience, _ = replayed(kept)
    plain = opened(model, tmp_path / "plain", TURNS, replay=0)
    move(plain)
    drawn = collect(plain, 8)
    assert drawn.samples.media == experience.samples.media
    (rows,), (others,) = experience.rows, drawn.rows
    assert not torch.equal(rows.ids, others.ids)
    for name in ("text/length", "text/turns", "text/surprise", "text/stopped"):
        assert experience.metrics[name] == drawn.metrics[name], name


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget",
    [pytest.param({"replay": 4}, marks=pytest.mark.slow), EVERYTHING],
    ids=["replay", "everything"],
)
def test_a_resumed_run_of_turns_with_a_kl_off_the_reward(model, tmp_path, budget):
    whole, broken, again = (
        opened(model, tmp_path / name, KL | OFF, **budget) for name in ("whole", "broken", "again")
    )
    progress, alarms = Progress(), Alarms()
    said = [iterate(whole, progress).metrics for _ in range(4)]
    assert sum(each["budget/replayed"] for each in said) > 0
    progress = Progress()
    for _ in range(2):
        iterate(broken, progress)
    checkpoint.save_checkpoint(broken, progress, Alarms())
    saved = checkpoint.newest(broken.folder)
    progress = checkpoint.restore(again, saved, alarms)
    last = [iterate(again, progress).metrics for _ in range(2)]
    assert equal(whole, again)
    kl = [each["kl_sample"] for each in said[2:]]
    assert kl == [each["kl_sample"] for each in last] and max(map(abs, kl)) > 1e-3
