"""Rows per call of a model: one number each for sampling, decoding and training."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, runtime_checkable

from flowrl.models.out_of_memory import out_of_memory
from flowrl.settings.sections.train import CallKind as CallKind


@dataclass
class CallSizes:
    """Maximum rows per call; None means all of them.

    sampling  of the encoders and the denoiser, or of generation
    decoding  of the decoder
    training  evaluations of the update, and of log-probabilities
    """

    sampling: int | None = None
    decoding: int | None = None
    training: int | None = None

    @classmethod
    def same(cls, rows: int | None) -> "CallSizes":
        return cls(rows, rows, rows)

    def __str__(self) -> str:
        return ", ".join(f"{rows or 'all'} in {kind}" for kind, rows in asdict(self).items())

    def rows(self, kind: CallKind, total: int) -> int:
        """Rows per call of this kind, at most the total."""
        bound: int | None = getattr(self, kind)
        return bound or max(total, 1)

    def lower(self, kind: CallKind) -> bool:
        """Halve the rows per call of one kind; False if the limit is already one row, or there is
        no limit."""
        rows: int | None = getattr(self, kind)
        if rows is None or rows == 1:
            return False
        setattr(self, kind, rows // 2)
        return True

    def take(self, rows: Mapping[str, int | None]) -> None:
        """Set the limits. ValueError for anything that is not a limit."""
        for limit in fields(self):
            value = rows[limit.name]
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{limit.name}: {value!r} is not a number of rows")
            setattr(self, limit.name, value)


@runtime_checkable
class HasSizes(Protocol):
    """A policy with limits on its call sizes."""

    @property
    def sizes(self) -> CallSizes: ...


class SamplingCallSize:
    """The attribute `rows_per_call` of a policy, which reads the limit of sampling and sets all
    limits."""

    def __get__(self, owner: HasSizes, kind: type | None = None) -> int | None:
        return owner.sizes.sampling

    def __set__(self, owner: HasSizes, rows: int | None) -> None:
        owner.sizes.take(asdict(CallSizes.same(rows)))


class CallTooLarge(RuntimeError):
    """A call of the model had more rows than fit in memory.

    kinds       kinds of the calls that failed, on any process
    agreed      whether every process raises this error, so that all can repeat their calls
    repeatable  False if the weights have changed since rows were assigned to calls
    """

    def __init__(self, kinds: frozenset[CallKind], reason: str, agreed: bool = False) -> None:
        super().__init__(reason)
        self.kinds, self.agreed, self.repeatable = kinds, agreed, True

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers send it to the training process. By itself an exception is made again from its
        message alone."""
        return CallTooLarge, (self.kinds, str(self), self.agreed), vars(self)


@contextmanager
def bounded_call(kind: CallKind) -> Iterator[None]:
    """Turn an out-of-memory error of the model into `CallTooLarge` of this kind."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CallTooLarge) or not out_of_memory(error):
            raise
        reason = str(error).strip() or "out of memory"
        raise CallTooLarge(frozenset({kind}), reason) from error
