"""The merged rounds of an iteration: scores, gathered columns and rows of all kept draws.

An iteration has one round unless `budget.flat: resample` draws more prompts. Merging, dropping and
re-encoding happen here; credit and the update see one set of draws.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from operator import itemgetter

import torch
from torch import Tensor

from flowrl.budget.spending import DrawRequest
from flowrl.likelihoods.rows import Rows, stacked, take
from flowrl.likelihoods.token import TokenPolicy
from flowrl.likelihoods.transition import rows_by_shape
from flowrl.prompts import Draws
from flowrl.run.experience.rewriting import Rewritings, rewrite_draws
from flowrl.run.experience.round import PlanSamples, Round, sample_round
from flowrl.run.experience.start_values import learn_start_values
from flowrl.run.experience.units import timed
from flowrl.run.state.session import Session
from flowrl.run.state.smaller_calls import with_smaller_calls
from samplers import Velocity
from samplers.host import on_host, sent

ModelCall = Velocity | TokenPolicy  # what a likelihood evaluates: of images, of texts


@dataclass(frozen=True)
class LearnedRows:
    """Rows to train on. Their `prompt` is an index into `draws` (ids), which `policy` has
    encoded."""

    rows: tuple[Rows, ...]
    draws: tuple[int, ...]
    policy: ModelCall
    prompts: tuple[int, ...]  # of the draws, as rows of the prompt file


@dataclass(frozen=True)
class Rounds:
    session: Session
    each: tuple[Round, ...]
    kept: Tensor  # [draws of all rounds and processes] bool: False for draws that are left out
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    rewritings: Rewritings | None = None  # that the draws are of, if a model wrote their prompts
    start_samples: int = 0  # that credit asked of the start, over all processes

    @classmethod
    def sample(cls, session: Session, iteration: int) -> "Rounds":
        """Sample rounds until the budget stops; a single round without a budget."""
        prompts, spending, seconds = session.prompts, session.spending, dict[str, float]()
        weights = session.tracker.weights(len(prompts)) if session.tracker else None
        count, seed, start = session.draw_count, session.run.train.seed, 0

        def sampled(draws: Draws) -> Round:
            nonlocal start
            if session.algorithm.samples_start:
                learn = partial(learn_start_values, session, iteration, draws, seconds)
                start += with_smaller_calls(session.learner, session.terminal, learn)
            sample = partial(sample_round, session, iteration, draws, seconds)
            return with_smaller_calls(session.learner, session.terminal, sample)

        ahead = None if session.source is None else session.source.draws(iteration)
        if spending is None:
            drawn, written = ahead or prompts.draw(iteration, count, seed, weights), None
            if session.before is not None:
                written = rewrite_draws(session, iteration, drawn, seconds)
            only = sampled(drawn if written is None else written.draws)
            return cls.of(session, only, seconds, written, start)
        request = DrawRequest(prompts, count, seed, iteration, weights)
        each = [sampled(ahead)] if ahead else list[Round]()
        while (draws := spending.draws(request, [r.outcome for r in each])) is not None:
            each.append(sampled(draws))
        kept = spending.kept(request, [r.outcome for r in each])
        return cls(session, tuple(each), kept, seconds, start_samples=start)

    @classmethod
    def of(
        cls,
        session: Session,
        only: Round,
        seconds: dict[str, float],
        rewritings: Rewritings | None = None,
        start_samples: int = 0,
    ) -> "Rounds":
        """A single round, with all draws kept."""
        kept = torch.ones(len(only.draws.ids), dtype=torch.bool)
        return cls(session, (only,), kept, seconds, rewritings, start_samples)

    @property
    def first(self) -> Round:
        return self.each[0]

    @property
    def merges(self) -> bool:
        """Whether samples of several draws are compared."""
        return any(n > 1 for each in self.each for n in each.draws.merged)

    @property
    def merged_groups(self) -> tuple[int, ...]:
        """Number of draws in each kept group; groups are kept or dropped as a whole."""
        counts = [n for r in self.each for n in r.draws.merged]
        whole = self.kept.split(counts)
        return tuple(n for n, part in zip(counts, whole, strict=True) if bool(part[0]))

    def parts(self, plan: int) -> list[PlanSamples]:
        """Samples of a plan, by round."""
        return [r.parts[plan] for r in self.each]

    def gathered(self, columns: Iterable[Tensor | None]) -> Tensor:
        """Gather a column from all rounds and processes, in the order of the draws."""
        parts = []
        for r, column in zip(self.each, columns, strict=True):
            assert column is not None, "all rollouts of a plan have the same columns"
            parts.append(self.session.parallel.gatherer(len(r.draws.ids))(column))
        return torch.cat(parts)

    def local(self, columns: Sequence[Tensor], group: int) -> list[tuple[Tensor, ...]]:
        """This process's part, per round, of columns over all samples."""
        cuts, start = [], 0
        for r in self.each:
            share = slice((start + r.mine.start) * group, (start + r.mine.stop) * group)
            cuts.append(tuple(map(itemgetter(share), columns)))
            start += len(r.draws.ids)
        return cuts

    def merged(self, columns: Sequence[Sequence[tuple[Tensor, ...]]]) -> LearnedRows:
        """Join the rows of all plans. `columns`: per plan and round, advantages and mask [n k]."""
        likelihood, unit = self.session.algorithm.likelihood, self.session.algorithm.loss.unit
        rows: list[list[Rows]] = [[] for _ in self.each]
        for plan, owns in enumerate(columns):
            for mine, r, own in zip(rows, self.each, owns, strict=True):
                if r.counts:
                    first = 0 if not mine or mine[-1].place is None else mine[-1].place + 1
                    advantage, mask = own
                    rollout = r.parts[plan].rollout
                    mine += rows_by_shape(likelihood, rollout, advantage, mask, first)
        first = self.first
        made = LearnedRows(tuple(rows[0]), first.ids, first.batch.policy, first.prompts)
        if len(self.each) > 1:
            made = self._merged(rows)
        spending = self.session.spending
        if spending is None:
            return made
        return replace(made, rows=tuple(spending.rows(each, unit) for each in made.rows))

    def _merged(self, rows: Sequence[Sequence[Rows]]) -> LearnedRows:
        """Stack the rows of all rounds, without dropped draws, and encode the kept prompts."""
        session = self.session
        counts = [len(r.draws.ids) for r in self.each]
        here = [
            part[list(r.mine)] & r.counts
            for part, r in zip(self.kept.split(counts), self.each, strict=True)
        ]
        flags = torch.cat(here).tolist()
        draws = tuple(compress((draw for r in self.each for draw in r.ids), flags))
        prompts = tuple(compress((row for r in self.each for row in r.prompts), flags))
        with session.parallel.together(), timed(self.seconds, "encode"):
            taken = session.prompts.take(prompts or self.first.prompts)
            policy = session.learner.policy.open(*taken, session.algorithm.steps).policy
        place = torch.cat(here).cumsum(0) - 1  # of each kept draw of this process
        places = place.masked_fill(~torch.cat(here), -1).split([len(mine) for mine in here])
        pairs = [(mine, at) for mine, at in zip(rows, places, strict=True) if mine]
        moved = [[_moved(each, at) for each in mine] for mine, at in pairs]
        whole = tuple(stacked(same) for same in zip(*moved, strict=True))
        return LearnedRows(whole, draws, policy, prompts)


def _moved(rows: Rows, place: Tensor) -> Rows:
    """Keep the rows of draws whose new index is not -1, with that index."""
    moved = place[on_host(rows.prompt)]
    left = take(rows, (moved >= 0).nonzero()[:, 0])
    return replace(left, prompt=sent(moved[moved >= 0], rows.prompt.device))
