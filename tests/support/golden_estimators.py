"""The face's estimators, by the names that papers and their code give them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.contrib.text_riskpo import QUANTILES, RiskPO
from flowrl.credit.advantages import (
    Clip,
    Context,
    Estimator,
    LeaveOneOut,
    Rescale,
    Standardize,
    Sum,
)
from flowrl.credit.augmented import Augmented
from flowrl.credit.comparisons import BestWorst
from flowrl.credit.success import BestGap, BetaNormalize, MaxRL, PassAtK
from flowrl.credit.turns import Baseline, LengthBaseline, Penalize, WhitenTokens
from flowrl.credit.values import (
    REFERENCE,
    TRACKED,
    Credit,
    ReferenceRatios,
    TrackedStatistics,
    Transform,
    by_column,
)
from rewards import Scores
from samplers import Columns


@dataclass(frozen=True)
class Given:
    """What `estimator` takes beside rewards and groups."""

    weights: Tensor | None = None
    scale: str = "group"
    correction: int = 1
    eps: float = 1e-4
    lengths: Tensor | None = None
    mask: Tensor | None = None
    baseline: Tensor | None = None
    k: int = 4
    most: float = 1e6
    clip: float | None = None
    divergence: Tensor | None = None
    beta: float = 0.0
    normalize: bool = False
    bundle: int | Tensor = 1
    quantiles: tuple[float, float] | None = None
    w_mix: float = 0.0
    natural: bool = True
    scaled: bool = False
    credit: str = "uniform"


@dataclass(frozen=True)
class _ShareInformative:
    """GPG (arXiv:2504.02546), which the product does not have: (value - p) times samples over
    samples whose reward is not 0."""

    def __call__(self, credit: Credit, context: Context) -> Credit:
        def rule(value: Tensor, mask: Tensor) -> Tensor:
            some = ((value != 0) & mask).sum((0, 1), keepdim=True).clamp(min=1)
            centred = Standardize(scale=None).rule(value, mask)
            return centred * mask.sum((0, 1), keepdim=True) / some

        return by_column(credit, context, rule)


def _chain(name: str, s: Given) -> tuple[Transform, ...]:
    rule = Standardize(None if s.scale == "none" else s.scale, s.correction, s.eps)  # type: ignore[arg-type]
    whole = Standardize("batch", s.correction, s.eps, centre="batch")
    total, population = Sum(partial=True), Standardize("group", 0, 1e-6)
    risk = RiskPO(
        s.bundle if isinstance(s.bundle, int) else 1, mix=s.w_mix, natural=s.natural,
        scaled=s.scaled, credit=s.credit,  # type: ignore[arg-type]
    )  # fmt: skip
    after: tuple[Transform, ...] = (whole,) if s.normalize else ()
    known: dict[str, tuple[Transform, ...]] = {
        "grpo": (total, rule),
        "dr_grpo": (total, Standardize(None)),
        "rloo": (total, LeaveOneOut(), *after),
        "gdpo": (rule, total, whole),
        "best_worst": (total, BestWorst()),
        "opo": (total, LengthBaseline()),
        "reinforce": (total,),
        "reinforce_plus_plus": (total, WhitenTokens()),
        "reinforce_plus_plus_baseline": (total, Standardize(None), WhitenTokens()),
        "remax": (total, Baseline()),
        "single_stream": (total, Baseline(), whole),
        "aapo": (total, Augmented(rule)),
        "gpg": (total, _ShareInformative()),
        "grpo_passk": (total, BestGap(s.scale != "none")),
        "maxrl": (total, MaxRL()),
        "maxrl_clipped": (total, MaxRL(floor=0.125, eps=0.0)),
        "maxrl_spread": (total, MaxRL(spread=True)),
        "conditional": (total, MaxRL("none")),
        "conditional_less_one": (total, MaxRL("one")),
        "population": (total, population),
        "pkpo": (total, PassAtK(s.k)),
        "passk": (total, PassAtK(s.k, "analytic")),
        "bnpo": (total, BetaNormalize(s.most, correction=1)),
        "riskpo": (total, risk),
    }
    aliases = {
        "rloo_vectorized": "rloo", "pass_at_k": "pkpo", "passk_training": "passk", "beta": "bnpo",
        "clipped_pnorm": "maxrl_clipped", "misc_grpo": "population", "misc_maxrl": "maxrl_spread",
        "misc_reinforce_without_baseline": "reinforce",
        "misc_reinforce_with_baseline": "dr_grpo",
        "misc_reinforce_with_p_normalization": "maxrl",
        "misc_conditional_expectation": "conditional", "misc_vr-cond": "conditional_less_one",
        "reinforce++": "reinforce_plus_plus", "spo": "single_stream",
    }  # fmt: skip
    found = known[aliases.get(name, name)]
    return (*found, Rescale(8.0, 1.0)) if name == "clipped_pnorm" else found


@dataclass(frozen=True)
class _Packed:
    """Samples of any order and group size, as contiguous groups of one size; smaller groups are
    filled up with samples that nobody scored."""

    place: Tensor  # of each sample, after filling up
    order: Tensor  # of samples
    size: int
    groups: int

    @classmethod
    def of(cls, group: int | Tensor, n: int) -> "_Packed":
        ids = torch.arange(n) // group if isinstance(group, int) else group
        found = [torch.nonzero(ids == i)[:, 0] for i in ids.unique().tolist()]
        size = max(map(len, found))
        place = torch.cat([g * size + torch.arange(len(at)) for g, at in enumerate(found)])
        return cls(place, torch.cat(found), size, len(found))

    def pack(self, column: Tensor) -> Tensor:
        whole = torch.zeros(self.groups * self.size, *column.shape[1:], dtype=column.dtype)
        whole[self.place] = column[self.order]
        return whole

    def unpack(self, column: Tensor) -> Tensor:
        found = torch.zeros(len(self.order), dtype=column.dtype)
        found[self.order] = column[self.place]
        return found


def estimator(name: str, rewards: Tensor, group: int | Tensor, **settings: object) -> Tensor:
    """[n] advantages of rewards [n] or [n r], NaN for unscored.

    `group` is the size of contiguous groups, or an id a sample, in any order. Names: see `_chain`.
    `scale` (group, batch, none), `correction` and `eps` are grpo's and gdpo's; `lengths` [n] or
    `mask` [n t] those of the methods that weigh by length; `baseline` [n] or a value a group that
    of remax and aapo; `k` that of pass@k; `clip` cuts rewards before anything else, then
    `beta` times a `divergence` [n] to the reference is taken off.
    """
    s = Given(**settings)  # type: ignore[arg-type]
    values = rewards[:, None] if rewards.ndim == 1 else rewards
    if s.mask is not None and s.lengths is None:
        s = replace(s, lengths=s.mask.sum(1))
    packed = _Packed.of(group, len(values))
    scored = packed.pack(~values.isnan())
    values = packed.pack(values.nan_to_num(0.0))
    scores = Scores(values, scored, tuple(map(str, range(values.shape[1]))))
    columns = Columns((packed.size,), (True,), (1.0,), (1.0,))
    context = Context(columns, torch.ones(values.shape[1]) if s.weights is None else s.weights)
    if s.lengths is not None:
        context = replace(context, lengths=packed.pack(s.lengths.double()))
    if s.baseline is not None:
        context = context.with_column(TRACKED, TrackedStatistics(_by_group(s.baseline, packed)))
    if s.quantiles is not None:
        context = context.with_column(QUANTILES, s.quantiles)
    chain = _chain(name, s)
    if s.divergence is not None:
        moved = packed.pack(s.divergence.double())[:, None]
        reference = ReferenceRatios(moved, torch.zeros_like(moved, dtype=torch.int64))
        context = context.with_column(REFERENCE, reference)
        chain = (chain[0], Penalize(s.beta), *chain[1:])
    if s.clip is not None:
        chain = (chain[0], Clip(s.clip), *chain[1:])
    return packed.unpack(Estimator(chain)(scores, context)[0][:, 0])


def _by_group(baseline: Tensor, packed: _Packed) -> Tensor:
    """[g] as given, or the first of each group's [n]."""
    if len(baseline) == packed.groups:
        return baseline.double()
    return packed.pack(baseline.double()).view(-1, packed.size)[:, 0]
