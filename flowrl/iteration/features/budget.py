"""A sampling budget: which prompts are drawn, how often, in how many rounds, and which samples are
trained on (`flowrl.budget`).

Rounds are joined, so that credit, rows and the update see one set of draws. Draws that a budget
leaves out are masked in credit and dropped from the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.budget.groups import Groups, samples_of
from flowrl.budget.spending import Rationed, RoundScores
from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.credit import CreditInput, Estimate, SampleCredit, estimating
from flowrl.iteration.draw import draws_here
from flowrl.iteration.draw_requests import draw_request
from flowrl.iteration.features.replay import LEARNED
from flowrl.iteration.features.tracker import SAMPLED_SCORES
from flowrl.iteration.features.units import join_of
from flowrl.iteration.records import (
    Credited,
    Drawn,
    PlanScores,
    Sampled,
    Scored,
    TrainingRows,
)
from flowrl.iteration.stages import MakeRows, Sample, Score, Stages
from flowrl.iteration.units import SamplingUnit, added
from flowrl.likelihoods.rows import Rows, take
from flowrl.prompts import Draws
from flowrl.session.session import SPENDING, Session
from flowrl.table import Column, Table, joined_tables
from rewards import Scores
from samplers.host import on_host, sent

KEPT: Column[Tensor] = Column("draws that are trained on", "budget", "whole")  # [g] bool
ROUNDS: Column[Scored] = Column("scores of all rounds", "budget", "whole")


@dataclass(frozen=True)
class RationedDraw:
    """The first round of draws."""

    session: Session
    spending: Rationed

    def __call__(self, iteration: int) -> Drawn:
        draws = self.spending.draws(draw_request(self.session, iteration), [])
        assert draws is not None, "the first round is never empty"
        return draws_here(self.session, iteration, draws)


@dataclass(frozen=True)
class RoundsOfSamples:
    """Samples and scores round after round until the budget stops, and joins the rounds."""

    session: Session
    spending: Rationed
    sample: Sample
    score: Score

    def __call__(self, first: Drawn) -> Sampled:
        call, rounds = draw_request(self.session, first.iteration), list[tuple[Sampled, Scored]]()
        outcomes, drawn = list[RoundScores](), first
        while True:
            samples = self.sample(drawn)
            rounds.append((samples, self.score(samples)))
            plans = rounds[-1][1].plans
            outcomes.append(RoundScores(drawn.draws, tuple(plan.totals for plan in plans)))
            draws = self.spending.draws(call, outcomes)
            if draws is None:
                break
            drawn = draws_here(self.session, first.iteration, draws)
        kept_draws = self.spending.kept(call, outcomes)
        samples, scores = joined_rounds(self.session, rounds)
        table = samples.table.with_value(KEPT, kept_draws).with_value(ROUNDS, scores)
        return replace(samples, table=table)


def known_scores(samples: Sampled) -> Scored:
    """The scores of all rounds, which were made while sampling."""
    return samples.table[ROUNDS]


def joined_rounds(
    session: Session, rounds: Sequence[tuple[Sampled, Scored]]
) -> tuple[Sampled, Scored]:
    """All rounds as one: their draws one after the other, with the first round's samples for pages
    and its statistics."""
    if len(rounds) == 1:
        return rounds[0]
    samples, scores = [sampled for sampled, _ in rounds], [scored for _, scored in rounds]
    drawn, units, first = [sampled.drawn for sampled in samples], list[SamplingUnit](), 0
    for part in drawn:
        units.append(replace(part.unit, first=first))
        first += len(units[-1].ids)
    draws = Draws(
        tuple(draw for part in drawn for draw in part.draws.ids),
        tuple(row for part in drawn for row in part.draws.rows),
        tuple(count for part in drawn for count in part.draws.merged),
    )
    shares = tuple(share for part in drawn for share in part.shares)
    join = join_of(session)
    by_plan = zip(*(sampled.rollouts for sampled in samples), strict=True)
    counted = [pair for pair in rounds if pair[0].drawn.counts]
    unit = replace(
        samples[0].unit,
        rollouts=tuple(join(units, parts) for parts in by_plan),
        evaluations=sum(sampled.unit.evaluations for sampled in samples),
        scored=sum(sampled.unit.scored for sampled, _ in counted),
    )
    joined = replace(
        samples[0],
        drawn=replace(drawn[0], draws=draws, shares=shares),
        unit=unit,
        metrics=added([sampled.metrics for sampled in samples]),
    )
    plans = [
        joined_plans(parts) for parts in zip(*(scored.plans for scored in scores), strict=True)
    ]
    return joined, replace(
        scores[0],
        plans=tuple(plans),
        scored=sum(scored.scored for _, scored in counted),
        table=added_tables([scored.table for scored in scores]),
    )


def added_tables(parts: Sequence[Table]) -> Table:
    """The columns of all rounds; counts are added up."""
    values = {
        column: sum(part[column] for part in parts) if isinstance(value, int) else value
        for column, value in parts[0].values.items()
    }
    return Table(values)


def joined_plans(parts: Sequence[PlanScores]) -> PlanScores:
    """The scores of one plan over all rounds."""
    table = joined_tables([part.table.without(LEARNED) for part in parts])
    learned = Scores.joined([part.table[LEARNED] for part in parts])
    return PlanScores(
        Scores.joined([part.own for part in parts]),
        Scores.joined([part.everyone for part in parts]),
        torch.cat([part.totals for part in parts]),
        table.with_value(LEARNED, learned),
    )


@dataclass(frozen=True)
class KeptEstimate:
    """Advantages of the kept draws, compared in the groups of their prompts; others are masked."""

    session: Session
    inner: Estimate

    def __call__(self, inputs: CreditInput) -> SampleCredit:
        learned = inputs.context.table.get(LEARNED, inputs.scores)
        kept_draws = inputs.samples.table[KEPT]
        merged = merged_groups(inputs.samples.drawn.draws.merged, kept_draws)
        return estimate_in_groups(self.session, self.inner, inputs, learned, kept_draws, merged)


def merged_groups(counts: Sequence[int], kept_draws: Tensor) -> tuple[int, ...]:
    """Number of draws in each kept group; groups are kept or dropped as a whole."""
    by_group = kept_draws.split(list(counts))
    return tuple(n for n, part in zip(counts, by_group, strict=True) if bool(part[0]))


def estimate_in_groups(
    session: Session,
    inner: Estimate,
    inputs: CreditInput,
    learned: Scores,
    kept_draws: Tensor,
    merged: tuple[int, ...],
) -> SampleCredit:
    """Estimate the advantages of the kept draws, of which those of one prompt are one group, and
    return them in the order of all samples; others are masked.

    learned  scores that are trained on
    merged   number of draws in each group
    """
    draws, group = kept_draws.nonzero()[:, 0], inputs.context.columns.group
    groups, samples = Groups(merged, group), samples_of(draws, group)

    def arranged(scores: Scores) -> Scores:
        return groups.scores(scores.arranged(lambda column: column[samples]))

    context, scores = groups.context(inputs.context, draws), arranged(learned)
    if learned is not inputs.scores:
        context = context.with_column(SAMPLED_SCORES, arranged(inputs.scores))
    summed = session.algorithm.advantage.summed(scores, context)
    credit = inner(replace(inputs, scores=scores, context=context, summed=summed))

    def of_all_samples(column: Tensor) -> Tensor:
        spread = torch.zeros(len(inputs.scores.values), *column.shape[1:]).to(column)
        spread[samples] = column[groups.index]
        return spread

    table = credit.table.arranged(of_all_samples, "sample")
    return replace(
        credit,
        advantages=of_all_samples(credit.advantages),
        mask=of_all_samples(credit.mask),
        table=table,
    )


@dataclass(frozen=True)
class KeptRows:
    """Drops the rows of other draws, and encodes the kept prompts again where several rounds were
    joined."""

    session: Session
    spending: Rationed
    clock: PhaseClock
    inner: MakeRows

    def __call__(self, samples: Sampled, scores: Scored, credit: Credited) -> TrainingRows:
        rows, spending = self.inner(samples, scores, credit), self.spending
        if len(samples.drawn.shares) > 1:
            rows = self.merged(samples, rows)
        together = self.session.algorithm.loss.unit
        kept_rows = tuple(spending.rows(part, together) for part in rows.rows)
        return replace(rows, rows=kept_rows, metrics={**rows.metrics, **spending.metrics()})

    def merged(self, samples: Sampled, rows: TrainingRows) -> TrainingRows:
        session, of = self.session, samples.drawn
        kept_by_share = samples.table[KEPT].split([share.count for share in of.shares])
        flags = torch.cat(
            [
                part[list(share.mine)] & share.counts
                for part, share in zip(kept_by_share, of.shares, strict=True)
            ]
        )
        indices = flags.nonzero()[:, 0].tolist()
        draws = tuple(rows.draws[i] for i in indices)
        prompts = tuple(rows.prompts[i] for i in indices)
        with session.parallel.together(), self.clock("encode"):
            first = rows.prompts[: len(of.shares[0].mine)]
            texts_and_meta = session.prompts.take(prompts or first)
            policy = session.learner.policy.open(*texts_and_meta, session.algorithm.steps).policy
        position = (flags.cumsum(0) - 1).masked_fill(~flags, -1)
        renumbered = tuple(moved_rows(part, position) for part in rows.rows)
        return replace(rows, rows=renumbered, draws=draws, prompts=prompts, policy=policy)


def moved_rows(rows: Rows, new_index: Tensor) -> Rows:
    """Keep the rows of draws whose new index is not -1, with that index."""
    index = new_index[on_host(rows.prompt)]
    remaining = take(rows, (index >= 0).nonzero()[:, 0])
    return replace(remaining, prompt=sent(index[index >= 0], rows.prompt.device))


def wrap(stages: Stages, session: Session) -> Stages:
    spending = session.table[SPENDING]
    stages = replace(
        stages,
        draw=RationedDraw(session, spending),
        sample=RoundsOfSamples(session, spending, stages.sample, stages.score),
        score=known_scores,
        rows=KeptRows(session, spending, stages.clock, stages.rows),
    )
    return estimating(stages, lambda inner: KeptEstimate(session, inner))
