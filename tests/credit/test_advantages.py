import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.credit.advantages import (
    Clip,
    Context,
    Credit,
    Estimator,
    LeaveOneOut,
    Rescale,
    ScaleSteps,
    Standardize,
    Sum,
)
from flowrl.credit.comparisons import (
    BestWorst,
    Exponential,
    ParentDifference,
    PruneWidth,
    TwoLevel,
)
from flowrl.credit.selection import BestAnd
from flowrl.losses.ratio import clipped_surrogate
from rewards import Scores
from samplers import Chain, Columns, FlowSDE

EVERY = [
    Standardize(),
    Standardize("batch"),
    Standardize(None),
    Standardize("batch", centre="batch"),
    LeaveOneOut(),
    TwoLevel(),
    ParentDifference(),
    BestWorst(),
]
NAN = float("nan")


def columns(*nodes: int) -> Columns:
    ones = (1.0,) * len(nodes)
    return Columns(nodes, (True,) * len(nodes), ones, ones)


def scores(values: Tensor) -> Scores:
    """[n] or [n r]; NaN is unscored."""
    values = values[:, None] if values.ndim == 1 else values
    return Scores(values.nan_to_num(0.0), ~values.isnan(), tuple("abcdef"[: values.shape[1]]))


def credit(
    transforms, values: Tensor, nodes: tuple[int, ...], weights=None, **fusion
) -> tuple[Tensor, Tensor]:
    given = scores(values)
    w = torch.ones(given.values.shape[1]) if weights is None else torch.tensor(weights)
    return Estimator(transforms, **fusion)(given, Context(columns(*nodes), w))


def draw(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(2, 8), st.integers(1, 4), st.integers(0, 99))
def test_a_chain_is_grpo(group, draws, seed):
    r = draw(group * draws, seed)
    got, mask = credit((Standardize(eps=0.0),), r, (group,) * 3)
    g = r.view(draws, group)
    want = (g - g.mean(1, keepdim=True)) / g.std(1, keepdim=True, correction=0)
    torch.testing.assert_close(got, want.flatten()[:, None].expand(-1, 3))
    assert mask.all() and got.dtype == torch.float64


@given(st.sampled_from(EVERY), st.integers(0, 99))
def test_groups_may_come_in_any_order(transform, seed):
    r = draw(12, seed)
    order = torch.tensor([2, 0, 1])
    got = credit((transform,), r, (2, 4))[0].view(3, 4, 2)
    moved = credit((transform,), r.view(3, 4)[order].flatten(), (2, 4))[0].view(3, 4, 2)
    torch.testing.assert_close(moved, got[order])


@given(st.integers(0, 99), st.floats(0.1, 10), st.floats(-5, 5))
def test_standardized_advantages_ignore_a_rewards_scale_and_origin(seed, scale, origin):
    r, rule = draw(12, seed), (Standardize(eps=0.0),)
    got = credit(rule, r * scale + origin, (6,))[0]
    torch.testing.assert_close(got, credit(rule, r, (6,))[0])


@given(st.sampled_from(EVERY), st.integers(2, 12), st.floats(1e-3, 1e3), st.booleans())
def test_equal_scores_teach_exactly_nothing(transform, group, value, rounding):
    """Also where float32 means are off by an ulp, or the spread is below 1e-6 of the values."""
    r = torch.full((2 * group,), value)
    if rounding:
        r[::2] *= 1 + 1e-7
    assert credit((transform,), r, (group, group))[0].eq(0).all()


@given(st.sampled_from([*EVERY[:5], BestWorst()]), st.integers(0, 99))
def test_unscored_samples_are_as_if_absent(transform, seed):
    """Groups of four with one sample unscored: the credit of groups of three."""
    r = draw(12, seed)
    holes = torch.cat([torch.cat([g[:1], torch.tensor([NAN]).double(), g[1:]]) for g in r.split(3)])
    got, mask = credit((transform,), holes, (4,))
    want, _ = credit((transform,), r, (3,))
    assert mask[:, 0].tolist() == [True, False, True, True] * 4
    torch.testing.assert_close(got[mask[:, 0]], want)
    assert got[~mask].eq(0).all()


def test_a_group_that_nobody_scored_is_masked_and_silent():
    r = torch.tensor([1.0, 2.0, NAN, NAN])
    for transform in (*EVERY, Exponential()):
        got, mask = credit((transform,), r, (2,))
        assert got.isfinite().all() and got[2:].eq(0).all()
        assert mask[:, 0].tolist() == [True, True, False, False]


def test_a_lone_scored_sample_has_no_advantage():
    for transform in EVERY[:5]:
        group = torch.tensor([3.0, NAN, NAN, NAN, 1.0, 2.0, 3.0, 5.0])
        got = credit((transform,), group, (4,))[0]
        if transform != EVERY[3]:
            assert got[0] == 0


def test_tree_credit_by_hand():
    """Two children, two leaves each; leaf scores 1 3 | 5 7."""
    r = torch.tensor([1.0, 3.0, 5.0, 7.0])
    value, _ = credit((), r, (2, 4))
    assert value[:, 0].tolist() == [2, 2, 6, 6]
    got, _ = credit((Standardize(eps=0.0),), r, (2, 4))
    assert got[:, 0].tolist() == [-1, -1, 1, 1]
    torch.testing.assert_close(got[:, 1], (r.double() - 4) / 5**0.5)


def test_depths_are_standardized_over_nodes_not_leaves():
    """Leaf scores 1 2 | 3 6: at depth 1 two nodes, 1.5 and 4.5, so one over root two."""
    got, _ = credit((Standardize(correction=1, eps=0.0),), torch.tensor([1.0, 2, 3, 6]), (2, 4))
    torch.testing.assert_close(got[:, 0], torch.tensor([-1.0, -1, 1, 1]).double() / 2**0.5)
    want = torch.tensor([-0.9258, -0.4629, 0, 1.3887]).double()
    torch.testing.assert_close(got[:, 1], want, atol=1e-4, rtol=0)


def test_a_nodes_value_comes_from_its_scored_leaves():
    r = torch.tensor([1.0, NAN, 5.0, 8.0])
    value, mask = credit((), r, (2, 4))
    assert value[:, 0].tolist() == [1, 1, 6.5, 6.5] and mask[:, 0].all()
    assert value[1, 1] == 0 and mask[:, 1].tolist() == [True, False, True, True]
    assert credit((), r, (2, 4), fusion="max")[0][:, 0].tolist() == [1, 1, 8, 8]


def test_path_fusion_weighs_children_by_their_edges():
    """Children with log-densities 0 and log 3 weigh 1/4 and 3/4; without a score, nothing."""
    logp = {1: torch.tensor([0.0, 3.0, 3.0, 0.0]).log()}
    logp[1] = torch.tensor([1.0, 3.0, 3.0, 1.0]).log()
    context = Context(columns(2, 4), torch.ones(1), logp)
    estimator = Estimator((), fusion="path")
    got, _ = estimator(scores(torch.tensor([4.0, 8.0, 4.0, 8.0])), context)
    torch.testing.assert_close(got[:, 0], torch.tensor([7.0, 7.0, 5.0, 5.0]).double())
    got, mask = estimator(scores(torch.tensor([4.0, NAN, NAN, NAN])), context)
    assert got[:, 0].tolist() == [4, 4, 0, 0] and mask[:, 0].tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match="branching step 1: train that step"):
        estimator(scores(torch.ones(4)), Context(columns(2, 4), torch.ones(1)))


def test_sum_weighs_rewards_where_it_stands():
    r = torch.tensor([[1.0, 10.0], [2.0, 30.0], [3.0, 20.0]])
    first, _ = credit((Sum(), Standardize(None)), r, (3,), [1.0, 0.5])
    torch.testing.assert_close(first[:, 0], torch.tensor([-6.0, 5.0, 1.0]).double())
    after, _ = credit((Standardize(eps=0.0), Sum()), r, (3,), [1.0, 0.5])
    s = 1.5**0.5
    torch.testing.assert_close(after[:, 0], torch.tensor([-1.5 * s, s / 2, s]).double())
    implied, _ = credit((Standardize(None),), r, (3,), [1.0, 0.5])
    assert torch.equal(implied, first)


def test_a_part_missing_masks_a_sample_unless_all_lack_it():
    r = torch.tensor([[1.0, 5.0], [2.0, NAN], [1.0, NAN], [2.0, NAN]])
    value, mask = credit((Sum(),), r, (2,))
    assert mask[:, 0].tolist() == [True, False, True, True]
    assert value[:, 0].tolist() == [6, 0, 1, 2]
    value, mask = credit((Sum(partial=True),), r, (2,))
    assert mask.all() and value[:, 0].tolist() == [6, 2, 1, 2]


@given(st.integers(2, 8), st.integers(0, 99))
def test_leave_one_out(group, seed):
    r = draw(group, seed)
    want = torch.stack([r[i] - torch.cat([r[:i], r[i + 1 :]]).mean() for i in range(group)])
    torch.testing.assert_close(credit((LeaveOneOut(),), r, (group,))[0][:, 0], want)


@pytest.mark.parametrize("scale", ["group", "batch", None])
def test_equal_rewards_are_worth_exactly_nothing(scale):
    """The mean of three times 0.1 is not 0.1, and what is left is not credit."""
    r = torch.tensor([0.1, 0.1, 0.1, 0.2, 0.5, 0.9], dtype=torch.float64)
    got = credit((Standardize(scale),), r, (3,))[0][:, 0]
    assert got[:3].eq(0).all() and got[3:].ne(0).all()


def test_trimmed_statistics_leave_the_lowest_out():
    r = torch.tensor([-100.0, 1.0, 2.0, 3.0])
    got = credit((Standardize(trim=0.25, eps=0.0),), r, (4,))[0][:, 0]
    want = (r.double() - 2) / (2 / 3) ** 0.5
    torch.testing.assert_close(got, want)


def test_a_flat_group_may_be_told_how_it_stands_in_the_batch():
    r = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    plain = credit((Standardize(eps=0.0),), r, (2,))[0][:, 0]
    blended = credit((Standardize(eps=0.0, blend=0.5),), r, (2,))[0][:, 0]
    assert plain.tolist() == [0, 0, 0, 0, -1, 1]
    torch.testing.assert_close(blended, torch.tensor([0.5, 0.5, -0.5, -0.5, -1, 1]).double())


def test_step_weights_are_relative_to_all_but_the_last():
    at = Columns((2, 2, 2), (False, True, True), (0.3, 0.1, 9.0), (0.25, 0.5, 0.25))
    ones = Credit(torch.ones(2, 3, 1).double(), torch.ones(2, 3, 1, dtype=torch.bool))
    for by, want in (("std", [1.5, 0.5, 45.0]), ("1/h", [4 / 3, 2 / 3, 4 / 3])):
        got = ScaleSteps(by)(ones, Context(at, torch.ones(1))).value[0, :, 0]
        torch.testing.assert_close(got, torch.tensor(want).double())


def test_step_weights_are_relative_to_the_steps_that_are_trained():
    """A list that ends on a level below .005 has one more step that no planner trains on."""
    sigmas = (1.0, 0.6, 0.2, 0.001, 0.0)
    (plan,) = Chain(FlowSDE(0.7), 2)(sigmas, 0, 0)
    trained = [step.train for step in plan.steps]
    assert trained == [True, True, False, False]
    ones = Credit(torch.ones(2, 4, 1).double(), torch.ones(2, 4, 1, dtype=torch.bool))
    for by in ("std", "1/h"):
        weight = ScaleSteps(by)(ones, Context(plan.columns, torch.ones(1))).value[0, :, 0]
        assert weight[torch.tensor(trained)].mean().item() == pytest.approx(1.0)


def test_a_step_weight_can_ride_on_the_advantage():
    log_ratio, a = torch.randn(16, 1) * 0.3, torch.randn(16, 1)
    torch.testing.assert_close(
        clipped_surrogate(log_ratio, 2.5 * a, 0.2, 0.28),
        2.5 * clipped_surrogate(log_ratio, a, 0.2, 0.28),
    )


def test_clip_and_rescale():
    got, _ = credit((Clip(5.0), Rescale(5.0, 1.0)), torch.tensor([-8.0, 2.5, 6.0]), (3,))
    assert got[:, 0].tolist() == [-1, 0.5, 1]


def test_best_and_worst_are_told_apart_only_where_they_differ():
    got, _ = credit((BestWorst(),), torch.tensor([1.0, 3, 2, 5, 5, 5, NAN, 1, 2]), (3,))
    assert got[:, 0].tolist() == [-1, 1, 0, 0, 0, 0, 0, -1, 1]


@pytest.mark.parametrize(
    ("other", "kept"),
    [
        ("random", [[True, True, False], [True, True, False], [False, True, False]]),
        ("worst", [[True, False, True], [True, True, False], [False, True, False]]),
        ("none", [[True, False, False], [False, True, False], [False, True, False]]),
    ],
)
def test_the_best_and_one_other_are_kept(other, kept):
    """Also where the best is the first, and where it is alone."""
    values = torch.tensor([3.0, 2, 1, 1, 4, 2, NAN, 5, NAN])
    _, mask = credit((BestAnd(other),), values, (3,))
    assert mask[:, 0].view(3, 3).tolist() == kept


def test_parent_difference_by_hand():
    got, _ = credit((ParentDifference(),), torch.tensor([1.0, 3.0, 5.0, 7.0]), (2, 2, 4))
    assert got.tolist() == [[-2, 0, -1], [-2, 0, 1], [2, 0, -1], [2, 0, 1]]


def test_families_hang_on_the_last_split():
    assert columns(1, 2, 2, 6, 6).families == (1, 1, 1, 2, 2)
    assert columns(4, 4).families == (1, 1)


def test_two_levels_by_hand():
    """Leaves 1 3 | 5 9 under two children: siblings differ by 1 and 2, the group has mean 4.5."""
    rule = Standardize(None)
    r = torch.tensor([1.0, 3.0, 5.0, 9.0])
    near, _ = credit((TwoLevel(1.0, 0.0, rule),), r, (2, 4))
    assert near[:, 1].tolist() == [-1, 1, -2, 2] and near[:, 0].tolist() == [-2.5, -2.5, 2.5, 2.5]
    both, _ = credit((TwoLevel(1.0, 0.5, rule),), r, (2, 4))
    assert both[:, 1].tolist() == [-2.75, 0.25, -1.75, 4.25]


def test_width_pruning_masks_after_the_last_split():
    r = torch.tensor([1.0, 3.0, 9.0, 7.0])
    for keep, kept in (
        ("branch", [False, True, True, False]),
        ("extremes", [True, False, True, False]),
    ):
        value, mask = credit((Sum(), PruneWidth(keep)), r, (2, 4, 4))
        assert mask[:, 2].tolist() == kept and mask[:, :2].all()
        assert value[:, 2].ne(0).tolist() == kept
    _, mask = credit((Sum(), PruneWidth("extremes", 0.5)), torch.tensor([4.0, 1, 2, 3]), (4, 4))
    assert mask.tolist() == [[True] * 2, [True] * 2, [False] * 2, [False] * 2]


def test_pruned_leaves_leave_the_statistics():
    r = torch.tensor([4.0, 1, 2, 3])
    got, _ = credit((Sum(), PruneWidth("extremes"), Standardize(eps=0.0)), r, (4,))
    assert got[:, 0].tolist() == [1, -1, 0, 0]


@given(st.integers(0, 99), st.floats(-300, 300))
def test_exponential_weights_have_mean_one_and_ignore_the_origin(seed, origin):
    r = draw(8, seed)
    got = credit((Exponential(2.0),), r + origin, (4,))[0][:, 0].view(2, 4)
    want = (2 * r).view(2, 4).softmax(1) * 4
    torch.testing.assert_close(got, want)
    whole = credit((Exponential(2.0, "batch"),), r, (4,))[0][:, 0]
    torch.testing.assert_close(whole, (2 * r).softmax(0) * 8)
