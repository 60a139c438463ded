"""Metrics of an update are brought to the CPU together: transfers do not grow with the chunks."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.iteration.tally import Tally

# operations that wait for a GPU to return a number or a size
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}


class CountedTransfers(TorchDispatchMode):
    """Counts operations after which a GPU's queue is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, index = func._schema.name, args[1] if len(args) > 1 else ()
        by_mask = name == "aten::index" and any(
            each is not None and each.dtype == torch.bool for each in index
        )
        self.count += name in WAITING or by_mask
        return func(*args, **(kwargs or {}))


def chunks(count: int):
    draw = torch.Generator().manual_seed(0)
    for _ in range(count):
        values = torch.randn(3, 4, generator=draw)
        yield values, torch.rand(3, 4, generator=draw) < 0.7


def test_the_count_sees_what_waits():
    with CountedTransfers() as counted:
        values = torch.arange(4.0)
        float(values.sum())
        values[values > 1]
    assert counted.count == 2


def test_adding_metrics_waits_for_nothing_and_sums_are_as_they_were():
    tally = Tally()
    with CountedTransfers() as counted:
        for values, mask in chunks(20):
            tally.add("ratio", values, mask)
            tally.add("loss", values[:, :1], mask)
    assert counted.count == 0
    tally.settle()
    total = 0.0
    for values, mask in chunks(20):
        total += float(values.double()[mask].sum())
    kept = torch.cat([values.double()[mask] for values, mask in chunks(20)])
    assert tally.sums["ratio"] == total and tally.counts["ratio"] == len(kept)
    assert tally.highest["ratio"] == float(kept.max())
    assert tally.lowest["ratio"] == float(kept.min()) and not tally.waiting


def test_an_empty_mask_has_no_mean():
    tally = Tally()
    tally.add("loss", torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool))
    assert "loss" not in tally.means()
