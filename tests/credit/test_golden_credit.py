"""Statistics, trees and schedules against arrays that the papers' own code produced."""

import pytest
import torch
from torch import Tensor

from flowrl.algorithm import Decay
from flowrl.credit.advantages import Context, Credit, Estimator, ScaleSteps, Standardize, Sum
from flowrl.credit.comparisons import PruneWidth
from flowrl.likelihoods.transition import Transition
from flowrl.recipes.matching import awm_times
from rewards import Samples, Scores, load
from samplers import Columns
from tests import golden_api as api
from tests.support.golden_tools import arrays, close, columns, says, scores, transition_rows


def estimate(transforms, given: Scores, group: int, weights=None) -> Tensor:
    weights = torch.ones(given.values.shape[1]) if weights is None else torch.tensor(weights)
    return Estimator(transforms)(given, Context(columns((group,)), weights))[0][:, 0]


def test_flow_grpo_statistics():
    z = arrays("pergroup_advantages")
    ids, r = z["prompt_id"], z["rewards_1d"]
    for scale, name in (("group", "groupstd"), ("batch", "globalstd")):
        got = api.estimator("grpo", r, ids, scale=scale, correction=0)
        close(got, z[f"adv_1d_{name}"])
        assert got[ids == 3].eq(0).all(), "group 3 has one reward: exactly 0"
        for t in range(3):
            got = api.estimator("grpo", z["rewards_2d"][:, t], ids, scale=scale, correction=0)
            close(got, z[f"adv_2d_{name}"][:, t])
    close(api.group_advantage(r, 20), z["adv_no_tracking"])
    got, spread = api.estimator("best_worst", r, ids), ids != 3
    close(got[spread], z["adv_dpo"][spread])
    assert got[~spread].eq(0).all(), "a tie teaches nothing; the code gives it +1 and -1"


def test_dance_statistics():
    z = arrays("pergroup_advantages")
    unbiased = Standardize(correction=1, eps=1e-8)
    close(estimate((unbiased,), scores(z["dance_rewards"]), 12), z["dance_adv_group"])
    everyone = torch.cat([z["dance_rewards"], z["dance_other_rank"]])
    whole = Standardize("batch", 1, 1e-8, centre="batch")
    close(estimate((whole,), scores(everyone), 12)[:24], z["dance_adv_global"])
    both = scores(z["hy_vq_rewards"], z["hy_mq_rewards"])
    for name, weights in (("a", [1.0, 0.0]), ("b", [0.6, 0.4])):
        each = [estimate((unbiased,), scores(z[f"hy_{m}_rewards"]), 24) for m in ("vq", "mq")]
        for got, m in zip(each, ("vq", "mq"), strict=True):
            close(got, z[f"hy_{name}_{m}_adv"])
        context = Context(columns((24,)), torch.tensor(weights))
        chain = (unbiased, Sum(), PruneWidth("extremes", 8 / 24))
        _, mask = Estimator(chain)(both, context)
        assert torch.nonzero(mask[:, 0])[:, 0].tolist() == sorted(z[f"hy_{name}_selected"].tolist())


@pytest.mark.parametrize("trim", [0.0, 0.25])
def test_mix_statistics(trim):
    z = arrays("pergroup_advantages")
    given = scores(
        *(z[f"mix_{m}Model"] for m in ("HPSClipReward", "PickScoreReward", "ImageReward"))
    )
    rule, third = Standardize(correction=1, eps=1e-8, trim=trim), [1 / 3] * 3
    name = f"trim{int(trim * 100)}"
    close(estimate((rule, Sum()), given, 12, third), z[f"mix_adv_aggr_{name}"], 2e-6)
    # float32 rewards near 0.3 with a spread of .01: the authors' arithmetic is float32
    close(estimate((Sum(), rule), given, 12, third), z[f"mix_reward_aggr_{name}"], 5e-6)


def test_gdpo_statistics():
    z = arrays("pergroup_advantages")
    given, weights = scores(z["pref_winrate"], z["pref_clip"]), [0.4, 0.6]
    rule = Standardize(correction=1, eps=1e-8)
    close(estimate((rule, Sum()), given, 8, weights), z["pref_adv_plain"])
    whole = Standardize("batch", 1, 1e-8, centre="batch")
    close(estimate((rule, Sum(), whole), given, 8, weights), z["pref_adv_gdpo"], 2e-6)


def test_awm_statistics_and_schedules():
    z = arrays("mm_schedules_and_stats")
    for scale, name in (("batch", "adv_globalTrue"), ("group", "adv_globalFalse")):
        got = api.estimator("grpo", z["rewards"], z["group"], scale=scale, correction=0)
        close(got, z[name])
    decays = {
        "nft_decay_type0": Decay(),
        "nft_decay_type1": Decay(slope=0.001, most=0.5),
        "nft_decay_type2": Decay(flat=75, slope=0.0075, most=0.999),
        "awm_kl_ema_linear": Decay(slope=0.001, most=0.3),
    }
    for name, decay in decays.items():
        got = torch.tensor([decay(s) for s in z["steps"].tolist()], dtype=torch.float64)
        close(got, z[name], 1e-12)


def test_flow_factory_statistics():
    """Its floor of 1e-6 under the std, and its float32 constants, are not copied: compare groups
    with spread, in the mode that computes its std exactly."""
    z = arrays("mm_adv_flowfactory")
    rewards = torch.stack([z["r1"], z["r2"], z["r3"]], 1)
    weights = {"w1": torch.ones(3), "w2": torch.tensor([1, 0.5, 0.1])}
    for name, w in weights.items():
        for scale, flag in (("batch", "True"), ("group", "False")):
            got = api.estimator(
                "grpo", rewards, z["group"], weights=w, scale=scale, correction=0, eps=0.0
            )
            close(got, z[f"distributed_k_repeat__global{flag}__{name}__sum"], 1e-5)


@pytest.mark.parametrize("weights", ["w1", "w2"])
@pytest.mark.parametrize("rewards", ["full", "nan"])
def test_trl_statistics(rewards, weights):
    z = arrays("mm_trl_advantages_1_16_0")
    r = z["rewards" if rewards == "full" else "rewards_nan"]
    w = torch.tensor({"w1": [1.0, 1.0, 1.0], "w2": [1.0, 0.5, 0.1]}[weights])
    for scale in ("group", "batch", "none"):
        got = api.estimator("grpo", r, 8, weights=w, scale=scale)
        close(got, z[f"{rewards}__sum_then_normalize__{scale}__{weights}"], 2e-6)
    got = api.estimator("gdpo", r, 8, weights=w)
    close(got, z[f"{rewards}__normalize_then_sum__group__{weights}"], 2e-6)


def test_rloo_statistics():
    z = arrays("mm_trl_rloo_gmpo_gspotoken")
    got = api.estimator("rloo", z["rewards"], 4, weights=torch.tensor([1, 0.5]))
    close(got, z["rloo_adv_plain"])


def paths(z: dict[str, Tensor], p: str) -> tuple[list[int], list[list[int]]]:
    """Leaves in depth-first order (as places in the given reward order) and their root paths."""
    parent, depth = z[f"{p}_parent"].tolist(), z[f"{p}_depth"].tolist()
    place = {row: i for i, row in enumerate(z[f"{p}_leaf_index"].tolist())}
    leaves = sorted(place)  # rows are in depth-first order
    found = []
    for leaf in leaves:
        path, row = [], leaf
        while parent[row] >= 0:
            path.insert(0, row)
            row = parent[row]
        assert [depth[row] for row in path] == list(range(1, len(path) + 1))
        found.append(path)
    return [place[leaf] for leaf in leaves], found


@pytest.mark.parametrize("p", ["tiny", "lat", "ties"])
@pytest.mark.parametrize("fusion", ["mean", "path"])
def test_branch_tree_credit(p, fusion):
    z = arrays("branch_tree_advantage")
    order, found = paths(z, p)
    trees = int((z[f"{p}_parent"] < 0).sum())
    nodes = tuple(len({path[k] for path in found}) // trees for k in range(len(found[0])))
    given = z[f"{p}_leaf_reward"][order]
    logp = {
        k: z[f"{p}_log_prob"][list(dict.fromkeys(path[k] for path in found))]
        for k in range(len(nodes))
    }
    context = Context(columns(nodes), torch.ones(1), logp)
    kind = "mean" if fusion == "mean" else "probw"
    want_value, want = (
        torch.stack([z[f"{p}_{a}_{kind}"][path] for path in found]) for a in ("reward", "adv")
    )
    value, _ = Estimator((), fusion)(scores(given), context)
    close(value, want_value, 2e-6)
    got, _ = Estimator((Standardize(correction=1, eps=1e-8),), fusion)(scores(given), context)
    close(got, want, 5e-4)
    if fusion == "mean":
        close(api.tree_credit(given, nodes), got)


def test_temp_flow_weights_are_the_steps_std():
    """The code's 2.25 is one over the mean std of the nine trained steps."""
    z = arrays("tempflow_perstep")
    k = len(z["std"]) + 1
    std = (*z["std"].tolist(), 0.006)
    ones = (1.0,) * k
    credit = Credit(torch.ones(2, k, 1, dtype=torch.float64), torch.ones(2, k, 1, dtype=torch.bool))
    context = Context(Columns((2,) * k, (True,) * k, std, ones), torch.ones(1))
    got = ScaleSteps("std")(credit, context).value[0, :-1, 0]
    close(got, z["weight_sd3"], 2e-3)
    for step in range(9):
        rows = transition_rows(
            z["x"].expand(6, -1, -1, -1), z["branch_next"][step], z["sigmas"][step : step + 2], 0.7
        )
        found = says(Transition(), z["v"].expand(6, -1, -1, -1), rows)
        close(found.logp[:, 0], z["branch_log_prob"][step], 1e-5)


AWM_TIMES = ["discrete", "discrete_with_init", "discrete_wo_init", "logit_normal", "uniform"]


@pytest.mark.parametrize("name", AWM_TIMES)
def test_awm_time_samplers(name):
    """Same strata, same means: 400 published draws of 6 times against 2000 of ours."""
    z = arrays("mm_awm_time_samplers")
    want = z[f"{name}_t"][:, :, 0].double().sort(1).values
    sigmas = (z["scheduler_timesteps"] / 1000).tolist()
    rng = torch.Generator().manual_seed(0)
    drawn = torch.stack([awm_times(name)(sigmas, 6, rng) for _ in range(2000)])
    got = drawn.double().sort(1).values
    if name.startswith("discrete"):
        for stratum in range(6):
            values = (a[:, stratum].float().unique() for a in (got, want))
            torch.testing.assert_close(*values, atol=1e-6, rtol=0)
    close(got.mean(0), want.mean(0), 4e-3)
    close(got.std(0), want.std(0), 4e-3)
    assert (drawn[1:, 0] != drawn[:-1, 0]).any(), "the order is random"


def test_pref_win_rate():
    z = arrays("pref_winrate")
    pairs, outcome = z["pairs"], z["outcome"]

    def judge(samples: Samples, a: Tensor, b: Tensor) -> Tensor:
        assert torch.equal(torch.stack([a, b], 1), pairs), "each pair once, the earlier first"
        return torch.where(outcome == 1, 1.0, torch.where(outcome == 2, 0.0, 0.5))

    samples = Samples(["a"] * 5, ["p"] * 5, torch.zeros(5, dtype=torch.long))
    rates = load("win_rate", judge=judge)(samples)
    close(rates, z["think_win_rate"], 5.01e-4)  # published to 3 decimals
