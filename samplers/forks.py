"""Trees of completions that fork where the model was least certain: their nodes are ragged.

d draws, g leaves of each (n = d g), t tokens, k decision points. Every leaf is a whole completion.
The first `roots` leaves are independent; each later leaf copies an earlier one up to a position and
continues from there. So `common` describes a tree: the number of first tokens that one leaf copied
from another. A node is a run of tokens that the same leaves pass.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from samplers.untyped import integers


@dataclass(frozen=True)
class Forking:
    """Rounds of forks, as in EPTree (TreeRL, arXiv:2506.11902). Its (M, N, L, T) are the roots,
    `top`, `rounds` and `branch`.

    top     number of positions, at least 1, at which each tree forks per round: the most uncertain
            tokens of all its completions, excluding earlier forks
    branch  number of completions, at least 1, that continue from each position, starting with a new
            draw of that token
    rounds  rounds of forks, at least 1; each forks all completions so far
    by      the uncertainty of a token: the `entropy` of its distribution, or its `surprise`,
            minus its log-probability, as the published code has it
    """

    top: int
    branch: int
    rounds: int = 1
    by: Literal["entropy", "surprise"] = "entropy"

    def __post_init__(self) -> None:
        if min(self.top, self.branch, self.rounds) < 1:
            raise ValueError(
                f"forks: top, branch and rounds must be at least 1, not {self.top}, "
                f"{self.branch} and {self.rounds}"
            )

    @property
    def leaves(self) -> int:
        """Number of completions in one tree."""
        return 1 + self.top * self.branch * self.rounds

    @property
    def points(self) -> int:
        """Maximum number of nodes on the path to a leaf: one more than the number of rounds."""
        return 1 + self.top * self.rounds


class Grown(NamedTuple):
    """Trees under construction. A leaf's index is its number within its draw, in order of creation.

    tree    [g] the root of each leaf
    first   [d g] the position from which it was generated
    common  [d g g] number of first tokens that two leaves share; on the diagonal, more than a leaf
            has
    forked  [d g t] tokens at which a fork was made
    """

    tree: Int[Tensor, " g"]
    first: Int[Tensor, "d g"]
    common: Int[Tensor, "d g g"]
    forked: Bool[Tensor, "d g t"]

    @classmethod
    def roots(cls, draws: int, roots: int, length: int) -> "Grown":
        common = torch.eye(roots, dtype=torch.int64) * (length + 1)
        return cls(
            torch.arange(roots),
            torch.zeros(draws, roots, dtype=torch.int64),
            common.expand(draws, -1, -1),
            torch.zeros(draws, roots, length, dtype=torch.bool),
        )


def choose(
    grown: Grown, score: Float[Tensor, "d g t"], written: Bool[Tensor, "d g t"], rule: Forking
) -> tuple[Int[Tensor, "d f"], Int[Tensor, "d f"]]:
    """Choose where trees fork: a leaf's index and a position for each of the roots * top forks.

    Each token is considered once, at the leaf that generated it. A tree of fewer tokens than `top`
    forks at some of them twice.
    """
    length = score.shape[-1]
    unshared = torch.arange(length) >= grown.first[..., None]
    free = score.masked_fill(~(written & unshared & ~grown.forked), -torch.inf)
    leaves, positions = list[Tensor](), list[Tensor]()
    for root in sorted(set(integers(grown.tree))):
        members = (grown.tree == root).nonzero()[:, 0]
        flat = free[:, members].flatten(1)
        best = flat.argsort(dim=1, descending=True, stable=True)
        count = flat.isfinite().sum(1, keepdim=True).clamp(min=1)
        rank = torch.arange(rule.top) % count
        token = best.gather(1, rank)
        leaves.append(members[token // length])
        positions.append(token % length)
    return torch.cat(leaves, 1), torch.cat(positions, 1)


def grow(
    grown: Grown, leaf: Int[Tensor, "d f"], position: Int[Tensor, "d f"], branch: int
) -> Grown:
    """Append `branch` new leaves for each fork."""
    rows = torch.arange(len(leaf))[:, None]
    forked = grown.forked.clone()
    forked[rows, leaf, position] = True
    leaf, position = (part.repeat_interleave(branch, 1) for part in (leaf, position))
    new = leaf.shape[1]
    shared = grown.common[rows, leaf]  # of the leaves that are copied, with all older ones
    old = torch.minimum(position[..., None], shared)
    among = shared.gather(2, leaf[:, None].expand(-1, new, -1))
    among = torch.minimum(among, torch.minimum(position[..., None], position[:, None]))
    whole = torch.eye(new, dtype=torch.bool)
    among = torch.where(whole, forked.shape[-1] + 1, among)
    top = torch.cat([grown.common, old.transpose(1, 2)], 2)
    common = torch.cat([top, torch.cat([old, among], 2)], 1)
    blank = forked.new_zeros(len(leaf), new, forked.shape[-1])
    tree = torch.cat([grown.tree, grown.tree[leaf[0]]]) if len(leaf) else grown.tree
    return Grown(tree, torch.cat([grown.first, position], 1), common, torch.cat([forked, blank], 1))


def points(common: Int[Tensor, "n g"], length: int) -> Int[Tensor, "n t"]:
    """Decision point of each token: the number of nodes that its leaf passed before it."""
    return _cuts(common, length).long().cumsum(1)


def _cuts(common: Tensor, length: int) -> Bool[Tensor, "n t"]:
    """Positions at which a leaf diverges from other leaves."""
    inside = (common > 0) & (common < length)
    cuts = torch.zeros(len(common), length, dtype=torch.bool)
    row, other = inside.nonzero(as_tuple=True)
    cuts[row, common[row, other]] = True
    return cuts


def passed(common: Int[Tensor, "n g"], length: int, most: int) -> Int[Tensor, "n k"]:
    """Node that a leaf passes at each decision point, named by the index of the node's first leaf.
    After its last node, a leaf is its own node."""
    starts = torch.full((len(common), most), length)
    starts[:, 0] = 0
    row, at = _cuts(common, length).nonzero(as_tuple=True)
    starts[row, points(common, length)[row, at]] = at
    return (common[:, None] > starts[..., None]).int().argmax(2)


def owned(common: Int[Tensor, "n g"], length: int) -> Bool[Tensor, "n t"]:
    """Mask of the positions that a leaf shares with no earlier leaf of its draw."""
    group = common.shape[1]
    index = torch.arange(len(common))[:, None] % group
    earlier = torch.arange(group) < index
    before = (common * earlier).amax(1, keepdim=True)
    return torch.arange(length) >= before


def by_draw(rows: Tensor, draws: int) -> Tensor:
    """Reshape [m ...] to [draws m/draws ...]."""
    return rows.reshape(draws, len(rows) // draws, *rows.shape[1:])
