"""A KL that is taken off the reward: how far completions are from the start, in whole runs."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Estimator, LeaveOneOut
from flowrl.credit.turns import Penalize
from flowrl.credit.values import REFERENCE
from flowrl.errors import UserError
from flowrl.estimate import memory
from flowrl.iteration.features.reference import reference_log_ratios
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.table import TEXT_RECIPES
from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings.read import run_from
from samplers import Chain, FlowSDE
from samplers.completions import Completions, Forks, Segments
from samplers.forks import Forking
from tests.support import text_runs
from tests.support.iterations import Collected, collect, iterate
from tests.support.runs import same_weights

KL, HEAT = 0.5, 0.7
NEAR = 1e-5  # log-probabilities are kept in float32
RLOO = {"name": "text_rloo", "length": 6, "group": 4, "temperature": HEAT}
PLUS = {"name": "text_reinforce", "length": 6, "group": 4, "baseline": False, "temperature": HEAT}
CENTRED = PLUS | {"baseline": True}
REMAX = {"name": "text_remax", "length": 6, "group": 2, "temperature": HEAT}
OFF = {"kl": KL, "kl_in": "reward"}
FLAT = "\n\ndef flat(samples):\n    return [1.0] * len(samples.prompts)\n"


def opened(
    model: Path, folder: Path, recipe: dict[str, Any], reward: str = "share", **train: Any
) -> Session:
    """Float64 weights, and chunks of 5 completions."""
    folder.mkdir(exist_ok=True)
    settings = text_runs.tree(model, folder, recipe, **{"rows_per_call": 5, **train})
    settings["model"]["dtype"] = "float64"
    own = folder / "own.py"
    own.write_text(own.read_text() + FLAT)
    settings["rewards"] = [{"name": f"{own}:{reward}"}]
    run = run_from(settings, "test")
    return open_session(run, folder, open_accelerator(run, folder))


@torch.no_grad()
def move(kept: Session) -> None:
    """The same step away from the start every time."""
    rng = torch.Generator().manual_seed(3)
    for p in kept.learner.policies.parameters.values():
        p.add_(0.1 * torch.randn(p.shape, generator=rng, dtype=p.dtype))
    kept.learner.policies.publish()


@torch.no_grad()
def surprise(network: Any, context: list[int], words: list[int]) -> Tensor:
    """log p of each word behind a context: one text in one call, no padding."""
    logits = network(torch.tensor([context + words])).logits[0, len(context) - 1 : -1]
    each = (logits / HEAT).log_softmax(-1)
    return each[torch.arange(len(words)), torch.tensor(words)]


def by_hand(kept: Session, model: Path, experience: Collected) -> list[list[float]]:
    """log p(now) - log p(start) of each row's own tokens, with the model read anew as the start."""
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    (rows,) = experience.rows
    found = []
    for i, (place, ids) in enumerate(zip(rows.prompt, rows.ids.tolist(), strict=True)):
        group = kept.algorithm.group
        context = kept.learner.policy.encode(experience.samples.prompts[int(place) * group])
        words = ids[: int(rows.ends[i])]
        now, then = (surprise(m, context, words) for m in (kept.learner.policy.model, start))
        found.append((now - then)[rows.written[i, : len(words)]].tolist())
    return found


def rloo(reward: Tensor, apart: list[list[float]]) -> list[list[float]]:
    value = (reward.flatten() - KL * torch.tensor([sum(own) for own in apart])).view(3, 4)
    each = (value - (value.sum(1, keepdim=True) - value) / 3).flatten().tolist()
    return [[a] * len(own) for a, own in zip(each, apart, strict=True)]


def remax(reward: Tensor, apart: list[list[float]]) -> list[list[float]]:
    gain = (reward[:, :2] - reward[:, 2:]).flatten().tolist()
    return [[a - KL * sum(own)] * len(own) for a, own in zip(gain, apart, strict=True)]


def plus(reward: Tensor, apart: list[list[float]]) -> list[list[float]]:
    """As trainers of texts have it: -KL a token, the outcome at the last, added up backwards."""
    returns = []
    for outcome, own in zip(reward.flatten().tolist(), apart, strict=True):
        paid = [-KL * each for each in own]
        paid[-1] += outcome
        returns.append([sum(paid[t:]) for t in range(len(paid))])
    tokens = [value for own in returns for value in own]
    mean, std = statistics.fmean(tokens), (statistics.variance(tokens) + 1e-8) ** 0.5
    return [[(value - mean) / std for value in own] for own in returns]


def centred(reward: Tensor, apart: list[list[float]]) -> list[list[float]]:
    return plus(reward - reward.mean(1, keepdim=True), apart)


def agree(experience: Collected, want: list[list[float]]) -> None:
    """Advantages of all tokens of the model's own, and of nothing else."""
    (rows,) = experience.rows
    assert torch.equal(rows.mask, rows.written) and rows.advantage[~rows.mask].eq(0).all()
    for own, mask, values in zip(rows.advantage, rows.mask, want, strict=True):
        torch.testing.assert_close(own[mask], torch.tensor(values), atol=NEAR, rtol=0)


RULES = [(RLOO, rloo), (PLUS, plus), (CENTRED, centred), (REMAX, remax)]


@pytest.mark.parametrize(("recipe", "rule"), RULES, ids=["rloo", "plus", "centred", "remax"])
def test_advantages_are_of_rewards_less_what_completions_are_apart(model, tmp_path, recipe, rule):
    kept = opened(model, tmp_path, recipe | OFF)
    move(kept)
    experience = collect(kept, 0)
    apart = by_hand(kept, model, experience)
    whole = torch.tensor([sum(own) for own in apart])
    assert whole.abs().min() > 1e-3 and whole.std() > 0.1, "the start is left behind"
    assert len({len(own) for own in apart}) > 2, "completions of different lengths"
    agree(experience, rule(experience.scores.values.double().view(3, -1), apart))
    assert experience.metrics["kl_sample"] == pytest.approx(float(whole.mean()), abs=NEAR)


def test_unscored_completions_have_no_part_in_what_tokens_are_compared_with(model, tmp_path):
    kept = opened(model, tmp_path, PLUS | OFF, "patchy", on_failure="skip_group")
    move(kept)
    experience = collect(kept, 0)
    (rows,), scored = experience.rows, experience.scores.scored[:, 0]
    assert 2 < int(scored.sum()) < len(scored)
    assert torch.equal(rows.mask, rows.written & scored[:, None])
    apart = by_hand(kept, model, experience)
    own = [each for each, some in zip(apart, scored, strict=True) if some]
    mean = sum(map(sum, own)) / len(own)
    assert experience.metrics["kl_sample"] == pytest.approx(mean, abs=NEAR)
    want = plus(experience.scores.values[scored].double(), own)
    for got, mask, values in zip(rows.advantage[scored], rows.mask[scored], want, strict=True):
        torch.testing.assert_close(got[mask], torch.tensor(values), atol=NEAR, rtol=0)


@pytest.mark.slow
def test_each_evaluation_is_counted_once(model, tmp_path):
    """Of drawn tokens alone, greedy ones are not asked for; twice where `old` is computed anew."""
    for index, (recipe, anew) in enumerate([(RLOO, False), (REMAX, False), (RLOO, True)]):
        kept = opened(model, tmp_path / str(index), recipe | OFF, recompute_old=anew)
        plain = opened(model, tmp_path / f"{index}p", recipe, recompute_old=anew)
        (rows,) = collect(kept, 0).rows
        tokens = int(rows.lengths.sum())
        more, less = (iterate(each, Progress()).metrics for each in (kept, plain))
        assert more["count/frozen"] - less["count/frozen"] == tokens * (1 + anew)
        assert more["count/sampling"] == less["count/sampling"]
        assert more["count/training"] == less["count/training"] == tokens
        assert "seconds/ref" in more and "kl_sample" not in less


def test_nothing_is_taken_off_before_the_first_step(model, tmp_path):
    """Exactly nothing where both are computed at one shape; else the sampler's rounding."""

    def learned(name: str, more: dict[str, Any], **train: Any) -> tuple[Tensor, float | None]:
        experience = collect(opened(model, tmp_path / name, RLOO | more, **train), 0)
        return experience.rows[0].advantage, experience.metrics.get("kl_sample")

    plain, nothing = learned("plain", {})
    anew, exact = learned("anew", OFF, recompute_old=True)
    stored, near = learned("stored", OFF)
    assert nothing is None and exact == 0.0 and torch.equal(anew, plain)
    assert near == pytest.approx(0.0, abs=NEAR)
    torch.testing.assert_close(stored, plain, atol=NEAR, rtol=0)


def test_what_another_engine_said_is_not_read(model, tmp_path):
    kept = opened(model, tmp_path, RLOO | OFF)
    move(kept)
    with torch.no_grad():
        batch = kept.learner.policy.open(["a:", "cab :"], [], 6)
        (rollout,) = batch.rollouts(kept.algorithm.plan, (0, 1), seed=0, iteration=0)
    own = reference_log_ratios(kept.learner, batch.policy, rollout)
    other = replace(rollout, elsewhere=True, logp=rollout.logp - 1.0)
    again = reference_log_ratios(kept.learner, batch.policy, other)
    torch.testing.assert_close(again, own, atol=NEAR, rtol=0, equal_nan=True)
    assert own.nansum(1).abs().min() > 1e-3


def test_weights_that_are_no_numbers_are_not_taken_for_tokens_that_are_not_there(model, tmp_path):
    kept = opened(model, tmp_path, PLUS | OFF)
    policies = kept.learner.policies
    policies._switch = None  # the start as weights, in place of no adapters
    policies._weights["ref"] = {
        n: torch.full_like(p, torch.nan) for n, p in policies.network.items()
    }
    with pytest.raises(UserError, match="log-probability of a sample is not finite"):
        collect(kept, 0)


@pytest.mark.slow
def test_it_pulls_back_to_the_start_where_no_reward_teaches(model, tmp_path):
    """A constant reward has no gradient; with the KL off it, steps lead back to the start."""

    def log(name: str, more: dict[str, Any]) -> tuple[Session, list[dict[str, float]]]:
        recipe = RLOO | {"group": 16} | more
        kept = opened(model, tmp_path / name, recipe, "flat", lr=1e-2, rows_per_call=64)
        move(kept)
        progress = Progress()
        return kept, [iterate(kept, progress).metrics for _ in range(12)]

    _, still = log("still", {})
    assert all(each["grad_norm"] == 0 for each in still)
    kept, back = log("back", OFF)
    assert back[0]["grad_norm"] > 0 and kept.learner.policies.inside == "current"
    far = [each["kl_sample"] for each in back]
    assert sum(far[-3:]) < 0.5 * sum(far[:3]), far


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [RLOO, PLUS], ids=["rloo", "plus"])
def test_a_resumed_run_ends_with_the_same_bits(model, tmp_path, recipe):
    whole, broken, again = (
        opened(model, tmp_path / name, recipe | OFF) for name in ("whole", "broken", "again")
    )
    progress = Progress()
    for _ in range(3):
        iterate(whole, progress)
    progress = Progress()
    for _ in range(2):
        iterate(broken, progress)
    checkpoint.save_checkpoint(broken, progress, Alarms())
    progress = checkpoint.restore(again, tmp_path / "broken" / "checkpoints" / "000002", Alarms())
    last = iterate(again, progress).metrics
    assert same_weights(whole, again)
    assert abs(last["kl_sample"]) > 1e-4, "the start is not where the run resumed"


def test_the_start_is_held_where_it_is_asked_for_only(model, tmp_path):
    off, plain = (text_runs.session(model, tmp_path, RLOO | more) for more in (OFF, {}))
    assert "ref" in off.learner.policies.names and "ref" not in plain.learner.policies.names
    assert off.algorithm.roles == {"old", "ref"} and plain.algorithm.roles == {"old"}
    found = [memory.estimate(each.run) for each in (off, plain)]
    bytes_ = sum(p.nbytes for p in off.learner.policies.parameters.values())
    assert [each and each.parts["averages and initial weights"] for each in found] == [bytes_, 0]


@pytest.mark.parametrize(
    "plan",
    [Segments(2, 2, (2,)), Forks(2, Forking(2, 2, 1, "surprise"))],
    ids=["segments", "forks"],
)
def test_trees_are_refused(plan):
    rule = Estimator((Penalize(KL), LeaveOneOut()))
    with pytest.raises(UserError, match="completions of a tree share tokens"):
        Algorithm(6, plan, rule, Token(), Surrogate(0.2, 0.2))
    assert Algorithm(6, Completions(4), rule, Token(), Surrogate(0.2, 0.2)).reads == (REFERENCE,)


def test_pictures_and_a_weight_of_nothing_are_refused():
    rule = Estimator((Penalize(KL), LeaveOneOut()))
    with pytest.raises(UserError, match="use an Anchor"):
        Algorithm(4, Chain(FlowSDE(), 4), rule, Transition(), Surrogate(0.2, 0.2))
    for name in ("text_rloo", "text_reinforce", "text_remax"):
        with pytest.raises(UserError, match="needs kl above 0"):
            TEXT_RECIPES[name](kl_in="reward")
        assert (
            REFERENCE not in TEXT_RECIPES[name](kl=KL).reads
            and TEXT_RECIPES[name](kl=KL).loss.anchors
        )
        made = TEXT_RECIPES[name](kl=KL, kl_in="reward")
        assert REFERENCE in made.reads and not made.loss.anchors
