"""The contracts: samples in, one number per sample out. n samples, r rewards, p pairs."""

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from rewards.audio import Audio

T = TypeVar("T")

Kind = Literal["image", "video", "sound", "text", "tensor"]


class MediaForm(NamedTuple):
    """The kind of samples that a model generates, and the shape of one sample if it is a tensor."""

    kind: Kind
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, item: Any) -> "MediaForm":
        """The form of a sample. ValueError for anything that is not a sample."""
        kind = _kind(item)
        return cls(kind, tuple(item.shape) if kind == "tensor" else ())

    def __str__(self) -> str:
        return f"{self.kind} [{' '.join(map(str, self.shape))}]" if self.shape else self.kind


@dataclass(frozen=True)
class Samples:
    """n decoded samples; the samples of a group are contiguous.

    media   images [n 3 h w] or videos [n f 3 h w], floats in 0..1; or n tensors [3 h w] or
            [f 3 h w] of any sizes; or n strings; or, of sound alone, the waveforms of `audio`
            [n channels time]; or tensors [n k] or [n t k] from a user's own model: points,
            trajectories. None in a sequence is a sample that could not be read; `score_all` removes
            it before it calls a reward. Sounds of files may have several lengths and rates: then
            they are a list of `Audio` of one row, `audio` is None, and each form has a call
    group   one id per sample; two draws of the same prompt are two groups
    meta    the other columns of the prompt file, one mapping per sample; or empty
    audio   the sound of videos, or sound alone: `audio.waveform` [n channels time] in -1..1 at
            `audio.rate` Hz; None for samples without
    """

    media: Any
    prompts: Sequence[str]
    group: Int[Tensor, " n"]
    meta: Sequence[Mapping[str, Any]] = field(default=())
    audio: Audio | None = None

    def __post_init__(self) -> None:
        n = len(self.prompts)
        counts = {"media": len(self.media), "group": len(self.group), "meta": len(self.meta)}
        if not self.meta:
            counts.pop("meta")
        if self.audio is not None:
            counts["waveforms"] = len(self.audio)
        for name, count in counts.items():
            if count != n:
                raise ValueError(f"Samples: {n} prompts but {count} {name}; each sample needs one")

    def __getattr__(self, name: str) -> Any:
        """Raise an error that lists the attributes; called only for missing names."""
        raise AttributeError(no_such_name(name))

    @property
    def kind(self) -> Kind:
        """Kind of the media. ValueError if they cannot be scored or mix two kinds.

        "image" if there are no samples; "sound" if the sound is all that they are.
        """
        kind = self._kind_of_media
        return "sound" if kind == "tensor" and self.audio is not None else kind

    @property
    def sounds(self) -> list[Audio]:
        """The sound of each sample; none if they have none."""
        if self.audio is not None:
            return self.audio.each
        listed = [] if isinstance(self.media, Tensor) else self.media
        return [item for item in listed if isinstance(item, Audio)]

    @property
    def by_sound(self) -> "Iterator[tuple[list[int], Samples]]":
        """The rows of each rate and shape of a list of sounds, and their samples with one `audio`;
        other samples as they are."""
        listed = [] if isinstance(self.media, Tensor) else list(self.media)
        sounds = [item for item in listed if isinstance(item, Audio)]
        if not sounds or len(sounds) < len(listed):
            yield list(range(len(self.prompts))), self
            return
        forms: dict[tuple[Any, ...], list[int]] = {}
        for row, sound in enumerate(sounds):
            forms.setdefault((sound.rate, *sound.waveform.shape), []).append(row)
        for rows in forms.values():
            audio, part = Audio.joined([sounds[row] for row in rows]), self.take(rows)
            yield rows, Samples.of_sound(audio, part.prompts, part.group, part.meta)

    @property
    def _kind_of_media(self) -> Kind:
        if isinstance(self.media, Tensor):
            return _kind(self.media[0] if len(self.media) else torch.empty(self.media.shape[1:]))
        readable = [item for item in self.media if item is not None]
        kinds = {_kind(item) for item in readable}
        if len(kinds) > 1:
            raise ValueError(f"Samples: {' and '.join(sorted(kinds))} in one batch; separate them")
        return _kind(readable[0]) if readable else "image"

    @classmethod
    def of_sound(
        cls,
        audio: Audio,
        prompts: Sequence[str],
        group: Int[Tensor, " n"],
        meta: Sequence[Mapping[str, Any]] = (),
    ) -> "Samples":
        """Samples of sound alone."""
        return cls(audio.waveform, prompts, group, meta, audio)

    def on_cpu(self) -> "Samples":
        """The same samples with their media in host memory."""
        media, audio = self.media, self.audio
        if audio is not None:
            audio = audio.cpu()
        if isinstance(media, Tensor):
            return replace(self, media=media.cpu(), audio=audio)
        moved = [m.cpu() if isinstance(m, Tensor | Audio) else m for m in media]
        return replace(self, media=moved, audio=audio)

    def take(self, rows: Sequence[int] | Int[Tensor, " m"]) -> "Samples":
        """Samples of these rows, in this order; groups keep their ids."""
        at = rows.tolist() if isinstance(rows, Tensor) else [int(row) for row in rows]
        index = torch.tensor(at, dtype=torch.long)
        media = (
            self.media[index.to(self.media.device)]
            if isinstance(self.media, Tensor)
            else [self.media[i] for i in at]
        )
        meta = [self.meta[i] for i in at] if self.meta else ()
        group = self.group[index.to(self.group.device)]
        audio = None if self.audio is None else self.audio.take(index)
        return Samples(media, [self.prompts[i] for i in at], group, meta, audio)


def no_such_name(name: str) -> str:
    """Error message for an attribute that samples do not have."""
    return (
        f"samples have no {name!r}; they have media (images [n 3 h w] or videos [n f 3 h w] in "
        "0..1, n texts, waveforms [n channels time], or tensors [n k] or [n t k]), prompts, meta "
        "(other columns of the prompt file), audio (None, or waveform [n channels time] and rate), "
        "group, kind and take"
    )


def _kind(item: Any) -> Kind:
    if isinstance(item, str):
        return "text"
    if isinstance(item, Audio):
        return "sound"
    if isinstance(item, Tensor) and item.is_floating_point() and item.ndim in (3, 4):
        if item.shape[-3] == 3:
            return "image" if item.ndim == 3 else "video"
    if isinstance(item, Tensor) and item.is_floating_point() and item.ndim in (1, 2):
        return "tensor"
    kind_name = (
        f"a tensor of shape {list(item.shape)} and {item.dtype}"
        if isinstance(item, Tensor)
        else type(item).__name__
    )
    raise ValueError(
        "Samples: a sample is a float image [3 h w], a video [f 3 h w], a tensor [k] or [t k], or "
        f"a string, not {kind_name}"
    )


def cell(row: Mapping[str, Any], column: str) -> Any:
    """A row's value in a column; None if the row does not have it.

    `reward_model.ground_truth` is the key `ground_truth` of the mapping in the column
    `reward_model`, or of the JSON object that is its text, unless the row has a column with that
    full name. `summaries.0.text` is the key `text` of the first entry of the list `summaries`.
    """
    if column in row:
        return row[column]
    first, dot, rest = column.partition(".")
    inner = columns_inside(row.get(first)) if dot else None
    return None if inner is None else cell(inner, rest)


def columns_inside(value: Any) -> Mapping[str, Any] | None:
    """The nested columns of a cell: a mapping, the entries of a list by their number from 0, or the
    text of a JSON object, as which tables without a type for mappings store one (INTELLECT-2's
    `verification_info`)."""
    if isinstance(value, list | tuple):
        return {str(i): entry for i, entry in enumerate(value)}
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):  # a text that only begins as an object does
            return None
    return value if isinstance(value, Mapping) else None


class RewardScores(NamedTuple):
    """Scores of n samples by one reward, which may fail, or abstain where it does not apply.

    values   NaN where there is no score, so that arithmetic cannot take a missing one for a number
    applies  False where the reward has nothing to say of the sample: it abstains
    """

    values: Float[Tensor, " n"]
    applies: Bool[Tensor, " n"]

    @property
    def plain(self) -> "Tensor | RewardScores":
        """The values alone if the reward applies to every sample."""
        return self.values if bool(self.applies.all()) else self

    @classmethod
    def nowhere(cls, n: int) -> "RewardScores":
        """A reward that applies to none of n samples, to be filled with `put`."""
        missing = torch.full((n,), torch.nan, dtype=torch.float64)
        return cls(missing, torch.zeros(n, dtype=torch.bool))

    def put(self, rows: Sequence[int] | Int[Tensor, " m"], scores: "RewardScores") -> None:
        """Write the scores of these rows in place."""
        self.values[rows], self.applies[rows] = scores

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "RewardScores":
        """The same samples with other values."""
        return self._replace(values=change(self.values))


@runtime_checkable
class Reward(Protocol):
    """Scores samples; higher is better. NaN marks a sample that the reward cannot score.

    A reward that does not apply to every sample returns `RewardScores`, or a list with None.
    Pointwise rewards ignore `samples.group`; groupwise rewards compare samples within a group. A
    reward may say which of them it is: `SaysPer`. Scores are floats on the CPU, without gradient.
    A reward must not change its inputs.
    """

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores: ...


@runtime_checkable
class SaysPer(Protocol):
    """A reward, or a user's function, that says what a score depends on: "sample" if on that sample
    alone, "group" if on the samples of its group too, as win rates do. None says nothing."""

    @property
    def per(self) -> Literal["sample", "group"] | None: ...


def per_of(reward: object) -> Literal["sample", "group"] | None:
    """The word of a reward on what its scores depend on; None without one. ValueError for another
    word, which names the reward."""
    said = reward.per if isinstance(reward, SaysPer) else None
    if said not in (None, "sample", "group"):
        name = getattr(reward, "__name__", type(reward).__name__)
        raise ValueError(f"reward {name}: per must be 'sample' or 'group', not {said!r}")
    return said


@runtime_checkable
class Waits(Protocol):
    """A reward with `waits` True mostly waits for a server. A run calls it with the samples of a
    few draws as soon as they exist; all samples of a draw come together."""

    @property
    def waits(self) -> bool: ...


@runtime_checkable
class Concurrent(Protocol):
    """A reward with `concurrent` True may be called from several threads at once.

    The reward limits its own requests in flight. For a composite reward this covers only its own
    code: each of its members must be concurrent too."""

    @property
    def concurrent(self) -> bool: ...


@runtime_checkable
class Cancels(Protocol):
    """A reward whose calls other threads may wait for; `cancel` ends these calls with an error."""

    def cancel(self) -> None: ...


@runtime_checkable
class FindsAnswers(Protocol):
    """A text reward that reads an answer in each text, as majority votes need."""

    def answers(self, samples: Samples) -> Sequence[Hashable | None]:
        """The answer of each text, equal for equal answers; None for a text without one."""
        ...


@runtime_checkable
class Judge(Protocol):
    """P(sample a is preferred to sample b), for pairs of rows of `samples`.

    NaN, or None in a list, marks a pair without a verdict, which is left out.
    """

    def __call__(
        self, samples: Samples, a: Int[Tensor, " p"], b: Int[Tensor, " p"]
    ) -> Float[Tensor, " p"]: ...


class IntermediateScores(NamedTuple):
    """Scores of predicted clean samples of intermediate states; column k is the state before step
    k. `values` is 0 where `scored` is False. `weights` belong to rewards used for intermediate
    states only; None if they are the samples' own rewards. `abstained` marks states to which a
    reward does not apply; None: there are none."""

    values: Float[Tensor, "n k r"]
    scored: Bool[Tensor, "n k r"]
    weights: Float[Tensor, " r"] | None = None
    abstained: Bool[Tensor, "n k r"] | None = None

    @property
    def complete(self) -> Bool[Tensor, "n k"]:
        """States whose total is known: see `Scores.complete`."""
        return totals_known(self.scored, self.abstained)

    def arranged(self, move: Callable[[Tensor], Tensor]) -> "IntermediateScores":
        """Apply `move` to the rows [n ...] of all columns."""
        abstained = _given(self.abstained, self.scored)
        return IntermediateScores(
            move(self.values), move(self.scored), self.weights, move(abstained)
        )


def _given(abstained: Tensor | None, scored: Tensor) -> Tensor:
    """The mask of abstentions; all False if there are none."""
    return torch.zeros_like(scored) if abstained is None else abstained


def totals_known(
    scored: Bool[Tensor, "*n r"], abstained: Bool[Tensor, "*n r"] | None
) -> Bool[Tensor, "*n"]:
    """A mask of known totals: some reward applies, and each that applies has a score."""
    return scored.any(-1) & (scored | _given(abstained, scored)).all(-1)


@dataclass(frozen=True)
class Scores:
    """Scores with one column per reward. `values` is 0 where `scored` is False.

    A reward abstains from a sample to which it does not apply. That is no failure: the sample's
    total is the sum over the rewards that apply. Without a score a reward has failed, unless it
    abstained.

    intermediate  scores of intermediate states by the same rewards, if the plan asks for them
    abstained     where a reward does not apply; None: every reward applies to every sample
    """

    values: Float[Tensor, "n r"]
    scored: Bool[Tensor, "n r"]
    names: tuple[str, ...]
    intermediate: IntermediateScores | None = None
    abstained: Bool[Tensor, "n r"] | None = None

    @property
    def way(self) -> IntermediateScores | None:
        """Older name of `intermediate`."""
        return self.intermediate

    @property
    def applies(self) -> Bool[Tensor, "n r"]:
        """A mask of the rewards that apply, be it with a score or with a failure."""
        return ~_given(self.abstained, self.scored)

    @property
    def complete(self) -> Bool[Tensor, " n"]:
        """Samples whose total is known: some reward applies, and each that applies has a score."""
        return totals_known(self.scored, self.abstained)

    @property
    def outside(self) -> Bool[Tensor, " n"]:
        """Samples to which no reward applies."""
        return ~self.applies.any(1)

    @property
    def unscored(self) -> dict[str, int]:
        """Number of samples that each reward should have scored and could not."""
        missing = (self.applies & ~self.scored).sum(0).tolist()
        return dict(zip(self.names, missing, strict=True))

    @property
    def terms(self) -> "Scores":
        """The scores as terms of a sum: a reward adds 0 to a sample to which it does not apply, if
        another reward has scored that sample."""
        zeros = ~self.applies & self.scored.any(1, keepdim=True)
        return replace(self, scored=self.scored | zeros)

    def totals(self, weights: Float[Tensor, " r"]) -> Float[Tensor, " n"]:
        """The weighted sum over the rewards that apply, NaN where it is not `complete`."""
        weighted = self.values @ weights.to(self.values.dtype)
        return torch.where(self.complete, weighted, torch.nan)

    def of(self, rewards: Sequence[int]) -> "Scores":
        """The columns of these rewards, without scores of intermediate states."""
        at = list(rewards)
        abstained = None if self.abstained is None else self.abstained[:, at]
        names = tuple(self.names[i] for i in at)
        return Scores(self.values[:, at], self.scored[:, at], names, abstained=abstained)

    def arranged(self, move: Callable[[Tensor], Tensor]) -> "Scores":
        """Apply `move` to the rows [n ...] of every column."""
        way = None if self.intermediate is None else self.intermediate.arranged(move)
        # moved even where nothing abstained here: `move` may gather from all processes
        abstained = move(_given(self.abstained, self.scored))
        return Scores(move(self.values), move(self.scored), self.names, way, abstained)

    @classmethod
    def joined(cls, parts: "Sequence[Scores]") -> "Scores":
        """Concatenate the samples of all parts."""
        if len(parts) == 1:
            return parts[0]
        ways, way = [part.intermediate for part in parts if part.intermediate is not None], None
        if ways:
            way = IntermediateScores(
                torch.cat([w.values for w in ways]),
                torch.cat([w.scored for w in ways]),
                ways[0].weights,
                torch.cat([_given(w.abstained, w.scored) for w in ways]),
            )
        values, scored = torch.cat([p.values for p in parts]), torch.cat([p.scored for p in parts])
        abstained = torch.cat([_given(p.abstained, p.scored) for p in parts])
        return cls(values, scored, parts[0].names, way, abstained)

    @classmethod
    def of_rewards(cls, columns: "Mapping[str, RewardScores]") -> "Scores":
        """Scores from those of each reward, in the mapping's order."""
        values = torch.stack([column.values for column in columns.values()], 1)
        applies = torch.stack([column.applies for column in columns.values()], 1)
        scored = ~values.isnan()
        return cls(values.nan_to_num(0.0), scored, tuple(columns), abstained=~applies)

    def column(self, name: str) -> RewardScores:
        """Return the scores of one reward."""
        at = self.names.index(name)
        values = self.values[:, at].masked_fill(~self.scored[:, at], torch.nan)
        return RewardScores(values, self.applies[:, at])


# Numbers that rewards report with their scores: requests, failures, tokens, spread of votes.


@runtime_checkable
class Reports(Protocol):
    """A reward that reports numbers for the log. `report` returns the numbers since the last call
    and resets them."""

    def report(self) -> dict[str, float]: ...


def reports(rewards: Mapping[str, Reward | Judge]) -> dict[str, float]:
    """`calls/<label>/<number>` of all rewards, including members of composite rewards."""
    numbers: dict[str, float] = {}
    for label, reward in rewards.items():
        for part in parts_of(reward, Reports):
            for name, value in part.report().items():
                key = f"calls/{label}/{name}"
                numbers[key] = numbers.get(key, 0.0) + value
    return numbers


def parts_of(thing: Any, kind: type[T]) -> Iterator[T]:
    """Find objects of a kind in a reward and in all of its members."""
    if isinstance(thing, kind):
        yield thing
    elif is_dataclass(thing):
        for field in fields(thing):
            yield from parts_of(getattr(thing, field.name), kind)
    elif isinstance(thing, Mapping):
        yield from parts_of(list(thing.values()), kind)
    elif isinstance(thing, Sequence) and not isinstance(thing, str):
        for part in thing:
            yield from parts_of(part, kind)


# Types of settings: ranges that the loader checks, and groups that several rewards share.
OneOrMore = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]

INLINE = "its fields are settings of the reward"
Inline = Annotated[T, INLINE]
"""Annotation of a parameter that takes a dataclass whose fields are settings of the reward."""
NEEDED_COLUMN = "a column of the prompt file without which no row can be scored"
NeededColumn = Annotated[str, NEEDED_COLUMN]
