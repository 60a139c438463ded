"""A decoder's own output is checked before a pipeline clamps it: infinity would become white."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from flowrl.models.diffusers.call.proof_checks import NotFinitePartError, refuse_weights
from flowrl.models.diffusers.call.scheduler_standin import Patch


def finite_decoder(pipe: Any) -> list[Patch]:
    """Patches of each component's `decode` that raise NotFinitePartError for NaN or infinity."""
    parts = {n: part for n, part in pipe.components.items() if isinstance(part, nn.Module)}
    decoders = {n: part for n, part in parts.items() if callable(getattr(part, "decode", None))}
    return [Patch(part, "decode", _checked(pipe, n, part)) for n, part in decoders.items()]


def _checked(pipe: Any, name: str, part: Any) -> Any:
    real = part.decode

    def decode(*args: Any, **named: Any) -> Any:
        output = real(*args, **named)
        if not all(bool(values.isfinite().all()) for values in _tensors(output)):
            refuse_weights(type(pipe).__name__, {name: part})
            raise NotFinitePartError(
                f"{type(pipe).__name__}: its decoder {name} makes NaN or infinity, which would be "
                "white or black: lower train.lr, or decode in float32 (model.dtype: float32)"
            )
        return output

    return decode


def _tensors(output: Any) -> Iterator[Tensor]:
    """The pixels of a decoder's output: a tensor, a tuple, or a record of them."""
    if isinstance(output, Tensor):
        yield output
        return
    values = output if isinstance(output, tuple) else vars(output).values()
    yield from (value for value in values if isinstance(value, Tensor))
