"""Credit that reads lengths, turns, states and trees, against loops over samples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.contrib.text_rebn import WhitenTurns
from flowrl.credit.advantages import Context, Estimator, LeaveOneOut, Standardize
from flowrl.credit.comparisons import ParentDifference, TwoLevel
from flowrl.credit.trees import GlobalLocal
from flowrl.credit.turns import (
    Baseline,
    Discount,
    LengthBaseline,
    Penalize,
    States,
    Turns,
    WhitenTokens,
)
from flowrl.credit.values import (
    NodeLevel,
    ReferenceRatios,
    SampleTurns,
    TrackedStatistics,
    node_values,
)
from flowrl.errors import UserError
from flowrl.likelihoods.token import shared_credit
from rewards import Scores
from tests.support.credit_context import context_of as context_with
from tests.support.golden_tools import close, columns

GROUP, DRAWS = 4, 3


def rewards(n: int = GROUP * DRAWS, seed: int = 0) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def credit(chain, values: Tensor, shape=(GROUP,), scored: Tensor | None = None, **context):
    """Advantages and mask [n k]."""
    known = torch.ones(len(values), 1, dtype=torch.bool) if scored is None else scored[:, None]
    scores = Scores(values[:, None] * known, known, ("r",))
    return Estimator(chain)(scores, context_with(columns(shape), torch.ones(1), **context))


LENGTHS = torch.tensor([3, 1, 7, 2, 5, 5, 1, 2, 4, 9, 9, 1])


def test_opo_weighs_its_baseline_by_length():
    r = rewards()
    got = credit((LengthBaseline(),), r, lengths=LENGTHS)[0][:, 0]
    for g in range(DRAWS):
        own = slice(g * GROUP, (g + 1) * GROUP)
        base = np.average(r[own].numpy(), weights=LENGTHS[own].numpy())
        close(got[own], r[own] - base, 1e-12)
    same = credit((LengthBaseline(),), r, lengths=torch.full_like(LENGTHS, 6))[0]
    close(same, credit((Standardize(None),), r)[0], 1e-12)


def test_reinforce_plus_plus_whitens_over_tokens():
    r = rewards()
    tokens = r.repeat_interleave(LENGTHS)
    want = (r - tokens.mean()) / (tokens.var() + 1e-8).sqrt()
    close(credit((WhitenTokens(),), r, lengths=LENGTHS)[0][:, 0], want, 1e-12)
    centred = r - r.view(-1, GROUP).mean(1).repeat_interleave(GROUP)
    each = centred.repeat_interleave(LENGTHS)
    want = (centred - each.mean()) / (each.var() + 1e-8).sqrt()
    got = credit((Standardize(None), WhitenTokens()), r, lengths=LENGTHS)[0][:, 0]
    close(got, want, 1e-12)
    flat = credit((WhitenTokens(),), torch.full((12,), 0.3).double(), lengths=LENGTHS)[0]
    assert flat.eq(0).all(), "no spread, exactly 0"


def test_a_value_from_elsewhere_is_the_baseline():
    r, base = rewards(), torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    each = base.repeat_interleave(GROUP)
    close(credit((Baseline(),), r, tracked=TrackedStatistics(base))[0][:, 0], r - each, 1e-15)
    far = rewards(seed=1)
    apart = torch.stack([0.25 * far, 0.75 * far, torch.full_like(far, torch.nan)], 1)
    got = credit(
        (Penalize(0.1), Standardize(None)),
        r,
        reference=ReferenceRatios(apart, torch.zeros(12, 3).long()),
    )[0]
    close(got, credit((Standardize(None),), r - 0.1 * far)[0], 1e-12)


def test_a_token_answers_for_itself_and_for_those_after_it():
    r, nan = rewards(), torch.nan
    apart = torch.tensor([[1, nan, 2, 4], [0.5, -3, nan, nan]] * 6, dtype=torch.float64)
    known = {"reference": ReferenceRatios(apart, torch.zeros(12, 4, dtype=torch.int64))}
    value, mask = credit((Penalize(0.1, each=True),), r, **known)
    want = torch.tensor([[0.7, 0, 0.6, 0.4], [-0.25, -0.3, 0, 0]] * 6, dtype=torch.float64)
    assert torch.equal(mask, ~apart.isnan())
    close(value, (r[:, None] - want) * mask, 1e-12)
    lengths = mask.sum(1)
    white = credit((Penalize(0.1, each=True), WhitenTokens()), r, **known, lengths=lengths)
    each = value[mask]
    close(white[0][mask], (each - each.mean()) / (each.var() + 1e-8).sqrt(), 1e-12)
    with pytest.raises(UserError, match="after the transforms that compare samples"):
        credit((Penalize(0.1, each=True), Standardize()), r, **known)


def test_a_token_starts_from_the_credit_of_its_turn():
    """Two turns with a reply between them, or one: Discount halves what the first is worth."""
    r, nan = rewards(), torch.nan
    apart = torch.tensor([[1, nan, 2, 4], [0.5, -3, nan, nan]] * 6, dtype=torch.float64)
    points = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0]] * 6)
    exists = torch.tensor([[True, True], [True, False]] * 6)
    value, mask = credit(
        (Discount(0.5), Penalize(0.1, each=True)), r, (GROUP,) * 2,
        reference=ReferenceRatios(apart, points), turns=SampleTurns(exists, 0 * exists),
    )  # fmt: skip
    share = torch.tensor([[0.5, 0, 1, 1], [1, 1, 0, 0]] * 6, dtype=torch.float64)
    want = torch.tensor([[0.7, 0, 0.6, 0.4], [-0.25, -0.3, 0, 0]] * 6, dtype=torch.float64)
    assert torch.equal(mask, ~apart.isnan())
    close(value, share * r[:, None] - want, 1e-12)


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        (LengthBaseline(), "lengths"),
        (WhitenTokens(), "lengths"),
        (Baseline(), "a baseline"),
        (Penalize(0.1), "divergences"),
        (States(), "turns"),
        (Turns(), "turns"),
    ],
)
def test_what_is_not_given_is_named(rule, what):
    with pytest.raises(UserError, match=what):
        credit((rule,), rewards())


EXISTS = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]] * DRAWS).bool()
TURNS = (GROUP,) * 3
BARE = SampleTurns(EXISTS, torch.zeros(GROUP * DRAWS, 3, dtype=torch.int64))


def test_an_outcome_holds_for_all_turns_of_its_trajectory():
    """AgentFlow: one comparison of trajectories, whatever turns they have."""
    r = rewards()
    value, mask = credit((Standardize(correction=1),), r, TURNS, turns=BARE)
    once = credit((Standardize(correction=1),), r)[0]
    close(value, once * EXISTS, 1e-15)
    assert torch.equal(mask, EXISTS)
    apart, _ = credit((Turns(), Standardize(None)), r, TURNS, turns=BARE)
    pair = r.view(-1, GROUP)[:, [0, 3]]
    close(apart.view(-1, GROUP, 3)[:, [0, 3], 2], pair - pair.mean(1, keepdim=True), 1e-12)


def test_discounts_count_the_turns_that_follow():
    got = credit((Discount(0.5),), torch.ones(12).double(), TURNS, turns=BARE)[0][:4]
    want = [[0.25, 0.5, 1], [1, 0, 0], [0.5, 1, 0], [0.25, 0.5, 1]]
    close(got, torch.tensor(want), 1e-15)


@pytest.mark.parametrize("scale", [False, True])
def test_gigpo_by_loops(scale):
    r = rewards()
    states = torch.tensor([[0, 1, 2], [0, 0, 0], [3, 1, 0], [0, 4, 1]] * DRAWS)
    rule = States(weight=0.7, gamma=0.9, scale=scale)
    got, _ = credit((rule,), r, TURNS, turns=SampleTurns(EXISTS, states))
    for g in range(DRAWS):
        found: dict[int, list[float]] = {}
        entries = []
        for i in range(g * GROUP, (g + 1) * GROUP):
            turns = int(EXISTS[i].sum())
            for k in range(turns):
                value = float(r[i]) * 0.9 ** (turns - 1 - k)
                found.setdefault(int(states[i, k]), []).append(value)
                entries.append((i, k, value, int(states[i, k])))
        own = r[g * GROUP : (g + 1) * GROUP].numpy()
        for i, k, value, state in entries:
            group = found[state]
            step = 0.0 if len(group) == 1 else value - np.mean(group)
            episode = float(r[i]) - own.mean()
            if scale:
                step /= (np.std(group, ddof=1) if len(group) > 1 else 1) + 1e-6
                episode /= np.std(own, ddof=1) + 1e-6
            assert got[i, k].item() == pytest.approx(episode + 0.7 * step, abs=1e-9)


def test_rewards_of_turns_are_whitened_over_the_batch():
    r = rewards()
    got, _ = credit((WhitenTurns(),), r, TURNS, turns=BARE)
    every = r[:, None].expand(-1, 3)[EXISTS]
    close(got[EXISTS], (every - every.mean()) / (every.std(correction=0) + 1e-9), 1e-12)


def uniform_ids(nodes: tuple[int, ...], draws: int) -> Tensor:
    leaf = torch.arange(draws * nodes[-1]) % nodes[-1]
    return torch.stack([leaf * count // nodes[-1] + 100 for count in nodes], 1)


TREE_RULES = [
    Standardize(correction=1),
    Standardize("batch"),
    LeaveOneOut(),
    ParentDifference(),
    GlobalLocal(),
    GlobalLocal(power=1.0, scaled=True),
]


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_uniform_trees_by_ids_give_what_reshapes_give(seed, gaps):
    """One arithmetic for trees of denoising steps and trees of text."""
    nodes = (2, 4, 8)
    r = rewards(24, seed)
    scored = torch.rand(24, generator=torch.Generator().manual_seed(seed)) > (0.3 if gaps else -1)
    for rule in TREE_RULES:
        for fusion in ("mean", "max"):
            scores = Scores((r * scored)[:, None], scored[:, None], ("r",))
            plain, named = (
                Estimator((rule,), fusion)(
                    scores, Context(columns(nodes), torch.ones(1), nodes=ids)
                )
                for ids in (None, uniform_ids(nodes, 3))
            )
            close(named[0], plain[0], 1e-12)
            assert torch.equal(named[1], plain[1])


RAGGED = torch.tensor(
    [  # a draw of six leaves: the first three part at point 1, two of them again at point 2
        [0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [2, 3, 5],
    ]
)  # fmt: skip


def node_value(ids: Tensor, r: Tensor, i: int, k: int) -> tuple[float, int]:
    same = [float(r[j]) for j in range(6) if ids[j, k] == ids[i, k]]
    return float(np.mean(same)), len(same)


def test_ragged_trees_by_loops():
    r = rewards(6)
    nodes, context = (6, 6, 6), {"nodes": RAGGED}
    depth = credit((Standardize(None),), r, nodes, **context)[0]
    differ = credit((ParentDifference(),), r, nodes, **context)[0]
    local = credit((GlobalLocal(power=0.5, first=True),), r, nodes, **context)[0]
    root = float(r.mean())
    for i in range(6):
        before = root
        for k in range(3):
            value, leaves = node_value(RAGGED, r, i, k)
            level = {int(RAGGED[j, k]): node_value(RAGGED, r, j, k)[0] for j in range(6)}
            assert depth[i, k].item() == pytest.approx(value - np.mean(list(level.values())))
            assert differ[i, k].item() == pytest.approx(value - before, abs=1e-12)
            bracket = (value - root) + (value - before)
            assert local[i, k].item() == pytest.approx(bracket * leaves**0.5, abs=1e-12)
            before = value
    with pytest.raises(UserError, match="uniform trees"):
        credit((TwoLevel(),), r, nodes, **context)


def test_a_node_of_a_ragged_tree_has_credit_if_one_of_its_leaves_has():
    r, scored = rewards(6), torch.tensor([True, False, True, True, False, False])
    scores = Scores(r[:, None] * scored[:, None], scored[:, None], ("r",))
    value, mask = node_values(scores, context_with(columns((6, 6, 6)), torch.ones(1), nodes=RAGGED))
    shared, kept = shared_credit(r[:, None].expand(6, 3), scored[:, None].expand(6, 3), RAGGED, 6)
    for k in range(3):
        for i in range(6):
            leaves = [j for j in range(6) if RAGGED[j, k] == RAGGED[i, k] and scored[j]]
            assert bool(mask[i, k]) == bool(kept[i, k]) == bool(leaves)
            mean = sum(float(r[j]) for j in leaves) / max(len(leaves), 1)
            assert float(value[i, k]) == pytest.approx(mean)
            assert float(shared[i, k]) == pytest.approx(mean)


def test_tempo_is_the_sum_over_paths_and_grpo_where_nothing_branches():
    """arXiv:2509.18314: A = (r - mean + V(child) - V(parent)) / std on each leaf's path; a node's
    entries are trained once here, so they carry the sum over its leaves."""
    nodes, r = (2, 4, 8), rewards(8)
    got = credit((GlobalLocal(power=1.0, scaled=True, eps=0.0),), r, nodes)[0]
    for k, count in enumerate(nodes):
        for node in range(count):
            under = slice(node * 8 // count, (node + 1) * 8 // count)
            value, parent = r[under].mean(), 0.0
            if k:
                above = node * nodes[k - 1] // count
                wide = slice(above * 8 // nodes[k - 1], (above + 1) * 8 // nodes[k - 1])
                parent = value - r[wide].mean()
            want = ((r[under] - r.mean() + parent) / r.std()).sum()
            close(got[under, k], want.expand(8 // count), 1e-12)
    flat = credit((GlobalLocal(power=1.0, scaled=True),), rewards(), (GROUP,))[0]
    close(flat, credit((Standardize(correction=1, eps=1e-6),), rewards())[0], 1e-12)


def test_levels_of_ids():
    level = NodeLevel.of(torch.tensor([7, 7, 3, 9, 9, 9]), 3)
    assert level.first.tolist() == [[2, 0], [3, -1]] and level.node_of_leaf.tolist() == [
        1,
        1,
        0,
        2,
        2,
        2,
    ]
    column = torch.arange(6.0)[:, None]
    assert level.total(column)[..., 0].tolist() == [[2, 1], [12, 0]]
    assert level.at_nodes(column)[..., 0].tolist() == [[2, 0], [3, 0]]
    assert level.at_leaves(level.at_nodes(column))[:, 0].tolist() == [0, 0, 2, 3, 3, 3]
