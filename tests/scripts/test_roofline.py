"""Least seconds of a GPU, counted on the meta device."""

import pytest
import torch

from flowrl.paths import run_file
from flowrl.settings.read import override, read_run
from scripts.benchmarks.roofline import ARMS, BANDWIDTH, PEAK, counted, iteration


def test_products_and_passes_are_counted_apart() -> None:
    a, b = (torch.empty(8, 16, 32, dtype=torch.bfloat16, device="meta") for _ in range(2))
    w = torch.empty(32, 64, device="meta", requires_grad=True)
    with counted() as seen:
        x = torch.nn.functional.scaled_dot_product_attention(query=a, key=b, value=b)
        y = x.float().view(-1, 32) @ w
        y.backward(torch.empty_like(y))
    products = 4 * 8 * 16 * 16 * 32 / PEAK[torch.bfloat16]
    products += 2 * 2 * 128 * 32 * 64 / PEAK[torch.float32]  # forward, and the weight's gradient
    assert seen.seconds.products == pytest.approx(products)
    cast = 8 * 16 * 32 * (2 + 4)
    assert seen.seconds.passes == pytest.approx(cast / BANDWIDTH)


@pytest.mark.slow
def test_an_iteration_is_counted_for_each_way_of_adapters() -> None:
    run = override(read_run(run_file("demo_lora")), {"model": {"dtype": "bfloat16"}})
    found = iteration(run)
    assert tuple(found) == ARMS and all(each.kernels > 1000 for each in found.values())
    base, float32, half = (found[name] for name in ("base", "float32", "bfloat16"))
    assert float32.products > half.products > base.products > 0
    assert float32.passes > half.passes > base.passes > 0
