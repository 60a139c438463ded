"""Losses as entries, their reduction to one number, and the base of all losses on ratios.

A loss returns one value per entry [b t]. The update reduces them once, over the mask, the whole
optimizer step and all processes, so that the result depends neither on chunks nor on processes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.credit.choices import AnyPlan, Choices
from flowrl.credit.proxies import GATE
from flowrl.credit.steps import CarriesWeights
from flowrl.credit.values import Transform
from flowrl.errors import UserError
from flowrl.likelihoods.rows import Evaluation, Evaluations, Rows
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Likelihood, Transition
from flowrl.table import Column, columns_provided, columns_read
from samplers import Plan
from samplers.host import host_copy, uploaded
from samplers.kernels import is_affine

Denominator = Literal["tokens", "rows", "sequences"] | int
"""The average of unmasked values, over the B rows with any:

tokens     sum / all tokens: every token has the same weight (DAPO, arXiv:2503.14476)
rows       mean over a row's tokens, then over rows: every completion has the same weight (GRPO)
sequences  sum over a row's tokens, mean over rows: longer rows have more weight (LUSPO,
           arXiv:2602.05261)
an int     sum / (B times this constant length) (Dr. GRPO, arXiv:2503.20783)
"""


@dataclass(frozen=True)
class Derived:
    """A metric [b t] that is a function of tensors without gradient. It is computed where it is
    read: the update moves the tensors of all its calls to the CPU at once."""

    of: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


Metric = Tensor | Derived


def metric_values(metric: Metric) -> Float[Tensor, "b t"] | Bool[Tensor, "b t"]:
    """Values of a metric, on the device of its tensors."""
    return metric.of(*metric.inputs) if isinstance(metric, Derived) else metric


def as_derived(metric: Metric) -> Derived:
    return metric if isinstance(metric, Derived) else Derived(Tensor.detach, (metric.detach(),))


class Entries(NamedTuple):
    """Entries of a loss. Metrics are averaged over unmasked entries.

    `per_token` is a further term of the loss that is averaged over tokens, whatever the
    `denominator`: the entropy bonus. `new` is the trained policy's evaluation that the loss has
    read, which the update adds.
    """

    value: Float[Tensor, "b t"]
    denominator: Denominator
    metrics: Mapping[str, Metric]
    per_token: Float[Tensor, "b t"] | None = None
    new: Evaluation | None = None


PolicyTerm = tuple[Float[Tensor, "b t"], Mapping[str, Metric]]
"""The policy term of a loss, or a factor on it, and metrics."""


def past_low(ratio: Tensor, advantage: Tensor, low: float) -> Bool[Tensor, "b t"]:
    """Bad entries whose gradient PPO's clip (arXiv:1707.06347, eq. 7) removes: r < 1 - low."""
    return (advantage < 0) & (ratio < 1 - low)


def past_high(ratio: Tensor, advantage: Tensor, high: float) -> Bool[Tensor, "b t"]:
    """Good entries whose gradient PPO's clip removes: r > 1 + high."""
    return (advantage > 0) & (ratio > 1 + high)


class Counts(NamedTuple):
    """Denominators of an optimizer step, counted over all of its chunks and processes."""

    rows: float  # with an entry in the loss
    tokens: float

    @classmethod
    def of(cls, masks: Sequence[Tensor]) -> "Counts":
        if not masks:
            return cls(0.0, 0.0)
        copies = [host_copy(mask) for mask in masks]  # None where only the device has the mask
        masks = (
            masks if any(mask is None for mask in copies) else [m for m in copies if m is not None]
        )
        counts = [torch.stack([mask.any(1).sum(), mask.sum()]) for mask in masks]
        rows, tokens = torch.stack(counts).sum(0).cpu().unbind()  # one transfer
        return cls(float(rows), float(tokens))


def reduced(entries: Entries, mask: Bool[Tensor, "b t"], counts: Counts) -> Float[Tensor, ""]:
    """Reduce entries to their part of the loss: sums over the mask, divided by the step's
    counts."""
    value, kind = _unmasked(entries.value, mask), entries.denominator
    if kind == "rows":
        loss = (value.sum(1) / _lengths(mask)).sum() / max(counts.rows, 1.0)
    elif kind == "tokens":
        loss = value.sum() / max(counts.tokens, 1.0)
    else:
        length = 1 if kind == "sequences" else kind
        loss = value.sum() / (max(counts.rows, 1.0) * length)
    if entries.per_token is None:
        return loss
    return loss + _unmasked(entries.per_token, mask).sum() / max(counts.tokens, 1.0)


def _unmasked(value: Tensor, mask: Tensor) -> Tensor:
    """Values with 0 where masked: themselves where the host knows that nothing is."""
    copy = host_copy(mask)
    return value if copy is not None and bool(copy.all()) else torch.where(mask, value, 0.0)


def _lengths(mask: Tensor) -> Int[Tensor, " b"]:
    """Unmasked entries of each row, at least 1; counted on the host if it knows the mask."""
    copy = host_copy(mask)
    if copy is None:
        return mask.sum(1).clamp(min=1)
    return uploaded(copy.sum(1).clamp(min=1), mask.device)


@runtime_checkable
class Objective(Protocol):
    """A loss: computes entries from the evaluations of rows under several policies."""

    @property
    def unit(self) -> int: ...  # consecutive rows that must stay together in a minibatch

    @property
    def roles(self) -> frozenset[str]: ...  # evaluations that it reads beside "new"

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries: ...


@runtime_checkable
class ClipsRatio(Protocol):
    """A loss with a clip range, which the noise-floor check reads."""

    @property
    def clip(self) -> tuple[float, float]: ...  # below 1, above 1


def check_units(loss: Objective, likelihood: Likelihood) -> None:
    """UserError if the likelihood groups rows differently from the loss."""
    if loss.unit == likelihood.unit:
        return
    name, keeps = type(loss).__name__, type(likelihood).__name__
    if loss.unit == 1:
        raise UserError(
            f"the loss {name} takes each row alone, but {keeps} keeps {likelihood.unit} rows "
            "together: leave paired and together out of it, or choose a loss that compares rows"
        )
    way = f"Matching(together={loss.unit})"
    if loss.unit == 2:
        way = f"paired=True in {keeps} for the loss Preference, {way} for a loss of groups"
    raise UserError(
        f"the loss {name} compares {loss.unit} rows at a time, but {keeps} keeps "
        f"{likelihood.unit} together: use {way}, or choose another loss"
    )


@dataclass(frozen=True)
class Anchor:
    """A divergence from another policy, added to the loss.

        weight KL(new | role)

    `role` is "ref", the initial policy, or a named average (AWM's trust region). `corrected`
    multiplies the estimate by the ratio, with its gradient. Without it, the k3 estimate has the
    gradient of KL(ref | new) and k1 has no gradient; corrected, both have the gradient of KL(new |
    ref), also for samples of an older policy (DeepSeek-V3.2, arXiv:2512.02556). `gated` weights
    rows by the gate of their samples, `flowrl.credit.proxies.ProxyGate`.

    weight     weight of the divergence, above 0; larger keeps the policy nearer
    role       policy that it is measured from: `ref`, the initial one, or an average by its name
    corrected  whether the estimate is multiplied by the ratio
    gated      whether only the samples count that `proxy_gate` marks
    """

    weight: float
    role: str = "ref"
    corrected: bool = False
    gated: bool = False

    @property
    def reads(self) -> tuple[Column[Any], ...]:
        return (GATE,) if self.gated else ()

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise UserError(
                f"an anchor's weight must be above 0, not {self.weight}: leave the anchor out"
            )


def anchored(
    anchors: tuple[Anchor, ...], likelihood: Likelihood, evaluations: Evaluations, rows: Rows
) -> tuple[Float[Tensor, "b t"] | float, dict[str, Tensor]]:
    """Sum of the weighted divergences, each of which is also a metric: `kl`, `kl_<average>`."""
    total: Tensor | float = 0.0
    metrics: dict[str, Tensor] = {}
    for anchor in anchors:
        kl = likelihood.kl(evaluations["new"], evaluations[anchor.role], rows)
        if anchor.corrected:
            ratio = likelihood.log_ratio(evaluations["new"], evaluations["old"], rows).exp()
            kl = kl * ratio
        if anchor.gated:
            kl = kl * rows.table[GATE]
        total = total + anchor.weight * kl
        metrics["kl" if anchor.role == "ref" else f"kl_{anchor.role}"] = kl.detach()
    return total, metrics


@runtime_checkable
class Anchored(Protocol):
    """A loss with anchors."""

    @property
    def anchors(self) -> tuple[Anchor, ...]: ...


def check_columns(loss: Objective, likelihood: Likelihood, transforms: Sequence[Transform]) -> None:
    """UserError for a column that is read but not provided, or the reverse, and for one value per
    sample that a loss reads whose rows compare several samples."""
    of_loss = columns_of(loss)
    read = {*columns_read(transforms), *of_loss}
    provided = {*columns_provided([*transforms, loss])}
    for column in read - provided:
        if column.part is not None:
            raise UserError(
                f"this algorithm reads {column.name}, which need {column.part}: add "
                f"{column.part} to the advantage, or leave out what reads them"
            )
    for column in provided - read:
        raise UserError(
            f"{column.part} provides {column.name}, which nothing in this algorithm reads: leave "
            f"{column.part} out, or add what reads them"
        )
    for column in of_loss:
        if column.form == "sample" and likelihood.unit > 1:
            raise UserError(
                f"the loss reads {column.name}, one value per sample, but its rows compare "
                f"{likelihood.unit} samples: choose another loss, or leave out what reads them"
            )


@runtime_checkable
class Homogeneous(Protocol):
    """A loss that says whether it is homogeneous in the advantage: without its anchors and bonus,
    its values for c A are c times those for A, for every c > 0. One that says nothing counts as one
    that is not."""

    @property
    def homogeneous(self) -> bool: ...


def check_weighted(loss: Objective, transforms: Sequence[Transform]) -> None:
    """UserError for transforms that carry weights of steps in the advantage, if the loss does not
    pass them on."""
    weighted = [t for t in transforms if isinstance(t, CarriesWeights) and t.carries_weights]
    if weighted and not (isinstance(loss, Homogeneous) and loss.homogeneous):
        names = ", ".join(dict.fromkeys(type(transform).__name__ for transform in weighted))
        raise UserError(
            f"{names}: advantages carry the weights of steps, which reach the loss only if it is "
            f"homogeneous in the advantage, and {type(loss).__name__} does not say so: leave "
            f"{names} out, or set `homogeneous = True` in a loss of your own that is"
        )


def check_affine(loss: Objective, likelihood: Likelihood, plans: Sequence[AnyPlan]) -> None:
    """UserError for a divergence of velocities over a kernel that is not affine, if the loss reads
    it: it is that of means, divided by their slope in the velocity."""
    anchored = isinstance(loss, Anchored) and loss.anchors
    if not (anchored and isinstance(likelihood, Transition) and likelihood.kl_form == "velocity"):
        return
    for plan in plans:
        if isinstance(plan, Plan) and plan.kernel is not None and not is_affine(plan.kernel):
            name = type(plan.kernel).__name__
            raise UserError(
                f"kl_form: velocity divides the distance of means by their slope in the velocity, "
                f"but the kernel {name} does not say that its mean is a x + b v: choose another "
                f"kl_form, leave out the KL, or set `affine = True` in {name} if it is"
            )


def roles(anchors: tuple[Anchor, ...], *more: str) -> frozenset[str]:
    """Policies that the anchors read, and `more`."""
    corrected = ("old",) if any(anchor.corrected for anchor in anchors) else ()
    return frozenset((*more, *corrected, *(anchor.role for anchor in anchors)))


@runtime_checkable
class Weight(Protocol):
    """A factor [b t] without gradient for each entry of the policy term, and its metrics.

    It applies neither to anchors nor to the entropy bonus, and changes no denominator.
    """

    def __call__(self, evaluations: Evaluations, rows: Rows) -> PolicyTerm: ...


@runtime_checkable
class OfSteps(Protocol):
    """A weight of denoising steps, which the likelihood compares."""

    @property
    def likelihood(self) -> Likelihood: ...


@runtime_checkable
class EntropyShare(Protocol):
    """A weight that keeps the `share` of the iteration's tokens with the highest entropy."""

    @property
    def share(self) -> float | None: ...  # None: it chooses by something else


@dataclass(frozen=True, kw_only=True)
class RatioLoss(ABC):
    """Base of losses on the ratio to the sampling policy; subclasses define `policy`.

        loss = policy(ratio, A) prod(weights) + sum(anchors) - entropy H

    anchors      divergences from the initial policy or from averages
    weights      factors on the policy term: see `flowrl.losses.weights`
    entropy      weight of the entropy bonus, at least 0, which is averaged over tokens whatever the
                 denominator
    denominator  how entries are averaged: see `Denominator`
    """

    unit = 1
    of_tokens = False  # whether the ratio must be that of single tokens
    anchors: tuple[Anchor, ...] = ()
    weights: tuple[Weight, ...] = ()
    entropy: float = 0.0
    denominator: Denominator = "tokens"

    def __post_init__(self) -> None:
        if isinstance(self.denominator, int) and self.denominator < 1:
            raise UserError(f"a constant length must be at least 1, not {self.denominator}")
        if not 0 <= self.entropy < math.inf:
            raise UserError(f"an entropy bonus must be at least 0, not {self.entropy}")
        if sum(isinstance(weight, EntropyShare) for weight in self.weights) > 1:
            raise UserError(
                "a loss can select tokens by entropy only once: remove the other selections"
            )

    @property
    def roles(self) -> frozenset[str]:
        return roles(self.anchors, "old")

    def refuses(self, choices: Choices) -> str | None:
        """Refuses likelihoods that lack values needed by the ratio, the weights or the bonus."""
        likelihood = choices.likelihood
        of_tokens = any(not isinstance(weight, OfSteps) for weight in self.weights)
        if of_tokens and not isinstance(likelihood, Token):
            return "the weights of this loss are for tokens: leave them out of losses on images"
        if self.of_tokens and isinstance(likelihood, Token) and likelihood.ratio != "token":
            return f"{type(self).__name__} reads the ratios of tokens: set ratio to token"
        uncertain = self.entropy > 0 or any(isinstance(w, EntropyShare) for w in self.weights)
        if uncertain and not (isinstance(likelihood, Token) and likelihood.entropy):
            return "this loss reads entropies: it needs the likelihood Token(entropy=True)"
        return None

    @abstractmethod
    def policy(self, log_ratio: Tensor, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        """The policy term and its metrics, per entry [b t]."""

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries:
        log_ratio = likelihood.log_ratio(evaluations["new"], evaluations["old"], rows)
        value, metrics = self.policy(log_ratio, evaluations, rows)
        for weight in self.weights:
            factor, more = weight(evaluations, rows)
            value, metrics = value * factor, {**metrics, **more}
        divergence, kl = anchored(self.anchors, likelihood, evaluations, rows)
        ratio = Derived(torch.exp, (log_ratio.detach(),))
        common: dict[str, Metric] = {"ratio": ratio, "policy_loss": value.detach()}
        metrics = {**common, **metrics, **kl}
        bonus = None
        if self.entropy > 0:
            entropy = entropies(evaluations["new"])
            bonus, metrics["entropy"] = -self.entropy * entropy, entropy.detach()
        value = value + divergence if self.anchors else value
        return Entries(value, self.denominator, metrics, bonus)


def entropies(evaluation: Evaluation) -> Float[Tensor, "b t"]:
    """Entropies of tokens in nats, from the `out` of a token policy. UserError without them."""
    if evaluation.out is None:
        raise UserError("this loss reads entropies: set Token(entropy=True)")
    return evaluation.out


def columns_of(loss: Objective) -> tuple[Column[Any], ...]:
    """Columns of features that a loss, its anchors or its weights read."""
    anchors = loss.anchors if isinstance(loss, Anchored) else ()
    weights = loss.weights if isinstance(loss, RatioLoss) else ()
    return columns_read([loss, *anchors, *weights])


def entropy_share(loss: Objective) -> float | None:
    """Share of the iteration's most uncertain tokens that a loss trains on; None for all."""
    weights = loss.weights if isinstance(loss, RatioLoss) else ()
    shares = [weight.share for weight in weights if isinstance(weight, EntropyShare)]
    return next((share for share in shares if share is not None), None)
