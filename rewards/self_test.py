"""Is a reward fit to be trained on? A test of a second, before hours are spent.

A reward may say how: with `examples() -> Samples` it gives two samples, the better one first; one
that costs money or has state sets `one_call`, and is then asked once; one that is made of others
names them in `parts`. A reward without examples is shown a few pictures (or texts) that nobody
would call alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.combine import scored
from rewards.perception.media import WrongMedia
from rewards.types import Kind, Reward, Samples

TEST_IMAGE_SIZE = 64  # pixels of the pictures that are shown
ALIKE = 1e-6  # scores nearer than this, relative to their size, are the same
BATCHED = 0.01  # how far batched scores may be from single ones: half precision is no fault


@runtime_checkable
class Exemplary(Protocol):
    """A reward that knows two samples which it must tell apart, the better one first."""

    def examples(self) -> Samples | None: ...


@runtime_checkable
class OneCall(Protocol):
    """A reward that is asked only once by the self-test, if `one_call` is True."""

    @property
    def one_call(self) -> bool: ...


@runtime_checkable
class Made(Protocol):
    """A reward made of others: each of them is tested."""

    @property
    def parts(self) -> Mapping[str, Reward]: ...


@runtime_checkable
class ChecksPrompts(Protocol):
    """A reward that reads columns, and can tell from the prompt file alone what is wrong there."""

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError, naming a row, for one that could not be scored."""
        ...


@dataclass(frozen=True)
class Prompts:
    """What the run will ask for; shown to rewards that bring no examples."""

    texts: Sequence[str] = ("a red circle", "a blue square left of a green triangle")
    meta: Sequence[Mapping[str, Any]] = field(default=())
    kind: Kind = "image"


def probe(kind: Kind, prompts: Prompts) -> Samples:
    """Noise, a flat colour, a slope, a chequered board; or four texts. All in one group."""
    texts = [prompts.texts[i % len(prompts.texts)] for i in range(4)]
    meta = [prompts.meta[i % len(prompts.meta)] for i in range(4)] if prompts.meta else ()
    group = torch.zeros(4, dtype=torch.long)
    if kind == "text":
        return Samples(["7", "I do not know.", texts[0], "word " * 200], texts, group, meta)
    noise = torch.rand(
        3, TEST_IMAGE_SIZE, TEST_IMAGE_SIZE, generator=torch.Generator().manual_seed(0)
    )
    slope = torch.linspace(0, 1, TEST_IMAGE_SIZE).expand(3, TEST_IMAGE_SIZE, TEST_IMAGE_SIZE)
    place = torch.arange(TEST_IMAGE_SIZE) // 8
    board = ((place[:, None] + place) % 2).float().expand(3, TEST_IMAGE_SIZE, TEST_IMAGE_SIZE)
    flat = torch.tensor([0.7, 0.3, 0.1]).view(3, 1, 1).expand(3, TEST_IMAGE_SIZE, TEST_IMAGE_SIZE)
    media = torch.stack([noise, flat, slope, board])
    if kind == "video":
        media = media[:, None].repeat(1, 8, 1, 1, 1)
    return Samples(media, texts, group, meta)


def self_test(name: str, reward: Reward, prompts: Prompts | None = None) -> str:
    """A sentence on what was seen. ValueError, in the reward's name, for what is wrong.

    Wrong are: samples that must differ score alike or the wrong way round, nothing is scored, an
    infinite score, a wrong number of scores, and scores that depend on what else is in the batch.
    """
    if prompts is not None and isinstance(reward, ChecksPrompts):
        reward.check_prompts(prompts.texts, prompts.meta)
    prompts = Prompts() if prompts is None else prompts
    if isinstance(reward, Made):
        said = [self_test(f"{name}: {part}", r, prompts) for part, r in reward.parts.items()]
        return "; ".join(said)
    shown = reward.examples() if isinstance(reward, Exemplary) else None
    if shown is not None:
        scores = scored(name, reward, shown)
        _told_apart(name, scores)
        said = f"{name}: {scores[0]:.4g} for the better of its examples, {scores[1]:.4g}"
    else:
        shown, scores = _shown(name, reward, prompts)
        _not_alike(name, scores, shown)
        said = f"{name}: {', '.join(f'{s:.4g}' for s in scores)} for {len(scores)} unlike samples"
    if isinstance(reward, OneCall) and reward.one_call:
        return f"{said}; asked once"
    return f"{said}; {_single(name, reward, shown, scores)}"


def _shown(name: str, reward: Reward, prompts: Prompts) -> tuple[Samples, Float[Tensor, " n"]]:
    """Samples of the run's kind, or of whichever kind the reward takes, and their scores."""
    kinds: list[Kind] = [prompts.kind, *[k for k in ("image", "video") if k != prompts.kind]]
    refused = ""
    for kind in kinds if prompts.kind != "text" else kinds[:1]:
        samples = probe(kind, prompts)
        try:
            return samples, scored(name, reward, samples)
        except WrongMedia as error:
            refused = refused or str(error)
    raise ValueError(refused)


def _told_apart(name: str, scores: Float[Tensor, " n"]) -> None:
    if len(scores) != 2:
        raise ValueError(f"reward {name}: `examples` gives two samples, not {len(scores)}")
    if scores.isnan().any():
        raise ValueError(f"reward {name}: it does not score its own examples: {_list(scores)}")
    better, worse = scores.tolist()
    if _alike(scores):
        raise ValueError(f"reward {name}: its two examples both score {better:.6g}")
    if better < worse:
        raise ValueError(
            f"reward {name}: the better of its examples scores {better:.6g}, the other {worse:.6g};"
            " is the sign wrong?"
        )


def _not_alike(name: str, scores: Float[Tensor, " n"], samples: Samples) -> None:
    known = scores[~scores.isnan()]
    what = (
        "texts" if samples.kind == "text" else "noise, a flat colour, a slope and a chequered board"
    )
    way_out = (
        "if that is right, say what it tells apart: examples() -> Samples, two samples with the "
        "better one first"
    )
    if len(known) == 0:
        raise ValueError(f"reward {name}: it scores none of {what}; {way_out}")
    if _alike(known):
        raise ValueError(f"reward {name}: {what} all score {known[0]:.6g}; {way_out}")


def _alike(scores: Float[Tensor, " n"]) -> bool:
    return bool(scores.max() - scores.min() <= ALIKE * scores.abs().max().clamp(min=ALIKE))


def _single(name: str, reward: Reward, samples: Samples, scores: Float[Tensor, " n"]) -> str:
    """One by one the same; or, for a groupwise reward, the same in another order."""
    rows = range(len(scores))
    alone = torch.cat([scored(name, reward, samples.take([row])) for row in rows])
    if not scores.isnan().all() and alone.isnan().all():
        alone = scored(name, reward, samples.take(list(rows)[::-1])).flip(0)
        how = "in another order"
    else:
        how = "one by one"
    room = BATCHED * torch.maximum(scores.abs(), scores.nan_to_num(0).abs().max())
    same = (alone - scores).abs() <= room.clamp(min=ALIKE)
    if not (same | (alone.isnan() & scores.isnan())).all():
        raise ValueError(
            f"reward {name}: scores depend on the batch: {_list(scores)} together, {_list(alone)} "
            f"{how}; a reward must score each sample for itself"
        )
    return f"{how} the same"


def _list(scores: Float[Tensor, " n"]) -> str:
    return ", ".join(f"{score:.6g}" for score in scores)
