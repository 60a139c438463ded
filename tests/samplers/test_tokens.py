"""Keyed tokens: noise and draws follow their laws, the warp is transformers', bits and trees keep
their own."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from samplers import tokens
from samplers.completions import Completions, SegmentPoints, Segments, TextRollout
from samplers.noise import row_keys
from samplers.picture import describe_text_plan
from samplers.tokens import (
    blocks_of,
    draw_tokens,
    entropy,
    nucleus,
    pack,
    token_noise,
    unpack,
    warp,
)


def rows(n: int) -> torch.Tensor:
    return row_keys([(0, 0, 0, "token", i) for i in range(n)])


def test_the_noise_is_exponential():
    """Kolmogorov-Smirnov over 200,000 numbers against 1 - exp(-x); and the mean is 1."""
    noise = token_noise(rows(200), 3, 999).double().flatten().sort().values
    law = 1 - torch.exp(-noise)
    steps = torch.arange(1, len(noise) + 1) / len(noise)
    assert (law - steps).abs().max() < 1.63 / len(noise) ** 0.5  # the 1 % point
    assert abs(noise.mean() - 1) < 4 / len(noise) ** 0.5
    assert noise.isfinite().all() and (noise > 0).all()


def test_the_noise_of_rows_positions_and_places_is_unrelated():
    noise = torch.cat([token_noise(rows(400), position, 600) for position in (0, 1, 2)]).double()
    noise = (noise - noise.mean()) / noise.std()
    blocks = blocks_of(600)[0]
    for shifted in (noise.roll(1, 0), noise.roll(1, 1), noise.roll(1, 2), noise.roll(blocks, 2)):
        assert abs((noise * shifted).mean()) < 4 / noise.numel() ** 0.5


def test_a_row_s_noise_depends_on_nothing_but_its_key_position_and_place():
    (several,) = token_noise(rows(5), 7, 30)
    assert torch.equal(several[2:3], token_noise(rows(5)[2:3], 7, 30)[0])
    assert not torch.equal(several, token_noise(rows(5), 8, 30)[0])
    ahead = token_noise(rows(5), 5, 30, most=4)
    assert len(ahead) == 4 and torch.equal(ahead[2], several)
    assert len(token_noise(rows(5), 5, 30, most=2**20)) < 2**20


def by_steps(integers: torch.Tensor) -> torch.Tensor:
    """The noise of 40-bit integers, one rounding after another."""
    share = (integers.float() + 0.5) * 2.0**-40
    return -torch.log1p((-share).clamp(min=2.0**-24 - 1))


def hashed(key: int, counter: int) -> int:
    """40 bits of SplitMix64, by Python's own integers."""
    z = (key + counter * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) >> 24


def test_the_noise_has_the_bits_of_its_formula(monkeypatch):
    """A hash by Python's own integers, and then the formula step by step, also at the ends."""
    keys, position, words = rows(3), 5, 2**20
    integers = [
        [hashed(key, position * 2**20 + place + 1) for place in range(2 * 2**10)]
        for key in keys.tolist()
    ]
    assert torch.equal(token_noise(keys, position, words)[0], by_steps(torch.tensor(integers)))
    ends = torch.cat([torch.arange(70_000), 2**40 - 1 - torch.arange(70_000)])
    monkeypatch.setattr(tokens, "mixed_", lambda z: z)
    assert torch.equal(tokens._exponential(ends << 24), by_steps(ends))


def chi_square_limit(degrees: int) -> float:
    """Its 1e-4 point, by Wilson and Hilferty."""
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3


VOCABULARIES = (1, 2, 3, 5, 12, 25, 67, 101, 143)


def laws(words: int) -> Iterator[torch.Tensor]:
    """Distributions over so many tokens: uneven, with tokens, blocks or all but one left out."""
    draw = torch.Generator().manual_seed(words)
    uneven = torch.rand(words, generator=draw, dtype=torch.float64) + 0.05
    yield uneven
    yield torch.ones(words, dtype=torch.float64)
    alone = torch.zeros(words, dtype=torch.float64)
    alone[words // 2] = 0.3
    yield alone
    if words > 2:
        size = blocks_of(words)[1]
        yield uneven.clone().index_fill_(0, torch.arange(size), 0.0)  # a block
        last = torch.arange(words - max(1, words % size), words)
        yield uneven.clone().index_fill_(0, last, 0.0)  # the last block, where it is not full
        yield uneven * (torch.rand(words, generator=draw, dtype=torch.float64) < 0.5).index_fill_(
            0, torch.tensor([words // 2]), True
        )


@pytest.mark.quick_cases("143", "25")
@pytest.mark.parametrize("words", VOCABULARIES)
def test_tokens_are_drawn_with_their_probabilities(words):
    """100,000 draws of each law by a chi-square test; what has no probability is never drawn."""
    noise = token_noise(rows(1000), 0, words, most=100)
    for position in range(len(noise), 100):
        noise = torch.cat([noise, token_noise(rows(1000), position, words)])
    noise = noise.flatten(0, 1)
    for law in laws(words):
        law = law / law.sum()
        drawn = draw_tokens(law.float().expand(len(noise), words), noise)
        counts = torch.bincount(drawn, minlength=words).double()
        assert len(counts) == words and counts[law == 0].sum() == 0
        want = law[law > 0] * len(noise)
        statistic = ((counts[law > 0] - want).square() / want).sum()
        assert len(want) == 1 or statistic < chi_square_limit(len(want) - 1), (law, counts)


def test_tokens_of_positions_and_rows_are_independent():
    """Pairs of tokens at neighbouring positions, and of neighbouring rows, fill their table."""
    law = torch.tensor([0.3, 0.2, 0.15, 0.15, 0.1, 0.1])
    noise = torch.cat([token_noise(rows(50_000), position, 6) for position in (0, 1)])
    first, second = (draw_tokens(law.expand(50_000, 6), part) for part in noise)
    want = (law[:, None] * law).double() * 50_000
    for one, other in ((first, second), (first, first.roll(1)), (first, second.roll(1))):
        counts = torch.bincount(6 * one + other, minlength=36).double().view(6, 6)
        assert ((counts - want).square() / want).sum() < chi_square_limit(35)


@pytest.mark.parametrize("words", [1, 2, 5, 30, 101, 1000, 1009])
def test_a_plain_loop_draws_the_same_tokens(words):
    """Exponentials of Python's own hash; the block that wins, then the token of it that wins."""
    keys, position = rows(6), 3
    draw = torch.Generator().manual_seed(words)
    logits = 4 * torch.randn(6, words, generator=draw)
    logits[1, : words // 2] = -torch.inf
    drawn = draw_tokens(logits.softmax(-1), token_noise(keys, position, words)[0])
    count, size = blocks_of(words)
    for row, key in enumerate(keys.tolist()):
        mass = [math.exp(value) for value in logits[row].tolist()]
        blocks = [mass[start : start + size] for start in range(0, words, size)]
        assert len(blocks) == count
        counter = position * 2**20 + 1
        noise = [
            -math.log1p(-(hashed(key, counter + place) + 0.5) / 2**40)
            for place in range(count + size)
        ]
        best = max(range(count), key=lambda b: sum(blocks[b]) / noise[b])
        within = blocks[best]
        token = max(range(len(within)), key=lambda t: within[t] / noise[count + t])
        assert int(drawn[row]) == best * size + token


def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should():
    """2,000 of 262,144 tokens have probability 1e-6 each: together 40 of 20,000 draws."""
    words, draws, part = 262_144, 20_000, 500
    rare = torch.arange(2000) * 131 + 7
    law = torch.full((words,), (1 - 2e-3) / (words - 2000))
    law[rare] = 1e-6
    drawn = torch.cat([
        draw_tokens(law.expand(part, words), token_noise(keys, 0, words)[0])
        for keys in rows(draws).split(part)
    ])  # fmt: skip
    found = int(torch.isin(drawn, rare).sum())
    assert abs(found - 40) < 4 * 40**0.5
    assert len(drawn.unique()) > draws * 0.95  # the others are as likely as each other


@pytest.mark.parametrize("words", [1000, 1009, 32_000])
def test_a_row_draws_alone_what_it_draws_among_others(words):
    logits = 3 * torch.randn(64, words, generator=torch.Generator().manual_seed(0))
    (noise,) = token_noise(rows(64), 2, words)
    together = draw_tokens(logits.softmax(-1), noise)
    for row in range(64):
        key = rows(64)[row : row + 1]
        alone = draw_tokens(logits[row : row + 1].softmax(-1), token_noise(key, 2, words)[0])
        assert alone.tolist() == [together[row].item()]


def test_blocks_are_near_the_root_and_need_no_copy_where_a_divisor_is_near():
    public = {151936: 128, 152064: 384, 128256: 334, 32000: 160, 262144: 512, 49152: 192, 50257: 29}
    for words, size in public.items():
        assert blocks_of(words) == (-(-words // size), size)
    for words in range(1, 3000):
        count, size = blocks_of(words)
        assert (count - 1) * size < words <= count * size
        assert count + size <= 1 + 9 * math.sqrt(words)


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
