"""Groups that shrink while they are sampled: Pro-GRPO (arXiv:2512.15347)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.host import picked, sent
from samplers.plan import Plan
from samplers.planners import Planner, last_step
from samplers.route import Descent, Passage, PlainRoute, Predicted, Route, RouteRequest, StepWork
from samplers.routes.around import RouteAround
from samplers.step_tree import StepTree
from samplers.walk import Edges, State


@dataclass(frozen=True)
class Thinning:
    """Early stopping of samples: Pro-GRPO (arXiv:2512.15347).

    A draw starts with `start` samples. Before each step of `at` the projection x - sigma v is
    scored, and the `keep` samples with the most different rewards continue; the last `keep` is the
    plan's number of roots.

    at     steps before which samples stop, from 0, increasing
    keep   samples that continue from each of them, decreasing, at least 2
    start  samples of a draw at the beginning, at least 2
    """

    at: tuple[int, ...]
    keep: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        if len(self.at) != len(self.keep) or not self.at:
            raise ValueError(
                f"{len(self.at)} steps at which samples stop need as many group sizes, got "
                f"{len(self.keep)}"
            )
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(f"steps at which samples stop must increase, got {self.at}")
        sizes = (self.start, *self.keep)
        if list(sizes) != sorted(sizes, reverse=True) or min(sizes) < 2:
            raise ValueError(
                f"group sizes must decrease from {self.start} to at least 2, got {self.keep}"
            )

    def width(self, k: int) -> int:
        """Samples per draw that take step k."""
        return [self.start, *self.keep][sum(at <= k for at in self.at)]

    @property
    def scored(self) -> int:
        """Predicted clean samples per draw that are decoded and scored."""
        return sum(self.width(at - 1) for at in self.at)


@dataclass(frozen=True)
class ThinnedRoute(RouteAround):
    """Stops samples before their last step. It stands around the plain route alone, of a plan
    whose roots are the remaining samples."""

    how: Thinning

    @property
    def asks(self) -> frozenset[RouteRequest]:
        return frozenset({"score"})

    def refuses(self, plan: StepTree, layers: tuple[Route, ...]) -> str | None:
        alone = layers == (self, PlainRoute())
        if not alone or any(step.branch > 1 for step in plan.steps):
            return (
                "a plan whose group shrinks cannot have branches, guides, other intermediate "
                "rewards or kept states"
            )
        last = self.how.keep[-1]
        if plan.shared_noise or plan.roots != last:
            return (
                f"a group that shrinks to {last} needs as many roots, each with its own noise, but "
                f"this plan has {plan.roots}"
            )
        return None

    def work(self, plan: StepTree, k: int) -> StepWork:
        wide = self.how.width(k)
        if k not in self.how.at:
            return StepWork(wide, wide)
        before = self.how.width(k - 1)  # a sample stopped here was evaluated for its prediction
        said = f"{wide} of {before} samples continue"
        return StepWork(wide, wide, before - wide, predicted=before, words=said)

    def begin(self, passage: Passage) -> Descent:
        plan = passage.plan
        assert isinstance(plan, Plan), "routes go along plans"
        score = passage.answer("score", "a group that shrinks needs an intermediate reward")
        wide = replace(plan, roots=self.how.start, route=PlainRoute())
        return ThinnedDescent(passage, self.how, score, wide)


@dataclass
class ThinnedDescent:
    """A remaining sample takes the noise of its index among the remaining ones, keyed by its draw
    like all noise.

    wide  the plan of as many samples as there are now
    """

    passage: Passage
    how: Thinning
    score: Predicted
    wide: Plan

    def root(self) -> State:
        return self.passage.walk.root(self.wide)

    def step(self, k: int, at: State) -> State:
        if k in self.how.at:
            at = self.remaining(k, at)
        return self.passage.take(k, at, self.wide)

    def remaining(self, k: int, at: State) -> State:
        """The states that go on, and no transitions of others."""
        walk, edges, sigma = self.passage.walk, self.passage.edges, self.wide.steps[k].sigma
        at.v = walk.look(at.x, sigma)
        x0, draws = at.x - sigma * at.v, len(walk.draws)
        score = self.score(self.wide, x0, walk.prompt(x0)).view(draws, -1)
        chosen = extremes(score, self.how.width(k)) + score.shape[1] * torch.arange(draws)[:, None]
        rows = sent(chosen.flatten(), at.x.device)
        edges[:] = [_taken(edge, rows) for edge in edges]
        self.wide = replace(self.wide, roots=self.how.width(k))
        return at.rows(rows)


def _taken(edges: Edges, rows: Tensor) -> Edges:
    columns = {column.name: getattr(edges, column.name) for column in fields(edges)}
    taken = {name: column[rows] for name, column in columns.items() if isinstance(column, Tensor)}
    return replace(edges, **{**taken, "prompt": picked(edges.prompt, rows)})


def extremes(score: Float[Tensor, "n m"], keep: int) -> Int[Tensor, "n keep"]:
    """Indices, in increasing order, of the `keep` scores of each row that have the largest
    variance.

    These are the j highest and the keep - j lowest scores, for the best j (the smallest such j).
    Scores that are not finite are taken only if there are too few others.
    """
    n, m = score.shape
    if not 1 <= keep <= m:
        raise ValueError(f"cannot keep {keep} of {m} samples")
    scored = score.isfinite()
    order = score.double().masked_fill(~scored, torch.inf).argsort(dim=1, stable=True)
    chosen = torch.empty(n, keep, dtype=torch.long)
    for row in range(n):
        count = int(scored[row].sum())
        if count <= keep:
            chosen[row] = order[row, :keep].cpu()
            continue
        values = score[row].double()[order[row]]
        ends = [[*range(keep - high), *range(count - high, count)] for high in range(keep + 1)]
        spread = [float(values[places].var(correction=0)) for places in ends]
        chosen[row] = order[row, ends[spread.index(max(spread))]].cpu()
    return chosen.sort(dim=1).values


@dataclass(frozen=True)
class Thinned:
    """Plans of another planner whose groups shrink during sampling: see `Thinning`.

    The other planner's group is the group of remaining samples.

    how  when groups shrink and to what: {at: [...], keep: [...], start: ...}
    """

    otherwise: Planner
    how: Thinning

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        if wrong := [k for k in self.how.at if not 0 < k <= last_step(sigmas)]:
            raise ValueError(
                f"samples cannot be stopped before the steps {wrong}: choose steps from 1 to "
                f"{last_step(sigmas)}"
            )
        plans = self.otherwise(sigmas, iteration, seed)
        return tuple(
            replace(plan, route=ThinnedRoute(self.how, inner=plan.route)) for plan in plans
        )
