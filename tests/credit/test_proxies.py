"""GARDO against plain loops in float64: whose KL counts, the share that adapts, diverse samples."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Estimator, Standardize
from flowrl.credit.choices import named_rewards
from flowrl.credit.proxies import GATE as GATE_COLUMN
from flowrl.credit.proxies import (
    Diverse,
    GateHistory,
    GateShare,
    ProxyGate,
    adapted,
    doubt,
    gate_of,
    standing,
)
from flowrl.credit.values import Context
from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import Evaluation, TransitionRows
from flowrl.likelihoods.transition import Transition
from flowrl.losses.averages import Refresh
from flowrl.losses.base import Anchor, Counts, reduced
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.table import TEXT_RECIPES
from flowrl.table import Table
from rewards import Scores
from samplers import Chain, Columns, FlowSDE, Ode, Tree

NAMES = ("proxy", "one", "two", "distance")
WEIGHTS = torch.tensor([2.0, 0.0, 0.0, 0.0])
GATE = ProxyGate(("one", "two"), 0.25)


def columns(group: int) -> Columns:
    return Columns((group,) * 2, (True,) * 2, (1.0,) * 2, (1.0,) * 2)


def made(seed: int, n: int = 24, levels: int = 7) -> Scores:
    """Scores with ties, and some that are missing."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(0, levels, (n, 4), generator=draw) / 4
    scored = torch.rand(n, 4, generator=draw) > 0.06
    return Scores(values * scored, scored, NAMES)


def rank(values: list[float], i: int) -> float:
    """Share of the others below; half for an equal one."""
    others = [v for j, v in enumerate(values) if j != i]
    wins = sum(1.0 if values[i] > v else 0.5 if values[i] == v else 0.0 for v in others)
    return wins / len(others)


def by_loops(scores: Scores, share: float, learned: list[bool]) -> tuple[list[float], list[float]]:
    """Uncertainties of the scored samples, and the gate of all."""
    n = len(scores.values)
    rows = [i for i in range(n) if bool(scores.scored[i].all())]
    table = [[float(scores.values[i, k]) for i in rows] for k in range(4)]
    u = [rank(table[0], i) - (rank(table[1], i) + rank(table[2], i)) / 2 for i in range(len(rows))]
    u = [0.0 if abs(each) < 1e-12 else each for each in u]
    bound = float(np.percentile([each for each in u if each >= 0], 100 - 100 * share))
    chosen = [i for i, each in zip(rows, u, strict=True) if each > bound + 1e-12 and learned[i]]
    return u, [sum(learned) / len(chosen) if i in chosen else 0.0 for i in range(n)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.1, 0.25, 0.6])
def test_the_gate_is_the_plain_loops(seed, share):
    scores = made(seed)
    learned = [i % 5 != 3 for i in range(24)]
    u, gate = by_loops(scores, share, learned)
    found, known = doubt(scores, WEIGHTS, ("one", "two"))
    assert known.tolist() == scores.scored.all(1).tolist()
    torch.testing.assert_close(found, torch.tensor(u, dtype=torch.float64), atol=1e-12, rtol=0.0)
    context = Context(columns(6), WEIGHTS)
    own = ProxyGate(("one", "two"), share).weights(scores, context, torch.tensor(learned))
    torch.testing.assert_close(own, torch.tensor(gate, dtype=torch.float64), atol=1e-12, rtol=0.0)
    if any(gate):
        assert float(own.sum()) == pytest.approx(sum(learned)), "the KL keeps its scale"


def test_a_sample_that_only_the_proxy_likes_is_gated_and_one_that_it_alone_dislikes_is_not():
    proxy = torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0, 0.0])
    others = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 9.0])
    values = torch.stack([proxy, others, others, others], 1)
    scores = Scores(values, torch.ones_like(values, dtype=torch.bool), NAMES)
    every = torch.ones(6, dtype=torch.bool)
    gate = GATE.weights(scores, Context(columns(6), WEIGHTS), every)
    assert gate.tolist() == [6.0, 0, 0, 0, 0, 0]


def test_rewards_that_agree_gate_nothing_and_missing_ones_gate_nobody():
    values = torch.arange(6.0)[:, None].expand(6, 4)
    every, context = torch.ones(6, dtype=torch.bool), Context(columns(6), WEIGHTS)
    agreed = Scores(values, torch.ones_like(values, dtype=torch.bool), NAMES)
    assert not GATE.weights(agreed, context, every).any()
    nothing = Scores(values, torch.zeros_like(values, dtype=torch.bool), NAMES)
    assert not GATE.weights(nothing, context, every).any()
    assert standing(torch.tensor([3.0])).tolist() == [0.0]


class Released:
    """The authors' rule, as they keep its state."""

    def __init__(self, share: float) -> None:
        self.share, self.buffer = share, list[float]()

    def update(self, mean: float) -> float:
        if self.buffer:
            if mean > max(self.buffer):
                self.share = self.share * 1.1
            elif mean < min(self.buffer):
                self.share = self.share * 0.9
        self.share = min(max(self.share, 0.02), 0.2)
        self.buffer = [*self.buffer, mean][-20:]
        return self.share


@pytest.mark.parametrize("slope", [-0.02, 0.0, 0.02])
def test_the_share_follows_the_released_rule(slope):
    draw, theirs, ours = random.Random(1), Released(0.1), GateHistory(0.1, ())
    seen = set()
    for step in range(60):
        mean = 0.3 + slope * step + draw.random() / 4
        ours = adapted(ours, mean)
        assert ours.share == theirs.update(mean) and len(ours.means) <= 20
        seen.add(ours.share)
    assert len(seen) > 2 and (slope == 0 or {-0.02: 0.02, 0.02: 0.2}[slope] in seen)


def test_the_tracker_adapts_the_share_that_the_gate_uses_and_resumes():
    tracker, theirs = GateShare(("one", "two"), 0.25), Released(0.25)
    every = torch.ones(60, dtype=torch.bool)
    for seed in range(12):
        scores = made(seed, 60, 1000)
        context = tracker.before(Context(columns(6), WEIGHTS))
        u, _ = by_loops(scores, 0.25, [True] * 60)
        share = theirs.update(float(np.mean([each for each in u if each >= 0])))
        _, gate = by_loops(scores, share, [True] * 60)
        own = GATE.weights(scores, context, every)
        torch.testing.assert_close(
            own, torch.tensor(gate, dtype=torch.float64), atol=1e-12, rtol=0.0
        )
        tracker.after(scores, context)
        again = GateShare(("one", "two"), 0.25)
        again.restore(tracker.state())
        assert again.history == tracker.history
        tracker = again
    assert tracker.history.share == pytest.approx(theirs.share) and theirs.share != 0.25


@pytest.mark.parametrize("seed", range(4))
def test_diverse_advantages_are_the_plain_loops(seed):
    scores, group = made(seed), 6
    context = Context(columns(group), WEIGHTS)
    value, mask = Estimator((Diverse("distance"),))(scores, context)
    plain, _ = Estimator((Standardize(scale=None),))(scores, context)
    changed = 0
    for first in range(0, 24, group):
        rows = range(first, first + group)
        some = [k for k in range(4) if any(bool(scores.scored[i, k]) for i in rows)]
        whole = [i for i in rows if all(bool(scores.scored[i, k]) for k in some)]
        assert [i for i in rows if bool(mask[i].all())] == whole
        r = {i: 2 * float(scores.values[i, 0]) for i in whole}
        mean = sum(r.values()) / len(whole)
        d = {i: float(scores.values[i, 3]) for i in rows if bool(scores.scored[i, 3])}
        most = sum(d.values()) / len(d) if d else 0.0
        for i in whole:
            factor = d[i] / most if r[i] > mean and i in d and most > 0 else 1.0
            assert value[i].tolist() == pytest.approx([(r[i] - mean) * factor] * 2, abs=1e-12)
            changed += value[i, 0] != plain[i, 0]
    assert changed > 4


def test_a_group_of_copies_keeps_its_advantages():
    values = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    scores = Scores(values, torch.ones_like(values, dtype=torch.bool), NAMES)
    value, _ = Estimator((Diverse("distance"),))(scores, Context(columns(3), WEIGHTS))
    assert value[:, 0].tolist() == pytest.approx([4 / 3, -2 / 3, -2 / 3])


def test_a_gated_anchor_adds_the_mean_kl_of_the_gated_rows():
    """Loss and gradient, against the KL of gated rows alone."""
    draw = torch.Generator().manual_seed(2)
    n, gated = 8, [1, 4, 6]
    gate = torch.zeros(n, 1, dtype=torch.float64)
    gate[gated] = n / len(gated)
    means = [torch.randn(n, 3, generator=draw, dtype=torch.float64) for _ in range(2)]
    new = means[0].requires_grad_()
    every = torch.ones(n, 1, dtype=torch.bool)
    s = torch.full((n,), 0.8, dtype=torch.float64)
    rows = TransitionRows(
        prompt=torch.arange(n), advantage=torch.zeros(n, 1, dtype=torch.float64), mask=every,
        old=None, table=Table({GATE_COLUMN: gate}), x=means[1], x_next=means[1],
        sigma=s, sigma_next=s - 0.2,
        kernel=FlowSDE(0.7),
    )  # fmt: skip
    nothing = torch.zeros(n, 1, dtype=torch.float64)
    says = {"new": Evaluation(nothing, new), "old": Evaluation(nothing, None)}
    says["recent"] = Evaluation(nothing, means[1])
    loss = Surrogate(0.2, 0.2, anchors=(Anchor(0.3, "recent", gated=True),))
    entries = loss(Transition(kl_form="published"), says, rows)
    total = reduced(entries, every, Counts.of([every]))
    (slope,) = torch.autograd.grad(total, new)
    std = 0.7 * math.sqrt(0.8 / 0.2)
    wanted, slopes = 0.0, torch.zeros_like(slope)
    for i in gated:
        for k in range(3):
            gap = float(new[i, k].detach() - means[1][i, k])
            wanted += gap * gap / (2 * std * std) / 3 / len(gated)
            slopes[i, k] = 0.3 * gap / (std * std) / 3 / len(gated)
    assert float(total.detach()) == pytest.approx(0.3 * wanted, rel=1e-12)
    torch.testing.assert_close(slope, slopes, atol=1e-14, rtol=1e-12)
    kl = entries.metrics["kl_recent"]
    assert float(kl.mean()) == pytest.approx(wanted, rel=1e-12), "the metric is of the gated rows"


def test_when_an_average_is_refreshed():
    rule = Refresh(16, 3e-4)
    assert [rule.due(n, 0.0) for n in (0, 15, 16, 17)] == [False, False, True, True]
    assert rule.due(1, 4e-4) and not rule.due(1, 3e-4) and not rule.due(1, math.nan)
    assert not Refresh(16).due(1, 1e9)


CHAIN, CLIP = Chain(FlowSDE(), 4), Surrogate(0.2, 0.2)
GATED = Surrogate(0.2, 0.2, anchors=(Anchor(1.0, gated=True),))
CREDIT = Estimator((Standardize(), GATE))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((4, CHAIN, CREDIT, Transition(), CLIP), "which nothing in this algorithm reads"),
        ((4, CHAIN, Estimator((Standardize(),)), Transition(), GATED),
         "which need ProxyGate: add ProxyGate to the advantage"),
        ((4, Tree(FlowSDE(), (0, 1)), CREDIT, Transition(), GATED), "ProxyGate needs independent"),
        ((4, Tree(FlowSDE(), (0, 1)), Estimator((Diverse("d"),)), Transition(), CLIP),
         "Diverse needs independent"),
        ((4, CHAIN, CREDIT, Transition(), GATED), None),
        ((4, Ode(4), CREDIT, Matching(), GATED), None),
    ],
)  # fmt: skip
def test_what_cannot_be_gated_is_refused(parts, message):
    if message is None:
        assert gate_of(Algorithm(*parts).transforms) is GATE
        return
    with pytest.raises(UserError, match=message):
        Algorithm(*parts)


@pytest.mark.parametrize("transform", [GATE, Diverse("d")])
def test_texts_are_refused(transform):
    plain = TEXT_RECIPES["text_grpo"]()
    with pytest.raises(UserError, match="leave it out for texts"):
        replace(plain, advantage=Estimator((Standardize(), transform)))


def test_the_rewards_that_parts_name():
    assert named_rewards((Diverse("d"), GATE)) == ("d", "one", "two") and gate_of(()) is None


@pytest.mark.parametrize(("group", "refused"), [(1, True), (2, False)])
def test_a_gate_needs_groups_of_two(group, refused):
    """Asked alone: the estimator refuses a group of one as well."""
    plan = Ode(group)
    choices = SimpleNamespace(plan=plan, plans=plan([1.0, 0.5, 0.0], 0, 0))
    said = GATE.refuses(choices)
    assert (said or "").startswith("a group of one has no advantage") == refused == bool(said)
