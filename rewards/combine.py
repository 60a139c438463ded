"""Score with all rewards of a run, check their scores, and make judges from rewards."""

import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rewards.guard import Called, guarded_call
from rewards.types import Judge, Reward, RewardScores, Samples, Scores

NOTED = re.compile("in (reward|judge) (.*)", re.DOTALL)  # the note of an exception of one


@dataclass(frozen=True)
class ByScore:
    """Turns a pointwise reward into a judge: 1 if a scores higher, 0 if lower, 1/2 if equal.

    NaN where either is unscored, or the reward does not apply to it. Each sample is scored once, in
    however many pairs it is. Errors name the reward `name`.
    """

    reward: Reward
    name: str = "judge"

    def __call__(
        self, samples: Samples, a: Int[Tensor, " p"], b: Int[Tensor, " p"]
    ) -> Float[Tensor, " p"]:
        return self.verdicts(samples, a, b).values

    def verdicts(
        self, samples: Samples, a: Int[Tensor, " p"], b: Int[Tensor, " p"]
    ) -> RewardScores:
        """Verdicts, and the pairs of two samples to which the reward applies."""
        score, applies = reward_scores(self.name, self.reward, samples)
        first, second = a.cpu(), b.cpu()
        difference = score[first] - score[second]
        won = (torch.sign(difference) + 1) / 2
        # the sign of NaN would be 0
        won = won.masked_fill(difference.isnan(), torch.nan)
        return RewardScores(won, applies[first] & applies[second])


def score_all(rewards: Mapping[str, Reward], samples: Samples) -> Scores:
    """Scores of all rewards, one column each in the mapping's order, float64 on the CPU.

    None (alone or in a list) marks a sample to which the reward does not apply, NaN one that it
    could not score. Samples whose media are None are unscored by all rewards and never passed to
    one. An exception of a reward passes through, with the reward's name as a note;
    `reward_scores` lists the other errors.
    """
    if not rewards:
        raise ValueError("score_all needs at least one reward")
    return Scores.of_rewards(
        {n: reward_scores(n, reward, samples) for n, reward in rewards.items()}
    )


def scored(name: str, reward: Reward, samples: Samples) -> Float[Tensor, " n"]:
    """The values of `reward_scores`, NaN without a score, where numbers alone are read."""
    return reward_scores(name, reward, samples).values


def reward_scores(name: str, reward: Reward, samples: Samples) -> RewardScores:
    """Scores of one reward, as float64 on the CPU.

    ValueError, naming the reward, for a result that is not one finite real number per sample, and
    for a reward that changes the run (`rewards.guard`).
    """
    n = len(samples.prompts)
    missing = torch.zeros(n, dtype=torch.bool)
    if not isinstance(samples.media, Tensor):
        missing = torch.tensor([item is None for item in samples.media], dtype=torch.bool)
    failed = torch.full((n,), torch.nan, dtype=torch.float64)
    scores = RewardScores(failed, torch.ones(n, dtype=torch.bool))
    if missing.all():
        return scores
    scorable = torch.nonzero(~missing).flatten()
    shown = samples if len(scorable) == n else samples.take(scorable)
    with _noted("reward", name):
        for rows, part in shown.by_sound:
            column = _column("reward", name, guarded_call(name, reward, part), len(rows))
            scores.put(scorable[rows], column)
    return scores


def judged(
    name: str, judge: Judge, samples: Samples, a: Int[Tensor, " p"], b: Int[Tensor, " p"]
) -> Float[Tensor, " p"]:
    """Verdicts of a judge as float64 on the CPU; NaN without a verdict. Raises the same errors as
    `reward_scores`."""
    with _noted("judge", name):
        result = guarded_call(name, lambda s: judge(s, a.clone(), b.clone()), samples, "judge")
        return _column("judge", name, result, len(a)).values


def _column(kind: Called, name: str, result: Any, n: int) -> RewardScores:
    """Convert the result of a reward or judge to n numbers."""
    try:
        column = _numbers(result, n)
        if column.values.shape != (n,):
            raise ValueError(f"shape {list(column.values.shape)}")
        if column.applies.shape != (n,):
            raise ValueError(f"RewardScores with applies of shape {list(column.applies.shape)}")
        if column.values.isinf().any():
            raise ValueError("an infinite score")
    except ValueError as error:
        item, missing = "pair", "None or NaN without a verdict"
        if kind == "reward":
            item, missing = "sample", "None where it does not apply, NaN if it cannot score"
        raise ValueError(
            f"{kind} {name!r} returned {error}; expected {n} finite numbers, one per {item}, in "
            f"a tensor or list ({missing})"
        ) from error
    return column


def _numbers(result: Any, n: int) -> RewardScores:
    """ValueError, with a description of the result, for anything but real numbers."""
    if result is None:
        return RewardScores.nowhere(n)
    if isinstance(result, RewardScores):
        applies = result.applies.detach().cpu().bool()
        values = _every_applies(result.values.detach().cpu()).values
        # what a reward says of a sample to which it does not apply is not read
        return RewardScores(values.masked_fill(~applies, torch.nan), applies)
    if isinstance(result, np.ma.MaskedArray):
        raise ValueError("a masked array, whose mask would be lost: return .filled(numpy.nan)")
    if isinstance(result, Set):
        raise ValueError(f"a {type(result).__name__}, which has no order")
    if isinstance(result, np.ndarray):
        result = torch.from_numpy(result) if result.dtype.kind in "fiub" else result.tolist()
    if isinstance(result, Tensor):
        if result.is_complex():
            raise ValueError("complex numbers")
        if result.layout is not torch.strided:
            raise ValueError("a sparse tensor")
        return _every_applies(result.detach().cpu())
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
        raise ValueError(f"one {type(result).__name__}")
    listed = list(result)
    applies = torch.tensor([value is not None for value in listed], dtype=torch.bool)
    numbers = [torch.nan if value is None else _number(value) for value in listed]
    return RewardScores(torch.tensor(numbers, dtype=torch.float64), applies)


def _every_applies(values: Tensor) -> RewardScores:
    return RewardScores(values.double(), torch.ones(values.shape, dtype=torch.bool))


def _number(value: Any) -> float:
    if value is np.ma.masked:
        raise ValueError("a list with a masked number")
    if isinstance(value, Tensor | np.ndarray) and value.shape == ():
        value = value.item()
    if not isinstance(value, Real | np.bool_):
        raise ValueError(f"a list with a {type(value).__name__}, {value!r:.60}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("an infinite score") from None


def blamed(error: BaseException) -> str | None:
    """Describe an exception that a reward or judge raised, with the last line outside libraries.

    None for other errors. A ValueError of this package already is a sentence.
    """
    notes: list[str] = getattr(error, "__notes__", [])
    noted = [match for note in notes if (match := NOTED.fullmatch(note)) is not None]
    if not noted:
        return None
    # a judge within a reward is the reward's affair
    kind, label = next((match for match in noted if match[1] == "reward"), noted[0]).groups()
    label = label.strip("'")
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if _outside_libraries(Path(f.filename))] or frames
    if (
        isinstance(error, ValueError)
        and Path(__file__).parent in Path(outside[-1].filename).parents
    ):
        return str(error)
    try:
        text = ": " + " ".join(str(error).split())
    except Exception:  # a class of the user's
        text = ", which has no text"
    raised = f"{type(error).__name__}{text}"
    place = f"{Path(outside[-1].filename).name}, {outside[-1].lineno}"
    return f"the {kind} {label} raised {raised} ({place})"


def _outside_libraries(file: Path) -> bool:
    folders = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    return Path(__file__).parent in file.parents or not any(f in file.parents for f in folders)


@contextmanager
def _noted(kind: Called, name: str) -> Iterator[None]:
    """Add the name of the reward or judge to any exception."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in {kind} {name!r}")
        raise
