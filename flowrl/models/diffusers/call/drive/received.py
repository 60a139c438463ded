"""Arguments of a scheduler's `step`, and values that stand in its lists of times and levels."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.errors import UserError
from samplers.layout import Layout

MAIN_SCHEDULER = "scheduler"  # the component that steps a state, or its first part


class Received(NamedTuple):
    """Arguments of one `scheduler.step`, and its result in the pipeline's own call."""

    output: Tensor
    timestep: Any
    sample: Tensor
    following: Tensor | None = None
    # `sample` as the denoiser sees it: some schedulers scale it (Euler-discrete), most do not
    state: Tensor | None = None
    # the scheduler's own prediction of the clean sample, in its first step, where it returns one
    clean: Tensor | None = None
    more: Mapping[str, Any] = {}  # the other arguments of the step (eta)
    scheduler: str = MAIN_SCHEDULER  # the component that was asked
    times: Sequence[Any] = ()  # of the parts, if there are several

    @classmethod
    def joined(cls, parts: Sequence["Received"]) -> "Received":
        """Join rows that were called one at a time."""
        first = parts[0]
        return first._replace(
            output=torch.cat([part.output for part in parts]),
            sample=torch.cat([part.sample for part in parts]),
            following=_joined([part.following for part in parts]),
            state=_joined([part.state for part in parts]),
            clean=_joined([part.clean for part in parts]),
        )

    @classmethod
    def packed(cls, parts: Sequence["Received"], owner: str, rows: int) -> "Received":
        """One step of several states, whose parts a loop steps in turn, with a row per sample.

        UserError if one scheduler steps them at different times, or if they have other rows. Parts
        that schedulers of their own step have times of their own.
        """
        parts = [part.folded(rows) for part in parts]
        first = parts[0]
        shown = [torch.as_tensor(part.timestep).cpu() for part in parts]
        same = [
            t for part, t in zip(parts, shown, strict=True) if part.scheduler == first.scheduler
        ]
        if not all(torch.equal(time, shown[0]) for time in same):
            raise UserError(
                f"{owner} steps its states at different times in one step ({shown}): our samplers "
                "have one list of levels for all"
            )
        if len({len(part.sample) for part in parts}) > 1:
            raise UserError(f"{owner} steps states of different numbers of rows in one step")
        return first._replace(
            times=tuple(part.timestep for part in parts),
            output=Layout.pack([part.output for part in parts]),
            sample=Layout.pack([part.sample for part in parts]),
            following=_packed([part.following for part in parts]),
            state=_packed([part.state for part in parts]),
            clean=_packed([part.clean for part in parts]),
        )

    def folded(self, rows: int) -> "Received":
        """One row per sample: some loops step the frames of all videos as rows."""
        if len(self.output) == len(self.sample) == rows:
            return self
        return self._replace(
            output=_folded(self.output, rows),
            sample=_folded(self.sample, rows),
            following=None if self.following is None else _folded(self.following, rows),
            state=None if self.state is None else _folded(self.state, rows),
            clean=None if self.clean is None else _folded(self.clean, rows),
        )


def _joined(values: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [value for value in values if value is not None]
    return torch.cat(tensors) if tensors else None


def _packed(values: Sequence[Tensor | None]) -> Tensor | None:
    present = [value for value in values if value is not None]
    return Layout.pack(present) if len(present) == len(values) else None


def _folded(value: Tensor, rows: int) -> Tensor:
    if len(value) == rows or len(value) % rows:
        return value
    return value.reshape(rows, len(value) // rows, *value.shape[1:])


class PerRow(Tensor):
    """A vector of timesteps in place of the loop's scalar `t`.

    Most loops broadcast `t` by `expand` to the rows that the denoiser sees. Here `expand` repeats
    the vector instead, so that in guidance's doubled batch both copies of a row get its time.
    """

    @staticmethod
    def __new__(cls, times: Tensor) -> "PerRow":
        return Tensor._make_subclass(cls, times)

    def expand(self, *shape: Any) -> Tensor:  # type: ignore[override]
        sizes = shape[0] if isinstance(shape[0], tuple | list) else shape
        plain = self.as_subclass(Tensor)
        if len(sizes) != 1 or sizes[0] % len(plain):
            raise ValueError(f"one timestep per row cannot be expanded to {tuple(sizes)}")
        return plain.repeat(sizes[0] // len(plain))


class OneStep(list):
    """A one-step loop with a vector as its timestep, in place of a tensor of shape [1]."""

    shape = (1,)


class LevelPerRow(Tensor):
    """A vector of levels in place of one entry of the scheduler's `sigmas`.

    Loops that guide the predicted clean sample multiply and divide predictions [n *d] by it.
    """

    @staticmethod
    def __new__(cls, levels: Tensor) -> "LevelPerRow":
        return Tensor._make_subclass(cls, levels)

    def _beside(self, other: Tensor) -> Tensor:
        plain = self.as_subclass(Tensor)
        if len(other) != len(plain):
            raise ValueError(f"one level per row does not fit {len(other)} rows")
        return plain.to(other.device).reshape(-1, *(1,) * (other.ndim - 1))

    def __rmul__(self, other: Tensor) -> Tensor:  # type: ignore[override]
        return other * self._beside(other)

    def __rtruediv__(self, other: Tensor) -> Tensor:  # type: ignore[override]
        return other / self._beside(other)
