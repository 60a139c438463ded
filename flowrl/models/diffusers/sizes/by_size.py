"""Prompts of several sizes: each size has a loop of its own, with its own schedule and proof.

A call of the network, the encoders or the decoder holds rows of one size. Noise belongs to a sample
and has its shape, so a sample does not depend on the sizes beside it.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from flowrl.errors import UserError
from flowrl.models.call_sizes import CallSizes
from flowrl.models.diffusers.batch import MediaBatch, Scales
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.loop.image_shapes import latent_shapes, sized_by_images
from flowrl.models.diffusers.call.loop.loop import Loop
from flowrl.models.diffusers.memory.offload import OffloadedParts
from flowrl.models.diffusers.replay.replay import Replay
from flowrl.models.diffusers.sizes.mixed_batch import MixedBatch
from flowrl.models.evaluation_counter import Meter
from flowrl.models.policy import Batch
from flowrl.prompts.row_sizes import RowSize, check_seconds, described, row_sizes
from samplers import Planner

Proofs = dict[tuple[int, float | None], Replay]  # by steps and guidance
Meta = Sequence[Mapping[str, Any]]


class LoopSize(NamedTuple):
    """The difference between loops of one pipeline: arguments of its call, and the latents' shape
    where an image alone determines it."""

    call: tuple[tuple[str, float | None], ...]
    image: tuple[int, ...] = ()

    @classmethod
    def of(cls, loop: Loop, row_size: RowSize = RowSize()) -> "LoopSize":
        """A loop's size, with the sizes of a row in place of the call's. A pipeline ignores sizes
        that its call does not take."""
        names = [name for name in RowSize._fields if name in loop.driver.parameters]
        return cls(tuple((name, row_size.given.get(name, loop.call.get(name))) for name in names))

    @property
    def arguments(self) -> dict[str, float]:
        return {name: value for name, value in self.call if value is not None}

    def __str__(self) -> str:
        return described(dict(self.call)) or f"latents {list(self.image)}"


Loops = dict[LoopSize, tuple[Loop, Proofs]]
OpenedBatch = Batch[Planner, Any, Any]  # a MediaBatch or a MixedBatch


@dataclass
class KnownRows:
    """Sizes of the rows that a run has named so far.

    places          the sizes, each with the place of a row; empty: the policy's own
    own_size_alone  whether all prompts that will be opened have the policy's own size
    """

    places: dict[LoopSize, str] = field(default_factory=dict[LoopSize, str])
    own_size_alone: bool = False

    def all_named(self, run_size: LoopSize) -> None:
        """Note that no other rows will come."""
        self.own_size_alone = self.places.keys() == {run_size}


@dataclass(frozen=True)
class LoopState:
    """The loop that a policy drives, and all that changes in a run.

    loop    the pipeline's loop, which learns traits from the pipeline's own call
    proofs  of the loop
    loops   of other sizes, which policies at these sizes share
    sizes   rows per call
    rows    known sizes of rows
    """

    loop: Loop
    proofs: Proofs = field(default_factory=Proofs)
    loops: Loops = field(default_factory=Loops)
    sizes: CallSizes = field(default_factory=CallSizes)
    rows: KnownRows = field(default_factory=KnownRows)

    def at(self, loop: Loop, proofs: Proofs) -> "LoopState":
        """The same with another loop: prompts have several sizes then."""
        return replace(self, loop=loop, proofs=proofs, rows=KnownRows(self.rows.places))


P = TypeVar("P", bound="Sizable")


class Sizable:
    """The part of `PipelinePolicy` that has a twin for each size of prompts."""

    pipe: Any
    state: LoopState
    use: Any
    call: Mapping[str, Any]

    @property
    @abstractmethod
    def loop(self) -> Loop: ...

    @property
    @abstractmethod
    def guidance(self) -> Scales: ...

    @property
    @abstractmethod
    def frozen(self) -> OffloadedParts: ...

    @abstractmethod
    def alike(self, state: LoopState, use: Any) -> Any: ...

    @property
    def used(self) -> Mapping[LoopSize, str]:
        """Sizes of known rows, with a row's place; empty: the policy's own."""
        return self.state.rows.places

    def at(self: P, size: LoopSize, place: str = "") -> P:
        return twin_at(self, size, place)

    @property
    def sized(self: P) -> list[P]:
        """The policy at each size of the known rows; this one without any."""
        return [self.at(*size_and_place) for size_and_place in self.used.items()] or [self]

    def sized_for(self: P, meta: Meta) -> list[P]:
        """The policy at each known size that rows with these columns have. Sizes that images set
        count as theirs."""
        sizes = {LoopSize.of(self.loop, row_size) for row_size in {*row_sizes(meta)} or {RowSize()}}
        used = [item for item in self.used.items() if item[0]._replace(image=()) in sizes]
        return [self.at(size, place) for size, place in used] or [self]

    def proofs(self, prompts: Sequence[str], steps: int, meta: Meta = ()) -> list[str]:
        return prove_by_size(self, prompts, steps, meta)

    def check_rows(self, meta: Meta) -> None:
        """Note the sizes of all rows. UserError for rows that this pipeline refuses."""
        self.loop.missing.check(self.loop.traits, meta)
        for group in rows_by_size(self, [""] * len(meta), meta):
            self.state.rows.places[group.size] = columns.places(meta)[group.rows[0]]
            group.policy.row_arguments(group.take(meta), [""] * len(group.rows))
        self.frozen.rest()

    def check_all_rows(self, meta: Meta) -> None:
        """Check the rows of all prompts that will be opened. If they have the policy's own size,
        `open` no longer asks for it."""
        self.check_rows(meta)
        self.state.rows.all_named(LoopSize.of(self.loop))


class SizedRows(NamedTuple):
    """A policy at one size, and the rows that have it."""

    policy: Any
    size: LoopSize
    rows: list[int]

    def take(self, column: Sequence[Any]) -> list[Any]:
        return [column[i] for i in self.rows] if column else []


def rows_by_size(policy: Sizable, prompts: Sequence[str], meta: Meta) -> list[SizedRows]:
    """The rows of each size, which columns or images set, with the policy at that size, in order of
    each size's first row. UserError, with the row's place, for a size that the pipeline refuses."""
    check_seconds(meta, policy.loop.driver.parameters.__contains__)
    sizes = row_sizes(meta) or [RowSize()] * len(prompts)
    places = columns.places(meta) or [""] * len(prompts)
    shapes: Sequence[tuple[int, ...]] = [()] * len(prompts)
    if sized_by_images(policy.loop) and (extras := policy.loop.extras(meta, prompts)):
        shapes = latent_shapes(policy.loop, extras)
    loop_sizes = {size: LoopSize.of(policy.loop, size) for size in set(sizes)}
    groups = dict[LoopSize, list[int]]()
    for i, (size, shape) in enumerate(zip(sizes, shapes, strict=True)):
        groups.setdefault(loop_sizes[size]._replace(image=shape), []).append(i)
    firsts = [places[rows[0]] for rows in groups.values()]
    if len(groups) > 1 and policy.loop.driver.layout is not None:
        raise UserError(
            f"{firsts[1]}: it has another size than {firsts[0]}, but videos with sound need "
            "one size: choose rows with `where`, or leave their sizes out with `keep`"
        )
    pairs = zip(groups.items(), firsts, strict=True)
    return [SizedRows(policy.at(size, at), size, rows) for (size, rows), at in pairs]


def other_sizes(policy: Sizable, meta: Meta) -> bool:
    """Whether any row has another size than the policy, as far as columns show."""
    run_size = LoopSize.of(policy.loop)
    sizes = {LoopSize.of(policy.loop, row_size) for row_size in set(row_sizes(meta))}
    return len(policy.used) > 1 or not sizes <= {run_size}


def twin_at(policy: P, size: LoopSize, place: str) -> P:
    """The policy at another size: the same modules, guidance and call sizes, and a loop of its own.
    UserError, naming the `place`, for a size that the pipeline refuses."""
    shape = policy.loop.shaped(size.image)
    if size == LoopSize.of(policy.loop)._replace(image=shape):
        return policy
    if size not in policy.state.loops:
        call = {**policy.call, **policy.loop.traits.shared, **size.arguments}
        try:
            loop = policy.loop.with_call(call)
        except UserError as error:
            raise UserError(f"{place}: {error}" if place else str(error)) from error
        policy.state.loops[size] = loop, {}
        policy.frozen.rest()
    return policy.alike(policy.state.at(*policy.state.loops[size]), policy.use)


def called_with(policy: P, call: Mapping[str, Any]) -> P:
    """The policy with further arguments of its call: the same modules and guidance, and a loop,
    proofs and sizes of its own. UserError for arguments that the pipeline refuses."""
    try:
        loop = policy.loop.with_call({**policy.call, **policy.loop.traits.shared, **call})
    except UserError as error:
        raise UserError(f"evaluate.call: {error}") from error
    policy.frozen.rest()
    return policy.alike(replace(policy.state.at(loop, {}), loops={}), policy.use)


def open_by_size(policy: Sizable, prompts: Sequence[str], meta: Meta, steps: int) -> OpenedBatch:
    """Encode prompts, each size by itself; a plain batch if all have one size."""
    groups, meter, batches = rows_by_size(policy, prompts, meta), Meter(), list[MediaBatch]()
    for group in groups:
        encoded = group.policy.encode(group.take(prompts), group.take(meta))
        batches.append(MediaBatch(group.policy, encoded, steps, meter, rolls=policy.use.rolls))
    if len(batches) == 1:
        return batches[0]
    return MixedBatch(tuple(batches), tuple(tuple(group.rows) for group in groups), meter)


def prove_by_size(policy: Sizable, prompts: Sequence[str], steps: int, meta: Meta) -> list[str]:
    """Prove the pipeline at each size, at the guidance scales of sampling and training.

    The independence of rows is checked at the higher scale, which also uses negative prompts.
    """
    groups, sentences = rows_by_size(policy, prompts, meta), list[str]()
    trained = policy.guidance.train
    scales = sorted(set(policy.guidance), key=lambda scale: math.inf if scale is None else scale)
    for group in groups:
        for scale in scales:
            replay = group.policy.prove(
                group.take(prompts), steps=steps, guidance=scale, meta=group.take(meta),
                complete=scale == scales[-1], gradient=scale == trained,
            )  # fmt: skip
            sentences.append(str(replay) if len(groups) == 1 else f"{group.size}: {replay}")
    return sentences
