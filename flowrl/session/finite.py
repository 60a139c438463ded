"""Checks for NaN and infinity in samples, scores, losses, weights, averages and files."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NoReturn

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowrl.errors import NotFiniteError
from flowrl.likelihoods.rows import Rows
from flowrl.models.policy import RolloutLike
from rewards.audio import Audio

Named = Iterable[tuple[str, Tensor]]
# a loss that is not finite is no error of its own where its optimizer step was skipped
_METRICS = {"reward": "the reward", "reward_std": "the reward's spread", "loss": "the loss"}


# what weights that have grown too large would need
_SMALLER = "lower train.lr or use model.dtype: float32"
# a reward answers for itself: no learning rate changes what it returns for the same samples
_OF_REWARDS = "let each reward return a finite number, or None for a sample that it cannot score"


def refuse(quantity: str, plural: bool = False, fix: str = _SMALLER) -> NoReturn:
    raise NotFiniteError(
        f"{quantity} {'are' if plural else 'is'} not finite (NaN or infinity); {fix}"
    )


@torch.no_grad()
def first_not_finite(named: Named) -> str | None:
    """Name of the first tensor that contains NaN or infinity. Waits for a GPU once per device."""
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[str], list[Tensor]]] = {}
    finite: dict[str, bool] = {}  # in the order of the tensors
    for name, tensor in named:
        part = tensor.detach()
        if part.numel() and part.is_floating_point():
            names, parts = kinds.setdefault((part.device, part.dtype), ([], []))
            names.append(name)
            parts.append(part)
            finite[name] = True
    verdicts: dict[torch.device, tuple[list[str], list[Tensor]]] = {}
    for (device, _), (names, parts) in kinds.items():
        all_names, flags = verdicts.setdefault(device, ([], []))
        all_names.extend(names)
        flags.append(_largest(parts).isfinite())
    for names, flags in verdicts.values():
        for name, flag in zip(names, torch.cat(flags).tolist(), strict=True):
            finite[name] = finite[name] and flag
    return next((name for name, good in finite.items() if not good), None)


def _largest(values: list[Tensor]) -> Tensor:
    """The largest absolute entry of each tensor, or NaN if it contains one. All tensors have one
    device and dtype, so that a GPU reduces many in one kernel."""
    if values[0].device.type != "cpu":
        return torch.stack(list(torch._foreach_norm(values, math.inf)))  # type: ignore[reportPrivateImportUsage]
    ends = [torch.stack(torch.aminmax(value)) for value in values]  # needs no copy; fast on a CPU
    return torch.stack(ends).abs().amax(1)


def check_samples(rollout: RolloutLike, media: object, place: str) -> None:
    """Check media, and latents too, since decoders may hide their faults. NotFiniteError names
    `place`."""
    parts = media if isinstance(media, list | tuple) else [media]
    parts = [part.waveform if isinstance(part, Audio) else part for part in parts]
    named = [("the samples", part) for part in parts if isinstance(part, Tensor)]
    named = [("the latents of the samples", of_size.x0) for of_size in rollout.by_size] + named
    if (name := first_not_finite(named)) is not None:
        refuse(f"{name} of {place}", plural=True)


def check_iteration(
    rows: Iterable[Rows], weights: Named, metrics: Mapping[str, float], iteration: int
) -> None:
    """Check an iteration: one reduction per process and one exchange of results, after which all
    processes raise the same NotFiniteError or none. `metrics` cover all processes."""
    for name, quantity in _METRICS.items():
        skipped = name == "loss" and metrics["skipped"] > 0
        measured = name in metrics  # an iteration whose groups are all flat has no loss
        if measured and not skipped and not math.isfinite(metrics[name]):
            fix = _SMALLER if name == "loss" else _OF_REWARDS
            refuse(f"{quantity} of iteration {iteration}", fix=fix)
    verdicts = gather_object([first_not_finite(chain(_sampled(rows), weights))])
    name = next((verdict for verdict in verdicts if verdict is not None), None)
    if name is not None:
        refuse(f"{name} after iteration {iteration}")


def _sampled(rows: Iterable[Rows]) -> Iterator[tuple[str, Tensor]]:
    """Stored log-probabilities of the trained entries."""
    for part in rows:
        if part.old is not None:
            stored = part.old.logp.expand(part.mask.shape)
            yield "a log-probability of the samples", stored.masked_fill(~part.mask, 0.0)
