"""Decoded media: check that they are finite before a pipeline clamps them, and convert them to
tensors.

Infinity would become white. With gradient methods the decoder runs in the update, which waits for a
GPU once per optimizer step: results of the check stay on the device until then.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.models.diffusers.call.patches import Patch
from flowrl.models.diffusers.call.proof_checks import NotFinitePartError, refuse_weights

_unread: list[tuple[Tensor, Callable[[], NoReturn]]] = []  # spreads, and who raises the error


@dataclass(frozen=True)
class LateVerdicts:
    """Ranges of decoders' values, on the device, which are finite if all values are, each with the
    function that raises its error."""

    spreads: Sequence[Tensor]
    refuse: Sequence[Callable[[], NoReturn]]

    def judge(self, spreads: Sequence[float]) -> None:
        """NotFinitePartError for the first bad one of `spreads`, which were read from the
        device."""
        for spread, refuse in zip(spreads, self.refuse, strict=True):
            if not math.isfinite(spread):
                refuse()


def late_verdicts() -> LateVerdicts:
    """Results of the checks since the last call."""
    late, _unread[:] = tuple(_unread), []
    return LateVerdicts([spread for spread, _ in late], [refuse for _, refuse in late])


def finite_decoder(pipe: Any) -> list[Patch]:
    """Patches for each component's `decode` that raise NotFinitePartError for NaN or infinity."""
    parts = {n: part for n, part in pipe.components.items() if isinstance(part, nn.Module)}
    decoders = {n: part for n, part in parts.items() if callable(getattr(part, "decode", None))}
    return [Patch(part, "decode", _checked(pipe, n, part)) for n, part in decoders.items()]


def _checked(pipe: Any, name: str, part: Any) -> Any:
    real = part.decode

    def refuse() -> NoReturn:
        refuse_weights(type(pipe).__name__, {name: part})
        raise NotFinitePartError(
            f"{type(pipe).__name__}: its decoder {name} outputs NaN or infinity, which would be "
            "white or black: lower train.lr, or decode in float32 (model.dtype: float32)"
        )

    def decode(*args: Any, **named: Any) -> Any:
        output = real(*args, **named)
        for values in _tensors(output):
            if not values.numel():
                continue
            low, high = values.detach().aminmax()  # of NaN both are NaN
            spread = high.float() - low.float()
            if values.device.type == "cuda" and values.requires_grad:
                _unread.append((spread, refuse))
            elif not math.isfinite(spread):
                refuse()
        return output

    return decode


def _tensors(output: Any) -> Iterator[Tensor]:
    """The pixels of a decoder's output: a tensor, a tuple, or a record of them."""
    if isinstance(output, Tensor):
        yield output
        return
    values = output if isinstance(output, tuple) else vars(output).values()
    yield from (value for value in values if isinstance(value, Tensor))


def media_of(result: Any, double: bool = False) -> Tensor:
    """Images as tensors; some pipelines return channels-last arrays for everything but PIL.

    A list has the images of each row (layers of one image). Transparent parts become white.
    `double` keeps float64, which otherwise becomes float32.
    """
    if isinstance(result, np.ndarray):
        result = torch.from_numpy(result).movedim(-1, -3)
    media = torch.stack([*result]) if isinstance(result, list | tuple) else result
    media = media if double and media.dtype == torch.float64 else media.float()
    if media.ndim > 3 and media.shape[-3] == 4:
        colours, seen = media.split((3, 1), -3)
        media = colours * seen + (1 - seen)
    return media
