"""Calibrate the noise of each step from the gains of steps (DenseGRPO, arXiv:2601.20218)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Sum
from flowrl.credit.intermediate import gained
from flowrl.credit.values import Context, node_values
from flowrl.errors import UserError
from flowrl.iteration.draw import draws_here
from flowrl.iteration.open import open_stages
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from samplers import Chain, Looking, Plan, Rollout, TableSDE
from samplers.table_sde import as_table


@dataclass(frozen=True)
class CalibrationRound:
    """One round: the noise used, how many steps gained and lost, and the noise for the next
    round."""

    table: tuple[float, ...]
    above: tuple[int, ...]
    below: tuple[int, ...]
    then: tuple[float, ...]


def recalibrated(
    table: Sequence[float], above: Sequence[int], below: Sequence[int], within: int, by: float
) -> tuple[float, ...]:
    """Raise the noise of steps where about as many trajectories gain as lose, and lower it
    elsewhere.

    psi_k <- psi_k + by if |above - below| < within, else psi_k - by, at least `by`.
    """
    steps = zip(table, above, below, strict=True)
    return tuple(
        psi + by if abs(up - down) < within else max(psi - by, by) for psi, up, down in steps
    )


def calibrate(session: Session, rounds: int, within: int, by: float) -> Iterator[CalibrationRound]:
    """Sample rounds of trajectories without training, each with the noise that the previous round
    computed.

    Raise a UserError if the recipe has no chains whose gains are known from the first step on.
    """
    check_calibrated(session.algorithm)
    algorithm, table = session.algorithm, None
    for number in range(rounds):
        if table is not None:
            algorithm = with_noise(session.algorithm, table)
        round_session = replace(session, learner=replace(session.learner, algorithm=algorithm))
        plan, gains, scored = step_gains(round_session, number)
        if table is None:
            assert plan.kernel is not None
            table = as_table(plan.kernel, plan.sigmas).table
        steps = range(len(table))
        above, below = (
            tuple(int((scored[:, k] & (sign * gains[:, k] > 0)).sum()) for k in steps)
            for sign in (1, -1)
        )
        new_table = recalibrated(table, above, below, within, by)
        yield CalibrationRound(table, above, below, new_table)
        table = new_table


def with_noise(algorithm: Algorithm, table: tuple[float, ...]) -> Algorithm:
    """The algorithm with a noise table."""
    look = algorithm.plan
    assert isinstance(look, Looking) and isinstance(look.otherwise, Chain)
    return replace(
        algorithm, plan=replace(look, otherwise=replace(look.otherwise, kernel=TableSDE(table)))
    )


def check_calibrated(algorithm: Algorithm) -> None:
    """UserError unless the plan has chains whose gains are known from the first step on."""
    look = algorithm.plan
    if not isinstance(look, Looking) or not isinstance(look.otherwise, Chain):
        raise UserError(
            "calibrate: this recipe has no chains with intermediate rewards: use dense_grpo"
        )
    if not look.first:
        raise UserError(
            "calibrate counts the gains of steps, starting from noise: use dense_grpo with "
            "reward: gain"
        )


def step_gains(
    session: Session, number: int
) -> tuple[Plan, Float[Tensor, "n k"], Bool[Tensor, "n k"]]:
    """The plan of a round, the gain of each step of its trajectories, and where it is known."""
    run, seed = session.run, session.run.train.seed
    draws = session.prompts.draw(number, run.prompts.per_iteration, seed, None)
    stages = open_stages(session, Progress())
    samples = stages.sample(draws_here(session, number, draws))
    (rollout,), (scores,) = samples.rollouts, stages.score(samples).plans
    assert isinstance(rollout, Rollout), "intermediate scores need prompts of one size"
    context = Context(rollout.columns, session.weights(number), scores=scores.everyone)
    credit = Sum()(gained(node_values(scores.everyone, context), context), context)
    return rollout.plan, credit.value[..., 0], credit.mask[..., 0]
