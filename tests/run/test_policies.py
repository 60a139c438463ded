import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from flowrl.algorithm import Average, Decay
from flowrl.models.adapters import adapter_switch
from flowrl.session import policies as policies_module
from flowrl.session.policies import Policies


def layer(weight: float = 1.0) -> nn.Linear:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, weight)
    return module


def policies(module: nn.Module) -> Policies:
    return Policies(dict(module.named_parameters()), (Average("slow", Decay(start=0.75)),))


def test_using_swaps_the_weights_in_and_out():
    module = layer(1.0)
    kept = policies(module)
    with torch.no_grad():
        module.weight.fill_(5.0)
    x = torch.ones(1, 1)
    for name, value in (("ref", 1.0), ("slow", 1.0), ("current", 5.0)):
        with kept.using(name):
            assert module(x).item() == value
            with kept.using(name):
                assert module(x).item() == value
            assert module(x).item() == value
        assert module(x).item() == 5.0


def test_weights_come_back_after_an_error_and_nesting_is_refused():
    module = layer(1.0)
    kept = policies(module)
    with torch.no_grad():
        module.weight.fill_(5.0)
    with pytest.raises(RuntimeError, match="reward"), kept.using("ref"):
        raise RuntimeError("reward")
    assert module.weight.item() == 5.0
    with pytest.raises(AssertionError, match="already"), kept.using("ref"), kept.using("slow"):
        pass


def test_follow_is_the_average_by_its_formula():
    module = layer(1.0)
    kept = policies(module)
    with torch.no_grad():
        module.weight.fill_(5.0)
    kept.follow(1)
    with kept.using("slow"):
        assert module.weight.item() == pytest.approx(0.75 * 1.0 + 0.25 * 5.0)
    with kept.using("ref"):
        assert module.weight.item() == 1.0


def test_gradients_belong_to_the_current_weights():
    """A graph that was made before another policy is swapped in must not see its numbers."""
    module = layer(3.0)
    kept = policies(module)
    with torch.no_grad():
        module.weight.fill_(2.0)
    x = torch.ones(1, 1, requires_grad=True)
    out = module(x)
    with kept.using("ref"), torch.no_grad():
        module(x)
    out.sum().backward()
    assert x.grad.item() == 2.0  # d out / d x is the current weight, 3 would be the start's
    assert module.weight.grad.item() == 1.0


def test_state_goes_round():
    first, second = layer(1.0), layer(1.0)
    a, b = policies(first), policies(second)
    with torch.no_grad():
        first.weight.fill_(5.0)
    a.follow(1)
    b.restore(a.state())
    for name in ("current", "slow", "ref"):
        with a.using(name), b.using(name):
            assert torch.equal(first.weight, second.weight)
    assert not any(key.startswith("ref/") for key in a.state())


def test_policies_follow_each_other_where_the_start_is_the_network_without_adapters():
    """In every order: the start switches adapters off and leaves another one's weights in place."""
    module = get_peft_model(nn.Sequential(layer(3.0)), LoraConfig(r=1, target_modules=["0"]))
    named = {name: p for name, p in module.named_parameters() if ".lora_" in name}
    x, switch = torch.ones(1, 1), adapter_switch([module])
    kept = Policies(named, (Average("slow", Decay(start=0.75)),), switch=switch)
    with torch.no_grad():
        for p in named.values():
            p.fill_(2.0)
        kept.follow(1)
        values = {"ref": 3.0, "current": module(x).item()}
        kept.put("slow")
        values["slow"] = module(x).item()
        assert len(set(values.values())) == 3
        for first, second in itertools.permutations(values, 2):
            for name in (first, second, first, second, "current"):
                kept.put(name)
                assert module(x).item() == values[name], (first, second, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_differences_of_many_tensors_are_found_in_few_kernels(dtype: torch.dtype):
    own = [torch.randn(3, k + 1).to(dtype) for k in range(2 * policies_module.TOGETHER + 3)]
    pairs = [(p, p.float()) for p in own]
    assert not policies_module._differences(pairs).any()
    assert policies_module.same_values(own, [w for _, w in pairs])
    for place in (0, policies_module.TOGETHER, len(own) - 1):
        for value in (1.0, torch.nan, torch.inf):
            other = [(p, w.clone()) for p, w in pairs]
            other[place][1][-1, 0] += value
            assert policies_module._differences(other).ne(0).nonzero().tolist() == [[place]]
            assert not policies_module.same_values(own, [w for _, w in other])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_rounded_into_the_network_by_one_call(dtype: torch.dtype, monkeypatch):
    module, calls = nn.Sequential(*(nn.Linear(2, 2, dtype=dtype) for _ in range(5))), []
    kept, copy = Policies(dict(module.named_parameters())), torch._foreach_copy_
    for p in kept.parameters.values():
        p.data = torch.randn(p.shape)
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *a: calls.append(len(a[0])) or copy(*a))
    kept.publish()
    assert calls == [10]
    for name, p in module.named_parameters():
        assert torch.equal(p, kept.parameters[name].to(dtype))
