"""What is known already is not evaluated: the policy that sampled where it is the trained one
still, and the adapters' products where the start has none."""

from collections import Counter

import pytest
import torch

from flowrl.models.diffusers.lora import lora
from flowrl.session.policies import Policies
from flowrl.session.progress import Progress
from tests.support import iterations, runs
from tests.support.iterations import collect

NFT = runs.NFT | {"kl": 1e-2}
# its loss has an average of its own
AWM = {"name": "awm", "steps": 4, "group": 4, "levels_per_sample": 2}


def stepped(pipeline, folder, alike: bool, recipe=NFT):
    """An iteration of two optimizer steps: metrics, weights, and calls under each policy."""
    kept = runs.session(pipeline, folder, recipe, updates=2)
    policies, calls = kept.learner.policies, Counter[str]()
    assert (
        policies.equal_to_current(policies.names)
        == {each.name for each in policies.averages}
        != set()
    )
    if not alike:
        policies.equal_to_current = lambda _: set()
    experience = collect(kept, 0)
    hook = kept.learner.policy.denoisers[0].register_forward_pre_hook(
        lambda *_: calls.update([f"{policies.inside} {torch.is_grad_enabled()}"])
    )
    found = iterations.update(kept.learner, experience, Progress()).metrics
    hook.remove()
    return found, [p.detach().clone() for p in policies.parameters.values()], calls, kept


def test_the_old_policy_is_evaluated_once_it_differs(pipeline, tmp_path):
    found, weights, calls, kept = stepped(pipeline, tmp_path, True)
    more, others, every, _ = stepped(pipeline, tmp_path, False)
    assert all(map(torch.equal, weights, others))
    assert calls["current True"] == every["current True"]
    assert calls["trailing False"] * 2 == every["trailing False"] > 0  # of the second step alone
    assert calls["ref False"] == every["ref False"] > 0
    rows = found["count/training"] / 2
    assert more["count/frozen"] - found["count/frozen"] == rows
    assert {name: found[name] for name in found if "count" not in name} == {
        name: more[name] for name in more if "count" not in name
    }
    assert (
        kept.learner.policies.equal_to_current(kept.learner.policies.names) == set()
    )  # it lags behind now


@pytest.mark.slow
def test_an_average_of_the_loss_is_evaluated_once_it_differs(pipeline, tmp_path):
    found, weights, calls, kept = stepped(pipeline, tmp_path, True, AWM)
    more, others, every, _ = stepped(pipeline, tmp_path, False, AWM)
    (average,) = kept.learner.policies.averages
    assert all(map(torch.equal, weights, others))
    assert calls[f"{average.name} False"] * 2 == every[f"{average.name} False"] > 0
    assert found["loss"] == more["loss"]


def test_the_reference_has_no_products_of_adapters_and_the_same_bits(pipeline, tmp_path):
    kept = runs.session(pipeline, tmp_path, NFT)
    policy, policies = kept.learner.policy, kept.learner.policies
    plain = Policies(policy.trainable())  # swaps the adapters' weights
    batch = policy.open(["a red ball", "a cube"], [], 4)
    shape = policy.shape(4)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    asked = x, torch.tensor([0.5, 0.9]), torch.tensor([0, 1])
    with torch.no_grad():
        batch.policy(*asked)  # proves the pipeline
        for p in policies.network.values():
            p.add_(0.1)
        changed = batch.policy(*asked)
        counted: list[str] = []
        for name, module in policy.denoisers[0].named_modules():
            if name.endswith(f"lora_A.{lora.ADAPTER}"):
                module.register_forward_hook(lambda *_, name=name: counted.append(name))
        with plain.using("ref"):
            swapped = batch.policy(*asked)
        assert len(counted) > 10
        counted.clear()
        with policies.using("ref"):
            bare = batch.policy(*asked)
        assert not counted
        assert torch.equal(bare, swapped) and not torch.equal(bare, changed)
        assert torch.equal(batch.policy(*asked), changed) and counted
