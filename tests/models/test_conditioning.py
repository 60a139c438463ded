"""Rows of prompts, whatever encode_prompt returns."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from flowrl.errors import UserError
from flowrl.models.diffusers.call.inputs.conditioning import Conditioning, learn
from flowrl.models.diffusers.call.rows.encoding_cache import EncodingCache
from flowrl.models.diffusers.call.rows.row_calls import encoded_in_calls
from flowrl.models.diffusers.policy import PipelinePolicy
from tests.support.advice import advice
from tests.support.driving import PROMPTS, policy
from tests.support.tiny_pipelines import FAMILIES, SQUARE, qwen_image, sd3


def test_conditioning_rows_are_the_pipelines_own_encoding() -> None:
    made = policy(SQUARE | {"negative_prompt": "bad blurry"}, rows=1)
    conditioning = made.encode([*PROMPTS, PROMPTS[0]])
    assert len(conditioning) == 3
    theirs = sd3().encode_prompt(
        PROMPTS, PROMPTS, PROMPTS, negative_prompt="bad blurry", max_sequence_length=16
    )
    taken = conditioning.take(torch.tensor([2, 1]))
    for ours, expected in zip(taken.calls()[0], theirs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    both = Conditioning.cat([taken, conditioning.take([0])])
    assert len(both) == 3 and torch.equal(both.calls()[0][0][2], taken.calls()[0][0][0])
    with pytest.raises(IndexError):
        conditioning.take([3])


def test_lengths_are_padded_only_where_they_differ() -> None:
    """Qwen-Image leaves the mask out where nothing is padded; joining brings it back."""
    call = FAMILIES["qwen"][1] | {"max_sequence_length": 64}
    made = PipelinePolicy(qwen_image(), call=call, rows_per_call=1)
    joined = made.encode(PROMPTS)
    embeds, mask = joined.calls()[0]
    theirs, their_mask = qwen_image().encode_prompt(PROMPTS)
    torch.testing.assert_close(embeds, theirs, rtol=1e-5, atol=1e-6)
    assert mask.dtype == their_mask.dtype and torch.equal(mask, their_mask)
    assert made.encode([PROMPTS[0]] * 3).calls()[0][1] is None


def test_learn_takes_lists_and_refuses_what_has_no_rows() -> None:
    def lists(prompts: Any) -> tuple[Any, ...]:
        rows = [torch.full((len(p.split()), 2), float(len(p))) for p in prompts]
        return ((rows, None, torch.arange(3)),)

    layout = learn(lists, "Some")
    joined = Conditioning.cat(
        [Conditioning(layout, lists(p)[0], tuple(p)) for p in (["a b", "c"], ["d e f"])]
    )
    rows, nothing, same = joined.take([2, 0]).calls()[0]
    assert [len(row) for row in rows] == [3, 2] and nothing is None
    assert torch.equal(same, torch.arange(3))
    for bad in (
        lambda prompts: (torch.tensor([float(len(p)) for p in prompts for _ in range(2)]),),
        lambda prompts: (torch.zeros(4, len(prompts[0])),),
        lambda prompts: (len(prompts),),
    ):
        with pytest.raises(UserError, match="Some"):
            learn(bad, "Some")

    def unmasked(prompts: Any) -> tuple[Any, ...]:
        return (torch.zeros(len(prompts), max(len(p) for p in prompts), 3),)


def test_lengths_without_a_mask_need_one_call_or_one_length() -> None:
    """Calls of one row are those of a small train.rows_per_call, and of model.encodings."""

    def unmasked(prompts: Any) -> tuple[Any, ...]:
        return (torch.zeros(len(prompts), max(len(p) for p in prompts), 3),)

    layout = learn(unmasked, "Some")

    def encode(prompts: Sequence[str], _: Any) -> Conditioning:
        return Conditioning(layout, unmasked(prompts), tuple(prompts))

    def encoded(prompts: list[str], rows: int | None) -> Conditioning:
        if rows is None:
            kept = EncodingCache("cpu", 2**20)
            return kept.encode(encode, prompts, (), torch.device("cpu"))
        return encoded_in_calls(encode, prompts, (), rows)

    for rows in (1, None):
        for follow in (partial(encoded, ["a", "bc"], 2), partial(encoded, ["ab", "bc"], rows)):
            (values,) = advice(
                "tokens, and the pipeline returns no mask: encode them in one call (raise "
                "train.rows_per_call, and leave model.encodings out), or give prompts of one "
                "length in tokens",
                partial(encoded, ["a", "bc"], rows),
                follow,
            ).values
            assert values.shape == (2, 2, 3)


def test_rows_behind_one_another_are_taken_from_both_parts() -> None:
    """Negative prompts in front of prompts, in one tensor: InstructPix2Pix and older pipelines."""

    def both(prompts: Any) -> tuple[Any, ...]:
        lengths = torch.tensor([float(len(p)) for p in prompts])
        return (torch.cat([-lengths, lengths])[:, None],)

    layout = learn(both, "Some")
    assert layout.slots[0].blocks == 2
    parts = [Conditioning(layout, both(p), tuple(p)) for p in (["a", "bc"], ["def"])]
    joined = Conditioning.cat(parts)
    assert joined.calls()[0].flatten().tolist() == [-1, -2, -3, 1, 2, 3]
    taken = joined.take([2, 0])
    assert taken.calls()[0].flatten().tolist() == [-3, -1, 3, 1]
    assert taken.prompts == ("def", "a")
