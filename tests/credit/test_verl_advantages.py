"""The example of verl's estimators. Without verl (which needs ray) they are called as the trainer
of verl 0.9.1 calls them: by keyword, with `config` and perhaps `reward_baselines`."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from examples.verl_advantages import ADVANTAGES, estimator, register

GROUP, LENGTH = 4, 5
INDEX = np.array(["b", "a", "c"] * GROUP, dtype=object)
REWARD = torch.tensor([1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0.0])


def batch():
    mask = torch.arange(LENGTH) < torch.tensor([5, 3, 1, 4, 2, 5, 5, 3, 4, 1, 2, 5])[:, None]
    reward = torch.zeros(len(REWARD), LENGTH)
    reward[torch.arange(len(REWARD)), mask.sum(1) - 1] = REWARD
    return {
        "token_level_rewards": reward, "response_mask": mask.float(), "index": INDEX,
        "config": None, "reward_baselines": torch.zeros(len(REWARD)),
    }  # fmt: skip


def by_hand(name: str, r: torch.Tensor) -> torch.Tensor:
    mean = r.mean()
    if name == "flowrl_grpo":
        return (r - mean) / (r.std() + 1e-6)
    if name == "flowrl_rloo":
        return (r - mean) * GROUP / (GROUP - 1)
    return r - mean + 0.1 if name == "flowrl_asymre" else (r - mean) / (mean + 1e-6)


@pytest.mark.parametrize("name", ["flowrl_grpo", "flowrl_rloo", "flowrl_asymre", "flowrl_maxrl"])
def test_groups_are_found_in_any_order(name):
    given = batch()
    advantages, returns = estimator(ADVANTAGES[name])(**given)
    assert advantages.shape == returns.shape == (len(REWARD), LENGTH)
    for prompt in "abc":
        own = torch.from_numpy(prompt == INDEX)
        want = by_hand(name, REWARD[own])[:, None] * given["response_mask"][own]
        torch.testing.assert_close(advantages[own], want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_all_are_finite_and_zero_at_padding(name):
    given = batch()
    advantages, _ = estimator(ADVANTAGES[name])(**given)
    assert advantages.isfinite().all() and advantages.abs().max() > 0.1
    assert advantages[given["response_mask"] == 0].eq(0).all()


def test_groups_of_different_sizes_are_refused():
    given = batch() | {"index": np.array(["a"] * 5 + ["b"] * 7, dtype=object)}
    with pytest.raises(ValueError, match="keep one number"):
        estimator(ADVANTAGES["flowrl_grpo"])(**given)


@pytest.mark.skipif(not (find_spec("verl") and find_spec("ray")), reason="verl is not installed")
def test_verl_calls_them_and_agrees():
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    register()
    for ours, theirs in (("flowrl_grpo", "grpo"), ("flowrl_rloo", "rloo")):
        names = ("token_level_rewards", "response_mask", "index")
        given = {name: batch()[name] for name in names}
        pair = [get_adv_estimator_fn(name)(**given)[0] for name in (ours, theirs)]
        torch.testing.assert_close(*pair, atol=1e-5, rtol=0)
