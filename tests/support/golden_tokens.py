"""The face's losses on tokens, with settings by the names that TRL gives them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.contrib.text_gppo import GPPO
from flowrl.likelihoods.rows import Evaluation, Rows, TokenRows
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.token_ratios import RatioLevel
from flowrl.losses.base import Anchor, Counts, Entries, Objective, Weight, reduced
from flowrl.losses.preference import Preference
from flowrl.losses.ratio import Surrogate
from flowrl.losses.token import CISPO, GMPO, SAPO, VESPO, Reinforce
from flowrl.losses.weights import HighEntropy, Mismatch, OffPolicyMask


@dataclass(frozen=True)
class TokenSettings:
    """What `token_loss` takes beside its tensors, under TRL's names and with its defaults.

    level                     also importance_sampling_level: token | sequence | sequence_token
    delta, dual               two-sided clip; verl's clip_ratio_c is dual
    num_items, grad_accum, steps_per_generation, evaluating    denominators of many micro-batches
    importance_sampling_ratio the factor of an engine's mismatch; or `sampling` log-probs with
                              mismatch (token_truncate ...), mismatch_max, mismatch_min
    """

    level: str | None = None
    importance_sampling_level: str | None = None
    epsilon: float = 0.2
    epsilon_low: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    dual: float | None = None
    beta: float = 0.0
    kl_form: str = "k3"
    use_bias_correction_kl: bool = False
    max_completion_length: int | None = None
    aggregation: str | None = None
    num_items: float | None = None
    grad_accum: float = 1.0
    steps_per_generation: float | None = None
    evaluating: bool = False
    sampling: Tensor | None = None
    importance_sampling_ratio: Tensor | None = None
    mismatch: str | None = None
    mismatch_max: float = 3.0
    mismatch_min: float = 0.0
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropies: Tensor | None = None
    entropy_coef: float = 0.0
    tool_mask: Tensor | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    @property
    def range(self) -> tuple[float, float]:
        low = self.epsilon if self.epsilon_low is None else self.epsilon_low
        return low, low if self.epsilon_high is None else self.epsilon_high

    @property
    def bounds(self) -> tuple[float, float, float | None]:
        """low, high and dual. A two-sided clip at delta bounds bad samples; below 1 + high it
        bounds good ones there, and bad ones at 1 + high."""
        low, high = self.range
        if self.delta is None:
            return low, high, self.dual
        return low, min(high, self.delta - 1), max(1 + high, self.delta)


@dataclass(frozen=True)
class _Given:
    """A factor that the caller computed."""

    ratio: Tensor

    def factor(self, evaluations: Mapping[str, Evaluation], rows: Rows) -> Tensor:
        return self.ratio

    def __call__(
        self, evaluations: Mapping[str, Evaluation], rows: Rows
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.ratio.expand_as(rows.mask), {}


def _mismatch(s: TokenSettings) -> Mismatch | _Given | None:
    if s.importance_sampling_ratio is not None:
        return _Given(s.importance_sampling_ratio)
    if s.mismatch is None:
        return None
    level, mode = s.mismatch.split("_")
    return Mismatch(level, mode, s.mismatch_max, s.mismatch_min)  # type: ignore[arg-type]


def _objective(loss_type: str, s: TokenSettings, length: int) -> Objective:
    weights: list[Weight] = []
    if s.off_policy_mask_threshold is not None:
        weights.append(OffPolicyMask(s.off_policy_mask_threshold))
    if s.top_entropy_quantile < 1:
        weights.append(HighEntropy(s.top_entropy_quantile))
    mismatch = _mismatch(s)
    if mismatch is not None and loss_type != "vespo":
        weights.append(mismatch)
    anchors = (Anchor(s.beta, corrected=s.use_bias_correction_kl),) if s.beta else ()
    constant = s.max_completion_length or length
    kinds = {
        "grpo": "rows", "gspo": "rows", "gspo_token": "rows", "rloo": "rows", "sapo": "rows",
        "gmpo": "rows", "geo_mean": "rows", "dr_grpo": constant, "luspo": "sequences",
        "token-mean": "tokens", "seq-mean-token-mean": "rows",
        "seq-mean-token-sum": "sequences", "seq-mean-token-sum-norm": constant,
    }  # fmt: skip
    shared = {
        "anchors": anchors, "weights": tuple(weights), "entropy": s.entropy_coef,
        "denominator": kinds.get(s.aggregation or loss_type, "tokens"),
    }  # fmt: skip
    (low, high), known = s.range, loss_type
    if known == "cispo":
        return CISPO(high, **shared)
    if known == "sapo":
        return SAPO(s.sapo_temperature_pos, s.sapo_temperature_neg, **shared)
    if known == "vespo":
        sides = (s.vespo_k_pos, s.vespo_lambda_pos), (s.vespo_k_neg, s.vespo_lambda_neg)
        return VESPO(*sides, mismatch, **shared)  # type: ignore[arg-type]
    if known in ("gmpo", "geo_mean"):
        return GMPO(low, high, **shared)
    if known == "gppo":
        return GPPO(low, high, **shared)
    if known in ("reinforce", "gpg"):
        return Reinforce(**shared)
    assert known in (*kinds, "bnpo", "dapo", "vanilla", "ppo"), f"no loss {known!r}"
    return Surrogate(*s.bounds, **shared)


def _level(loss_type: str, s: TokenSettings) -> RatioLevel:
    usual = {"gspo": "sequence", "gspo_token": "sequence_token", "rloo": "product"}
    return s.level or s.importance_sampling_level or usual.get(loss_type, "token")  # type: ignore[return-value]


def token_loss(
    loss_type: str, new: Tensor, old: Tensor | None, ref: Tensor | None, mask: Tensor,
    advantage: Tensor, **settings: object,
) -> Tensor:  # fmt: skip
    """The loss of one micro-batch, as TRL's trainers reduce it. All [b t]; `advantage` also [b].

    `loss_type`: grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo, vespo, gmpo, gspo, gspo_token, rloo,
    gppo, reinforce, vanilla (PPO, averaged over tokens), dpo (rows in pairs, the better first).
    Settings: see `TokenSettings`. TRL counts rows that are masked as a whole in means over rows, so
    this does; the product's update does not.
    """
    s = TokenSettings(**settings)  # type: ignore[arg-type]
    keep = mask.bool() if s.tool_mask is None else (mask * s.tool_mask).bool()
    b, t = keep.shape
    old = new.detach() if old is None else old
    each = (advantage if advantage.ndim == 2 else advantage[:, None]).expand(b, t)
    rows = TokenRows(
        torch.arange(b), each, keep, None, torch.zeros(b, t, dtype=torch.long), keep.sum(1), 1.0,
        None, s.sampling,
    )  # fmt: skip
    says = {"new": Evaluation(new, s.entropies), "old": Evaluation(old, None)}
    if ref is not None:
        says["ref"] = Evaluation(ref, None)
    likelihood = Token(ratio=_level(loss_type, s), kl_form=s.kl_form)  # type: ignore[arg-type]
    if loss_type == "dpo":
        entries = Preference(s.beta)(likelihood, says, rows)
    else:
        entries = _objective(loss_type, s, t)(likelihood, says, rows)
    return _share(entries, keep, s, loss_type)


def _share(entries: Entries, keep: Tensor, s: TokenSettings, loss_type: str) -> Tensor:
    """This micro-batch's part of an optimizer step."""
    b, tokens = len(keep), float(keep.sum())
    parts = 1.0 if s.evaluating else s.grad_accum
    policy, own = entries._replace(per_token=None), Counts(b * parts, tokens * parts)
    if s.num_items is not None or loss_type in ("dapo", "cispo", "vespo"):
        items = tokens if s.num_items is None else s.num_items
        window = 1.0 if s.evaluating else s.grad_accum / (s.steps_per_generation or s.grad_accum)
        own = own._replace(tokens=items * window)
    loss = reduced(policy, keep, own)
    if entries.per_token is not None:
        bonus = Entries(entries.per_token, "tokens", {})
        loss = loss + reduced(bonus, keep, Counts(b, tokens * parts))
    return loss
