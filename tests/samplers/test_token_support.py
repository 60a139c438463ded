"""Kept tokens come back as they were, whatever is done to their positions, in little memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.budget.successes import cut, put
from samplers.completions import Completions, Forking, Forks, Segments
from samplers.token_support import TokenSupport, joined_kept
from samplers.tokens import pack, token_support
from tests.language.test_sampling_rules import PROMPTS, policy


def masks(seed: int, rows: int, vocabulary: int) -> torch.Tensor:
    """Rows with no, few and most of the tokens."""
    draw = torch.Generator().manual_seed(seed)
    share = torch.tensor([0.0, 0.02, 0.4, 1.0])[torch.randint(4, (rows, 1), generator=draw)]
    return torch.rand(rows, vocabulary, generator=draw) < share


@settings(max_examples=30)
@given(st.integers(1, 200), st.integers(0, 9), st.integers(0, 2**32))
def test_sets_come_back(vocabulary, rows, seed):
    mask = masks(seed, rows, vocabulary)
    assert torch.equal(TokenSupport.of(mask).mask(vocabulary), mask)


@settings(max_examples=30)
@given(st.integers(1, 200), st.integers(0, 2**32))
def test_positions_may_be_chosen_repeated_joined_written_and_forgotten(vocabulary, seed):
    mask, other = masks(seed, 6, vocabulary), masks(seed + 1, 4, vocabulary)
    kept, more = TokenSupport.of(mask), TokenSupport.of(other)
    index = torch.tensor([5, 0, 0, 3])
    again = kept[index]
    assert again.pool is kept.pool and torch.equal(again.mask(vocabulary), mask[index])
    whole = joined_kept([again, more, kept])
    want = torch.cat([mask[index], other, mask])
    assert torch.equal(whole.mask(vocabulary), want)
    put = kept.put((torch.tensor([1, 4]),), more[torch.tensor([2, 0])])
    want = mask.clone()
    want[[1, 4]] = other[[2, 0]]
    assert torch.equal(put.mask(vocabulary), want)
    there = torch.tensor([True, False, True, True])
    some = again.only(there)
    assert torch.equal(some.mask(vocabulary), mask[index] & there[:, None])
    once = TokenSupport.of(mask[[5, 0, 3]] & there[[0, 2, 3], None])  # row 0 is stored once
    assert len(some.pool) == len(once.pool)


def test_memory_is_that_of_the_kept_tokens_and_never_more_than_bits():
    """At 152,000 entries: 12 bytes per token of a text, and 4 per token that was kept."""
    vocabulary, kept = 151_936, 40
    logp = torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    few = TokenSupport.of(token_support(logp, 1.0, kept, 0.0))
    assert few.memory == 8 * (12 + 4 * kept)
    flat = TokenSupport.of(token_support(logp, 0.95, 0, 0.0))
    assert flat.memory == 8 * (12 + vocabulary // 8)


@pytest.mark.parametrize(
    "plan",
    [
        Completions(6, top_p=0.8),
        Segments(2, 2, (2, 4), top_p=0.8),
        Forks(2, Forking(1, 2, 1, "entropy"), top_p=0.8),
    ],
)
def test_texts_keep_the_sets_of_their_own_distributions(plan):
    """Each token's set is the one of a plain call of the model, and trunks are stored once."""
    made = policy()
    batch = made.open(PROMPTS, [], 7)
    (found,) = batch.rollouts(plan, range(4), seed=0, iteration=0)
    vocabulary = made.model.config.vocab_size
    sets = found.kept.mask(vocabulary)
    assert not sets[~found.written].any()
    for row in (0, len(found.ids) - 1):
        context = batch.contexts[int(found.prompt[row])]
        for t in range(int(found.lengths[row])):
            ids = torch.tensor([[*context, *found.ids[row, :t].tolist()]])
            with torch.no_grad():
                logp = made.model(ids).logits[0, -1:].log_softmax(-1)
            assert torch.equal(sets[row, t], token_support(logp, 0.8, 0, 0.0)[0])
    stored = int(found.kept.counts[found.own].abs().sum())  # here both forms may occur
    assert len(found.kept.pool) == stored
    if not isinstance(plan, Completions):  # all leaves of a trunk refer to its sets
        assert stored < int(found.kept.counts.abs().sum())


@pytest.mark.parametrize("older", [False, True])
def test_a_replayed_completion_has_its_sets_also_from_older_checkpoints(older):
    """Checkpoints before these sets held a bit per entry of the vocabulary."""
    made = policy()
    batch = made.open(PROMPTS, [], 7)
    plan = Completions(3, top_p=0.8)
    first, second = (batch.rollouts(plan, range(4), seed=s, iteration=0)[0] for s in (0, 1))
    vocabulary = made.model.config.vocab_size
    pieces = cut(first, 5)
    if older:
        names = [name for name in pieces if name.startswith(".kept.")]
        assert len([pieces.pop(name) for name in names]) == 3
        pieces[".kept"] = pack(first.kept.mask(vocabulary)[5])
    found = put(second, {2: pieces})
    want = second.kept.mask(vocabulary)
    want[2] = first.kept.mask(vocabulary)[5]
    assert torch.equal(found.kept.mask(vocabulary), want)
    assert torch.equal(found.ids[2], first.ids[5]) and torch.equal(found.ids[3], second.ids[3])
