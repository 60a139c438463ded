"""Credit from scores on the way, against loops over samples and steps, and tables by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flowrl.contrib.dense_grpo import StepGain
from flowrl.contrib.potential_tree import Potential
from flowrl.contrib.turning_point import TurningPoint
from flowrl.contrib.vgpo import AbsoluteValue, Discounted
from flowrl.credit.advantages import Context, Estimator, Standardize, Sum
from flowrl.credit.values import node_values
from flowrl.errors import UserError
from flowrl.recipes.table import IMAGE_RECIPES as RECIPES
from rewards import Scores
from rewards.types import IntermediateScores
from samplers import Chain, ConstantSDE, FlowSDE, Frozen, Looking, Ode, Tree, Window
from tests.support.routes import looks_of

LEVELS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
WEIGHTS = torch.tensor([1.0, 0.5], dtype=torch.float64)


def context(planner, weights=WEIGHTS) -> Context:
    return Context(planner(LEVELS, 0, 0)[0].columns, weights)


def drawn(planner, draws: int = 2, rewards: int = 2, seed: int = 0) -> Scores:
    """Random scores at the leaves, and at every state that the plan looks at."""
    (plan,) = planner(LEVELS, 0, 0)
    rng, n = torch.Generator().manual_seed(seed), draws * plan.group
    values = torch.rand(n, rewards, generator=rng, dtype=torch.float64)
    way = torch.zeros(n, len(plan.steps), rewards, dtype=torch.float64)
    known = torch.zeros(n, len(plan.steps), rewards, dtype=torch.bool)
    for k in looks_of(plan).at:
        own = torch.rand(draws * plan.states[k], rewards, generator=rng, dtype=torch.float64)
        way[:, k] = own.repeat_interleave(n // len(own), 0)
        known[:, k] = True
    whole = torch.ones_like(values, dtype=torch.bool)
    return Scores(values, whole, ("a", "b")[:rewards], IntermediateScores(way, known))


def credited(transform, scores, of: Context):
    return transform(node_values(scores, of), replace(of, scores=scores))


CHAIN = Looking(Chain(FlowSDE(), 3))  # 4 noisy steps and a last one without noise
WINDOW = Looking(Window(FlowSDE(), 3, 2, Frozen(1)))


@pytest.mark.parametrize("planner", [CHAIN, WINDOW])
def test_gains_add_up(planner):
    scores = drawn(planner)
    gains = credited(StepGain(), scores, context(planner))
    (plan,) = planner(LEVELS, 0, 0)
    noisy = [k for k, step in enumerate(plan.steps) if step.noisy]
    whole = scores.values - scores.intermediate.values[:, noisy[0]]
    torch.testing.assert_close(gains.value.sum(1), whole)
    for k in range(5):  # a step without noise gains nothing, and is not trained on
        assert bool(gains.mask[:, k].all()) == (k in noisy) and gains.mask[:, k].any() == (
            k in noisy
        )
    for k, after in zip(noisy, [*noisy[1:], None], strict=True):
        end = scores.values if after is None else scores.intermediate.values[:, after]
        torch.testing.assert_close(gains.value[:, k], end - scores.intermediate.values[:, k])
    ends = credited(StepGain(relative=False), scores, context(planner))
    torch.testing.assert_close(ends.value[:, noisy[-1]], scores.values)


def test_a_state_before_the_ode_has_the_value_behind_it():
    """Noise at the steps 0 and 2: what step 0 makes is scored before step 2."""
    planner = Looking(Chain(FlowSDE(), 2))
    columns = replace(context(planner).columns, noisy=(True, False, True, False, False))
    scores = drawn(planner)
    known = scores.intermediate.scored.clone()
    known[:, [1, 3]] = False
    scores = replace(
        scores, intermediate=IntermediateScores(scores.intermediate.values * known, known)
    )
    gains = credited(StepGain(), scores, Context(columns, WEIGHTS))
    way = scores.intermediate.values
    torch.testing.assert_close(gains.value[:, 0], way[:, 2] - way[:, 0])
    torch.testing.assert_close(gains.value[:, 2], scores.values - way[:, 2])
    assert gains.mask[:, 0].all() and gains.mask[:, 2].all() and not gains.mask[:, [1, 3, 4]].any()


def test_a_step_without_a_score_is_masked_and_no_failure():
    scores, of = drawn(CHAIN), context(CHAIN)
    known = scores.intermediate.scored.clone()
    known[1, 2] = False  # the second sample, before step 2: the steps 1 and 2 lack an end
    some = replace(scores, intermediate=IntermediateScores(scores.intermediate.values, known))
    own = Estimator((StepGain(), Sum(), Standardize()))
    advantages, mask = own(some, of)
    assert mask[1].tolist() == [True, False, False, True, False]
    assert mask[[0, 2, 3, 4, 5], :4].all() and (advantages[1, 1:3] == 0).all()
    nothing = replace(
        scores, intermediate=IntermediateScores(scores.intermediate.values, torch.zeros_like(known))
    )
    assert own.summed(nothing, of).mask[..., 0].any(1).all(), (
        "failures are those of the samples alone"
    )
    assert not own(nothing, of)[1][:, :3].any()
    lost = replace(scores, scored=torch.zeros_like(scores.scored))
    assert not own.summed(lost, of).mask[..., 0].any(1).any()


def test_gains_are_standardised_by_group_and_step():
    scores, of = drawn(CHAIN), context(CHAIN)
    advantages, _ = Estimator((StepGain(), Sum(), Standardize(eps=0.0)))(scores, of)
    totals = torch.cat([scores.intermediate.values[:, :4], scores.values[:, None]], 1) @ WEIGHTS
    for draw in range(2):
        for k in range(4):
            own = [float(totals[i, k + 1] - totals[i, k]) for i in range(3 * draw, 3 * draw + 3)]
            mean = sum(own) / 3
            std = (sum((x - mean) ** 2 for x in own) / 3) ** 0.5
            want = [(x - mean) / std for x in own]
            assert advantages[3 * draw : 3 * draw + 3, k].tolist() == pytest.approx(want)


def test_one_noisy_step_is_mix_grpo_with_a_window_of_one():
    """With one noise for the group, V_0 is a constant, which the mean takes out."""
    planner = Looking(Window(FlowSDE(), 4, 1, Frozen(2), shared_noise=True))
    scores, of = drawn(planner), context(planner)
    dense = Estimator((StepGain(), Sum(), Standardize()))(scores, of)[0]
    plain = Estimator((Sum(), Standardize()))(scores, of)[0]
    torch.testing.assert_close(dense[:, 2], plain[:, 2])


def test_siblings_of_a_tree_share_what_they_gained():
    planner = Looking(Tree(ConstantSDE(), (0, 2), 2))
    scores, of = drawn(planner), context(planner)
    gains = credited(StepGain(), scores, of).value
    assert planner(LEVELS, 0, 0)[0].nodes == (2, 2, 4, 4, 4)
    assert torch.equal(gains[0::2, :2], gains[1::2, :2])
    assert not torch.isclose(gains[0::2, 2], gains[1::2, 2]).any()
    torch.testing.assert_close(gains.sum(1), scores.values - scores.intermediate.values[:, 0])


# R_0 to R_4 of a trajectory: turns, by hand
TABLE = {
    (0.0, -1.0, 2.0, 3.0, 4.0): [0, 1, 0, 0],  # down, then up for good
    (0.0, 1.0, 2.0, 1.0, 3.0): [1, 0, 0, 1],  # the first step counts by itself
    (0.0, 0.0, 1.0, 0.0, 1.0): [0, 0, 0, 1],  # a tie before the rise: no turn
    (0.0, 1.0, -1.0, 1.0, 0.0): [0, 0, 0, 0],  # ends where it began
    (4.0, 5.0, 3.0, 3.5, 1.0): [0, 1, 0, 1],  # it falls: down is the way
    (1.0, 1.0, 1.0, 1.0, 1.0): [0, 0, 0, 0],
}
STRICT = {
    (0.0, -1.0, 2.0, 3.0, 4.0): [0, 1, 0, 0],
    (0.0, 1.0, 2.0, 1.0, 3.0): [1, 0, 0, 0],  # nothing follows the last step
    (0.0, 4.0, 3.0, 2.0, 1.0): [0, 0, 0, 0],  # up, and then only down
}


def trajectory(rewards) -> Scores:
    """Two samples of one trajectory, so that they make a group."""
    way = torch.zeros(2, 5, 1, dtype=torch.float64)
    way[:, :4, 0] = torch.tensor(rewards[:4], dtype=torch.float64)
    known = torch.ones(2, 5, 1, dtype=torch.bool)
    known[:, 4] = False
    end = torch.full((2, 1), rewards[4], dtype=torch.float64)
    return Scores(end, torch.ones(2, 1, dtype=torch.bool), ("a",), IntermediateScores(way, known))


@pytest.mark.parametrize("strict", [False, True])
def test_turning_points_by_hand(strict):
    of = context(Looking(Chain(FlowSDE(), 2)), torch.ones(1, dtype=torch.float64))
    for rewards, turns in (STRICT if strict else TABLE).items():
        gains = [b - a for a, b in pairwise(rewards)]
        whole = rewards[4] - rewards[0]
        paper = [
            rewards[4] - start if turn else gain
            for start, gain, turn in zip(rewards, gains, turns, strict=False)
        ]
        released = [whole + 0.5 * gain * turn for gain, turn in zip(gains, turns, strict=True)]
        for form, want in (("paper", paper), ("released", released)):
            part = TurningPoint(form, bonus=0.5, strict=strict)
            got = credited(part, trajectory(rewards), of)
            assert got.value[0, :4, 0].tolist() == want and got.mask[:, :4].all()
            assert not got.mask[:, 4].any() and got.value[0, 4, 0] == 0


def test_turns_have_the_signs_of_weighted_sums():
    """Reward a falls and b rises; their weights decide which way the sample goes."""
    scores = drawn(CHAIN, rewards=2)
    for weights in (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])):
        of = context(CHAIN, weights.double())
        chosen = int(weights.argmax())
        way = IntermediateScores(
            scores.intermediate.values[..., [chosen]], scores.intermediate.scored[..., [chosen]]
        )
        alone = Scores(scores.values[:, [chosen]], scores.scored[:, [chosen]], ("c",), way)
        chain = (TurningPoint("released"), Sum(), Standardize())
        both = Estimator(chain)(scores, of)[0]
        one = Estimator(chain)(alone, replace(of, weights=torch.ones(1).double()))[0]
        torch.testing.assert_close(both, one)


def test_turns_are_balanced_over_the_batch():
    part = TurningPoint(balanced=True)
    before = torch.tensor([[0.0, -1.0], [0.0, -2.0], [0.0, 3.0]])
    after = torch.tensor([[-1.0, 4.0], [-2.0, 1.0], [3.0, -1.0]])
    end, known = after[:, 1:], torch.ones(3, 1, dtype=torch.bool)
    plain = TurningPoint().turns(before, after, end, known)
    assert plain.tolist() == [[False, True], [False, True], [False, True]]
    # two turn upwards, by 5 and 3, one downwards, by 4: one of each stays
    assert part.turns(before, after, end, known).tolist() == [
        [False, True],
        [False, False],
        [False, True],
    ]


def test_a_turn_reads_the_whole_trajectory():
    scores = drawn(CHAIN)
    known = scores.intermediate.scored.clone()
    known[0, 2, 1] = False
    lost = replace(
        scores, intermediate=IntermediateScores(scores.intermediate.values * known, known)
    )
    got = credited(TurningPoint(), lost, context(CHAIN))
    assert not got.mask[0].any() and got.mask[1:, :4].all()


def test_discounted_values_by_a_loop():
    planner = Looking(Chain(FlowSDE(), 3), 1, first=False)
    scores, of = drawn(planner), context(planner)
    got = credited(Discounted(0.8), scores, of)
    for i in range(6):
        rewards = [*scores.intermediate.values[i, 1:4].tolist(), scores.values[i].tolist()]
        for k in range(4):
            for r in range(2):
                want = sum(0.8 ** (j - k) * rewards[j][r] for j in range(k, 4))
                assert float(got.value[i, k, r]) == pytest.approx(want)
    assert got.mask[:, :4].all() and not got.mask[:, 4].any()
    with pytest.raises(UserError, match="discount"):
        Discounted(1.5)


def test_absolute_values_by_a_loop():
    planner = Looking(Chain(FlowSDE(), 3), 1, first=False)
    scores, of = drawn(planner), context(planner)
    part = AbsoluteValue(kappa=0.3, share=0.5, bounds=(0.9, 1.1), eps=0.0)
    got = Estimator((Discounted(0.8), Sum(), part))(scores, of)[0]
    q = Estimator((Discounted(0.8), Sum()))(scores, of)[0]
    for draw in range(2):
        own = q[3 * draw : 3 * draw + 3, :4]
        for i in range(3):
            for k in range(4):
                column = own[:, k]
                std = float(((column - column.mean()) ** 2).mean().sqrt())
                weight = min(max(float(own[i, k] / own[i].mean()), 0.9), 1.1)
                early = 0.3 * float(own[i, k]) if k < 2.5 else 0.0
                want = weight * (float(own[i, k] - column.mean()) / std + early)
                assert float(got[3 * draw + i, k]) == pytest.approx(want)


def test_a_group_without_spread_still_learns_from_absolute_values():
    planner = Looking(Chain(FlowSDE(), 3), 1, first=False)
    scores = drawn(planner)
    flat = Scores(
        torch.ones_like(scores.values), scores.scored, scores.names,
        IntermediateScores(torch.ones_like(scores.intermediate.values), scores.intermediate.scored),
    )  # fmt: skip
    chain = (Discounted(0.5), Sum(), AbsoluteValue(0.3, bounds=(1.0, 1.0)))
    got = Estimator(chain)(flat, context(planner))[0]
    want = [0.3 * 1.5 * sum(0.5**j for j in range(4 - k)) for k in range(3)]
    assert got[0, :3].tolist() == pytest.approx(want) and got[0, 3] == 0


def test_a_potential_may_abstain():
    """Credit of a tree's nodes gains the standardised potential, or nothing where there is none."""
    planner = Looking(Tree(ConstantSDE(), (0, 2), 2), 1, first=False)
    scores, of = drawn(planner), context(planner)
    known = scores.intermediate.scored.clone()
    known[0:2, 1] = False  # the first node behind step 0 of the first draw
    own = torch.tensor([2.0, 0.0], dtype=torch.float64)
    scores = replace(
        scores, intermediate=IntermediateScores(scores.intermediate.values, known, own)
    )
    plain = Estimator((Sum(), Standardize()))(scores, of)[0]
    got, mask = Estimator((Sum(), Standardize(), Potential(0.7, eps=0.0)))(scores, of)
    assert mask.all()
    more = (got - plain) / 0.7
    total = 2.0 * scores.intermediate.values[..., 0]
    assert (more[0:4, 0] == 0).all(), "one node alone has no mean to differ from"
    nodes = total[[4, 6], 1]  # the second draw's two nodes behind step 0
    want = (nodes - nodes.mean()) / nodes.std(correction=0)
    torch.testing.assert_close(more[[4, 5, 6, 7], 0], want.repeat_interleave(2))
    leaves = total[4:8, 3]
    torch.testing.assert_close(more[4:8, 2], (leaves - leaves.mean()) / leaves.std(correction=0))
    assert (more[:, 4] == 0).all(), "the sample itself has its own score"


def test_what_makes_no_sense_is_refused():
    dense, turns = RECIPES["dense_grpo"](), RECIPES["turning_point"]()
    with pytest.raises(UserError, match="use a plan with intermediate rewards"):
        replace(dense, plan=Chain(FlowSDE(), 4))
    with pytest.raises(UserError, match="trains on no step"):
        replace(dense, plan=Looking(Ode(4), at=(0,)))
    with pytest.raises(UserError, match="without branches"):
        replace(turns, plan=Looking(Tree(FlowSDE(), (0, 1), 2)))
    replace(dense, plan=Looking(Tree(FlowSDE(), (0, 1), 2)))
    with pytest.raises(UserError, match="4 numbers does not fit 6 steps"):
        RECIPES["dense_grpo"](steps=6, noise=(0.1, 0.2, 0.3, 0.4))
    with pytest.raises(UserError, match="keep"):
        RECIPES["pro_grpo"](keep=())
