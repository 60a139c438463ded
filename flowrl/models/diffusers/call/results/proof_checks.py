"""Conditions on a pipeline's own call under which our samplers can replace its scheduler."""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import NotFiniteError, UserError
from flowrl.models.diffusers.call.drive.received import Received

MOST_CHANNELS = 8  # of a sound: 7.1 has the most that files of sound have in common use


class NotFinitePartError(NotFiniteError):
    """A weight, or a decoder's output, is NaN or infinite."""


def check_listed_steps(owner: str, levels: Sequence[float] | None, steps: int) -> None:
    """UserError for another number of steps than that of the levels which a pipeline lists."""
    if levels is not None and len(levels) != steps:
        shown_levels = ", ".join(f"{level:g}" for level in levels)
        raise UserError(
            f"{owner} was distilled for the {len(levels)} levels {shown_levels}, not for {steps} "
            f"steps: set recipe.steps and evaluate.steps to {len(levels)}, or other levels by "
            "model.sigmas"
        )


def check_states(
    owner: str, records: Sequence[Received], steps: int, visits: int, rows: int
) -> None:
    """Check that there is one state per prompt and as many steps as scheduled."""
    if len(records) != visits:
        raise UserError(
            f"{owner} calls scheduler.step {len(records)} times in {steps} steps, but its loop "
            f"{visits} times: pipelines with several states or loops cannot be driven"
        )
    seen = {len(tensor) for step in records for tensor in (step.sample, step.output)}
    if seen != {rows}:
        raise UserError(
            f"{owner} steps {sorted(seen)} states for {rows} prompts: pipelines with several "
            "states or loops cannot be driven"
        )


def finite(owner: str, parts: Mapping[str, Any], predicted: Sequence[Tensor]) -> None:
    """If a prediction is not finite, raise UserError naming the first weight that is not."""
    if all(bool(values.isfinite().all()) for values in predicted):
        return
    refuse_weights(owner, parts)
    modules = [part for part in parts.values() if isinstance(part, nn.Module)]
    if any(weight.dtype == torch.float16 for part in modules for weight in part.parameters()):
        raise UserError(
            f"{owner} predicts NaN or infinity, though its weights are finite: use model.dtype: "
            "float32 or bfloat16"
        )
    raise UserError(
        f"{owner} predicts NaN or infinity, though its weights are finite: lower guidance, or "
        "leave arguments out of `call`"
    )


def refuse_weights(owner: str, parts: Mapping[str, Any]) -> None:
    """UserError that names the first weight that is not finite, if any."""
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    for name, module in modules.items():
        for place, weight in chain(module.named_parameters(), module.named_buffers()):
            if weight.is_floating_point() and not bool(weight.isfinite().all()):
                raise NotFinitePartError(
                    f"{owner}: the tensor {name}.{place} has NaN or infinity: load the model's "
                    "files again, in another dtype if it was converted"
                )


def unbroken(owner: str, records: Sequence[Received]) -> str | None:
    """Why a loop is not a chain of steps: it changes its state between them. UserError for a loop
    with several states."""
    for step, (received, after) in enumerate(pairwise(records)):
        assert received.following is not None
        shapes = tuple(received.following.shape), tuple(after.sample.shape)
        if shapes[0] != shapes[1]:
            raise UserError(
                f"{owner} steps several states in turn (of shapes {shapes[0]} and {shapes[1]}), "
                "but our samplers have only one"
            )
        away = largest_difference(received.following.to(after.sample.dtype), after.sample)
        if away != 0:
            return (
                f"{owner} changes its state between steps (by {away:.3g} after step {step}), and "
                "not as inpainting does; our samplers would skip this change"
            )
    return None


def coloured(owner: str, media: Tensor) -> None:
    """Raise UserError for media that no reward can score."""
    if media.ndim not in (4, 5) or media.shape[-3] != 3:
        raise UserError(
            f"{owner} returns {tuple(media.shape)} for {len(media)} prompts: rewards need RGB, "
            "[n 3 h w] or [n f 3 h w]"
        )


def check_waveforms(owner: str, waveform: Tensor) -> None:
    """Raise UserError for waveforms that no reward can score."""
    if waveform.ndim != 3 or not 1 <= waveform.shape[1] <= MOST_CHANNELS:
        raise UserError(
            f"{owner} returns {tuple(waveform.shape)} for {len(waveform)} prompts: rewards need "
            f"waveforms [n channels time] of at most {MOST_CHANNELS} channels"
        )


def shown(media: Tensor) -> bool:
    """Whether pixels are in 0..1, as far as rounding goes."""
    return -1e-3 <= float(media.min()) <= float(media.max()) <= 1.001


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference; infinite if shapes differ or a value is NaN."""
    if ours.shape != theirs.shape:
        return float("inf")
    away = (ours.float() - theirs.float().to(ours.device)).abs().max()
    return float("inf") if bool(away.isnan()) else away.item()
