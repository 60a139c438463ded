"""Texts are sorted by length before they are cut into calls of the update."""

import pytest
import torch

from flowrl.iteration.minibatches import MOST_TEXTS, PADDING, TextCalls


def cut(ends, most=16, length=1024, tokens=True, unit=1):
    index = torch.arange(len(ends))
    return TextCalls(most, length, tokens).of(index, index // unit, ends)


def mixed(count=64, seed=0):
    share = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return (1 + 1023 * share**4).long().tolist()


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("tokens", [True, False])
def test_every_row_is_in_one_call_and_units_stay_together(tokens, unit):
    ends = mixed()
    parts = cut(ends, tokens=tokens, unit=unit)
    assert sorted(torch.cat(parts).tolist()) == list(range(64))
    for part in parts:
        assert part.view(-1, unit).sub(part[::unit, None]).eq(torch.arange(unit)).all()
        longest, inputs = max(ends[row] for row in part), len(part) // unit
        assert inputs <= 16 or (longest + 64) * inputs <= 16 * (1024 + 64)
        assert inputs <= (MOST_TEXTS if tokens else 16)
    widths = [max(ends[row] for row in part) for part in parts]
    assert widths == sorted(widths, reverse=True)


def test_little_of_a_call_is_padding_and_most_of_one_in_the_order_of_draws_is():
    ends = mixed()
    parts = cut(ends)
    positions = sum(len(part) * max(ends[row] for row in part) for part in parts)
    before = sum(16 * max(ends[at : at + 16]) for at in range(0, 64, 16))
    assert sum(ends) / before < 0.3 and sum(ends) / positions > 0.8 and PADDING < 0.15


def test_texts_of_one_length_stay_in_their_order():
    parts = cut([48] * 40, most=16, length=48)
    assert [part.tolist() for part in parts] == [[*range(16)], [*range(16, 32)], [*range(32, 40)]]
