"""Copies on the host of numbers that a device holds. The meta device stands for a GPU: what is read
back from it raises, so each of these reads is answered by a copy."""

import pytest
import torch

from samplers.host import derived, filled_rows, host_copy, on_device, on_host, picked, sent

DEVICE = "meta"


def test_a_tensor_of_the_cpu_is_its_own_copy():
    levels = torch.tensor([0.5, 0.25])
    assert on_host(levels) is levels and sent(levels, "cpu") is levels
    assert on_device(levels, "cpu") is levels


def test_what_was_sent_is_known():
    rows = torch.arange(6)
    there = sent(rows, DEVICE)
    assert there.device.type == DEVICE and on_host(there) is rows
    assert on_host(filled_rows(3, 0.5, torch.float32, DEVICE)).tolist() == [0.5] * 3
    assert on_host(picked(there, sent(torch.tensor([4, 1]), DEVICE))).tolist() == [4, 1]
    assert on_host(derived(lambda own: own + 2, there)).tolist() == [2, 3, 4, 5, 6, 7]


def test_what_nobody_sent_is_not_known():
    there = torch.empty(3, device=DEVICE)
    assert host_copy(there) is None and host_copy(derived(torch.neg, there)) is None
    with pytest.raises(NotImplementedError):  # a read that waits
        on_host(there)


def test_a_copy_is_forgotten_when_the_tensor_is_written_to_or_freed():
    there = sent(torch.arange(3), DEVICE)
    there += 1
    assert host_copy(there) is None
    again = sent(torch.arange(3), DEVICE)
    place = id(again)
    del again
    other = torch.empty(3, device=DEVICE)
    assert host_copy(other) is None, f"{id(other) == place}"
