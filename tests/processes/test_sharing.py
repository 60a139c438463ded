"""What processes exchange, with the other ones made up: sums of gradients, and company's calls."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flowrl.processes import sharding
from flowrl.processes.lockstep import (
    BACKWARD,
    CALL_KINDS,
    DONE,
    FAILED,
    Elsewhere,
    Lockstep,
    ModuleCall,
    kind_of_call,
)
from flowrl.processes.sharding import sum_gradients


@pytest.mark.parametrize("bucket", [2**24, 5, 1])
def test_gradients_are_summed_though_one_process_has_none(monkeypatch, bucket):
    """The other one used b and c; nobody used d; c is of another dtype."""
    sizes = {"a": (2, 3), "b": (4,), "c": (2,), "d": (3,)}
    weights = {
        name: nn.Parameter(torch.zeros(size, dtype=torch.float64 if name == "c" else torch.float32))
        for name, size in sizes.items()
    }
    weights["a"].grad = torch.full((2, 3), 2.0)
    weights["c"].grad = torch.full((2,), 3.0, dtype=torch.float64)
    theirs = {
        torch.float32: [torch.zeros(6), torch.arange(4.0)],
        torch.float64: [torch.tensor([10.0, 20.0], dtype=torch.float64)],
    }
    left = {dtype: torch.cat(parts) for dtype, parts in theirs.items()}

    def with_the_other(tensor, op=dist.ReduceOp.SUM):
        if tensor.dtype == torch.int32:
            other = torch.tensor([0, 1, 1, 0]).int()
            both = {dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}
            tensor.copy_(both[op](tensor, other))
            return
        mine, left[tensor.dtype] = left[tensor.dtype].split(
            [len(tensor), len(left[tensor.dtype]) - len(tensor)]
        )
        tensor.add_(mine)

    monkeypatch.setattr(dist, "all_reduce", with_the_other)
    monkeypatch.setattr(sharding, "BUCKET", bucket)
    sum_gradients(weights.values())
    found = {name: None if p.grad is None else p.grad.tolist() for name, p in weights.items()}
    assert found == {"a": [[2.0] * 3] * 2, "b": [0, 1, 2, 3], "c": [13, 23], "d": None}
    assert all(len(rest) == 0 for rest in left.values())


@pytest.fixture
def lockstep(monkeypatch):
    """Of one module; `others` says what the other process wants at each meeting."""
    monkeypatch.setattr(dist, "new_group", lambda backend: None)
    module = nn.Linear(2, 2, bias=False)
    made, others = Lockstep({"denoiser": module}), []
    monkeypatch.setattr(made, "_gather", lambda wanted: [wanted, others.pop(0)])
    return SimpleNamespace(made=made, module=module, others=others)


KIND = kind_of_call(((torch.ones(1, 2),), {}))
CALL = ModuleCall(0, 0, True, KIND).number(1)
FROZEN = ModuleCall(0, 0, False, KIND).number(1)


def test_a_call_is_numbered_and_known_by_its_number():
    kinds = (0, 1, CALL_KINDS - 1)
    every = [
        ModuleCall(m, p, graded, kind)
        for m in range(3)
        for p in range(4)
        for graded in (False, True)
        for kind in kinds
    ]
    numbers = [wanted.number(3) for wanted in every]
    assert len({*numbers}) == len(every) and min(numbers) > BACKWARD
    assert [ModuleCall.of(number, 3) for number in numbers] == every


def test_company_is_kept_with_the_smallest_inputs_and_counts_for_nothing(lockstep):
    seen = []
    lockstep.module.register_forward_hook(lambda module, given, out: seen.append(len(given[0])))
    lockstep.others += [CALL, CALL, CALL, CALL, BACKWARD]
    for rows in (3, 1, 5):  # in step
        out = lockstep.module(torch.ones(rows, 2))
    assert lockstep.made.company == 0
    lockstep.others[:] = [CALL, FROZEN, BACKWARD]
    lockstep.made.backward(out.sum())
    assert lockstep.made.company == 2 and len(lockstep.made.kept) == 0
    weight = lockstep.module.weight
    assert torch.equal(weight.grad, torch.full((2, 2), 5.0))  # of the five rows alone
    assert seen == [3, 1, 5]  # hooks are of the module; company calls its forward


def test_company_remembers_the_smallest_inputs_and_none_that_are_empty(lockstep):
    rows = []
    forward = lockstep.made._forwards[0]
    lockstep.made._forwards[0] = lambda x: rows.append(len(x)) or forward(x)
    lockstep.others += [CALL] * 3
    for count in (3, 0, 2):
        lockstep.module(torch.ones(count, 2))
    lockstep.others[:] = [CALL, DONE]
    lockstep.made.settle()
    assert rows == [3, 0, 2, 2]


def test_a_kind_is_what_decides_on_the_weights_and_no_size():
    """LTX-2 switches the attention between video and sound off, SD3 leaves out layers, and some
    calls have images."""
    x, y = torch.ones(2, 3), torch.ones(5, 4)
    same = [
        {"x": x, "isolate": False, "layers": None, "width": 4, "share": 0.5},
        {"x": y, "isolate": False, "layers": None, "width": 8, "share": 0.1},
    ]
    other = [
        same[0] | {"isolate": True},
        same[0] | {"layers": [0]},
        same[0] | {"layers": [1]},
        same[0] | {"x": None},
        same[0] | {"images": x},
        same[0] | {"rows": [x, y]},
    ]
    first, again, *others = (kind_of_call(((), named)) for named in (*same, *other))
    assert first == again and len({first, *others}) == len(other) + 1
    assert others[-1] == kind_of_call(((), same[0] | {"rows": [x, y, y]}))


def test_company_is_kept_with_inputs_of_the_same_kind(lockstep):
    """Else one process's gradients would be of other weights than the other's, and the sums over
    processes would not fit."""
    calls = []
    lockstep.made._forwards[0] = lambda x, isolate: calls.append((len(x), isolate)) or x.sum()
    kinds = [kind_of_call(((torch.ones(1),), {"isolate": isolate})) for isolate in (False, True)]
    numbers = [ModuleCall(0, 0, True, kind).number(1) for kind in kinds]
    lockstep.others += [numbers[0], numbers[1]]
    lockstep.module(torch.ones(3), isolate=False)
    lockstep.module(torch.ones(2), isolate=True)
    lockstep.others[:] = [*numbers, ModuleCall(0, 0, True, 7).number(1), DONE]
    lockstep.made.settle()
    assert calls[2:] == [(3, False), (2, True), (2, True)]  # of an unknown kind: the smallest


def test_company_is_kept_under_the_weights_of_the_call(lockstep):
    """The other process asks its reference; here the pieces of that policy have to be in force."""
    put = []
    policies = SimpleNamespace(names=("current", "ref"), inside="current", put=put.append)
    lockstep.others += [FROZEN, ModuleCall(0, 1, False, KIND).number(1), DONE]
    lockstep.made.weights = policies
    with torch.no_grad():
        lockstep.module(torch.ones(1, 2))
    lockstep.made.settle()
    assert put == ["ref", "current"]


def test_one_that_waits_at_the_end_goes_backward_with_the_others(lockstep):
    lockstep.others += [CALL, BACKWARD, DONE]
    lockstep.module(torch.ones(1, 2))
    lockstep.made.settle()
    assert lockstep.others == [] and lockstep.module.weight.grad is None


def test_a_failure_elsewhere_ends_whatever_one_waits_for(lockstep):
    lockstep.others += [FAILED, FAILED]
    with pytest.raises(Elsewhere):
        lockstep.made.settle()
    with pytest.raises(Elsewhere):
        lockstep.module(torch.ones(1, 2))
