"""Checks for NaN and infinity in samples, scores, losses, weights, averages and files."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowrl.errors import UserError
from flowrl.likelihoods.rows import Rows
from flowrl.models.policy import RolloutLike
from flowrl.models.shards import local_shard
from samplers import Rollout

Named = Iterable[tuple[str, Tensor]]
# a loss that is not finite is no error of its own where its optimizer step was skipped
_METRICS = {"reward": "the reward", "reward_std": "the reward's spread", "loss": "the loss"}


class NotFiniteError(UserError):
    """NaN or infinity that a run cannot continue from. A run turns it into `Stopped`, exit 3."""


def refuse(what: str, plural: bool = False) -> NoReturn:
    raise NotFiniteError(
        f"{what} {'are' if plural else 'is'} not finite (NaN or infinity); lower train.lr or use "
        "model.dtype: float32"
    )


@torch.no_grad()
def first_not_finite(named: Named) -> str | None:
    """Name the first tensor that holds NaN or infinity. One synchronization for all of them."""
    names: list[str] = []
    flags: list[Tensor] = []
    for name, tensor in named:
        values = local_shard(tensor.detach())
        if values.numel() and values.is_floating_point():
            least, most = torch.aminmax(values)  # keeps NaN, needs no copy, and is fast on a CPU
            names.append(name)
            flags.append(least.isfinite() & most.isfinite())
    if not flags:
        return None
    finite = torch.stack([flag.to(flags[0].device) for flag in flags])
    return None if finite.all() else names[int((~finite).nonzero()[0])]


def check_samples(rollout: RolloutLike, media: object, place: str) -> None:
    """Check latents, which decoders may hide, and media. NotFiniteError names `place`."""
    if isinstance(rollout, Rollout) and first_not_finite([("x0", rollout.x0)]):
        refuse(f"the latents of the samples of {place}", plural=True)
    parts = media if isinstance(media, list | tuple) else [media]
    if first_not_finite([("media", part) for part in parts if isinstance(part, Tensor)]):
        refuse(f"the samples of {place}", plural=True)


def check_iteration(
    rows: Iterable[Rows], weights: Named, metrics: Mapping[str, float], iteration: int
) -> None:
    """End an iteration: one reduction on each process, one exchange of verdicts, and all processes
    raise the same NotFiniteError or none. `metrics` are those of all processes."""
    for name, what in _METRICS.items():
        skipped = name == "loss" and metrics["skipped"] > 0
        there = name in metrics  # an iteration whose groups are all flat has no loss
        if there and not skipped and not math.isfinite(metrics[name]):
            refuse(f"{what} of iteration {iteration}")
    tensors = [*_sampled(rows), *((f"the {name}", weight) for name, weight in weights)]
    verdicts = gather_object([first_not_finite(tensors)])
    name = next((verdict for verdict in verdicts if verdict is not None), None)
    if name is not None:
        refuse(f"{name} after iteration {iteration}")


def _sampled(rows: Iterable[Rows]) -> Iterator[tuple[str, Tensor]]:
    """Stored log-probabilities of what is trained on."""
    for part in rows:
        if part.old is not None:
            stored = part.old.logp.expand(part.mask.shape)[part.mask]
            yield "a log-probability of the samples", stored
