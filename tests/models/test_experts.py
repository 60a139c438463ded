"""Of two denoisers the one that is not called rests, and nothing reads it there."""

import pytest
import torch
from torch import nn

from flowrl.errors import UserError
from flowrl.models.before_weights import check_before_weights
from flowrl.models.diffusers.memory import experts
from flowrl.models.diffusers.memory.experts import CPU, RestingExperts
from flowrl.session.learner import load_policy
from flowrl.settings import RunSettings
from flowrl.settings.read import run_from
from tests.support import runs
from tests.support.advice import advice

DEVICE = torch.device("cpu:0")  # another name than CPU: stands for a GPU


class Places:
    """Stands for two memories: weights that rest hold NaN, and each move is recorded."""

    def __init__(self) -> None:
        self.away: dict[int, torch.Tensor] = {}
        self.moves = 0

    def moved(self, tensor: torch.Tensor, device: torch.device) -> None:
        self.moves += 1
        if device == CPU:
            assert id(tensor) not in self.away, "it rests already"
            self.away[id(tensor)] = tensor.data
            tensor.data = torch.full_like(tensor.data, torch.nan)
        else:
            tensor.data = self.away.pop(id(tensor))


@pytest.fixture
def places(monkeypatch) -> Places:
    made = Places()
    monkeypatch.setattr(experts, "move_weight", made.moved)
    return made


class Denoiser(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.blocks = nn.ModuleList(nn.Linear(3, 3).requires_grad_(False) for _ in range(2))
        self.lora = nn.Parameter(torch.randn(3, 3))  # what is trained

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for block in self.blocks:
            x = torch.tanh(block(x @ self.lora)) * self.scale
        return (x,)


def pair() -> dict[str, Denoiser]:
    return {"transformer": Denoiser(0), "transformer_2": Denoiser(1)}


def gradients(both: dict[str, Denoiser]) -> list[torch.Tensor]:
    """A sampling pass, a call without gradients, and two graphs that wait at once."""
    high, low = both.values()
    x = torch.linspace(-1, 1, 6).view(2, 3)
    with torch.no_grad():
        first = high(x)[0] + low(x)[0] + high(x)[0]
        frozen = low(x)[0]
    mixed = torch.cat([high(x)[0], low(x)[0]])
    with torch.no_grad():
        again = high(x)[0]
    mixed.square().sum().backward()
    low(x)[0].sum().backward()
    return [first, frozen, mixed.detach(), again, high.lora.grad, low.lora.grad]


def test_numbers_are_the_same_and_one_expert_rests(places):
    plain, both = gradients(pair()), pair()
    made = RestingExperts.of(both, DEVICE)
    assert [each.awake for each in made.experts] == [False, False]
    for a, b in zip(plain, gradients(both), strict=True):
        assert torch.equal(a, b)
    assert [each.awake for each in made.experts] == [False, True]
    assert not [each.graded for each in made.experts if each.graded]
    assert not both["transformer"].lora.isnan().any()  # what is trained stays
    assert not both["transformer"].scale.isnan().any()  # it says where the module runs
    assert both["transformer"].blocks[0].weight.isnan().all()


def test_an_expert_is_moved_only_when_the_other_is_called(places):
    both = pair()
    RestingExperts.of(both, DEVICE)
    places.moves, x = 0, torch.ones(1, 3)
    with torch.no_grad():
        for _ in range(3):
            both["transformer"](x)
        assert places.moves == 4  # weights and biases of two layers
        both["transformer_2"](x)
    assert places.moves == 12


def test_a_graph_that_waits_keeps_its_expert(places):
    both = pair()
    made, x = RestingExperts.of(both, DEVICE), torch.ones(1, 3)
    value = both["transformer"](x)[0]
    both["transformer_2"](x)[0].sum().backward()
    assert all(each.awake for each in made.experts)
    value.sum().backward()
    assert not both["transformer"].lora.grad.isnan().any()
    with torch.no_grad():
        both["transformer_2"](x)
    assert not made.experts[0].awake


def test_one_denoiser_is_refused():
    with pytest.raises(UserError, match=r"offload_experts: .* one denoiser \(transformer\)"):
        RestingExperts.of({"transformer": Denoiser(0)}, DEVICE)


@pytest.mark.slow
def test_a_pipeline_with_one_denoiser_is_loaded_without_the_setting(pipeline, tmp_path):
    """Before weights and at the load, whichever comes first."""
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    offloaded = run_from(tree | {"model": {**tree["model"], "offload_experts": True}}, "test")
    plain = run_from(tree, "test")

    def loaded(run: RunSettings) -> None:
        load_policy(run, CPU)

    for step in (check_before_weights, loaded):
        advice(
            "model.offload_experts: the pipeline has only one denoiser ({}), which every step "
            "calls: leave it out",
            lambda step=step: step(offloaded),
            lambda step=step: step(plain),
        )
