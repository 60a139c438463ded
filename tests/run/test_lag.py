"""Samples of older weights: what the update evaluates, and the decoupled objective."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl.errors import UserError
from flowrl.iteration.features.units import summed_metrics
from flowrl.iteration.minibatches import shares_of
from flowrl.iteration.units import LAG
from flowrl.iteration.update import with_old
from flowrl.likelihoods.rows import BEHAVIOUR, Evaluation, TokenRows, TransitionRows, without_old
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Transition
from flowrl.losses.base import metric_values
from flowrl.losses.ratio import Surrogate
from flowrl.losses.weights import BehindClip, Decoupled, Mismatch
from flowrl.run import start
from flowrl.run.evaluate.guard import raised_by_training
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from flowrl.settings.read import check_plan, run_from
from flowrl.settings.sections.workers import WorkerSettings
from flowrl.table import EMPTY, Table
from rewards import Samples
from samplers import FlowSDE
from tests.support import runs, text_runs, tiny_lm
from tests.support.iterations import chunk_loss, collect, iterate

CHAIN = {"name": "flow_grpo", "steps": 3, "group": 2}
NFT = {"name": "nft", "steps": 3, "group": 2, "levels_per_sample": 2}
AWM = {"name": "awm", "steps": 5, "group": 2, "levels_per_sample": 2}


def lagging(pipeline, folder, recipe: dict[str, Any], **train: Any):
    """A session whose settings have a lag; it samples in this process."""
    settings = runs.tree(pipeline, folder, recipe, **train)
    return runs.opened({**settings, "workers": {"sampling": 1, "lag": 1}}, folder)


@pytest.fixture
def ray_is_there(monkeypatch):
    monkeypatch.setattr("flowrl.settings.checks.machine.find_spec", lambda name: name)


def moved(policies, names, by: float):
    """Copies of policies' weights, moved by keyed noise."""
    made = policies.copies(names)
    for weights in made.values():
        for place, weight in enumerate(weights.values()):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(place))
            weight.add_(noise.to(weight), alpha=by)
    return made


@pytest.mark.quick_cases("nft")
@pytest.mark.parametrize(
    ("recipe", "averages"), [(NFT, {"trailing"}), (AWM, {"current", "trust"})], ids=["nft", "awm"]
)
def test_losses_read_the_weights_as_they_were_at_sampling(recipe, averages, pipeline, tmp_path):
    """Beside a run in which those weights are placed by hand."""
    opened = lagging(pipeline, tmp_path, recipe)
    learner, policies = opened.learner, opened.learner.policies
    experience = collect(opened, 0)
    chunk = shares_of(learner, experience, 0)[0][0].rows()
    before = moved(policies, averages, 0.05)
    seen: dict[str, Evaluation] = {}
    for name, weights in before.items():
        here = {key: p.detach().clone() for key, p in policies.network.items()}
        policies.replace_weights("current", weights)
        with torch.no_grad():
            seen[name] = learner.algorithm.likelihood.evaluate(experience.policy, chunk)
        policies.replace_weights("current", here)
    found: dict[str, Evaluation] = {}

    class Spy:
        roles = learner.algorithm.loss.roles

        def __call__(self, likelihood, evaluations, rows):
            found.update(evaluations)
            return learner.algorithm.loss(likelihood, evaluations, rows)

    spying = replace(learner, algorithm=_with_loss(learner.algorithm, Spy()))
    policies.keep_sampled(before)
    assert policies.equal_to_current(policies.names) == set()
    chunk_loss(spying, experience, chunk, frozenset())
    role = {"trailing": "old", "current": "old", "trust": "trust"}
    for name, want in seen.items():
        torch.testing.assert_close(found[role[name]].logp, want.logp)
    policies.keep_sampled({})
    assert policies.equal_to_current(policies.names) == {each.name for each in policies.averages}
    chunk_loss(spying, experience, chunk, frozenset(policies.equal_to_current(policies.names)))
    torch.testing.assert_close(found["old"].logp, found["new"].logp.detach())


def _with_loss(algorithm, loss):
    made = object.__new__(type(algorithm))
    made.__dict__.update({**algorithm.__dict__, "loss": loss})
    return made


def test_the_first_ratio_of_late_samples_is_that_of_the_two_weights(pipeline, tmp_path):
    """Without `recompute_old` the stored log-densities stay, whatever the weights are by now."""
    opened = lagging(pipeline, tmp_path, {**CHAIN, "clip": 0.5})
    policies = opened.learner.policies
    experience = collect(opened, 0)
    before = policies.copies({"current"})
    policies.replace_weights("current", moved(policies, {"current"}, 0.05)["current"])
    policies.keep_sampled(before)
    (chunk, *_) = shares_of(opened.learner, experience, 0)[0]
    rows = chunk.rows()
    entries, _ = chunk_loss(opened.learner, experience, rows, frozenset())
    with torch.no_grad():
        new = opened.algorithm.likelihood.evaluate(experience.policy, rows).logp
    assert rows.old is not None
    torch.testing.assert_close(metric_values(entries.metrics["ratio"]), (new - rows.old.logp).exp())
    assert (metric_values(entries.metrics["ratio"]) - 1).abs().max() > 1e-4
    assert "mismatch" not in entries.metrics  # it compares equal weights only


def test_recomputed_log_densities_are_the_proximal_policys(pipeline, tmp_path):
    opened = lagging(pipeline, tmp_path, CHAIN, recompute_old=True)
    learner, policies = opened.learner, opened.learner.policies
    experience = collect(opened, 0)
    before = policies.copies({"current"})
    policies.replace_weights("current", moved(policies, {"current"}, 0.05)["current"])
    policies.keep_sampled(before)
    stored = experience.rows[0].old
    experience = replace(
        experience, rows=tuple(without_old(each, keep=True) for each in experience.rows)
    )
    shares = shares_of(learner, experience, 0)
    chunk = with_old(learner, experience, shares[0][:1])[0].rows()
    with torch.no_grad():
        now = opened.algorithm.likelihood.evaluate(experience.policy, chunk).logp
    assert chunk.old is not None and stored is not None
    torch.testing.assert_close(chunk.old.logp, now)
    entries, _ = chunk_loss(learner, experience, chunk)
    weight = (now - chunk.table[BEHAVIOUR].logp).exp()
    torch.testing.assert_close(metric_values(entries.metrics["ratio"]), torch.ones_like(now))
    torch.testing.assert_close(entries.metrics["behind_weight"], weight)
    assert (weight - 1).abs().max() > 1e-4


@pytest.mark.quick_cases("chain")
@pytest.mark.parametrize("recipe", [CHAIN, NFT], ids=["chain", "nft"])
def test_a_lag_in_one_process_samples_with_the_weights_of_its_version(recipe, pipeline, tmp_path):
    """Beside a session without a lag, in which the recorded weights are placed by hand."""
    settings = runs.tree(pipeline, tmp_path, recipe, iterations=4)
    cut = {"workers": {"unit": 1}}
    late = runs.opened({**settings, "workers": {"unit": 1, "lag": 2}}, tmp_path)
    late = start.with_source(late, start.sampled_ahead(late))
    name, began, progress = late.algorithm.behaviour, [], Progress()
    plain = runs.opened({**settings, **cut}, tmp_path)
    for iteration, version in enumerate((0, 0, 0, 1)):
        began.append(late.learner.policies.copies({name})[name])
        made = iterate(late, progress)
        assert made.metrics[LAG] == iteration - version
        plain.learner.policies.replace_weights(name, began[version])
        wanted = collect(plain, iteration)
        assert isinstance(made.scores.samples[0], Samples)
        assert made.scores.samples[0].media.equal(wanted.samples.media)
        assert made.scores.plans[0].own.values.equal(wanted.scores.values)
        pairs = zip(made.rows.rows, wanted.rows, strict=True)
        if recipe is CHAIN:
            assert all(mine.old.logp.equal(other.old.logp) for mine, other in pairs)
    assert not all(began[0][key].equal(began[2][key]) for key in began[0])


@pytest.mark.slow
def test_a_run_with_a_lag_that_is_resumed_with_more_iterations_has_the_same_bits(
    pipeline, tmp_path
):
    settings = runs.tree(pipeline, tmp_path, CHAIN)
    runs.check_resumed_bits({**settings, "workers": {"unit": 1, "lag": 1}}, tmp_path)


def test_what_processes_count_is_added_up_and_what_they_share_is_not():
    rows = [{"workers/joined": 2.0, "seconds/sending": 1.0, LAG: 1.0, "budget/outside": 0.5}] * 2
    assert summed_metrics(rows) == {
        "workers/joined": 4.0, "seconds/sending": 2.0, LAG: 1.0, "budget/outside": 0.5
    }  # fmt: skip


def test_an_alarm_says_how_old_its_samples_are(pipeline, tmp_path):
    opened, alarms = lagging(pipeline, tmp_path, CHAIN), Alarms()
    found: list[str] = []
    for n, reward in enumerate([1.0] * 5 + [0.0] * 5):
        row = {"reward": reward, "reward_std": 0.1, "reward_std/brightness": 0.1, LAG: 1.0}
        found += raised_by_training(opened, alarms, {**row, "reward/brightness": reward}, n).signs
    assert len(found) == 1 and "(samples at lag 1)" in found[0]
    assert "a smaller workers.lag" in found[0]


def test_an_iteration_without_a_lag_is_not_weighed(pipeline, tmp_path):
    plain = runs.session(pipeline, tmp_path, CHAIN, recompute_old=True)
    assert not any(isinstance(each, Decoupled) for each in plain.algorithm.loss.weights)
    assert "behind" not in iterate(plain, Progress()).metrics


def test_the_decoupled_objective_by_hand():
    """arXiv:2110.00641, eq. 6: prox / behaviour times min(r A, clip(r) A), r = new / prox."""
    generator = torch.Generator().manual_seed(3)

    def drawn() -> torch.Tensor:
        return 0.3 * torch.randn(6, 1, generator=generator, dtype=torch.float64)

    new, old, behaviour, advantage = drawn(), drawn(), drawn(), drawn()
    behaviour[0] = old[0] - 5  # a ratio above `high`
    state, one = torch.zeros(6, 2, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    rows = TransitionRows(
        torch.arange(6), advantage, torch.ones(6, 1, dtype=torch.bool), Evaluation(old, None),
        state, state, 0.5 * one, 0.25 * one, FlowSDE(0.7),
        table=Table({BEHAVIOUR: Evaluation(behaviour, None)}),
    )  # fmt: skip
    for mode in ("truncate", "mask", "none"):
        loss = Surrogate(0.2, 0.2, weights=(Decoupled(Transition(), mode, high=3.0),))
        found = loss(Transition(), {"new": Evaluation(new, None), "old": rows.old}, rows)
        for i in range(6):
            r, w = float((new - old)[i].exp()), float((old - behaviour)[i].exp())
            w = {"truncate": min(w, 3.0), "mask": w if w <= 3 else 0.0, "none": 1.0}[mode]
            a = float(advantage[i])
            want = -w * min(r * a, min(max(r, 0.8), 1.2) * a)
            assert float(found.value[i]) == pytest.approx(want, rel=1e-9)
        assert found.metrics["behind_outside"].sum() == 1
    assert found.metrics["behind"][0] == pytest.approx(5.0)


@pytest.mark.parametrize("tokens", [False, True], ids=["steps", "tokens"])
def test_rows_past_the_clip_range_of_the_policy_that_sampled_are_left_out(tokens):
    """PPO's clip, at the ratio of `old` to the policy that sampled, for a range of 0.8 to 1.3."""
    ratio = torch.tensor([[0.7], [1.1], [1.4]] * 2, dtype=torch.float64)
    advantage = torch.tensor([[1.0]] * 3 + [[-1.0]] * 3, dtype=torch.float64)
    old, behaviour = Evaluation(ratio.log() - 2, None), torch.full_like(ratio, -2.0)
    mask, state, one = advantage.bool(), torch.zeros(6, 2), torch.ones(6)
    common = torch.arange(6), advantage, mask, old
    if tokens:
        rows = TokenRows(*common, mask.long(), mask.long()[:, 0], 1.0, None, sampled=behaviour)
        likelihood = Token()
    else:
        noise = state, state, 0.5 * one, 0.25 * one, FlowSDE(0.7)
        table = Table({BEHAVIOUR: Evaluation(behaviour, None)})
        rows = TransitionRows(*common, *noise, table=table)
        likelihood = Transition()
    weight, metrics = BehindClip(likelihood, 0.2, 0.3)({"old": old}, rows)
    assert weight[:, 0].tolist() == [1, 1, 0, 0, 1, 1]
    assert metrics["behind_clipped"].equal(1 - weight)
    never = replace(rows, sampled=None) if tokens else replace(rows, table=EMPTY)
    assert bool((BehindClip(likelihood, 0.2, 0.3)({"old": old}, never)[0] == 1).all())


def test_the_correction_stands_in_losses_of_late_samples_only(ray_is_there, pipeline, tmp_path):
    def weights(recipe, workers, **train):
        settings = runs.tree(pipeline, tmp_path, recipe, **train)
        run = run_from({**settings, "workers": workers}, "test")
        check_plan(run)
        return getattr(run.algorithm().loss, "weights", ())

    lag = {"sampling": 1, "lag": 2, "correction": {"mode": "truncate", "high": 2.0}}
    within, only = weights({**CHAIN, "clip": 0.3}, lag, recompute_old=True)
    assert isinstance(only, Decoupled) and (only.mode, only.high) == ("truncate", 2.0)
    assert isinstance(within, BehindClip) and (within.low, within.high) == (0.3, 0.3)
    (same,) = weights(CHAIN, lag | {"clip": False}, recompute_old=True)
    assert isinstance(same, Decoupled)
    assert weights(CHAIN, lag) == () == weights(AWM, lag, recompute_old=True)
    assert weights(CHAIN, {"sampling": 1}, recompute_old=True) == ()


def test_texts_have_the_same_objective(ray_is_there, tmp_path):
    model = tiny_lm.write(tmp_path / "model")
    settings = text_runs.tree(model, tmp_path, text_runs.GRPO)
    settings["train"] |= {"recompute_old": True}
    run = run_from({**settings, "workers": {"sampling": 1, "lag": 1}}, "test")
    within, only = run.algorithm().loss.weights
    assert isinstance(only, Mismatch) and isinstance(within, BehindClip)


def test_a_loss_without_ratios_cannot_weigh_late_rows(pipeline, tmp_path):
    settings = runs.tree(pipeline, tmp_path, NFT)
    algorithm = run_from(settings, "test").algorithm()
    with pytest.raises(UserError, match="no ratio to weight"):
        WorkerSettings().around(algorithm)


def test_a_lag_asks_nothing_of_losses_that_compare_with_no_old(pipeline, tmp_path):
    """On-policy distillation has no ratio, so that recomputed log-densities change nothing."""
    opd = {"name": "opd", "steps": 6}
    settings = runs.tree(pipeline, tmp_path, opd, recompute_old=True)
    settings["teachers"] = {"folders": {"all": str(tmp_path)}}
    run = run_from({**settings, "workers": {"sampling": 1, "lag": 1}}, "test")
    assert not run.decouples(run.algorithm())


def test_a_row_without_an_advantage_is_past_no_clip_range():
    ratio = torch.tensor([[0.1], [1.0], [9.0]], dtype=torch.float64)
    old, zero = Evaluation(ratio.log(), None), torch.zeros(3, 1, dtype=torch.float64)
    mask = torch.ones(3, 1, dtype=torch.bool)
    ids = mask.long()
    rows = TokenRows(torch.arange(3), zero, mask, old, ids, ids[:, 0], 1.0, None, sampled=zero)
    weight, metrics = BehindClip(Token(), 0.2, 0.3)({"old": old}, rows)
    assert weight.flatten().tolist() == [1, 1, 1] and not metrics["behind_clipped"].any()
