"""A joint run: a language model writes the image model's prompts, and both learn.

There is one tree per prompt of the run: its first level holds the rewritings, and the image model's
levels follow. Equal rewritings of a prompt are one node, with the images of all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.budget.groups import grouped
from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.credit import CreditInput, Estimate, SampleCredit, estimating
from flowrl.iteration.features.budget import estimate_in_groups
from flowrl.iteration.records import (
    Credited,
    Drawn,
    Iteration,
    PlanCredit,
    Sampled,
    Scored,
    TrainingRows,
    Updated,
)
from flowrl.iteration.sample import UnitSampler, UnitStages
from flowrl.iteration.score import plan_scores
from flowrl.iteration.stages import MakeRows, Sample, Stages, Update
from flowrl.iteration.units import SamplingUnit, UnitSamples
from flowrl.models.call_sizes import bounded_call
from flowrl.models.policy import Batch
from flowrl.models.rewritten import instructed, open_texts
from flowrl.prompts import Draws
from flowrl.session.session import Session
from flowrl.session.smaller_calls import with_smaller_calls
from flowrl.table import Column
from rewards import Samples, Scores
from samplers import Sampling
from samplers.completions import TextRollout


@dataclass(frozen=True)
class Rewritings:
    """Rewritings of an iteration's prompts, t over all processes, and the d = t draws of their
    images.

    texts  the language model's samples
    order  the rewriting of each draw of images; equal rewritings of a prompt are adjacent
    equal  draws of images of each distinct rewriting, in order
    draws  of the images
    """

    texts: Sampled
    order: Int[Tensor, " t"]
    equal: tuple[int, ...]
    draws: Draws

    @property
    def group(self) -> int:
        """Rewritings per prompt."""
        (rollout,) = self.texts.rollouts
        return rollout.columns.group

    def means(
        self, values: Float[Tensor, "n c"], scored: Bool[Tensor, "n c"]
    ) -> tuple[Float[Tensor, "t c"], Bool[Tensor, "t c"]]:
        """Means over the known values of each rewriting's images, and a mask of rewritings with
        known values. The n images are in the order of their draws; equal rewritings share all of
        their images."""
        node = grouped(self.equal)
        of_image = node.repeat_interleave(len(values) // len(node))
        size = (len(self.equal), values.shape[1])
        total = torch.zeros(size, dtype=torch.float64)
        total = total.index_add(0, of_image, torch.where(scored, values.double(), 0.0))
        count = torch.zeros(size, dtype=torch.float64).index_add(0, of_image, scored.double())
        mean, has_value = torch.empty(len(node), size[1], dtype=torch.float64), count > 0
        mean[self.order] = (total / count.clamp(min=1))[node]
        mask = torch.empty(len(node), size[1], dtype=torch.bool)
        mask[self.order] = has_value[node]
        return mean, mask


REWRITINGS: Column[Rewritings] = Column("rewritings of the prompts", "joint", "whole")
IMAGES: Column[Scored] = Column("scores of the rewritings' images", "joint", "whole")
WRITER: Column[Iteration] = Column("the language model's part of the iteration", "joint", "whole")


@dataclass(frozen=True)
class WrittenPrompts:
    """Encodes the texts that were written for a unit's draws."""

    session: Session
    clock: PhaseClock

    def __call__(self, unit: SamplingUnit) -> Batch:
        session = self.session
        with self.clock("encode"), bounded_call("sampling"):
            _, meta = session.prompts.take(unit.rows)
            policy = session.learner.policy
            return open_texts(policy, unit.texts, meta, session.algorithm.steps)


def wrap_unit(stages: UnitStages, session: Session, clock: PhaseClock) -> UnitStages:
    sampler = stages.sample
    assert isinstance(sampler, UnitSampler), "it comes before features that change the sampler"
    return stages._replace(sample=replace(sampler, encode=WrittenPrompts(session, clock)))


@dataclass(frozen=True)
class RewritesPrompts:
    """Lets the language model write the prompts before the images are sampled."""

    session: Session
    writer: Session
    clock: PhaseClock
    inner: Sample

    def __call__(self, drawn: Drawn) -> Sampled:
        rewritings = rewritten(self.writer, drawn, self.clock, self.session)
        behaviour = self.session.algorithm.behaviour
        images = Drawn.of(self.session.parallel, drawn.iteration, rewritings.draws, behaviour)
        samples = self.inner(images)
        return replace(samples, table=samples.table.with_value(REWRITINGS, rewritings))


def rewritten(writer: Session, drawn: Drawn, clock: PhaseClock, images: Session) -> Rewritings:
    """Sample the rewritings of the draws' prompts, and gather their texts from all processes."""
    unit, joint = drawn.unit, images.run.joint
    assert joint is not None

    def write() -> tuple[Batch, TextRollout, list[str]]:
        with writer.parallel.together(), clock("rewrite"), bounded_call("sampling"):
            return written_texts(writer, drawn.iteration, unit)

    batch, rollout, texts = with_smaller_calls(writer.learner, writer.terminal, write)
    prompts, meta = writer.prompts.take([unit.rows[i] for i in rollout.prompt.tolist()])
    samples = Samples(texts, prompts, rollout.prompt, meta)
    all_texts = [
        text for part in writer.parallel.every(texts if drawn.counts else []) for text in part
    ]
    group = rollout.plan.group
    order, equal = neighbours(all_texts, group)
    draws = Draws(
        tuple(draw * group + i for draw in drawn.draws.ids for i in range(group)),
        tuple(row for row in drawn.draws.rows for _ in range(group)),
        (group,) * len(drawn.draws.ids) if joint.credit == "shared" else equal,
        tuple(all_texts[i] for i in order),
    )
    meter, statistics = batch.meter, batch.statistics(rollout, samples.media)
    counted = meter.graded + meter.frozen
    unit_samples = UnitSamples((rollout,), (samples,), statistics, counted)
    of_writer = replace(drawn, by=writer.algorithm.behaviour)
    return Rewritings(Sampled(of_writer, batch, unit_samples), torch.tensor(order), equal, draws)


def written_texts(
    writer: Session, iteration: int, unit: SamplingUnit
) -> tuple[Batch, TextRollout, list[str]]:
    learner, algorithm = writer.learner, writer.algorithm
    prompts, meta = writer.prompts.take(unit.rows)
    batch = learner.policy.open(instructed(writer.template, prompts), meta, algorithm.steps)
    with learner.policies.using(algorithm.behaviour), learner.merging.sampling() as aside:
        (rollout,) = batch.rollouts(
            algorithm.planned,
            unit.ids,
            seed=writer.run.train.seed,
            iteration=iteration,
            sampling=Sampling(aside=aside),
        )
    assert isinstance(rollout, TextRollout), "rewritings are texts"
    return batch, rollout, [text.strip() for text in batch.media(rollout)]


def neighbours(texts: list[str], group: int) -> tuple[list[int], tuple[int, ...]]:
    """An order of texts in which equal texts of a group are adjacent, in the order of their first
    occurrence, and the count of each distinct text in that order.

    Example: a b a c of one group have the order 0 2 1 3 and the counts 2 1 1.
    """
    order, equal = list[int](), list[int]()
    for start in range(0, len(texts), group):
        same_text: dict[str, list[int]] = {}
        for i in range(start, start + group):
            same_text.setdefault(texts[i], []).append(i)
        order += [i for same in same_text.values() for i in same]
        equal += [len(same) for same in same_text.values()]
    return order, tuple(equal)


@dataclass(frozen=True)
class ScoredByImages:
    """Scores of texts: the means over the scored images of each."""

    writer: Session

    def __call__(self, samples: Sampled) -> Scored:
        images, rewritings = samples.table[IMAGES], samples.table[REWRITINGS]
        by_plan, draws = [plan.everyone for plan in images.plans], len(rewritings.order)

        def of_all_plans(columns: Sequence[Tensor]) -> Tensor:
            return torch.cat([c.view(draws, -1, c.shape[1]) for c in columns], 1).flatten(0, 1)

        values = of_all_plans([scores.values for scores in by_plan])
        mean, scored = rewritings.means(values, of_all_plans([s.scored for s in by_plan]))
        _, applies = rewritings.means(values, of_all_plans([s.applies for s in by_plan]))
        everyone = Scores(mean, scored, by_plan[0].names, abstained=~applies)
        local = everyone.arranged(lambda column: samples.drawn.local(column, rewritings.group))
        weights = self.writer.weights(samples.drawn.iteration)
        return Scored((plan_scores(local, everyone, weights),), samples.unit.samples)


@dataclass(frozen=True)
class MergedEstimate:
    """Advantages of images, compared in groups of several draws."""

    session: Session
    inner: Estimate

    def __call__(self, inputs: CreditInput) -> SampleCredit:
        counts = inputs.samples.drawn.draws.merged
        if all(count == 1 for count in counts):
            return self.inner(inputs)
        kept_draws = torch.ones(sum(counts), dtype=torch.bool)
        return estimate_in_groups(
            self.session, self.inner, inputs, inputs.scores, kept_draws, tuple(counts)
        )


@dataclass(frozen=True)
class RowsOfBoth:
    """Rows of the images, and beside them those of the texts that were their prompts."""

    session: Session
    writer: Session
    texts: Stages
    inner: MakeRows

    def __call__(self, samples: Sampled, scores: Scored, credit: Credited) -> TrainingRows:
        rows, rewritings = self.inner(samples, scores, credit), samples.table[REWRITINGS]
        table = rewritings.texts.table.with_value(IMAGES, scores).with_value(REWRITINGS, rewritings)
        texts = replace(rewritings.texts, table=table)
        scored = self.texts.score(texts)
        credited = self.texts.credit(texts, scored)
        joint = self.session.run.joint
        assert joint is not None
        if joint.credit == "shared":
            credited = replace(credited, plans=(self.shared(samples, credit),))
        of_texts = self.texts.rows(texts, scored, credited)
        text_metrics = of_texts.metrics
        metric_names = {"flat_groups", "reward_std", "count/sampling"} | (
            text_metrics.keys() - rows.metrics
        )
        named = self.writer.learner.named
        metrics = {
            named(name): value for name, value in text_metrics.items() if name in metric_names
        }
        not_updated = Updated({}, 0)
        part = Iteration(
            number=rows.iteration + 1,
            samples=texts,
            scores=scored,
            credit=credited,
            rows=of_texts,
            updated=not_updated,
            metrics=dict(text_metrics),
        )
        return replace(
            rows,
            table=rows.table.with_value(WRITER, part),
            metrics={**rows.metrics, **metrics},
        )

    def shared(self, samples: Sampled, credit: Credited) -> PlanCredit:
        """The mean advantage of each rewriting's images, at all of the rewriting's decision
        points."""
        rewritings, sums = samples.table[REWRITINGS], list[Tensor]()
        gather = samples.drawn.gatherer(self.session.parallel)
        for plan in credit.plans:
            count = plan.mask.sum(1)
            mean = (plan.advantages * plan.mask).sum(1) / count.clamp(min=1)
            sums.append(gather(torch.stack([mean, (count > 0).double()], 1)))
        draws = len(rewritings.order)
        columns = torch.cat([part.view(draws, -1, 2) for part in sums], 1).flatten(0, 1)
        value, mask = rewritings.means(columns[:, :1], columns[:, 1:].bool())
        (rollout,) = rewritings.texts.rollouts
        points = len(rollout.columns.nodes)
        value, mask = (
            rewritings.texts.drawn.local(column.expand(-1, points).contiguous(), rewritings.group)
            for column in (value, mask)
        )
        return PlanCredit(value, mask)


@dataclass(frozen=True)
class UpdatesBoth:
    """Updates the language model, then the image model; one that does not learn is left out.

    Metrics of the last are the run's, the other's have its name before them.
    """

    session: Session
    writer: Session
    texts: Update
    images: Update

    def __call__(self, rows: TrainingRows) -> Updated:
        learner = self.writer.learner
        if not learner.learns:
            return self.images(rows)
        first = self.texts(rows.table[WRITER].rows)
        if not self.session.learner.learns:
            return first
        last = self.images(rows)
        named = {learner.named(name): value for name, value in first.metrics.items()}
        return replace(last, metrics={**last.metrics, **named})


def scored_by_images(texts: Stages, writer: Session) -> Stages:
    """The language model's plain stages, whose texts have the scores of their images."""
    return replace(texts, score=ScoredByImages(writer))


def wrap(stages: Stages, session: Session, texts: Stages) -> Stages:
    """The stages of the image model, which carry out those of the language model, `texts`."""
    writer = session.prompt_writer
    assert writer is not None, "the feature is the joint run's"
    stages = estimating(stages, lambda inner: MergedEstimate(session, inner))
    return replace(
        stages,
        sample=RewritesPrompts(session, writer, stages.clock, stages.sample),
        rows=RowsOfBoth(session, writer, texts, stages.rows),
        update=UpdatesBoth(session, writer, texts.update, stages.update),
    )
