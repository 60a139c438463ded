"""Counted operations beside formulas by hand, beside real calls, and over the public table."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flowrl.errors import UserError
from flowrl.estimate import flops, sizes
from flowrl.estimate.devices import parse_devices
from flowrl.estimate.time import at_work, estimate_time, iteration_work, time_report
from flowrl.models.description import Description, describe
from flowrl.models.public_configs import PUBLIC_MODELS
from flowrl.session.learner import load_policy
from flowrl.settings import PipelineSettings
from flowrl.settings.read import run_from
from tests.support import runs, text_runs, tiny_lm
from tests.support.tiny_pipelines import NAMED

FAMILIES = ("SD3", "FLUX.1", "Wan 2.1", "HunyuanVideo", "SDXL")


@pytest.mark.quick_cases("SD3")
@pytest.mark.parametrize(
    "family",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("SD3", "SDXL"))) for n in FAMILIES],
)
def test_the_count_is_that_of_a_real_call(family: str, tmp_path: Path) -> None:
    """One evaluation of the driven pipeline with tiny weights, guidance rows and all."""
    NAMED[family].build().save_pretrained(tmp_path / "pipe")
    tree = runs.tree(tmp_path / "pipe", tmp_path, runs.NFT)
    guidance = {"sample": 3.0, "train": 3.0}
    tree["model"] |= {"call": NAMED[family].call, "lora": None, "guidance": guidance}
    run = run_from(tree, "test")
    policy = load_policy(run, torch.device("cpu"))
    batch = policy.open(["a red ball"], [{}], 4)
    velocity = batch.policy
    x, sigma = torch.randn(1, *policy.shape(4)), torch.tensor([policy.schedule(4).sigmas[1]])
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        velocity(x, sigma, torch.zeros(1, dtype=torch.long))
    described = describe(run.model)
    assert described is not None
    count = flops.pipeline_flops(described, run.model, 4)
    assert count is not None and count.counted
    assert count.trained == pytest.approx(counter.get_total_flops(), rel=0.02)


class Block(torch.nn.Module):
    """A product, attention, and two kernels that are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8, device="meta")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        heads = functional.gelu(self.linear(hidden_states)).view(1, 5, 2, 4).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, heads, heads)
        return attended.transpose(1, 2).reshape(5, 8) + hidden_states


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 2), (torch.float32, 4)])
def test_kernels_are_counted_with_the_bytes_that_they_move(dtype: torch.dtype, size: int) -> None:
    """gelu reads and writes 40 numbers, the sum reads twice 40 and writes 40; attention, by its
    formula on the meta device, is one kernel; the reshape after it is a copy there of 40."""
    operations, kernels = flops.counted(
        Block(), dtype, hidden_states=torch.empty(5, 8, device="meta")
    )
    assert operations == 2 * 5 * 8 * 8 + 2 * 2 * 2 * 5 * 5 * 4 == kernels.operations
    copied = kernels.launched - 4  # whether attention's output lies as the reshape wants it
    assert copied in (0, 1)
    assert kernels.moved == size * (2 * 40 + 3 * 40 + copied * 2 * 40)


def public(name: str, **call: Any) -> tuple[Description, PipelineSettings]:
    model = PipelineSettings(pipeline=name, height=512, width=512, call=call)
    found = PUBLIC_MODELS[name]
    return Description(found.pipeline, found.configs, found.counts, public=True), model


@pytest.mark.slow
def test_flux_is_counted_as_by_hand() -> None:
    """FLUX.1: 19 double and 38 single blocks of width d over n image and t text tokens."""
    described, m = public("black-forest-labs/FLUX.1-dev")
    n, t, d = 32 * 32, 512, 3072
    linears = 19 * (n + t) * (4 + 8) * d * d + 38 * (n + t) * (3 + 4 + 5) * d * d
    attention = 57 * (n + t) ** 2 * d
    ends = n * (64 * d + d * 64) + t * 4096 * d
    by_hand = 2 * (linears + ends) + 4 * attention
    count = flops.pipeline_flops(described, m, 4)
    assert count is not None and count.state == pytest.approx(by_hand, rel=0.002)
    tokens = sizes.RowShape.of(described, m).tokens
    assert tokens == n
    assert flops.formula(described.first, n, t) == pytest.approx(count.state, rel=0.005)


@pytest.mark.slow
def test_the_public_table_has_the_published_numbers_of_weights() -> None:
    wanted = {
        "stabilityai/stable-diffusion-3.5-medium": 2_243_171_520,
        "black-forest-labs/FLUX.1-dev": 11_901_408_320,
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1_418_996_800,
        "hunyuanvideo-community/HunyuanVideo": 12_821_012_544,
        "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    }
    for name, weights in wanted.items():
        found = PUBLIC_MODELS[name]
        described = Description(found.pipeline, found.configs, found.counts, public=True)
        model = described.first if found.pipeline else described.language_model()
        assert sum(p.numel() for p in model.parameters()) == weights
        if found.pipeline:
            vae = described.component("vae")
            assert sum(p.numel() for p in vae.parameters()) == found.counts["vae"]


def test_an_iteration_counts_as_the_run_does(pipeline: Path, tmp_path: Path) -> None:
    """The counts that tests/run/test_run.py measures, and those of pairs and of two updates."""
    pairs = {"name": "dpo", "steps": 4, "group": 4, "levels_per_sample": 2}
    cases = [
        (runs.NFT, {}, (32, 16, 32)),
        (runs.FLOW_GRPO, {}, (32, 24, 24)),
        (runs.FLOW_GRPO, {"recompute_old": True, "updates": 2}, (32, 24, 36)),
        (pairs, {}, (32, 8, 8)),
    ]
    for recipe, train, wanted in cases:
        work = iteration_work(run_from(runs.tree(pipeline, tmp_path, recipe, **train), "test"))
        assert (work.sampling, work.training, work.frozen) == wanted, recipe["name"]
        assert work.samples == 8


@pytest.mark.slow
def test_seconds_follow_from_the_count(pipeline: Path, tmp_path: Path) -> None:
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    tree["model"] |= {"dtype": "bfloat16"}
    run, devices = run_from(tree, "test"), parse_devices("2xH100")
    found = estimate_time(run, devices, 0.5)
    assert found is not None
    state = found.count.state
    assert found.phases["sampling"] == pytest.approx(32 * state / (2 * 989.4e12 * 0.5))
    assert found.phases["training"] == pytest.approx((24 * 2 + 24) * state / (2 * 989.4e12 * 0.5))
    full = run_from(
        {
            **tree,
            "model": tree["model"] | {"lora": None},
            "train": {"gradient_checkpointing": True},
        },
        "test",
    )
    other = estimate_time(full, devices, 0.25)
    assert other is not None  # 4 passes with checkpointing, and half the speed
    ratio = other.phases["training"] / found.phases["training"]
    assert ratio == pytest.approx(2 * (24 * 4 + 24) / (24 * 2 + 24))
    assert at_work(16, 8, 1) == 8 and at_work(1, 8, 1) == 1 and at_work(9, 8, 1) == 4.5
    assert at_work(2, 8, 4) == 8  # four devices share each call
    said = time_report(run, devices, 0.5)
    assert (
        "on 2 x H100 at 50% of 989 TFLOP/s in bfloat16" in said and "not included: text enc" in said
    )


def test_texts_are_counted_too(tmp_path: Path) -> None:
    folder = tiny_lm.write(tmp_path / "model")
    run = run_from(text_runs.tree(folder, tmp_path, text_runs.GRPO), "test")
    described = describe(run.model)
    assert described is not None
    count = flops.text_flops(described, 6, torch.float32)
    model = described.language_model()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    tokens = sizes.PROMPT + 6
    by_hand = sum(2 * tokens * m.in_features * m.out_features for m in linears)
    by_hand += 2 * 4 * tokens**2 * 16  # layers, products of queries and keys and of values, width
    assert count.counted and count.state == pytest.approx(by_hand)
    found = estimate_time(run, parse_devices("RTX 4090"), 0.4)
    assert found is not None and found.phases["sampling"] > 0


def test_devices_are_read_or_refused() -> None:
    assert parse_devices("8xH100")[:2] == (8, "H100") and parse_devices("4090").name == "RTX-4090"
    assert parse_devices("2 x NVIDIA GeForce RTX 3090")[:2] == (2, "RTX-3090")
    for wrong in ("8xH1000", "0xH100", "gpu", ""):
        with pytest.raises(UserError, match="--devices: "):
            parse_devices(wrong)
