"""A short test of a reward before a run: sensitivity, sign, repeatability, batch independence.

A reward can take part in its own test. `examples() -> Samples` returns two samples, the better one
first. `one_call` is True for a reward that costs money or has state: it is called once. `parts`
names the members of a composite reward; they are tested instead. A reward without examples gets
four images (videos, texts) that any reward should score differently, of the kind that the run's
model generates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewards.audio import Audio
from rewards.combine import reward_scores, score_all, scored
from rewards.perception.media import WrongMedia, items
from rewards.types import Kind, Reward, Samples, per_of

_SIDE = 64  # pixels of the test images
_RATE = 16_000  # Hz, of their sound
_FRAMES, _SPEEDS = 8, (0, 0, 2, 8)  # of the test videos; pixels per frame of each
_ALIKE = 1e-6  # scores closer than this, relative to their size, count as equal
_BATCHED = 0.01  # allowed difference of batched scores from single ones: half precision
_ROUNDING = 1e-5  # allowed difference of two equal calls, relative to the scores: a GPU's rounding
_NOISE = 0.1  # allowed difference of two equal calls, in standard deviations within a group
_NEAR = 0.02  # how far images of one group are blended towards others
_SOUGHT = 256  # prompts, spread over all, among which a reward that abstains must find one


@runtime_checkable
class Exemplary(Protocol):
    """A reward with two example samples, which it must score differently; the better one comes
    first."""

    def examples(self) -> Samples | None: ...


@runtime_checkable
class OneCall(Protocol):
    """A reward that the self-test calls only once, if `one_call` is True."""

    @property
    def one_call(self) -> bool: ...


@runtime_checkable
class Made(Protocol):
    """A composite reward, whose members are tested too."""

    @property
    def parts(self) -> Mapping[str, Reward]: ...


@runtime_checkable
class ChecksPrompts(Protocol):
    """A reward that reads columns and can check the prompt file without any samples."""

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError, naming the row, if a row could not be scored."""
        ...


class Untested(ValueError):
    """A reward of some prompts alone, of which the test samples cannot tell whether it works."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of the run, for rewards without examples."""

    texts: Sequence[str] = ("a red circle", "a blue square left of a green triangle")
    meta: Sequence[Mapping[str, Any]] = field(default=())
    kind: Kind = "image"
    shape: tuple[int, ...] = ()  # of a sample that is a tensor


def probe(kind: Kind, prompts: Prompts) -> Samples:
    """Noise, a flat colour, a gradient, a chequerboard, as images or videos; or four texts; or, as
    tensors, noise, 0.5, a ramp from 0 to 1, and 1, -1, ... All in one group. In videos the noise
    and the colour stand still, and the others move to the right: the chequerboard by one square per
    frame. They have sound, which is also that of sound alone: noise, silence, a tone that grows,
    and clicks."""
    texts = [prompts.texts[i % len(prompts.texts)] for i in range(4)]
    meta = [prompts.meta[i % len(prompts.meta)] for i in range(4)] if prompts.meta else ()
    group = torch.zeros(4, dtype=torch.long)
    if kind == "text":
        return Samples(["7", "I do not know.", texts[0], "word " * 200], texts, group, meta)
    if kind == "sound":
        return Samples.of_sound(_sounds(), texts, group, meta)
    if kind == "tensor":
        count = math.prod(prompts.shape)
        noise = torch.randn(count, generator=torch.Generator().manual_seed(0))
        signs = 1.0 - 2.0 * (torch.arange(count) % 2)
        kinds = [noise, torch.full((count,), 0.5), torch.linspace(0, 1, count), signs]
        return Samples(torch.stack(kinds).view(4, *prompts.shape), texts, group, meta)
    noise = torch.rand(3, _SIDE, _SIDE, generator=torch.Generator().manual_seed(0))
    gradient = torch.linspace(0, 1, _SIDE).expand(3, _SIDE, _SIDE)
    position = torch.arange(_SIDE) // 8
    board = ((position[:, None] + position) % 2).float().expand(3, _SIDE, _SIDE)
    flat = torch.tensor([0.7, 0.3, 0.1]).view(3, 1, 1).expand(3, _SIDE, _SIDE)
    media = torch.stack([noise, flat, gradient, board])
    if kind == "video":
        positions = [position * speed for position in range(_FRAMES) for speed in _SPEEDS]
        moved = [media[i % 4].roll(by, -1) for i, by in enumerate(positions)]
        media = torch.stack(moved).view(_FRAMES, 4, 3, _SIDE, _SIDE).transpose(0, 1).contiguous()
    audio = _sounds() if kind == "video" else None
    return Samples(media, texts, group, meta, audio)


def _sounds() -> Audio:
    """Noise, silence, a tone that grows, and clicks: half a second of each."""
    time = torch.arange(_RATE // 2) / _RATE
    noise = 0.3 * torch.randn(len(time), generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    tone = time * torch.sin(2 * torch.pi * 440 * time)
    clicks = 0.5 * (torch.arange(len(time)) % (_RATE // 8) < _RATE // 100)
    return Audio(torch.stack([noise, torch.zeros_like(time), tone, clicks])[:, None], _RATE)


def self_test(
    name: str, reward: Reward, prompts: Prompts | None = None, *, one_kind: bool = False
) -> str:
    """Test a reward and return a sentence with its scores, or raise a ValueError that names it.
    `one_kind`: all samples that it will score are of the prompts' kind, so it must take that one.

    A reward that abstains is tested on prompts to which it applies: Untested if there are none, or
    if the test samples score the same there, as wrong answers do.

    A reward fails if its scores are not one finite number per sample, or if it scores nothing; if
    samples that must differ have equal scores or the wrong order; if two identical calls, or two
    positions in the batch, change a score by more than a tenth of the spread in a group; or if a
    score depends on the rest of the batch.
    """
    if prompts is not None and isinstance(reward, ChecksPrompts):
        reward.check_prompts(prompts.texts, prompts.meta)
    prompts = Prompts() if prompts is None else prompts
    if isinstance(reward, Made):
        lines = [
            self_test(f"{name}: {part}", member, prompts, one_kind=one_kind)
            for part, member in reward.parts.items()
        ]
        return "; ".join(lines)
    samples = reward.examples() if isinstance(reward, Exemplary) else None
    if samples is not None:
        if one_kind and samples.kind != prompts.kind:
            _check_kind(name, reward, prompts)
        scores = scored(name, reward, samples)
        _check_examples(name, scores)
        line = f"{name}: {scores[0]:.4g} for the better of its examples, {scores[1]:.4g}"
    else:
        samples, scores, abstains = _probed(name, reward, prompts, one_kind)
        samples, scores = _with_a_column(name, reward, samples, scores)
        _check_different(name, scores, samples, abstains)
        line = (
            f"{name}: {', '.join(f'{s:.4g}' for s in scores)} for {len(scores)} different samples"
        )
    if isinstance(reward, OneCall) and reward.one_call:
        return f"{line}; called once"
    noise = _check_repeatable(name, reward, samples, scores)
    how = _check_batches(name, reward, samples, scores)
    _check_places(name, reward, samples, noise)
    return f"{line}; {how}"


def _check_kind(name: str, reward: Reward, prompts: Prompts) -> None:
    """ValueError for a reward that does not score samples of the prompts' kind. Its examples are of
    another one, and those of a reward that is called once cost a call."""
    if isinstance(reward, OneCall) and reward.one_call:
        return
    try:
        reward_scores(name, reward, probe(prompts.kind, prompts))
    except WrongMedia:
        raise
    except ValueError:  # the samples of a run may have what these lack, such as a column
        return


def _probed(
    name: str, reward: Reward, prompts: Prompts, one_kind: bool = False
) -> tuple[Samples, Float[Tensor, " n"], bool]:
    """Test samples of the run's kind, or of a kind that the reward takes, their scores, and whether
    the reward abstains from some."""
    once = isinstance(reward, OneCall) and reward.one_call
    kinds: list[Kind] = [prompts.kind, *[k for k in ("image", "video") if k != prompts.kind]]
    refusal = ""
    for kind in kinds if prompts.kind in ("image", "video") and not one_kind else kinds[:1]:
        samples = probe(kind, prompts)
        try:
            scores = reward_scores(name, reward, samples)
        except WrongMedia as error:
            refusal = refusal or str(error)
            continue
        abstains = not bool(scores.applies.all())
        if once or not abstains:
            return samples, scores.values, abstains
        samples = probe(kind, _applicable(name, reward, prompts, samples))
        return samples, scored(name, reward, samples), abstains
    raise WrongMedia(refusal)


def _applicable(name: str, reward: Reward, prompts: Prompts, shown: Samples) -> Prompts:
    """The prompts to which a reward applies, among some that are spread over all. Untested if it
    applies to none of them."""
    count = min(len(prompts.texts), _SOUGHT)
    for start in range(0, count, len(shown.prompts)):
        rows = [i * len(prompts.texts) // count for i in range(count)][start:][: len(shown.prompts)]
        texts = [prompts.texts[row] for row in rows]
        meta = [prompts.meta[row] for row in rows] if prompts.meta else ()
        first_rows = replace(shown.take(range(len(rows))), prompts=texts, meta=meta)
        applies = reward_scores(name, reward, first_rows).applies.tolist()
        if any(applies):
            rows_applied = [i for i, applied in enumerate(applies) if applied]
            their_meta = [meta[i] for i in rows_applied] if meta else ()
            return replace(prompts, texts=[texts[i] for i in rows_applied], meta=their_meta)
    raise Untested(
        f"reward {name}: it applies to none of {count} prompts, spread over all (it returned None "
        "for each), so it is not tested; if it should apply, compare what it asks of a row with "
        "the prompt file"
    )


def _with_a_column(
    name: str, reward: Reward, samples: Samples, scores: Float[Tensor, " n"]
) -> tuple[Samples, Float[Tensor, " n"]]:
    """Test texts that all score the same, of which the first is replaced by one of its row's
    columns that scores differently, if there is one: a reward that compares with an answer scores
    0 for all others. Other samples are returned unchanged."""
    once = isinstance(reward, OneCall) and reward.one_call
    if samples.kind != "text" or once or not samples.meta or not _all_alike(scores):
        return samples, scores
    for value in samples.meta[0].values():
        if isinstance(value, str | int | float):
            changed = replace(samples, media=[str(value), *samples.media[1:]])
            scores_changed = reward_scores(name, reward, changed).values
            if not _all_alike(scores_changed):
                return changed, scores_changed
    return samples, scores


def _all_alike(scores: Float[Tensor, " n"]) -> bool:
    numbers = scores[~scores.isnan()]
    return len(numbers) > 0 and _alike(numbers)


def _check_examples(name: str, scores: Float[Tensor, " n"]) -> None:
    if len(scores) != 2:
        raise ValueError(f"reward {name}: `examples` must return two samples, not {len(scores)}")
    if scores.isnan().any():
        raise ValueError(f"reward {name}: it leaves its own examples unscored: {_list(scores)}")
    better, worse = scores.tolist()
    if _alike(scores):
        raise ValueError(f"reward {name}: both of its examples score {better:.6g}")
    if better < worse:
        raise ValueError(
            f"reward {name}: its better example scores {better:.6g}, the other one {worse:.6g}; "
            "is the sign wrong?"
        )


def _check_different(
    name: str, scores: Float[Tensor, " n"], samples: Samples, abstains: bool
) -> None:
    numbers = scores[~scores.isnan()]
    seen = "noise, a flat colour, a gradient, a chequerboard"
    shown = {
        "text": "texts",
        "image": seen,
        "video": f"videos ({seen}; the last two move)",
        "sound": "noise, silence, a tone that grows, and clicks",
        "tensor": "noise, 0.5, a ramp from 0 to 1, and 1, -1, 1, ...",
    }[samples.kind]
    way_out = (
        "if that is right, add examples() -> Samples: two samples that it scores differently, the "
        "better one first"
    )
    kind = Untested if abstains else ValueError
    if len(numbers) == 0:
        raise kind(f"reward {name}: it scores none of {shown}; {way_out}")
    if _alike(numbers):
        raise kind(f"reward {name}: {shown} all score {numbers[0]:.6g}; {way_out}")


def _alike(scores: Float[Tensor, " n"]) -> bool:
    return bool(scores.max() - scores.min() <= _ALIKE * scores.abs().max().clamp(min=_ALIKE))


def _check_repeatable(
    name: str, reward: Reward, samples: Samples, scores: Float[Tensor, " n"]
) -> float:
    """The largest difference in a second, identical call. ValueError if it is not small within a
    group."""
    again = scored(name, reward, samples)
    noise = _largest_gap(again, scores)
    if noise <= _rounding(scores):
        return noise
    spread = _spread(scored(name, reward, _similar(samples)))
    if noise > _NOISE * spread:
        raise ValueError(
            f"reward {name}: the same samples score first {_list(scores)}, then {_list(again)}; "
            f"the difference of {noise:.2g} is too large compared with the spread of "
            f"{spread:.2g} within a group; make it repeatable, or set its attribute "
            "one_call = True if that is impossible"
        )
    return noise


def _check_places(name: str, reward: Reward, samples: Samples, noise: float) -> None:
    """Similar samples in another order must score the same, up to a small part of their spread: a
    score that grows with the position in the batch would rank a group's samples by position."""
    near = _similar(samples)
    scores = scored(name, reward, near)
    back = list(range(len(scores)))[::-1]
    turned = scored(name, reward, near.take(back)).flip(0)
    gap, spread = _largest_gap(turned, scores), _spread(scores)
    if gap > max(_rounding(scores), 2 * noise, _NOISE * spread):
        raise ValueError(
            f"reward {name}: similar samples score {_list(scores)}, and {_list(turned)} with "
            f"the batch in reverse order; the difference of {gap:.2g} is too large compared "
            f"with their spread of {spread:.2g}; a reward must score each sample independently"
        )


def _largest_gap(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> float:
    """The largest difference; infinite if a sample is scored in only one of the two."""
    scored = ~(a.isnan() & b.isnan())
    return float((a - b).abs().nan_to_num(torch.inf)[scored].max()) if scored.any() else 0.0


def _rounding(scores: Float[Tensor, " n"]) -> float:
    return _ROUNDING * float(scores.abs().nan_to_num(0).max())


def _spread(scores: Float[Tensor, " n"]) -> float:
    numbers = scores[~scores.isnan()]
    return float(numbers.std(correction=0)) if len(numbers) else 0.0


def check_sum(
    rewards: Mapping[str, Reward], weights: Mapping[str, float], prompts: Prompts
) -> None:
    """ValueError if the weighted sum of several rewards is constant over samples that each of them
    distinguishes.

    The sum is over the rewards that apply to a sample. Rewards are skipped if they are called only
    once, have their own examples, or do not score the test samples.
    """
    for reward in rewards.values():
        once = isinstance(reward, OneCall) and reward.one_call
        if once or (isinstance(reward, Exemplary) and reward.examples() is not None):
            return
    samples = probe(prompts.kind, prompts)
    try:
        scores = score_all(rewards, samples)
    except WrongMedia:
        return
    weight = torch.tensor([weights[name] for name in rewards], dtype=torch.float64)
    columns, total = (
        (scores.values * weight)[scores.complete],
        scores.totals(weight)[scores.complete],
    )
    if len(total) < 2:
        return
    spread, left = float(columns.std(0, correction=0).max()), float(total.max() - total.min())
    if spread > 0 and left <= _ROUNDING * spread:
        raise ValueError(
            f"rewards {', '.join(rewards)}: they cancel: their weighted sum is {total[0]:.6g} "
            f"for all {len(total)} test samples, so no sample is better than another; change a "
            "weight"
        )


def _similar(samples: Samples) -> Samples:
    """Samples as similar as the samples of one group: the first image with a little of each other
    image blended in.

    Texts and images of different sizes stay as they are, since these differ as much within a group.
    """
    media = items(samples)
    if samples.kind == "text" or len({item.shape for item in media}) > 1:
        return samples
    near = torch.stack([media[0].lerp(item, _NEAR) for item in media])
    first = [samples.meta[0]] * len(media) if samples.meta else ()
    audio = samples.audio
    if audio is not None:
        audio = replace(audio, waveform=audio.waveform[:1].lerp(audio.waveform, _NEAR))
    return Samples(near, [samples.prompts[0]] * len(media), samples.group, first, audio)


def check_declared(name: str, reward: Reward, prompts: Prompts | None = None) -> None:
    """ValueError, naming it, for a reward that says what a score depends on (`per`), but whose
    scores depend on more. Calls no reward that says nothing, and none that may be called once."""
    if per_of(reward) is None or (isinstance(reward, OneCall) and reward.one_call):
        return
    samples = reward.examples() if isinstance(reward, Exemplary) else None
    if samples is not None:
        scores = scored(name, reward, samples)
    else:
        samples, scores, _ = _probed(name, reward, Prompts() if prompts is None else prompts)
    _check_batches(name, reward, samples, scores)


def _check_batches(name: str, reward: Reward, samples: Samples, scores: Float[Tensor, " n"]) -> str:
    """Samples scored one by one must have the same scores; for a groupwise reward, samples in
    another order, and a group beside another one. Without a word (`per`), a reward that scores no
    sample alone is groupwise."""
    said, rows = per_of(reward), list(range(len(scores)))
    alone = torch.full_like(scores, torch.nan)
    if said != "group":
        alone = torch.cat([scored(name, reward, samples.take([row])) for row in rows])
    how, way_out = "one by one", "a reward must score each sample independently"
    if said == "sample":
        way_out += ", since it says per = 'sample'; one that compares a group says 'group'"
    if said == "group" or (said is None and not scores.isnan().all() and alone.isnan().all()):
        alone = scored(name, reward, samples.take(rows[::-1])).flip(0)
        how = "in another order"
    if said == "group" and not _unlike(alone, scores).any():
        alone, how = _beside(name, reward, samples), "beside another group"
        way_out = "a reward that says per = 'group' may compare samples of one group alone"
    if _unlike(alone, scores).any():
        raise ValueError(
            f"reward {name}: scores depend on the batch: {_list(scores)} together, "
            f"{_list(alone)} {how}; {way_out}"
        )
    return f"{how} the same"


def _unlike(alone: Float[Tensor, " n"], scores: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Scores that differ by more than half precision explains."""
    room = _BATCHED * torch.maximum(scores.abs(), scores.nan_to_num(0).abs().max())
    same = (alone - scores).abs() <= room.clamp(min=_ALIKE)
    return ~(same | (alone.isnan() & scores.isnan()))


def _beside(name: str, reward: Reward, samples: Samples) -> Float[Tensor, " n"]:
    """Scores of the samples as one group of a batch that has a second one, of the same samples
    turned around."""
    n = len(samples.prompts)
    doubled = samples.take([*range(n), *reversed(range(n))])
    second = doubled.group.clone()
    second[n:] += int(samples.group.max()) + 1
    return scored(name, reward, replace(doubled, group=second))[:n]


def _list(scores: Float[Tensor, " n"]) -> str:
    return ", ".join(f"{score:.6g}" for score in scores)
