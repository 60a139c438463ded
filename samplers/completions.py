"""Plans of a language model's sampler as data, and the completions sampled under them.

A step is a token, so text planners are called like image planners; only the number of levels
counts. A plan is a level-uniform tree whose levels are *segments*: tokens between two cuts. Every
node branches after its cut, so "the ancestor of leaf i in segment k" is integer division. The
children of a completion that stopped before a cut are its copies. After the last segment a tree may
fork where the model was unsure (`samplers.forks`); its nodes are then ragged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from samplers.forks import Forking, owned, passed, points
from samplers.plan import Columns
from samplers.token_support import TokenSupport


@dataclass(frozen=True)
class TextPlan:
    """A tree of completions of at most `length` tokens: nodes per draw in each segment, and the
    tokens after which they branch.

    temperature  0 always takes the likeliest token: for evaluation only, since it has no density
    top_p        sample from the smallest set of tokens with this total probability
    top_k        sample from this many of the likeliest tokens; 0: all
    min_p        sample from tokens with at least this fraction of the likeliest token's probability
    forking      forks of whole completions: for a plan without cuts
    exact        sample with the current weights only, not on a server that may hold older ones
    greedy       the last completion of a draw is decoded greedily: a baseline, never trained on
    turns        maximum number of turns or steps of a completion, each a decision point: the policy
                 sets it. A completion may have fewer, see `TextRollout.exists`
    Raises ValueError for cuts and nodes that do not form a tree.
    """

    length: int
    nodes: tuple[int, ...]
    cuts: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    forking: Forking | None = None
    exact: bool = False
    greedy: bool = False
    turns: int = 1
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length must be at least 1, not {self.length}")
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature must be at least 0 and top_p in (0, 1], not {self.temperature} "
                f"and {self.top_p}"
            )
        if self.top_k < 0 or not 0 <= self.min_p < 1:
            raise ValueError(
                f"top_k must be at least 0 and min_p in [0, 1), not {self.top_k} and {self.min_p}"
            )
        if len(self.nodes) != len(self.cuts) + 1:
            raise ValueError(
                f"nodes {self.nodes}: {len(self.cuts)} cuts make {len(self.cuts) + 1} segments, "
                "each of which needs one number of nodes"
            )
        if self.cuts and self.forking is not None:
            raise ValueError("a tree has either forks or cuts, not both: leave one of them out")
        if self.greedy and (self.cuts or self.forking is not None):
            raise ValueError(
                "a tree cannot have a greedy completion: leave out greedy, or the tree"
            )
        if self.turns < 1 or (self.turns > 1 and (self.cuts or self.forking is not None)):
            raise ValueError(
                f"a plan with {self.turns} turns: turns must be at least 1, and a tree cannot have "
                "several"
            )
        wrong = [cut for cut in self.cuts if not 0 < cut < self.length]
        if wrong or list(self.cuts) != sorted(set(self.cuts)):
            raise ValueError(
                f"the tokens to branch after, {self.cuts}, must increase and lie between 0 and "
                f"{self.length}"
            )
        for parents, children in pairwise((1, *self.nodes)):
            if children < 1 or children % parents:
                raise ValueError(
                    f"nodes {self.nodes}: each number must be a multiple of the one before it"
                )

    @property
    def group(self) -> int:
        return self.nodes[-1] * (1 if self.forking is None else self.forking.leaves)

    @property
    def columns(self) -> Columns:
        nodes = self.nodes * self.turns
        if self.forking is not None:
            nodes = (self.group,) * self.forking.points
        ones = (1.0,) * len(nodes)
        return Columns(nodes, (True,) * len(nodes), std=ones, h=ones)

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """First token and end (exclusive) of each segment."""
        return tuple(pairwise((0, *self.cuts, self.length)))

    @property
    def tokens(self) -> int:
        """Maximum number of tokens that a draw generates; tokens that leaves share count once."""
        if self.forking is not None:
            return self.group * self.length
        return sum(n * (b - a) for n, (a, b) in zip(self.nodes, self.segments, strict=True))


@dataclass(frozen=True)
class Completions:
    """Independent completions: a tree that branches only at its root. `greedy` adds one greedy
    completion to the group.

    exact   whether completions are sampled with the current weights alone, and not on a server that
            may hold older ones
    greedy  whether the last sample of a group takes the likeliest tokens
    """

    group: int
    temperature: float = 1.0
    top_p: float = 1.0
    exact: bool = False
    greedy: bool = False
    top_k: int = 0
    min_p: float = 0.0

    def __call__(self, levels: Sequence[float], iteration: int, seed: int) -> tuple[TextPlan, ...]:
        plan = TextPlan(
            len(levels) - 1, (self.group + self.greedy,), temperature=self.temperature,
            top_p=self.top_p, exact=self.exact, greedy=self.greedy, top_k=self.top_k,
            min_p=self.min_p,
        )  # fmt: skip
        return (plan,)


@dataclass(frozen=True)
class Segments:
    """A tree: `roots` completions, each of which branches into `branch` after `at` tokens each.

    Tree-structured rollouts of language models: arXiv:2505.23564 (SPO), arXiv:2506.11902 (TreeRL).

    branch  completions of a node, at least 2
    at      tokens after which a completion branches, increasing, at least 1
    """

    roots: int
    branch: int
    at: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __call__(self, levels: Sequence[float], iteration: int, seed: int) -> tuple[TextPlan, ...]:
        nodes = tuple(self.roots * self.branch**k for k in range(len(self.at) + 1))
        plan = TextPlan(
            len(levels) - 1, nodes, self.at, self.temperature, self.top_p, top_k=self.top_k,
            min_p=self.min_p,
        )  # fmt: skip
        return (plan,)


@dataclass(frozen=True)
class Forks:
    """`roots` completions, each forked where the model was most uncertain.

    forking  where completions fork: {top: ..., branch: ..., rounds: 1, by: entropy}
    """

    roots: int
    forking: Forking
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __call__(self, levels: Sequence[float], iteration: int, seed: int) -> tuple[TextPlan, ...]:
        plan = TextPlan(
            len(levels) - 1, (self.roots,), temperature=self.temperature, top_p=self.top_p,
            forking=self.forking, top_k=self.top_k, min_p=self.min_p,
        )  # fmt: skip
        return (plan,)


@runtime_checkable
class TextPlanner(Protocol):
    """Makes text plans; `levels` has one entry more than the maximum length."""

    def __call__(
        self, levels: Sequence[float], iteration: int, seed: int
    ) -> tuple[TextPlan, ...]: ...


@dataclass(frozen=True)
class Say:
    """Tokens of one segment under the sampler, one entry per node; the counterpart of `Edges` for
    images."""

    step: int  # the segment, or turn
    logp: Float[Tensor, " nodes"]  # mean over its tokens; 0 where the node has none


@dataclass(frozen=True)
class SegmentPoints:
    """A decision point for each segment between the plan's cuts, the same in all samples."""


@dataclass(frozen=True)
class ForkPoints:
    """A decision point for each node that leads to a leaf of a tree that forked.

    common  number of first tokens that a leaf shares with each leaf of its draw
    """

    common: Int[Tensor, "n g"]


@dataclass(frozen=True)
class TurnPoints:
    """A decision point for each turn of a conversation with an environment, of which samples may
    have different numbers. A reply of the environment belongs to the turn after it.

    from_environment  tokens that the environment inserted, whose log-probability is 0
    states            ids of the states that turns were taken in; 0 where there is no such turn
    rewards           the environment's rewards of single turns; NaN where there is no reward
    """

    from_environment: Bool[Tensor, "n t"]
    states: Int[Tensor, "n k"]
    rewards: Float[Tensor, "n k"]

    @property
    def begins(self) -> Bool[Tensor, "n t"]:
        """Positions at which a reply begins."""
        before = torch.nn.functional.pad(self.from_environment[:, :-1], (1, 0))
        return self.from_environment & ~before


@dataclass(frozen=True)
class StepPoints:
    """A decision point for each step of a completion, of which samples may have different numbers.

    begins  tokens at which a further step begins
    """

    begins: Bool[Tensor, "n t"]


DecisionPoints = SegmentPoints | ForkPoints | TurnPoints | StepPoints


@dataclass(frozen=True)
class TextRollout:
    """Leaves of one draw are contiguous. Entries from position `ends` on are 0. On the CPU.

    ids        the tokens
    logp       their log-probabilities under the sampler (its temperature, its kept tokens)
    lengths    number of tokens that the model sampled in each, including stop tokens
    stopped    False where a completion was cut off at the plan's length
    kept       the tokens that top-p, top-k and min-p left; None where they left all
    points     where decision points lie: segments of the plan, forks, turns or steps
    replayed   samples that an older policy drew, with its `logp`
    elsewhere  another engine sampled them: `logp` is that engine's
    """

    by_size = ()  # rollouts of states
    plan: TextPlan
    ids: Int[Tensor, "n t"]
    logp: Float[Tensor, "n t"]
    lengths: Int[Tensor, " n"]
    stopped: Bool[Tensor, " n"]
    kept: TokenSupport | None
    prompt: Int[Tensor, " n"]
    draws: tuple[int, ...]
    seed: int
    iteration: int
    index: int
    points: DecisionPoints
    replayed: Bool[Tensor, " n"]
    elsewhere: bool = False

    @property
    def columns(self) -> Columns:
        return self.plan.columns

    @property
    def passed(self) -> Int[Tensor, "n k"]:
        """Node that each leaf passes at each decision point, numbered within its draw."""
        if isinstance(self.points, ForkPoints):
            return passed(self.points.common, self.plan.length, len(self.columns.nodes))
        leaf = torch.arange(len(self.ids)) % self.plan.group
        nodes = torch.tensor(self.columns.nodes)
        return leaf[:, None] * nodes // self.plan.group

    @property
    def nodes(self) -> Int[Tensor, "n k"] | None:
        """The nodes that each sample passes; None if they follow from the plan."""
        return self.passed if isinstance(self.points, ForkPoints) else None

    @property
    def from_environment(self) -> Bool[Tensor, "n t"] | None:
        """Tokens that an environment inserted; None where there is no environment."""
        return self.points.from_environment if isinstance(self.points, TurnPoints) else None

    @property
    def ends(self) -> Int[Tensor, " n"]:
        """Number of tokens of each sample, including the environment's."""
        replies = self.from_environment
        return self.lengths if replies is None else self.lengths + replies.sum(1)

    @property
    def written(self) -> Bool[Tensor, "n t"]:
        """Mask of the tokens that the model generated."""
        replies = self.from_environment
        whole = torch.arange(self.ids.shape[1]) < self.ends[:, None]
        return whole if replies is None else whole & ~replies

    @property
    def point(self) -> Int[Tensor, "n t"]:
        """Index of each position's decision point."""
        match self.points:
            case ForkPoints(common=common):
                return points(common, self.ids.shape[1])
            case TurnPoints(begins=begins) | StepPoints(begins=begins):
                return begins.cumsum(1)
            case SegmentPoints():
                cuts = torch.tensor(self.plan.cuts, dtype=torch.int64)
                positions = torch.arange(self.ids.shape[1])
                return torch.bucketize(positions, cuts, right=True).expand(len(self.ids), -1)

    @property
    def last(self) -> Int[Tensor, " n"]:
        """Index of each sample's last decision point."""
        if isinstance(self.points, TurnPoints | StepPoints):
            return self.points.begins.sum(1)
        return torch.full_like(self.lengths, len(self.columns.nodes) - 1)

    @property
    def exists(self) -> Bool[Tensor, "n k"]:
        """Whether each sample has each decision point. All have those of segments and forks."""
        return torch.arange(len(self.columns.nodes)) <= self.last[:, None]

    @property
    def own(self) -> Bool[Tensor, "n t"]:
        """Mask that counts each token once: at the first leaf of its node."""
        if isinstance(self.points, ForkPoints):
            return self.written & owned(self.points.common, self.ids.shape[1])
        nodes = torch.tensor(self.columns.nodes)
        leaves = self.plan.group // nodes[self.point]
        leaf = torch.arange(len(self.ids))[:, None] % self.plan.group
        return self.written & (leaf % leaves == 0)

    @property
    def edges(self) -> tuple[Say, ...]:
        """Edges for path fusion; empty for ragged trees, which path fusion does not support."""
        if isinstance(self.points, ForkPoints):
            return ()
        edges: list[Say] = []
        for k, nodes in enumerate(self.columns.nodes):
            leaves = self.plan.group // nodes
            of_point = (self.written & (self.point == k))[::leaves]
            mean = (self.logp[::leaves] * of_point).sum(1) / of_point.sum(1).clamp(min=1)
            edges.append(Say(k, mean))
        return tuple(edges)
