"""Devices that a run can name."""

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from flowrl.errors import UserError
from flowrl.session.session import on_cpu, open_accelerator
from flowrl.settings.read import run_from
from tests.support import runs
from tests.support.advice import advice


def test_mps_has_no_float64(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    tree = runs.tree(tmp_path, tmp_path, runs.FLOW_GRPO)
    tree["model"] |= {"device": "mps"}
    assert not on_cpu(run_from(tree, "test"))
    tree["model"] |= {"dtype": "float64"}
    single = tree | {"model": tree["model"] | {"dtype": "float32"}}
    on_the_cpu = advice(
        "model.dtype: mps has no float64; set model.dtype: float32",
        lambda: on_cpu(run_from(tree, "test")),
        lambda: on_cpu(run_from(single, "test")),
    )
    assert not on_the_cpu


def test_a_process_keeps_to_its_first_device(monkeypatch, tmp_path):
    """accelerate would train the second run on the first one's device, in silence."""
    tree = runs.tree(tmp_path, tmp_path, runs.FLOW_GRPO)
    open_accelerator(run_from(tree, "test"), tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tree["model"] |= {"device": "cuda"}
    with pytest.raises(UserError, match=r"model\.device: cuda, but .* set this process up for cpu"):
        open_accelerator(run_from(tree, "test"), tmp_path)
    tree["model"] |= {"device": "cpu"}
    monkeypatch.setattr(PartialState(), "device", torch.device("cuda"))

    def in_a_new_process() -> str:
        for shared in (PartialState, AcceleratorState, GradientState):
            monkeypatch.setattr(shared, "_shared_state", {})  # which a process begins with
        return open_accelerator(run_from(tree, "test"), tmp_path).device.type

    kind = advice(
        "model.device: {}, but accelerate has set this process up for {}, and keeps to it; start "
        "a process for each device",
        lambda: open_accelerator(run_from(tree, "test"), tmp_path),
        in_a_new_process,
    )
    assert kind == "cpu"
