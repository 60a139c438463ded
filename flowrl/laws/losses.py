"""Laws of losses."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.laws.trial import agree, normals, part_title, tried
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.pathwise import Pathwise
from flowrl.likelihoods.rows import Evaluation, Rows, TokenRows
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Likelihood, Transition
from flowrl.losses.base import Entries, Homogeneous, Objective, columns_of
from samplers import Chain, FlowSDE, Latents, Ode, Sampling, roll

_DRAWS, _GROUP, _TOKENS = 3, 4, 5
_STEPS = 40
_FACTORS = (0.25, 2.0, 9.0)


def check_loss(loss: Objective, likelihood: Likelihood | None = None) -> bool:
    """Check a loss on rows of a likelihood, by default the first of Transition, Matching and Token
    that the loss accepts.

    It returns Entries whose values are finite, the same for equal calls, and have a gradient in the
    trained policy. If it says `homogeneous = True`, its values for advantages c A are
    f(0) + c (f(A) - f(0)) for every c > 0: anchors do not depend on A. UserError for a loss that
    breaks one of these laws.

    Returns False if it could not be checked: there are no trial rows of its likelihood, or it reads
    columns of features.
    """
    name, checked = part_title(loss), False
    for trial in trials(likelihood, loss):
        checked, values = True, _values(name, loss, trial)
        if not torch.equal(values, _values(name, loss, trial)):
            raise UserError(
                f"{name} returns other values for the same rows: draw no random numbers"
            )
        if isinstance(loss, Homogeneous) and loss.homogeneous:
            zero = _values(name, loss, trial.scaled(0.0))
            for factor in _FACTORS:
                scaled = _values(name, loss, trial.scaled(factor))
                want = zero + factor * (values - zero)
                size = zero.abs() + (factor * (values - zero)).abs() + 1e-9
                if not agree(scaled, want, size):
                    raise UserError(
                        f"{name} says homogeneous = True, but its values for {factor:g} A are not "
                        f"{factor:g} times those for A: set homogeneous = False; it then runs "
                        "wherever advantages carry no weights of steps"
                    )
    return checked


@dataclass(frozen=True)
class LossTrial:
    """Rows, and evaluations of them by all policies, with a gradient in the new one's."""

    likelihood: Likelihood
    rows: Rows
    evaluations: Mapping[str, Evaluation]

    def scaled(self, factor: float) -> "LossTrial":
        """With the advantages times a factor."""
        return replace(self, rows=replace(self.rows, advantage=self.rows.advantage * factor))


def _values(name: str, loss: Objective, trial: LossTrial) -> Tensor:
    entries = tried(name, "loss", lambda: loss(trial.likelihood, trial.evaluations, trial.rows))
    if not isinstance(entries, Entries) or not isinstance(entries.value, Tensor):
        raise UserError(
            f"{name} must return flowrl.losses.base.Entries(value, denominator, metrics)"
        )
    value, mask = entries.value, trial.rows.mask
    if value.shape != mask.shape:
        raise UserError(
            f"{name} returns values {list(value.shape)} for rows with entries {list(mask.shape)}: "
            "it needs one value per entry"
        )
    if not value[mask].isfinite().all():
        raise UserError(f"{name} returns values that are not finite")
    if not value.requires_grad:
        raise UserError(
            f"{name}: its values do not depend on the trained policy, so it trains nothing: use "
            "evaluations['new'], not detached"
        )
    return torch.where(mask, value, 0.0).detach()


def trials(likelihood: Likelihood | None, loss: Objective) -> Iterator[LossTrial]:
    """Trial rows of a likelihood; none of a gradient method, which has no policies to compare, of a
    user's likelihood of texts, and for losses that read columns of features."""
    if likelihood is None:
        kinds = (Transition(means=True), Matching(), Token(entropy=True))
        likelihood = next((candidate for candidate in kinds if _accepts(loss, candidate)), None)
    if likelihood is None or isinstance(likelihood, Pathwise) or columns_of(loss):
        return
    if not likelihood.text:
        yield from _of_images(likelihood, loss)
    elif isinstance(likelihood, Token):
        yield _of_texts(likelihood, loss)


def _accepts(loss: Objective, likelihood: Likelihood) -> bool:
    try:
        for trial in trials(likelihood, loss):
            loss(trial.likelihood, trial.evaluations, trial.rows)
    except Exception:  # of any kind: it reads what these rows do not have
        return False
    return True


def _of_images(likelihood: Likelihood, loss: Objective) -> Iterator[LossTrial]:
    """Rows of states of three numbers, sampled by a policy whose velocity is linear."""

    def policy(slope: float, drift: Tensor | float):
        return lambda x, *_: slope * x + drift

    group = max(_GROUP, loss.unit)
    planner = Ode(group) if isinstance(likelihood, Matching) else Chain(FlowSDE(), group)
    latents = Latents((3,), dtype=torch.float64)
    plans = planner([1 - k / _STEPS for k in range(_STEPS)] + [0.0], 0, 0)
    (rollout,) = roll(
        plans, policy(0.5, 0.1), latents, range(_DRAWS), seed=0, iteration=0,
        sampling=Sampling(likelihood.keep_mean),
    )  # fmt: skip
    count = (_DRAWS * group, len(plans[0].columns.nodes))
    advantage, mask = normals(*count, seed=5), torch.ones(count, dtype=torch.bool)
    learned = torch.full((), 0.12, dtype=torch.float64, requires_grad=True)
    rows: Any = likelihood.rows(rollout, advantage, mask)[0]
    says = {"new": likelihood.evaluate(policy(0.48, learned), rows)}
    for index, role in enumerate(sorted(loss.roles | {"old"})):
        says[role] = likelihood.evaluate(policy(0.5 + 0.03 * index, 0.1), rows)
    yield LossTrial(likelihood, replace(rows, old=says["old"]), says)


def _of_texts(likelihood: Token, loss: Objective) -> LossTrial:
    """Completions of five tokens with log-probabilities drawn at random."""
    shape = (_DRAWS * _GROUP, _TOKENS)
    lengths = torch.full((shape[0],), _TOKENS)
    entropy = 1 + 0.1 * normals(*shape, seed=4).abs()

    def says(seed: int) -> Evaluation:
        return Evaluation(-1 - 0.3 * normals(*shape, seed=seed).abs(), entropy)

    new = Evaluation(says(1).logp.requires_grad_(), entropy.clone().requires_grad_())
    evaluations = {role: says(seed) for seed, role in enumerate(sorted({"old", *loss.roles}), 10)}
    rows = TokenRows(
        prompt=torch.arange(_DRAWS).repeat_interleave(_GROUP),
        advantage=normals(shape[0], 1, seed=5).expand(shape).clone(),
        mask=torch.arange(_TOKENS).expand(shape) < 4,
        old=evaluations["old"],
        ids=torch.ones(shape, dtype=torch.long),
        lengths=lengths,
        temperature=1.0,
        kept=None,
        sampled=says(30).logp,
    )
    return LossTrial(likelihood, rows, {**evaluations, "new": new})
