"""Training of the demos' models goes on after an interruption as if there had been none."""

import importlib

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def shared(monkeypatch):
    monkeypatch.syspath_prepend("scripts")
    module = importlib.import_module("pretraining")
    monkeypatch.setattr(module, "SAVED_EVERY", 2)
    return module


def trained(shared, path, broken_at: int | None = None, settings: str = "a") -> Tensor:
    torch.manual_seed(0)
    part = nn.Linear(3, 3)
    optimizers = shared.muon_and_adam([part.weight], part.parameters())
    calls = 0

    def loss() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == broken_at:
            raise KeyboardInterrupt
        return part(torch.randn(4, 3)).square().mean()

    shared.Flow([part], optimizers, 7, shared.Saved(path, settings)).train(loss)
    return torch.cat([p.detach().flatten() for p in part.parameters()])


def test_a_flow_goes_on_where_it_was_interrupted(shared, tmp_path):
    whole = trained(shared, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(shared, tmp_path / "new" / "broken", broken_at=6)
    assert (tmp_path / "new" / "broken").is_file()
    with pytest.raises(SystemExit, match="is unfinished with other settings"):
        trained(shared, tmp_path / "new" / "broken", settings="b")
    assert torch.equal(trained(shared, tmp_path / "new" / "broken"), whole)
    assert not (tmp_path / "new" / "broken").exists()


def test_files_beside_the_folder_have_its_whole_name(shared, tmp_path):
    each = [shared.PretrainArguments(tmp_path / name) for name in ("my-v1.5", "my-v1.6")]
    assert [given.beside(".png").name for given in each] == ["my-v1.5.png", "my-v1.6.png"]
    other = shared.PretrainArguments(tmp_path / "my-v1.5", seed=1).saved("work")
    assert other.path == each[0].saved("work").path
    assert len({other.settings, *(each[0].saved(w).settings for w in ("work", "quick"))}) == 3


def test_learning_rates_rise_and_fall(shared):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    (rate,) = shared.falling([optimizer], lambda share: 1 - share, 100, rise=10, least=0.2)
    seen = []
    for _ in range(100):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        rate.step()
    assert seen[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert seen[50] == pytest.approx(0.5)
    assert seen[-1] == 0.2
