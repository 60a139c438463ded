"""Rows that start from one state share its evaluation in the update, and are dealt together."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.estimate.time import iteration_work
from flowrl.iteration import update
from flowrl.iteration.minibatches import RowAssignment, calls
from flowrl.likelihoods.rows import Rows, TransitionRows, equal_before, input_of, stacked, take
from flowrl.likelihoods.transition import Transition
from flowrl.recipes.table import IMAGE_RECIPES
from flowrl.session import start_record as origin
from flowrl.session.learner import Learner
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from flowrl.session.start_record import StartRecord
from flowrl.settings.read import run_from
from samplers import Chain, FlowSDE, Fork, Latents, Plan, Planner, Sampling, Tree, Window, roll
from tests.support import iterations, runs
from tests.support.iterations import Collected, collect
from tests.support.tiny import TinyFlow

SIGMAS = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
STEPS = {"steps": 5, "group": 4}
SMALL: dict[str, dict[str, Any]] = {
    "mix_grpo": STEPS | {"window": 2, "every": 1, "kl": 0.1},
    "mix_grpo_flash": STEPS | {"window": 2, "every": 1},
    "flow_grpo_fast": STEPS | {"steps": 6, "window": 2},
    "dance_grpo": STEPS | {"fraction": 1.0},
    "temp_flow": {"steps": 4, "roots": 2, "branch": 3, "kl": 0.1},
    "branch_grpo": {"steps": 5, "at": [0, 2], "kl": 0.1},
    "branch_grpo_mix": {"steps": 5, "at": [0, 2], "window": 1},
}
SMALL |= {
    name: STEPS | {"levels_per_sample": 2} for name in ("awm", "nft", "dpo", "rwr", "dgpo", "crd")
}
SMALL |= {
    "flow_dppo": STEPS | {"noisy": 1},
    "g2rpo": STEPS | {"at": [0, 1]},
    "euphonium": STEPS | {"first": 1, "fraction": 1.0},
    "pro_grpo": {"steps": 5, "start": 6, "keep": [4], "at": [2]},
    "potential_tree": {"steps": 5, "at": [0, 2]},
}
# rows for each input: the children that share a state count once
SHARED = {"mix_grpo": 8 / 5, "mix_grpo_flash": 8 / 5, "dance_grpo": 16 / 13, "temp_flow": 3.0}
SHARED |= {"branch_grpo": 12 / 9, "branch_grpo_mix": 6 / 3}
RATIOS = SHARED | {"g2rpo": 4.0, "e_grpo": 4.0, "euphonium": 16 / 13, "fdfo": 16 / 13, "dgpo": 1.6}
RATIOS |= {"potential_tree": 12 / 9}


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """All names; the others than the chosen ones are slow."""
    return [pytest.param(n, marks=[pytest.mark.slow] * (n not in chosen)) for n in names]


def opened(pipeline, folder, name: str, **train: Any) -> Session:
    recipe = {"name": name, **SMALL.get(name, STEPS)}
    tree = runs.tree(pipeline, folder, recipe, **{"updates": 2, "lr": 1e-3, **train})
    if name == "gardo":  # compares with further rewards
        tree["rewards"] += [{"name": "jpeg", "weight": 0}, {"name": "colour", "weight": 0}]
        tree["recipe"] |= {"auxiliary": ["jpeg"], "distance": "colour"}
    tree["model"]["dtype"] = "float64"
    return runs.opened(tree, folder)


def unshared(experience: Collected) -> Collected:
    rows = (replace(each, state=None) for each in experience.rows)
    return replace(experience, rows=tuple(rows))


def dealt(rows: Rows) -> tuple[Rows, Tensor]:
    return rows, input_of(rows)


def distinct(rows: Rows) -> int:
    """Inputs of the network that differ, by their bits."""
    parts = (rows.x, rows.sigma, rows.prompt)  # type: ignore[attr-defined]
    return len({b"".join(part[i].numpy().tobytes() for part in parts) for i in range(len(rows.x))})  # type: ignore[attr-defined]


# gradient methods evaluate the steps that rebuild a sample: tests/run/test_through.py counts them,
# and tests/run/test_teachers.py those of opd, which needs a teacher
SURROGATES = [
    n for n, recipe in IMAGE_RECIPES.items() if not recipe().reward_gradient and n != "opd"
]


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(SURROGATES, "temp_flow", "mix_grpo", "flow_grpo"))
def test_training_evaluates_each_distinct_input_once(pipeline, tmp_path, name):
    """`flowrl plan` promises that number, and the rows are as many times more as the tree says."""
    kept = opened(pipeline, tmp_path, name, rows_per_call=3)
    experience = collect(kept, 0)
    kept.learner.policies.equal_to_current = lambda _: set()  # as later, when averages lag behind
    found = iterations.update(kept.learner, experience, Progress()).metrics
    inputs = sum(distinct(rows) for rows in experience.rows)
    rows = sum(len(rows.prompt) for rows in experience.rows)
    work = iteration_work(kept.run, 0, kept.learner.policy.schedule(kept.algorithm.steps).sigmas)
    assert found["count/training"] == inputs
    if name == "dgpo":  # the levels that were drawn decide: rows at sigma 1 share their state
        assert inputs < work.training
    else:
        assert inputs == work.training
    assert rows / inputs == pytest.approx(RATIOS.get(name, 1.0))
    shares = any(plan.shares_states for plan in kept.algorithm.plans)
    deals = name in RATIOS and name != "dgpo"  # whose groups were dealt together before
    assert shares == deals, "what a resume asks"
    if "ref" in kept.algorithm.loss.roles:
        assert found["count/frozen"] >= inputs
        assert found["count/frozen"] == work.frozen or name == "dgpo"


@pytest.mark.quick_cases("branch_grpo")
@pytest.mark.parametrize("name", quick(SHARED, "temp_flow", "branch_grpo"))
def test_gradients_are_those_of_each_row_evaluated_by_itself(pipeline, tmp_path, monkeypatch, name):
    """The same deal, with every child's state evaluated again, also for "ref" and "old"."""
    found: list[list[Tensor]] = []

    def step(learner: Learner, progress: Progress, tally: update.Tally) -> float:
        parameters = learner.policies.parameters.values()
        found.append([p.grad.clone() for p in parameters if p.grad is not None])
        learner.optimizer.zero_grad()
        with torch.no_grad():
            for p in parameters:  # so that the second step has ratios other than 1
                p.add_(0.05)
        return 1.0

    monkeypatch.setattr(update, "optimizer_step", step)
    kept = opened(pipeline, tmp_path, name, rows_per_call=3, recompute_old=name != "temp_flow")
    experience = collect(kept, 0)
    before = kept.learner.policies.state()
    once = iterations.update(kept.learner, experience, Progress()).metrics
    kept.learner.policies.restore(before)
    shares = update.shares_of
    alone = lambda *asked: [
        [
            replace(chunk, whole=unshared(replace(experience, rows=(chunk.whole,))).rows[0])
            for chunk in share
        ]
        for share in shares(*asked)
    ]
    monkeypatch.setattr(update, "shares_of", alone)
    each = iterations.update(kept.learner, experience, Progress()).metrics
    assert each["count/training"] > once["count/training"]
    assert each["ratio_max"] - each["ratio_min"] > 1e-4, "the second step has other ratios than 1"
    for end in ("ratio_max", "ratio_min"):
        assert each[end] == pytest.approx(once[end], rel=1e-12)
    assert len(found) == 4
    for got, want in zip(found[:2], found[2:], strict=True):
        size = max(float(grad.abs().max()) for grad in want)
        assert size > 1e-6
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12 * size, rtol=1e-12)


def planners() -> st.SearchStrategy[Planner]:
    """Chains, windows, forks and trees of at most 12 samples."""
    sde, noise = FlowSDE(), st.booleans()
    return st.one_of(
        st.builds(Chain, st.just(sde), st.integers(1, 4), st.just(1.0), noise),
        st.builds(lambda size, shared: Window(sde, 4, size, shared_noise=shared),
                  st.integers(1, 3), noise),
        st.builds(Fork, st.just(sde), st.integers(1, 3), st.integers(1, 3)),
        st.builds(lambda at, roots: Tree(sde, tuple(at), 2, roots),
                  st.sets(st.integers(0, 3), min_size=1, max_size=2), st.integers(1, 3)),
    )  # fmt: skip


def rows_of(plans: Sequence[Plan], draws: Sequence[int]) -> list[TransitionRows]:
    flow = TinyFlow(1)
    velocity = lambda x, sigma, prompt: flow(x, sigma, torch.zeros_like(prompt))
    found: list[TransitionRows] = []
    for rollout in roll(plans, velocity, Latents((2,)), draws, seed=0, iteration=0):
        credit = torch.zeros(len(rollout.x0), len(rollout.plan.steps))
        found += Transition().rows(rollout, credit, credit == 0)
    return found


@settings(max_examples=20)
@given(planners(), st.integers(1, 3), st.integers(0, 99))
def test_the_deal_is_of_inputs_whatever_the_order_of_rows_and_the_processes(planner, updates, seed):
    plans = planner(SIGMAS, 0, 0)
    draws, assignment = (4, 9, 11), RowAssignment(seed, 2, updates)
    parts, alone = rows_of(plans, draws), rows_of(plans, draws[1:])
    assert sum(len(p.prompt) for p in parts) == 3 * sum(plan.trained_nodes for plan in plans)
    assert sum(map(distinct, parts)) == 3 * sum(plan.trained_states for plan in plans)
    for place, (rows, other) in enumerate(zip(parts, alone, strict=True)):
        inputs = input_of(rows)
        steps = assignment.steps(*dealt(rows), draws, place, 1)
        assert int(inputs.max()) + 1 == distinct(rows)
        assert len(set(zip(inputs.tolist(), steps.tolist(), strict=True))) == distinct(rows)
        order = torch.randperm(len(steps), generator=torch.Generator().manual_seed(seed))
        mixed = assignment.steps(*dealt(take(rows, order)), draws, place, 1)
        if rows.state is not None:
            assert torch.equal(mixed, steps[order]), "a row's step is that of its node"
        assert torch.equal(
            assignment.steps(*dealt(other), draws[1:], place, 1), steps[rows.prompt > 0]
        )
        called = calls(order, inputs, 2)
        assert sorted(torch.cat(called).tolist()) == list(range(len(steps)))
        seen = [set(inputs[call].tolist()) for call in called]
        assert all(len(each) <= 2 for each in seen) and sum(map(len, seen)) == distinct(rows)


def test_one_state_per_step_does_not_send_a_draw_into_one_optimizer_step():
    """All steps of a fork with one root have one input per draw: they take turns."""
    parts = rows_of(Fork(FlowSDE(), 3)(SIGMAS, 0, 0), (0,))
    steps = [
        RowAssignment(0, 0, 2).steps(*dealt(rows), (0,), place, 1)
        for place, rows in enumerate(parts)
    ]
    assert [step.unique().tolist() for step in steps] == [[0], [1], [0], [1]]


def test_a_replayed_sample_among_siblings_has_its_own_state():
    """A replay puts another sample's states in for one that shared its noise."""
    plans = Chain(FlowSDE(), 4, shared_noise=True)([1.0, 0.6, 0.3, 0.0], 0, 0)
    flow = TinyFlow(1)
    torch.nn.init.normal_(flow.shift, generator=torch.Generator().manual_seed(0))
    policy = lambda x, sigma, prompt: flow(x, sigma, torch.zeros_like(prompt))
    sampling = Sampling[Any](True)
    (rollout,) = roll(plans, policy, Latents((2,)), (0, 1), seed=0, iteration=0, sampling=sampling)
    rollout.edges[0].x[2] += 1.0
    credit = torch.zeros(8, 3)
    first, second = Transition().rows(rollout, credit, credit == 0)
    assert first.state is not None and first.state.tolist() == [0, 0, 1, 2, 3, 3, 3, 3]
    assert second.state is None, "each has its own from the second step on"
    calls_of: list[int] = []

    def counted(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        calls_of.append(len(x))
        return policy(x, sigma, prompt)

    got = Transition().evaluate(counted, first)
    want = Transition().evaluate(counted, replace(first, state=None))
    assert calls_of == [4, 8]
    assert torch.equal(got.logp, want.logp) and torch.equal(got.out, want.out)
    others = replace(first, prompt=first.prompt + 2)  # of a further round, with their own numbers
    assert input_of(stacked([first, others])).tolist() == [0, 0, 1, 2, 3, 3, 3, 3,
                                                           4, 4, 5, 6, 7, 7, 7, 7]  # fmt: skip
    two = take(first, torch.tensor([3, 0]))
    assert torch.equal(Transition().evaluate(policy, two).logp, want.logp[[3, 0]])


@pytest.mark.parametrize("name", ["dance_grpo", "flow_grpo"])
def test_an_older_checkpoint_of_a_run_that_shares_states_is_resumed_with_one_line(
    pipeline, tmp_path, name
):
    run = run_from(runs.tree(pipeline, tmp_path, {"name": name, **STEPS}), "test")
    record = StartRecord.of(run, 1).state()
    assert origin.changes(run, tmp_path, kept(tmp_path, record), 1) == []
    del record["shared_states"]  # as versions wrote it that dealt every sample by itself
    lines = origin.changes(run, tmp_path, kept(tmp_path, record), 1)
    assert len(lines) == (name in SHARED)
    assert all("stay in one optimizer step" in line for line in lines)


def kept(folder: Path, record: dict[str, Any]) -> Path:
    checkpoint = folder / "000001"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "state.json").write_text(json.dumps({"origin": record}))
    return checkpoint


def test_equal_neighbours_have_one_number():
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 3.0], [1.0, 2.0], [torch.nan, 2.0]])
    assert equal_before(torch.cat([x, x[-1:]])).tolist() == [0, 0, 1, 2, 3, 4]
    assert equal_before(x[:0]).tolist() == []
