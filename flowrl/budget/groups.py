"""Groups for credit: the draws of one prompt as one group, whatever their number.

Credit needs groups of the same size, so draws of one group are contiguous, and smaller groups are
padded with unscored samples, which means and stds ignore.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from flowrl.credit.values import Context
from rewards.types import Scores


@dataclass(frozen=True)
class Groups:
    """Draws grouped for comparison. `counts`: draws of each group, in order; `size`: samples per
    draw.

    Example: counts (1, 2) and size 2 make two groups of 4 from 6 samples, at the indices 0 1 4 5 6
    7.
    """

    counts: tuple[int, ...]
    size: int

    @property
    def most(self) -> int:
        return max(self.counts, default=1)

    @cached_property
    def index(self) -> Int[Tensor, " n"]:
        """Index of each sample after groups are padded."""
        whole = self.most * self.size
        starts = torch.arange(len(self.counts)) * whole
        sizes = torch.tensor(self.counts) * self.size
        before = sizes.cumsum(0) - sizes
        return torch.arange(int(sizes.sum())) + (starts - before).repeat_interleave(sizes)

    @property
    def first(self) -> Int[Tensor, " g"]:
        """Index of the first draw of each group."""
        counts = torch.tensor(self.counts)
        return counts.cumsum(0) - counts

    def filled(self, column: Tensor, empty: float = 0.0) -> Tensor:
        """Pad groups: [n ...] to [g * most * size ...]."""
        shape = (len(self.counts) * self.most * self.size, *column.shape[1:])
        whole = column.new_full(shape, empty)
        whole[self.index] = column
        return whole

    def scores(self, scores: Scores) -> Scores:
        return scores.arranged(self.filled)

    def context(self, context: Context, draws: Int[Tensor, " d"]) -> Context:
        """The context of all draws, restricted to these draws and padded to their groups."""
        columns = context.columns
        samples = samples_of(draws, self.size)
        arranged = context.arranged(lambda column: self.filled(column[samples]))
        prompts = None if context.prompts is None else context.prompts[draws][self.first]
        logp = {
            k: edges.view(-1, columns.nodes[k])[draws].flatten()
            for k, edges in context.logp.items()
        }
        nodes = tuple(count * self.most for count in columns.nodes)
        parents = tuple(count * self.most for count in columns.origins)
        columns = replace(columns, nodes=nodes, parents=parents)
        return replace(arranged, columns=columns, logp=logp, prompts=prompts)


def samples_of(draws: Int[Tensor, " d"], size: int) -> Int[Tensor, " n"]:
    """Indices of the samples of some draws."""
    return (draws[:, None] * size + torch.arange(size)).flatten()


def grouped(merged: Sequence[int]) -> Int[Tensor, " d"]:
    """Group index of each draw, from the number of draws per group."""
    return torch.arange(len(merged)).repeat_interleave(torch.tensor(list(merged)))
