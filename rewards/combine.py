"""Rewards from judges, judges from rewards, and all rewards of a run at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rewards.types import Judge, Reward, Samples, Scores


@dataclass(frozen=True)
class WinRate:
    """How often a sample beats the others of its group, 0..1: Pref-GRPO, arXiv:2508.20751.

    Each pair is judged once, the earlier sample first. A pair without a verdict (NaN) is left out;
    a sample without any verdict, or alone in its group, is unscored. The authors' code gives half
    a win to both sides of a pair without a verdict: return 0.5 for that.
    """

    judge: Judge

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        group = samples.group.cpu()
        same = group[:, None] == group[None, :]
        a, b = torch.nonzero(same.triu(1), as_tuple=True)
        p = self.judge(samples, a, b).double().cpu()
        judged, won = (~p.isnan()).double(), p.nan_to_num(0.0)
        none = torch.zeros(len(group), dtype=torch.float64)
        wins = none.index_add(0, a, won).index_add(0, b, judged - won)
        count = none.index_add(0, a, judged).index_add(0, b, judged)
        return wins / count  # 0 / 0 is NaN: unscored


@dataclass(frozen=True)
class ByScore:
    """A judge from a pointwise reward: 1 where a scores higher, 0 where lower, 1/2 where equal.

    NaN where either is unscored. Each sample is scored once, in however many pairs it stands.
    """

    reward: Reward

    def __call__(
        self, samples: Samples, a: Int[Tensor, " p"], b: Int[Tensor, " p"]
    ) -> Float[Tensor, " p"]:
        score = scored("judge", self.reward, samples)
        apart = score[a.cpu()] - score[b.cpu()]
        won = (torch.sign(apart) + 1) / 2
        return won.masked_fill(apart.isnan(), torch.nan)  # the sign of NaN would be 0


def score_all(rewards: Mapping[str, Reward], samples: Samples) -> Scores:
    """One column a reward, in the mapping's order, float64 on the CPU.

    NaN (or None, alone or in a list) is a sample that the reward could not score; samples whose
    media are None are unscored by all and shown to none. What a reward raises passes through with
    the reward's name noted. ValueError for an infinite score or a wrong number of them.
    """
    if not rewards:
        raise ValueError("score_all needs at least one reward")
    columns = [scored(name, reward, samples) for name, reward in rewards.items()]
    values = torch.stack(columns, 1)
    known = ~values.isnan()
    return Scores(values.nan_to_num(0.0), known, tuple(rewards))


def scored(name: str, reward: Reward, samples: Samples) -> Float[Tensor, " n"]:
    """What one reward gives, as float64 on the CPU, NaN for what it could not score."""
    n = len(samples.prompts)
    missing = torch.zeros(n, dtype=torch.bool)
    if not isinstance(samples.media, Tensor):
        missing = torch.tensor([item is None for item in samples.media], dtype=torch.bool)
    column = torch.full((n,), torch.nan, dtype=torch.float64)
    if missing.all():
        return column
    kept = torch.nonzero(~missing).flatten()
    column[kept] = _asked(name, reward, samples if len(kept) == n else samples.take(kept))
    return column


def _asked(name: str, reward: Reward, samples: Samples) -> Float[Tensor, " n"]:
    n = len(samples.prompts)
    with _Noted(name):
        given: Tensor | Sequence[float | None] | None = reward(samples)
        if not isinstance(given, Tensor):
            listed = [None] * n if given is None else given
            given = torch.tensor(
                [torch.nan if s is None else float(s) for s in listed], dtype=torch.float64
            )
        if given.shape != (n,):
            raise ValueError(f"a score a sample: {n} wanted, shape {tuple(given.shape)} given")
        if given.isinf().any():
            raise ValueError("an infinite score; give NaN for what cannot be scored")
    return given.detach().double().cpu()


@dataclass(frozen=True)
class _Noted:
    """Adds the reward's name to whatever is raised inside."""

    name: str

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(f"in reward {self.name!r}")
