"""Turns as decision points: which tokens are of which, who has which, in what state."""

from dataclasses import replace

import pytest
import torch

from flowrl.budget.successes import cut, put
from flowrl.credit.advantages import Context, Estimator, Sum
from flowrl.credit.trackers import ReadsStart
from flowrl.credit.values import SampleTurns
from flowrl.errors import UserError
from flowrl.likelihoods.token import Token
from flowrl.models.language.environment import read_reply
from flowrl.recipes.table import TEXT_RECIPES
from rewards import Scores
from samplers.completions import Completions
from samplers.dialogue import state_id
from tests.support.credit_context import context_of as context_with
from tests.support.environments import META, PROMPTS, WARPED, by_hand, made, rollout
from tests.support.golden_tools import columns

GROUP, DRAWS, TURNS = 6, 5, 3
TREES = ("text_tree", "text_spo_tree", "text_tempo", "text_treerl")
BY_TURN = ("text_gigpo", "text_turns", "text_rebn", "text_process", "text_igpo")
CHAINS = [name for name in TEXT_RECIPES if name not in (*TREES, *BY_TURN)]
FEW = {"text_remax": {"group": GROUP - 1}, "text_pass_at_k": {"group": GROUP, "k": 2}}


@pytest.mark.parametrize("function", ["reply", "named"])
@pytest.mark.parametrize("steps", [24, 9])
def test_every_token_is_of_its_turn_and_every_turn_has_its_state(tmp_path, function, steps):
    policy = made(tmp_path, function)
    found, batch = rollout(policy, steps=steps)
    assert found.columns.nodes == (GROUP,) * TURNS and found.plan.turns == TURNS
    counts = []
    for row in range(len(found.ids)):
        parts, prompt = by_hand(policy, found, row, function), PROMPTS[int(found.prompt[row])]
        turns = [part for part, told in parts if not told]
        points = [
            (i + 1) // 2  # what is said to the model belongs to the turn behind it
            for i, (part, _) in enumerate(parts)
            for _ in part
        ]
        assert found.point[row, : len(points)].tolist() == points
        counts.append(len(turns))
        assert found.exists[row].tolist() == [k < len(turns) for k in range(TURNS)]
        assert int(found.last[row]) == len(turns) - 1
        replies = [policy.tokenizer.decode(part) for part, told in parts if told]
        names = [prompt, *replies]
        if function == "named":
            names = [prompt, *(reply.strip() for reply in replies)]
            names[2:] = [prompt] * len(names[2:])
        want = [*map(state_id, names), 0, 0, 0][:TURNS]
        assert found.points.states[row].tolist() == want
    assert {1, 2, 3} == set(counts) or steps == 9
    assert found.stopped.any() and not found.stopped.all()
    statistics = batch.statistics(found, batch.media(found)).means
    assert statistics["text/turns"] == pytest.approx(sum(counts) / len(counts))
    met = []
    for start in range(0, len(found.ids), GROUP):
        own = slice(start, start + GROUP)
        taken = found.points.states[own][found.exists[own]].tolist()
        met += [taken.count(state) > 1 for state in taken]
    assert statistics["text/met"] == pytest.approx(sum(met) / len(met))


def test_ids_of_states_are_the_content_s():
    """Written down: a checkpoint, another process and another release must know them again."""
    assert state_id("") == 2138177104155982770
    assert state_id("a:") == 7004545150726077201
    assert state_id("\u00e4") != state_id("a") and 0 <= state_id("x" * 10_000) < 2**63


def test_an_environment_that_ends_at_once_leaves_one_turn(tmp_path):
    found, _ = rollout(made(tmp_path, "at_once"))
    assert found.exists[:, 0].all() and not found.exists[:, 1:].any()
    assert not found.point.any() and not found.points.states[:, 1:].any()
    plain, _ = rollout(made(tmp_path, "at_once"), draws=(2,), prompts=["hi"], meta=META[:1])
    assert (plain.points.states[:, 0] == state_id("hi")).all()


@pytest.mark.slow
@pytest.mark.long
def test_neither_the_batch_nor_the_draw_changes_a_state(tmp_path):
    policy = made(tmp_path)
    found, _ = rollout(policy)
    alone, _ = rollout(policy, draws=(2,), prompts=PROMPTS[2:3], meta=META[2:3])
    other, _ = rollout(made(tmp_path, rows=1))
    assert torch.equal(found.points.states[12:18], alone.points.states)
    assert torch.equal(found.points.states, other.points.states)
    again, _ = rollout(policy, draws=(9,), prompts=PROMPTS[2:3], meta=META[2:3])
    assert set(again.points.states.flatten().tolist()) & set(
        alone.points.states[:, 1:].flatten().tolist()
    ) > {0}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"answer": "hi"}, "returned 'answer'; the known keys are 'reply', 'state' and 'reward'"),
        ({"reply": "hi", 3: ""}, "env.py:f returned 3; the known"),
        ({"state": "a"}, "returned no 'reply'; None would end"),
        ({}, "returned no 'reply'"),
        ({"reply": "hi", "state": 3}, "must return a text as the state, not 3"),
        ({"reply": "hi", "state": None}, "must return a text as the state, not None"),
        ({"reply": 3}, "must return a text or None, not 3"),
        (("hi", "a"), r"must return a text or None, not \('hi', 'a'\)"),
    ],
)
def test_what_a_function_may_not_give_is_said(found, message):
    with pytest.raises(UserError, match=message):
        read_reply(found, "env.py:f")


def test_what_a_function_may_give():
    assert read_reply("hi", "f") == ("hi", "hi", None) == read_reply({"reply": "hi"}, "f")
    assert read_reply({"reply": "hi", "state": "a"}, "f") == ("hi", "a", None)
    assert read_reply({"reply": "hi", "reward": 0.5}, "f") == ("hi", "hi", 0.5)
    assert (
        read_reply(None, "f")
        is read_reply({"reply": None}, "f")
        is read_reply({"reply": None, "state": 1}, "f")
    )


def context(turns: int, exists: torch.Tensor | None, rewards: int = 1) -> Context:
    rng = torch.Generator().manual_seed(1)
    weights = torch.rand(rewards, generator=rng) if rewards > 1 else torch.ones(1)
    return context_with(
        columns((GROUP,) * turns), weights,
        lengths=torch.randint(1, 9, (GROUP * DRAWS,), generator=rng),
        prompts=torch.arange(DRAWS),
        turns=None if exists is None else SampleTurns(exists, torch.zeros_like(exists).long()),
    )  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_credit_of_whole_texts_is_that_of_all_their_turns_to_the_bit(name):
    algorithm = TEXT_RECIPES[name](length=6, **FEW.get(name, {"group": GROUP}))
    rng = torch.Generator().manual_seed(0)
    won = (torch.rand(GROUP * DRAWS, 1, generator=rng) < 0.5).double()
    scored = torch.rand(GROUP * DRAWS, 1, generator=rng) < (2 if name == "text_riskpo" else 0.9)
    scores = Scores(won * scored, scored, ("won",))
    last = torch.randint(0, TURNS, (GROUP * DRAWS, 1), generator=rng)
    exists = torch.arange(TURNS) <= last
    tracker = algorithm.tracker()
    if isinstance(tracker, ReadsStart):
        tracker.learn(range(DRAWS), torch.rand(DRAWS, 4, generator=rng))
    (one, known), (value, mask) = (
        algorithm.advantage(scores, tracker.before(made))
        for made in (context(1, None), context(TURNS, exists))
    )
    if name == "text_reinforce":  # its statistics are sums over all turns' tokens
        torch.testing.assert_close(value, one * exists, rtol=1e-12, atol=1e-12)
    else:
        assert torch.equal(value, one * exists)
    assert torch.equal(mask, known & exists)
    assert one.any() and known.any()


@pytest.mark.parametrize("count", [2, 3, 5, 8, 17, 33])
def test_sums_of_many_rewards_do_not_depend_on_the_number_of_turns(count):
    rng = torch.Generator().manual_seed(0)
    values = torch.rand(GROUP * DRAWS, count, generator=rng, dtype=torch.float64)
    names = tuple(map(str, range(count)))
    scores = Scores(values, torch.ones_like(values, dtype=torch.bool), names)
    exists = torch.ones(GROUP * DRAWS, TURNS, dtype=torch.bool)
    one, _ = Estimator((Sum(),))(scores, context(1, None, count))
    value, _ = Estimator((Sum(),))(scores, context(TURNS, exists, count))
    assert torch.equal(value, one.expand(-1, TURNS))


def test_pairs_are_of_whole_texts_whatever_turns_they_have(tmp_path):
    """The best text ends early: its last turn is not the others'."""
    found, _ = rollout(made(tmp_path), Completions(GROUP, **WARPED))
    credit = -found.exists.sum(1).double() - torch.arange(len(found.ids)) / 100
    each = credit[:, None] * found.exists
    (rows,) = Token(paired=True).rows(found, each, found.exists)
    grouped = credit.view(-1, GROUP)
    first = torch.arange(len(grouped)) * GROUP
    want = torch.stack([grouped.argmax(1) + first, grouped.argmin(1) + first], 1).flatten()
    assert torch.equal(rows.ids, found.ids[want])
    assert torch.equal(rows.mask, found.written[want])


def test_a_success_that_is_replayed_brings_its_turns_and_states(tmp_path):
    policy = made(tmp_path, "named")
    found, _ = rollout(policy)
    later, _ = rollout(policy, draws=range(10, 14))
    most = int(found.exists.sum(1).argmax())
    other = put(later, {7: cut(found, most)})
    assert torch.equal(other.points.states[7], found.points.states[most])
    assert torch.equal(other.exists[7], found.exists[most])
    assert torch.equal(other.point[7], found.point[most])
    kept = [i for i in range(24) if i != 7]
    assert torch.equal(other.points.states[kept], later.points.states[kept])
    assert replace(found.plan, turns=1) != found.plan
