"""Replay of successes: a prompt whose samples all fail learns from an earlier success.

ARPO (arXiv:2505.16282) and others. A success keeps its part of the rollout, with everything that a
likelihood reads: tokens or states, and the log-probabilities under the policy that sampled it. So
the ratio to that policy is right, however old the success is; losses clip it as usual.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplers.completions import TextRollout
from samplers.token_support import TokenSupport, joined_kept
from samplers.tokens import unpack

RowChange = Callable[[str, Any], Any]  # (name, tensor or kept tokens) -> the same kind
_RENAMED = {  # columns of checkpoints before 0.2
    ".told": ".points.from_environment",
    ".from_environment": ".points.from_environment",
    ".states": ".points.states",
    ".rewards": ".points.rewards",
    ".begins": ".points.begins",
    ".common": ".points.common",
}
_OF_DRAW = ("prompt", "plan", "replayed")  # fields that a success does not bring along
Pieces = dict[str, Tensor]  # a sample's part of every tensor of a rollout, on the CPU


class Success(NamedTuple):
    """A successful sample of one prompt under one plan: `scores` [r], a mask of the scores that
    exist, and a mask of the rewards that apply, all in a checkpoint of an older version."""

    scores: Tensor
    scored: Tensor
    pieces: Pieces
    abstained: Tensor | None = None


def signature(rollout: Any) -> str:
    """A key of the plan: samples of different plans cannot replace each other."""
    return hashlib.blake2b(repr(rollout.plan).encode(), digest_size=8).hexdigest()


def cut(rollout: Any, sample: int) -> Pieces:
    pieces: Pieces = {}

    def keep(name: str, rows: Any) -> Any:
        row = rows[sample]
        if isinstance(row, TokenSupport):
            row = row.only(row.counts != 0).to("cpu")
            pieces.update({f"{name}.{part.name}": getattr(row, part.name) for part in fields(row)})
        else:
            pieces[name] = row.detach().cpu().clone()
        return rows

    _changed(rollout, len(rollout.prompt), keep)
    return pieces


def put(rollout: Any, pieces: Mapping[int, Pieces]) -> Any:
    """The rollout with these samples in place of its own (marked in text rollouts); their prompts
    stay."""

    def swap(name: str, rows: Any) -> Any:
        if isinstance(rows, TokenSupport):
            return _swapped(rows, {at: _kept(parts, name) for at, parts in pieces.items()})
        rows = rows.clone()
        for sample, parts in pieces.items():
            rows[sample] = parts[name].to(rows)
        return rows

    changed = _changed(rollout, len(rollout.prompt), swap) if pieces else rollout
    if not isinstance(changed, TextRollout):
        return changed
    replayed = changed.replayed.clone()
    replayed[list(pieces)] = True
    return replace(changed, replayed=replayed)


def _kept(parts: Pieces, name: str) -> TokenSupport:
    """A sample's kept tokens. Older checkpoints store one bit per vocabulary entry."""
    if name in parts:
        return TokenSupport.of(unpack(parts[name], 8 * parts[name].shape[-1]))
    return TokenSupport(*(parts[f"{name}.{part.name}"] for part in fields(TokenSupport)))


def _swapped(rows: TokenSupport, samples: Mapping[int, TokenSupport]) -> TokenSupport:
    device, index = rows.counts.device, torch.arange(len(rows.counts))
    index[list(samples)] = len(index) + torch.arange(len(samples))
    added = [support.mapped(lambda part: part[None]).to(device) for support in samples.values()]
    return joined_kept([rows, *added])[index.to(device)]


def _changed(value: Any, n: int, change: RowChange, name: str = "") -> Any:
    """`value` with every tensor of n rows changed, also in nested fields, but not `_OF_DRAW`."""
    if isinstance(value, TokenSupport):
        return change(name, value)
    if isinstance(value, Tensor):
        return change(name, value) if value.ndim and len(value) == n else value
    if type(value) is tuple:
        return tuple(_changed(part, n, change, f"{name}.{i}") for i, part in enumerate(value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    names = [f.name for f in fields(value) if f.name not in _OF_DRAW]
    parts = {f: _changed(getattr(value, f), n, change, f"{name}.{f}") for f in names}
    return replace(value, **parts)


@dataclass
class Successes:
    """A store of at most `most` successes, one per prompt and plan; the oldest are dropped first.
    It is the same on all processes."""

    most: int
    kept: dict[tuple[int, str], Success] = field(default_factory=dict)

    def of(self, prompt: int, plan: str) -> Success | None:
        return self.kept.get((prompt, plan))

    def add(self, prompt: int, plan: str, success: Success) -> None:
        self.kept.pop((prompt, plan), None)  # the newest stand last
        self.kept[prompt, plan] = success
        while len(self.kept) > self.most:
            self.kept.pop(next(iter(self.kept)))

    def state(self) -> list[Any]:
        return [[*key, *success] for key, success in self.kept.items()]

    def restore(self, state: list[Any]) -> None:
        self.kept = {(row[0], row[1]): _renamed(Success(*row[2:])) for row in state}


def _renamed(success: Success) -> Success:
    """A checkpoint's success, whose columns may have the names of an earlier version."""
    return success._replace(pieces={_RENAMED.get(k, k): v for k, v in success.pieces.items()})
