"""Process the rows of a batch in calls of bounded size, with results in the original row order."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from flowrl.models.diffusers.call.inputs.columns import Extra, by_image
from flowrl.models.diffusers.call.inputs.conditioning import Conditioning
from flowrl.models.diffusers.call.levels.schedule import Way
from flowrl.models.diffusers.call.results.decoder import Decoded
from rewards.audio import Audio
from samplers import Velocity
from samplers.host import on_host, picked, sent

Encode = Callable[[Sequence[str], Sequence[Extra]], Conditioning]
Evaluate = Callable[[Tensor, Tensor, Conditioning, Way], Tensor]  # x, sigma -> v


def rows_by_call(
    sigma: torch.Tensor,
    extras: Sequence[Extra],
    *,
    mixed: bool,
    size: int,
    together: Sequence[str] = (),
) -> list[torch.Tensor]:
    """Group rows by call: same images, one sigma unless `mixed`, and at most `size` rows.

    For the columns `together`, rows with images of the same form share a call.
    """
    alike = by_image(extras, together) if extras else [list(range(len(sigma)))]
    groups = [torch.tensor(rows, dtype=torch.long) for rows in alike]
    if not mixed and len(sigma):
        sigmas, place = torch.unique(sigma.detach().cpu(), return_inverse=True)
        levels = range(len(sigmas) - 1, -1, -1)  # falling, as a loop
        groups = [rows[place[rows] == i] for i in levels for rows in groups]
    return [part for group in groups if len(group) for part in group.split(size)]


def encoded_in_calls(
    encode: Encode, prompts: Sequence[str], extras: Sequence[Extra], size: int
) -> Conditioning:
    """Encode prompts in calls of at most `size` rows that share their images."""
    if not extras and len(prompts) <= size:
        return encode(prompts, ())
    groups = by_image(extras) if extras else [list(range(len(prompts)))]
    chunks = [g[i : i + size] for g in groups for i in range(0, len(g), size)]
    parts: list[Conditioning] = []
    for rows in chunks:
        row_extras = [extras[i] for i in rows] if extras else ()
        parts.append(encode([prompts[i] for i in rows], row_extras))
    if len(parts) == 1:  # all rows, in their order
        return parts[0]
    order = torch.tensor([i for rows in chunks for i in rows]).argsort()
    return Conditioning.cat(parts).take(order)


def velocity_in_calls(
    evaluate: Evaluate,
    conditioning: Conditioning,
    way: Way,
    most: Callable[[int], int],
    dtype: torch.dtype,
) -> Velocity:
    """(x [n *d], sigma [n], prompt [n]) -> v [n *d] in `dtype`, with gradients.

    `prompt` are rows of the conditioning; `most` maps the number of rows to the limit per call.
    """
    extras, take = conditioning.extras, conditioning.take

    def velocity(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        chosen = [extras[i] for i in on_host(prompt).tolist()] if extras else []
        size = most(len(sigma))
        if way.mixed and not chosen and len(sigma) <= size:
            return evaluate(x, sigma, take(prompt), way).to(x.device, dtype)
        levels = on_host(sigma)
        groups = rows_by_call(levels, chosen, mixed=way.mixed, size=size, together=way.together)
        if len(groups) == 1:  # all rows, in their order
            return evaluate(x, sigma, take(prompt), way).to(x.device, dtype)
        parts: list[Tensor] = []
        for rows in groups:
            at = sent(rows, x.device)
            own_rows = picked(prompt, rows if prompt.device == rows.device else at)
            v = evaluate(x[at], picked(sigma, at), take(own_rows), way)
            parts.append(v.to(x.device, dtype))
        return torch.cat(parts)[sent(torch.argsort(torch.cat(groups)), x.device)]

    return velocity


def decoded_in_calls(
    decode: Callable[[Tensor, Conditioning], Decoded],
    x0: Tensor,
    conditioning: Conditioning,
    size: int,
    together: Sequence[str],
    *,
    graded: bool,
) -> Decoded:
    """Decode x0 [n *d] in calls of at most `size` rows. Without gradients no part is held in memory
    twice."""
    extras = conditioning.extras
    if not extras and len(x0) <= size:
        return decode(x0, conditioning)
    zero = torch.zeros(len(x0))
    groups = rows_by_call(zero, extras, mixed=True, size=size, together=together)
    parts = (decode(x0[sent(rows, x0.device)], conditioning.take(rows)) for rows in groups)
    return _in_order(groups, parts, graded)


def _in_order(groups: Sequence[Tensor], parts: Iterator[Decoded], graded: bool) -> Decoded:
    """Rows of all groups in their original order."""
    first = next(parts)
    if len(groups) == 1:
        return first
    if graded or first.sound_alone:
        order = torch.argsort(torch.cat(list(groups)))
        return Decoded.joined([first, *parts]).take(order)
    count, sounds = sum(map(len, groups)), list[Audio]()
    whole = first.media.new_empty(count, *first.media.shape[1:])
    for rows, part in zip(groups, chain([first], parts), strict=True):
        whole[sent(rows, whole.device)] = part.media
        sounds += [] if part.audio is None else [part.audio]
    if not sounds:
        return Decoded(whole)
    return Decoded(whole, Audio.joined(sounds).take(torch.argsort(torch.cat(list(groups)))))
