"""Least seconds of a GPU, counted on the meta device."""

import pytest
import torch

from scripts.benchmarks.roofline import BANDWIDTH, PEAK, counted


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
