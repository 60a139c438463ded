"""Keys and values written behind each other: the same numbers as transformers' own layer, and few
copies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from flowrl.models.language.growing_cache import GrowingLayer, growing_cache
from tests.support import tiny_lm

ROWS, HEADS, WIDTH = 4, 2, 3
ops = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 3)),
        st.tuples(st.just("crop"), st.integers(1, 2)),
        st.tuples(st.just("take"), st.integers(0, 100)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
    ),
    max_size=30,
)


@given(ops, st.integers(0, 2**31))
def test_the_states_are_those_of_the_dynamic_layer(steps, seed):
    draw = torch.Generator().manual_seed(seed)
    layers = (GrowingLayer(30), DynamicLayer())
    for name, size in [("add", 5), *steps]:
        rows = layers[1].keys.shape[0] if layers[1].is_initialized else ROWS
        if name == "add":
            new = [torch.randn(rows, HEADS, size, WIDTH, generator=draw) for _ in range(2)]
        for layer in layers:
            if name == "add":
                found = layer.update(*new)
                assert found[0] is layer.keys and found[1] is layer.values
            elif name == "crop" and layer.get_seq_length() > size:
                layer.crop(-size)
            elif name == "take":
                layer.batch_select_indices(torch.arange(rows)[size % rows :])
            elif name == "repeat" and rows < 16:
                layer.batch_repeat_interleave(size)
        assert torch.equal(layers[0].keys, layers[1].keys)
        assert torch.equal(layers[0].values, layers[1].values)
        assert layers[0].get_seq_length() == layers[1].get_seq_length()


def test_two_views_do_not_share_what_comes_after_them():
    """A cropped copy of a layer's states that somebody kept is not overwritten by chance: rows that
    were selected have memory of their own."""
    layer = GrowingLayer(9)
    layer.update(torch.zeros(2, 1, 4, 1), torch.zeros(2, 1, 4, 1))
    layer.update(torch.ones(2, 1, 1, 1), torch.ones(2, 1, 1, 1))
    layer.batch_select_indices(torch.tensor([1]))
    before = layer.rooms[0]
    layer.update(torch.full((1, 1, 1, 1), 2.0), torch.full((1, 1, 1, 1), 2.0))
    assert layer.rooms[0].data_ptr() != before.data_ptr()
    assert layer.keys.flatten().tolist() == [0, 0, 0, 0, 1, 2] and before[1, 0, 5].item() != 2


def test_memory_is_reserved_anew_only_when_it_is_full():
    layer, places = GrowingLayer(300), set()
    layer.update(torch.zeros(1, 1, 16, 1), torch.zeros(1, 1, 16, 1))
    for _ in range(240):
        places.add(layer.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))[0].data_ptr())
    assert layer.get_seq_length() == 256
    assert len(places) <= 6 and layer.rooms[0].shape[-2] <= 300


@pytest.mark.parametrize("window", [None, 4])
def test_sliding_windows_are_left_as_they_are(window):
    config = tiny_lm.llama().config
    if window is not None:
        config.layer_types = ["sliding_attention", "full_attention"]
        config.sliding_window = window

    class Model:
        pass

    model = Model()
    model.config = config
    kinds = [type(layer).__name__ for layer in growing_cache(model, 9).layers]
    first = "GrowingLayer" if window is None else "DynamicSlidingWindowLayer"
    assert kinds == [first, "GrowingLayer"]
