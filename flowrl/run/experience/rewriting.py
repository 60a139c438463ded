"""The prompts that a language model writes in an iteration, their images' draws, and their scores.

There is one tree per prompt of the run: its first level holds the rewritings, and the image model's
levels follow. Equal rewritings of a prompt are one node, with the images of all of them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.budget.groups import grouped
from flowrl.models.call_sizes import bounded_call
from flowrl.models.policy import Batch
from flowrl.models.rewritten import instructed
from flowrl.prompts import Draws
from flowrl.run.experience.round import PlanSamples, Round, with_reference
from flowrl.run.experience.units import timed, totals
from flowrl.run.state.session import Session
from flowrl.run.state.smaller_calls import with_smaller_calls
from flowrl.run.state.units import UnitSamples
from rewards import Samples, Scores
from samplers import Sampling
from samplers.completions import TextRollout


@dataclass(frozen=True)
class Rewritings:
    """Rewritings of an iteration's prompts, t over all processes, and the d = t draws of their
    images.

    session  of the language model
    whole    the draws of the run's prompts; `mine` are this process's, if it `counts`
    order    the rewriting of each draw of images; equal rewritings of a prompt are adjacent
    equal    draws of images of each distinct rewriting, in order
    draws    of the images
    """

    session: Session
    whole: Draws
    mine: range
    counts: bool
    batch: Batch
    rollout: TextRollout
    samples: Samples
    order: Int[Tensor, " t"]
    equal: tuple[int, ...]
    draws: Draws

    @property
    def group(self) -> int:
        """Rewritings per prompt."""
        return self.rollout.plan.group

    def means(
        self, values: Float[Tensor, "n c"], known: Bool[Tensor, "n c"]
    ) -> tuple[Float[Tensor, "t c"], Bool[Tensor, "t c"]]:
        """Means over the known values of each rewriting's images, and a mask of rewritings with
        known values. The n images are in the order of their draws; equal rewritings share all of
        their images."""
        node = grouped(self.equal)
        of_image = node.repeat_interleave(len(values) // len(node))
        size = (len(self.equal), values.shape[1])
        total = torch.zeros(size, dtype=torch.float64)
        total = total.index_add(0, of_image, torch.where(known, values.double(), 0.0))
        count = torch.zeros(size, dtype=torch.float64).index_add(0, of_image, known.double())
        mean, some = torch.empty(len(node), size[1], dtype=torch.float64), count > 0
        mean[self.order] = (total / count.clamp(min=1))[node]
        there = torch.empty(len(node), size[1], dtype=torch.bool)
        there[self.order] = some[node]
        return mean, there

    def scored(self, images: Round, seconds: dict[str, float]) -> Round:
        """The texts as a round of the language model, scored by the means over their scored
        images."""
        each = [part.everyone for part in images.parts]
        draws = len(self.order)
        values, scored = (
            torch.cat([c.view(draws, -1, c.shape[1]) for c in columns], 1).flatten(0, 1)
            for columns in ([e.values for e in each], [e.scored for e in each])
        )
        everyone = Scores(*self.means(values, scored), each[0].names)
        share = slice(self.mine.start * self.group, self.mine.stop * self.group)
        own = Scores(everyone.values[share], everyone.scored[share], everyone.names)
        weighted = totals(everyone, self.session.weights(self.rollout.iteration))
        part = PlanSamples(self.rollout, self.samples, own, everyone, everyone, weighted)
        statistics = self.batch.statistics(self.rollout, self.samples.media)
        meter = self.batch.meter
        counted = meter.graded + meter.frozen
        found = UnitSamples((self.rollout,), (self.samples,), (own,), statistics, 0, counted)
        made = Round(self.whole, self.mine, self.counts, self.batch, (part,), found)
        reads = self.session.algorithm.reads_reference
        return with_reference(self.session, made, seconds) if reads else made


def rewrite_draws(
    session: Session, iteration: int, draws: Draws, seconds: dict[str, float]
) -> Rewritings:
    """Sample the rewritings of the draws' prompts, and gather their texts from all processes."""
    own = session.before
    assert own is not None, "a joint run has a language model"

    def write() -> tuple[Batch, TextRollout, list[str]]:
        with own.parallel.together(), timed(seconds, "rewrite"), bounded_call("sampling"):
            return _written(own, iteration, ids, rows)

    mine, counts = own.parallel.share(len(draws.ids))
    ids, rows = (part[mine.start : mine.stop] for part in (draws.ids, draws.rows))
    batch, rollout, texts = with_smaller_calls(own.learner, own.terminal, write)
    prompts, meta = own.prompts.take([rows[i] for i in rollout.prompt.tolist()])
    samples = Samples(texts, prompts, rollout.prompt, meta)
    every = [text for part in own.parallel.every(texts if counts else []) for text in part]
    order, equal = neighbours(every, rollout.plan.group)
    group, whole = rollout.plan.group, session.run.joint
    assert whole is not None
    shared = whole.credit == "shared"
    images = Draws(
        tuple(draw * group + i for draw in draws.ids for i in range(group)),
        tuple(row for row in draws.rows for _ in range(group)),
        (group,) * len(draws.ids) if shared else equal,
        tuple(every[i] for i in order),
    )
    place = torch.tensor(order)
    return Rewritings(own, draws, mine, counts, batch, rollout, samples, place, equal, images)


def _written(
    own: Session, iteration: int, ids: tuple[int, ...], rows: tuple[int, ...]
) -> tuple[Batch, TextRollout, list[str]]:
    learner, algorithm = own.learner, own.algorithm
    prompts, meta = own.prompts.take(rows)
    batch = learner.policy.open(instructed(own.template, prompts), meta, algorithm.steps)
    with learner.policies.using(algorithm.behaviour), learner.merging.sampling() as aside:
        (rollout,) = batch.rollouts(
            algorithm.plan,
            ids,
            seed=own.run.train.seed,
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
        places: dict[str, list[int]] = {}
        for i in range(start, start + group):
            places.setdefault(texts[i], []).append(i)
        order += [i for same in places.values() for i in same]
        equal += [len(same) for same in places.values()]
    return order, tuple(equal)
