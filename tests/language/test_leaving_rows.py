"""Rows that have ended leave a call of `generate`: the same tokens, in fewer positions."""

import pytest
import torch

from flowrl.models.language import generation
from flowrl.models.language.generation import Generation, rows_can_leave
from flowrl.models.language.stop_texts import StopTexts
from samplers.generate import TokenRequest
from samplers.noise import row_keys
from tests.support import tiny_lm

ROWS, LENGTH = 24, 50


class Counted:
    """Rows and new positions of every forward call."""

    def __init__(self, model):
        self.calls: list[tuple[int, int]] = []
        model.base_model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, _module, _args, named):
        self.calls.append(tuple(named["input_ids"].shape))

    @property
    def positions(self) -> int:
        return sum(rows * width for rows, width in self.calls)


class Past:
    """An event of a device that computes at once."""

    def __init__(self, **_):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass


def request(tokenizer, **settings) -> TokenRequest:
    prompts = ["a:", "cab :", "bead :", "a :"]
    contexts = [tokenizer(prompts[row % 4]).input_ids for row in range(ROWS)]
    noise = row_keys([(0, row) for row in range(ROWS)])
    room = torch.tensor([LENGTH - row % 5 for row in range(ROWS)])
    return TokenRequest(contexts, noise, room, 1.0, **({"top_p": 1.0} | settings))


def drawn(monkeypatch, leaving: bool, texts=(), **settings):
    model, tokenizer = tiny_lm.llama(), tiny_lm.tokenizer()
    model = model.double()
    if not leaving:
        monkeypatch.setattr(generation, "rows_can_leave", lambda _: False)
    heard = Counted(model)
    stop = StopTexts(texts, tokenizer) if texts else None
    made = Generation(model, [tokenizer.eos_token_id], None, stop)(request(tokenizer, **settings))
    monkeypatch.undo()
    return made, heard


def rows_of(made):
    for row, length in enumerate(made.lengths.tolist()):
        yield (
            row,
            [None if c is None else c[row, :length] for c in (made.ids, made.logp, made.spread)],
        )


@pytest.mark.quick_cases("plain", "stop text")
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"top_p": 0.9, "spread": True}, {"texts": ("ab",)},
        {"first": 7, "begun": torch.ones(ROWS, dtype=torch.long), "texts": ("ba",)},
    ],
    ids=["plain", "kept", "stop text", "begun"],
)  # fmt: skip
def test_tokens_are_those_of_rows_that_stay(monkeypatch, settings):
    stay, all_of_them = drawn(monkeypatch, False, **settings)
    leave, fewer = drawn(monkeypatch, True, **settings)
    assert torch.equal(stay.lengths, leave.lengths) and torch.equal(stay.stopped, leave.stopped)
    assert stay.lengths.unique().numel() > 5, "rows end at different places"
    for (row, mine), (_, theirs) in zip(rows_of(leave), rows_of(stay), strict=True):
        assert torch.equal(mine[0], theirs[0]), row
        torch.testing.assert_close(mine[1], theirs[1], atol=1e-10, rtol=0)
        if mine[2] is not None:
            torch.testing.assert_close(mine[2], theirs[2], atol=1e-10, rtol=0)
    if stay.kept is not None:
        there = torch.arange(stay.ids.shape[1]) < stay.lengths[:, None]
        own = [each.kept[there.nonzero(as_tuple=True)].mask(14) for each in (stay, leave)]
        assert torch.equal(*own)
    sizes = [rows for rows, _ in fewer.calls]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 1
    assert fewer.positions < 0.8 * all_of_them.positions
    assert {rows for rows, _ in all_of_them.calls} == {ROWS}


def test_short_texts_and_few_rows_stay(monkeypatch):
    model, tokenizer = tiny_lm.llama(), tiny_lm.tokenizer()
    heard = Counted(model)
    asked = request(tokenizer)
    sample = Generation(model, [tokenizer.eos_token_id])
    sample(asked.take(torch.arange(4)))
    assert {rows for rows, _ in heard.calls} == {4}
    heard.calls.clear()
    short = request(tokenizer)
    sample(TokenRequest(short.contexts, short.noise, short.room.clamp(max=15), 1.0, 1.0))
    assert {rows for rows, _ in heard.calls} == {ROWS}


@pytest.mark.skipif(
    "DeferredStopCheck" not in vars(generation.generating), reason="of transformers 5.23"
)
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9, "spread": True, "texts": ("ab",)}])
def test_a_cache_that_continues_has_no_token_beyond_the_end(monkeypatch, settings):
    """As on CUDA: whether rows have ended is read one token late."""
    plain, calls = drawn(monkeypatch, True, **settings)
    late = generation.read_late
    monkeypatch.setattr(generation, "read_late", lambda _: late(torch.device("cuda")))
    monkeypatch.setattr(torch, "Event", Past)  # the CPU has none
    deferred, more = drawn(monkeypatch, True, **settings)
    assert more.positions > calls.positions, "it was read late"
    assert torch.equal(plain.lengths, deferred.lengths)
    assert torch.equal(plain.stopped, deferred.stopped)
    for (row, mine), (_, theirs) in zip(rows_of(deferred), rows_of(plain), strict=True):
        assert torch.equal(mine[0], theirs[0]), row
        torch.testing.assert_close(mine[1], theirs[1], atol=1e-10, rtol=0)


def test_models_with_states_are_not_cut():
    model = tiny_lm.llama()
    assert rows_can_leave(model)
    model._is_stateful = True
    assert not rows_can_leave(model)
