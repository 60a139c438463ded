"""Devices that a run can name."""

import pytest
import torch

from flowrl.errors import UserError
from flowrl.run.state.session import on_cpu
from flowrl.settings.read import run_from
from tests.support import runs


def test_mps_has_no_float64(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    tree = runs.tree(tmp_path, tmp_path, runs.FLOW_GRPO)
    tree["model"] |= {"device": "mps"}
    assert not on_cpu(run_from(tree, "test"))
    tree["model"] |= {"dtype": "float64"}
    with pytest.raises(UserError, match=r"model\.dtype: mps has no float64"):
        on_cpu(run_from(tree, "test"))
