"""Proofs at the start of a run: rows of a call do not change each other's predictions."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from flowrl.errors import UserError
from flowrl.models.language.generation import Generation
from flowrl.models.language.prefixes import Packing, refuse_moved
from flowrl.models.language.token_scores import ScoringPolicy
from flowrl.models.language.trial_calls import trial_rows
from flowrl.models.language.vision import PromptImages
from flowrl.models.precision import HALF

# How far padding may move the distribution of the next token, in total variation. Rounding alone
# moves that of SmolLM2-135M by 3e-6 in float32 and by 0.03 in bfloat16, where the log-probabilities
# of its unlikeliest tokens move by 0.5 nats.
PADDING_TOLERANCE, HALF_PADDING_TOLERANCE = 1e-4, 0.1


def check_room(
    prompts: Sequence[str], contexts: Sequence[Sequence[int]], steps: int, positions: int
) -> None:
    """UserError, naming the longest prompt, if one leaves no room for a completion of `steps`
    tokens in the model's `positions`."""
    long = [i for i, ids in enumerate(contexts) if len(ids) + steps > positions]
    if long:
        worst = max(long, key=lambda i: len(contexts[i]))
        text = prompts[worst]
        shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
        raise UserError(
            f"{len(long)} of {len(prompts)} prompts are too long: the model has "
            f"{positions} positions, a completion takes up to {steps}, and the prompt "
            f"{shown} has {len(contexts[worst])} tokens; remove such "
            "prompts, or lower recipe.length"
        )


def prove_padding(reader: ScoringPolicy, stop: Sequence[int]) -> str:
    """Compare a short and a long prompt, the reader's, in one call with each by itself."""
    model, contexts, images = reader.model, reader.contexts, reader.images
    with torch.no_grad():  # the plain call that `flowrl.processes.lockstep` may repeat
        reader(trial_rows(contexts[0], 1, 1))

    def distribution(rows: Sequence[int]) -> Tensor:
        shown = [images[i] for i in rows] if images else []
        return _next(model, stop, [contexts[i] for i in rows], shown).exp()

    rows = range(len(contexts))
    batches = [*([i] for i in rows), rows]
    *alone, beside = reader.calls(lambda _: [distribution(part) for part in batches], {})
    moved = float((beside - torch.cat(alone)).abs().sum(-1).max() / 2)
    name = type(model).__name__
    if not moved <= tolerance(model):
        raise UserError(
            f"left padding changes {name}'s next-token distribution by {moved:.1e} "
            "(total variation): set train.rows_per_call: 1"
        )
    return f"left padding changes {name}'s next-token distribution by {moved:.1e} (total variation)"


def prove_images(reader: ScoringPolicy, stop: Sequence[int], *, alone: bool = False) -> str:
    """Compare a prompt's next token as sampling computes it, from a cache and left padding, with
    the training's, from right padding. `alone`: each call has one row, without padding. UserError
    if they differ."""
    model, images = reader.model, reader.images
    row = next(i for i, image in enumerate(images) if image is not None)
    shown, context = [images[row]] * 2, reader.contexts[row]
    texts = [[*context], [*context, *(stop[:1] or context[-1:])]]  # pads the other on the right
    if alone:
        shown, texts = shown[:1], texts[:1]

    @torch.no_grad()
    def both_logits(_: Any) -> tuple[Tensor, Tensor]:
        sampled = _next(model, stop, texts[:1], shown[:1]).exp()[0]
        last = ScoringPolicy(model, (), True).last_states(texts, model.device, shown)
        return sampled, model.get_output_embeddings()(last[0, len(context) - 1])

    sampled, logits = reader.calls(both_logits, {})
    moved = float((logits.float().softmax(-1) - sampled).abs().sum() / 2)
    if not moved <= tolerance(model):
        raise UserError(
            f"model.language: {type(model).__name__} predicts differently in training and in "
            f"sampling if a prompt has images, by {moved:.1e} (total variation): its images "
            "cannot be used"
        )
    return (
        f"prompts have images; training and sampling predict the next token with a difference "
        f"of {moved:.1e} (total variation)"
    )


@torch.no_grad()
def prove_packing(reader: ScoringPolicy, steps: int) -> str:
    """Compare texts in one pack with the same texts by themselves."""
    model, separate_head = reader.model, reader.separate_head
    context = [*max(reader.contexts, key=len)]
    ends = [context[:4], context[:2] + context[-2:], context[-4:]]
    texts = [[*context, *end[:steps]] for end in ends]
    head = model.get_output_embeddings()

    def distributions(packing: Packing | None) -> Tensor:
        last = ScoringPolicy(model, (), separate_head, packing).last_states(texts, model.device)
        logits = torch.cat([last[i, : len(text)] for i, text in enumerate(texts)])
        return (head(logits) if separate_head else logits).float().softmax(-1)

    ways = (None, Packing(math.inf))
    predictions = reader.calls(lambda _: [distributions(packing) for packing in ways], {})
    moved = float((predictions[1] - predictions[0]).abs().sum(-1).max() / 2)
    refuse_moved(model, moved, tolerance(model))
    return (
        f"shared prefixes are evaluated once, which changes the next-token distribution of "
        f"{type(model).__name__} by {moved:.1e} (total variation)"
    )


def tolerance(model: Any) -> float:
    return HALF_PADDING_TOLERANCE if model.dtype in HALF else PADDING_TOLERANCE


@torch.no_grad()
def _next(
    model: Any,
    stop: Sequence[int],
    contexts: Sequence[Sequence[int]],
    images: Sequence[PromptImages | None],
) -> Tensor:
    """Log-probabilities of each context's next token [n v], from left-padded generation."""
    listener = _ScoreRecorder()
    Generation(model, stop).generated(contexts, listener, 1, images=images)
    return listener.scores[0].log_softmax(-1)


class _ScoreRecorder(LogitsProcessor):
    def __init__(self) -> None:
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        self.scores.append(scores)
        return scores
