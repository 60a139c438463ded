"""The model of votes on pairs: Bradley-Terry with ties on a linear head.

p votes, d features, r dimensions of the span of the votes' differences. x [p d] is the difference
of the features of a pair, a minus b, and side [p] is 1 where a was shown on the left, -1 where b
was, and 0 where it is not known. With m = x w + beta side,

    P(a), P(b), P(tie) = exp(m / 2), exp(-m / 2), nu, each divided by their sum

which is Davidson 1970 (https://doi.org/10.1080/01621459.1970.10481082, equation 3) with log-linear
worths; without ties it is logistic regression. The penalised log-likelihood

    sum log P(vote) - ridge / 2 |w|^2 - beta^2 / 2 SIDE_SD^2 - (log nu)^2 / 2 LOG_NU_SD^2

is concave in (w, beta, log nu), so there is one fit, without a learning rate or a seed. By the
ridge, w lies in the span of the rows of x: the fit is made there, where it is exact and small.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import optimize

SIDE_SD = 1.0  # standard deviation of the prior of beta, in log-odds
LOG_NU_SD = 3.0  # of log nu: weak, so that votes without a winner have a finite fit too
RANK_TOLERANCE = 1e-12  # of singular values, relative to the largest
MOST_STEPS = 500  # of the trust region, which takes about ten

Differences = Float[np.ndarray, "p d"]


class _Basis(NamedTuple):
    """x = inside basis^T, with orthonormal columns [d r] of the basis."""

    inside: Float[np.ndarray, "p r"]
    basis: Float[np.ndarray, "d r"]

    @classmethod
    def of(cls, x: Differences) -> "_Basis":
        left, sizes, right = np.linalg.svd(x, full_matrices=False)
        large = sizes > RANK_TOLERANCE * (sizes[0] if len(sizes) else 0.0)
        return cls(left[:, large] * sizes[large], right[large].T)


@dataclass(frozen=True)
class Votes:
    """Votes on p pairs, as the shares of three verdicts.

    x     [p d] features of a minus features of b
    won   [p 3] shares of the verdicts a, b and tie; they sum to 1
    side  [p] 1 where a was on the left, -1 where it was on the right, 0 where it is not known
    """

    x: Differences
    won: Float[np.ndarray, "p 3"]
    side: Float[np.ndarray, " p"]

    @classmethod
    def of(
        cls,
        x: Differences,
        label: Float[np.ndarray, " p"],
        side: Float[np.ndarray, " p"] | None = None,
    ) -> "Votes":
        """Votes from labels P(a preferred): 1/2 is a tie, and any other share is divided between
        the two winners. ValueError for labels outside 0..1 and arrays of other lengths."""
        x, label = np.asarray(x, float), np.asarray(label, float)
        side = np.zeros(len(label)) if side is None else np.asarray(side, float)
        if x.ndim != 2 or not len(x) == len(label) == len(side):
            raise ValueError(
                f"votes: features {x.shape}, {len(label)} labels and {len(side)} sides do not fit"
            )
        if not (np.isfinite(x).all() and ((label >= 0) & (label <= 1)).all()):
            raise ValueError("votes: features must be finite, and labels in 0..1")
        tie = label == 0.5
        won = np.stack([np.where(tie, 0, label), np.where(tie, 0, 1 - label), tie], 1)
        return cls(x, won.astype(float), side)

    @property
    def tied(self) -> bool:
        """Whether somebody tied; otherwise nu is 0."""
        return bool(self.won[:, 2].any())

    @property
    def sided(self) -> bool:
        return bool(self.side.any())

    @cached_property
    def spanned(self) -> _Basis:
        """The span of the differences, in which fits at all ridges are made."""
        return _Basis.of(self.x)

    def take(self, rows: Float[np.ndarray, " k"] | Sequence[int]) -> "Votes":
        return Votes(self.x[rows], self.won[rows], self.side[rows])


@dataclass(frozen=True)
class VoteModel:
    """A fit, and its posterior at this ridge.

    weight   [d] of the features
    beta     log-odds of the left side; 0 if no side is known
    log_nu   -inf if nobody tied
    ridge    precision of the prior of each weight
    basis    [d r] of the span of the votes' differences
    spread   [r r] lower factor of the weights' posterior covariance in that span (Laplace); outside
             of it the votes say nothing, and the covariance is the prior's
    """

    weight: Float[np.ndarray, " d"]
    beta: float
    log_nu: float
    ridge: float
    basis: Float[np.ndarray, "d r"]
    spread: Float[np.ndarray, "r r"]

    def deviation(self, x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """Posterior standard deviation of x w."""
        inside = x @ self.basis
        outside = np.maximum((x**2).sum(1) - (inside**2).sum(1), 0.0) / self.ridge
        return np.sqrt(((inside @ self.spread) ** 2).sum(1) + outside)

    def verdicts(
        self, x: Float[np.ndarray, "n d"], side: Float[np.ndarray, " n"] | float = 0.0
    ) -> Float[np.ndarray, "n 3"]:
        """P(a), P(b) and P(tie) of pairs; without a side, as if nobody had one."""
        return np.exp(_log_verdicts(x @ self.weight + self.beta * side, self.log_nu))


def _log_verdicts(margin: Float[np.ndarray, " n"], log_nu: float) -> Float[np.ndarray, "n 3"]:
    three = np.stack([margin / 2, -margin / 2, np.full_like(margin, log_nu)], 1)
    return three - np.logaddexp.reduce(three, axis=1, keepdims=True)


def log_loss(model: VoteModel, votes: Votes) -> Float[np.ndarray, " p"]:
    """Minus the log-likelihood of each vote. A tie where the fit saw none has nu = 0, whose loss is
    infinite: it counts as a share of 1/2 of each winner."""
    margin = votes.x @ model.weight + model.beta * votes.side
    log_p = _log_verdicts(margin, model.log_nu)
    won = votes.won
    if np.isneginf(model.log_nu):
        won = np.stack([won[:, 0] + won[:, 2] / 2, won[:, 1] + won[:, 2] / 2], 1)
        log_p = log_p[:, :2]
    return -(won * log_p).sum(1)


@dataclass(frozen=True)
class _Objective:
    """Minus the penalised log-likelihood of theta = (z [r], beta if sided, log nu if tied)."""

    z: Float[np.ndarray, "p r"]
    votes: Votes
    ridge: float

    @cached_property
    def design(self) -> Float[np.ndarray, "p k"]:
        """The columns of the margin m: z, and the side if any is known."""
        side = self.votes.side[:, None]
        return np.concatenate([self.z, side], 1) if self.votes.sided else self.z

    @cached_property
    def penalty(self) -> Float[np.ndarray, " k"]:
        """Precision of the prior of each entry of theta."""
        more = [1 / SIDE_SD**2] * self.votes.sided + [1 / LOG_NU_SD**2] * self.votes.tied
        return np.array([self.ridge] * self.z.shape[1] + more)

    def log_p(self, theta: Float[np.ndarray, " k"]) -> Float[np.ndarray, "p 3"]:
        k = self.design.shape[1]
        log_nu = float(theta[k]) if self.votes.tied else -np.inf
        return _log_verdicts(self.design @ theta[:k], log_nu)

    def value(self, theta: Float[np.ndarray, " k"]) -> float:
        log_p, won = self.log_p(theta), self.votes.won
        likely = (won * np.where(won > 0, log_p, 0.0)).sum()  # nu = 0 has a log of -inf
        return float(self.penalty @ theta**2 / 2 - likely)

    def gradient(self, theta: Float[np.ndarray, " k"]) -> Float[np.ndarray, " k"]:
        p, won = np.exp(self.log_p(theta)), self.votes.won
        by_margin = (p[:, 0] - p[:, 1] - won[:, 0] + won[:, 1]) / 2
        parts = [self.design.T @ by_margin]
        if self.votes.tied:
            parts.append(np.array([(p[:, 2] - won[:, 2]).sum()]))
        return np.concatenate(parts) + self.penalty * theta

    def hessian(self, theta: Float[np.ndarray, " k"]) -> Float[np.ndarray, "k k"]:
        """Covariance, under the model, of the statistics (m / 2, -m / 2, log nu) of a verdict."""
        p, k = np.exp(self.log_p(theta)), self.design.shape[1]
        matrix = np.diag(self.penalty)
        difference = p[:, 0] - p[:, 1]
        by_margin = (p[:, 0] + p[:, 1] - difference**2) / 4
        matrix[:k, :k] += self.design.T @ (by_margin[:, None] * self.design)
        if self.votes.tied:
            mixed = self.design.T @ (-p[:, 2] * difference / 2)
            matrix[:k, k] += mixed
            matrix[k, :k] += mixed
            matrix[k, k] += (p[:, 2] * (1 - p[:, 2])).sum()
        return matrix


def fit_votes(votes: Votes, ridge: float, start: VoteModel | None = None) -> VoteModel:
    """The fit with this ridge by scipy's trust-exact, from zero or from an earlier fit of the same
    votes. ValueError for no votes, and for a ridge that is not positive."""
    if not len(votes.x):
        raise ValueError("no vote to fit: all pairs were skipped, or none was voted on")
    if not (np.isfinite(ridge) and ridge > 0):
        raise ValueError(f"the ridge must be a positive number, not {ridge}")
    inside, basis = votes.spanned
    objective = _Objective(inside, votes, ridge)
    r, theta = basis.shape[1], np.zeros(len(objective.penalty))
    if start is not None:
        theta[:r] = start.weight @ basis
    if len(theta):
        theta = optimize.minimize(
            objective.value, theta, jac=objective.gradient, hess=objective.hessian,
            method="trust-exact", options={"gtol": 1e-8, "maxiter": MOST_STEPS},
        ).x  # fmt: skip
        theta = _polished(objective, theta)
    if not votes.won[:, :2].any():
        theta[: objective.design.shape[1]] = 0.0  # ties tell no direction, and nor does rounding
    beta = float(theta[r]) if votes.sided else 0.0
    log_nu = float(theta[-1]) if votes.tied else -np.inf
    spread = np.zeros((r, r))
    if r:
        covariance = np.linalg.inv(objective.hessian(theta))[:r, :r]
        spread = np.linalg.cholesky((covariance + covariance.T) / 2)
    return VoteModel(basis @ theta[:r], beta, log_nu, ridge, basis, spread)


def _polished(objective: _Objective, theta: Float[np.ndarray, " k"]) -> Float[np.ndarray, " k"]:
    """Newton's last steps. Near the minimum the values of the objective differ by less than their
    rounding, so the trust region can no longer compare them, but its gradient still tells."""
    for _ in range(3):
        better = theta - np.linalg.solve(objective.hessian(theta), objective.gradient(theta))
        if not _size(objective, better) < _size(objective, theta):
            break
        theta = better
    return theta


def _size(objective: _Objective, theta: Float[np.ndarray, " k"]) -> float:
    return float(np.abs(objective.gradient(theta)).max(initial=0.0))
