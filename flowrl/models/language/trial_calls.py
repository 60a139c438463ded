"""Calls as large as a run's largest calls, to measure their GPU memory at the start."""

from collections.abc import Sequence
from typing import Any

import torch

from flowrl.likelihoods.rows import TokenRows
from flowrl.models.language.token_scores import ScoringPolicy


@torch.no_grad()
def trial_sampling(model: Any, context: Sequence[int], steps: int, rows: int) -> None:
    """Fill the cache of `rows` texts with a context and `steps` tokens, in one call."""
    text = [*context, *[context[-1]] * steps]
    ids = torch.tensor([text], device=model.device).expand(rows, -1)
    model(input_ids=ids, use_cache=True, logits_to_keep=1)


def trial_training(policy: ScoringPolicy, steps: int, rows: int) -> None:
    """Evaluate `rows` completions of `steps` tokens with gradients."""
    (context,) = policy.contexts
    policy(trial_rows(context, rows, steps)).logp.sum().backward()


def trial_rows(context: Sequence[int], rows: int, steps: int) -> TokenRows:
    """Completions of a policy's first context, which repeat its last token."""
    written = torch.ones(rows, steps, dtype=torch.bool)
    ids = torch.full((rows, steps), context[-1])
    prompt, lengths = torch.zeros(rows, dtype=torch.long), torch.full((rows,), steps)
    return TokenRows(
        prompt=prompt,
        advantage=torch.zeros(rows, steps),
        mask=written,
        old=None,
        ids=ids,
        lengths=lengths,
        temperature=1.0,
        kept=None,
    )
