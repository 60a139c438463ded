"""Keyed tokens: noise has its law, the warp is transformers', bits and trees keep their own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from samplers import tokens
from samplers.completions import Completions, SegmentPoints, Segments, TextRollout
from samplers.noise import row_keys
from samplers.picture import describe_text_plan
from samplers.tokens import entropy, gumbel, nucleus, pack, unpack, warp


def rows(n: int) -> torch.Tensor:
    return row_keys([(0, 0, 0, "token", i) for i in range(n)])


def test_the_noise_is_gumbel():
    """Kolmogorov-Smirnov over 200,000 draws against exp(-exp(-x)); and the mean is Euler's."""
    noise = gumbel(rows(200), 3, 1000).double().flatten().sort().values
    law = torch.exp(-torch.exp(-noise))
    steps = torch.arange(1, len(noise) + 1) / len(noise)
    assert (law - steps).abs().max() < 1.63 / len(noise) ** 0.5  # the 1 % point
    assert abs(noise.mean() - 0.5772156649) < 4 * 1.2825 / len(noise) ** 0.5
    assert noise.isfinite().all()


def test_the_noise_of_rows_positions_and_tokens_is_unrelated():
    noise = torch.stack([gumbel(rows(400), position, 50) for position in (0, 1, 2)], 1).double()
    noise = (noise - noise.mean()) / noise.std()
    for shifted in (noise.roll(1, 0), noise.roll(1, 1), noise.roll(1, 2)):
        assert abs((noise * shifted).mean()) < 4 / noise.numel() ** 0.5


def test_a_row_s_noise_depends_on_nothing_but_its_key_position_and_token():
    several = gumbel(rows(5), 7, 30)
    assert torch.equal(several[2:3], gumbel(rows(5)[2:3], 7, 30))
    assert torch.equal(several[:, :20], gumbel(rows(5), 7, 20))
    assert not torch.equal(several, gumbel(rows(5), 8, 30))


def by_steps(integers: torch.Tensor) -> torch.Tensor:
    """The noise of 40-bit integers, one rounding after another."""
    share = (integers.float() + 0.5) * 2.0**-40
    return -torch.log(-torch.log1p((-share).clamp(min=2.0**-24 - 1)))


def test_the_noise_has_the_bits_of_its_formula(monkeypatch):
    """A hash by Python's own integers, and then the formula step by step, also at the ends."""

    def hashed(key: int, counter: int) -> int:
        z = (key + counter * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) >> 24

    keys, position, words = rows(3), 5, 4000
    integers = [
        [hashed(key, position * 2**20 + token + 1) for token in range(words)]
        for key in keys.tolist()
    ]
    assert torch.equal(gumbel(keys, position, words), by_steps(torch.tensor(integers)))
    ends = torch.cat([torch.arange(70_000), 2**40 - 1 - torch.arange(70_000)])
    monkeypatch.setattr(tokens, "mixed_", lambda z: z)
    assert torch.equal(tokens._gumbel(ends << 24), by_steps(ends))


def test_tokens_are_drawn_with_their_probabilities():
    logp = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01]).log()
    drawn = (logp + gumbel(rows(40_000), 0, 5)).argmax(1)
    counts = torch.bincount(drawn, minlength=5).double()
    want = logp.exp().double() * 40_000
    assert ((counts - want).square() / want).sum() < 13.28  # chi-square, 4 degrees, the 1 % point


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 0.9), (1.0, 0.5), (1.3, 0.05)])
def test_the_warp_is_transformers(temperature, top_p):
    torch.manual_seed(0)
    logits = 3 * torch.randn(50, 40)
    theirs = TopPLogitsWarper(top_p)(None, TemperatureLogitsWarper(temperature)(None, logits))
    kept = nucleus(warp(logits, temperature), top_p)
    torch.testing.assert_close(warp(logits, temperature, kept), theirs.log_softmax(-1))


def test_entropy_counts_only_what_is_kept():
    logp = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    assert entropy(logp)[0].item() == pytest.approx(1.5 * torch.tensor(2.0).log().item())


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_bits_come_back(vocabulary, seed):
    kept = torch.rand(3, 2, vocabulary, generator=torch.Generator().manual_seed(seed)) < 0.5
    assert pack(kept).shape == (3, 2, -(-vocabulary // 8))
    assert torch.equal(unpack(pack(kept), vocabulary), kept)


def levels(length: int) -> list[float]:
    return [1 - k / length for k in range(length + 1)]


def test_a_tree_is_a_reshape_and_every_token_is_counted_once():
    (plan,) = Segments(2, 2, (2, 3))(levels(6), 0, 0)
    assert plan.nodes == (2, 4, 8) and plan.group == 8 and plan.columns.nodes == (2, 4, 8)
    assert plan.tokens == 2 * 2 + 4 * 1 + 8 * 3
    lengths = torch.full((8,), 6)
    ids = torch.zeros(8, 6, dtype=torch.int64)
    logp = -torch.arange(8.0)[:, None].expand(8, 6)
    rollout = TextRollout(
        plan, ids, logp, lengths, lengths > 6, None, torch.zeros(8, dtype=torch.int64), (0,), 0, 0,
        0, SegmentPoints(), lengths > 6,
    )  # fmt: skip
    assert rollout.point[0].tolist() == [0, 0, 1, 2, 2, 2]
    assert int(rollout.own.sum()) == plan.tokens
    assert rollout.own[:, 0].tolist() == [True, False, False, False, True, False, False, False]
    assert rollout.own[:, 2].tolist() == [True, False] * 4
    assert [edge.logp.tolist() for edge in rollout.edges] == [
        [0, -4], [0, -2, -4, -6], [-i for i in range(8)]
    ]  # fmt: skip


def test_a_plan_tells_itself():
    assert "8 completions of at most 5 tokens" in describe_text_plan(
        Completions(8)(levels(5), 0, 0)
    )
    assert "segment 1: tokens 2 to 4, 4 nodes" in describe_text_plan(
        Segments(2, 2, (2,))(levels(5), 0, 0)
    )
