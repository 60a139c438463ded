"""Groups that shrink while they are sampled: `samplers.looks.Thinning`."""

from dataclasses import replace

import torch
from torch import Tensor

from samplers.host import picked, sent
from samplers.looks import Thinning, extremes
from samplers.plan import Plan
from samplers.walk import Edges, Walk


def thinned(plan: Plan, how: Thinning, walk: Walk, index: int) -> tuple[Tensor, tuple[Edges, ...]]:
    """Sample shrinking groups:

    the remaining samples [n *d] and their trained transitions. A remaining sample takes the noise
    of its index among the remaining ones, keyed by its draw like all noise. ValueError without a
    reward.
    """
    if walk.reward is None:
        raise ValueError(
            "a group that shrinks needs an intermediate reward: pass Sampling(score=...)"
        )
    draws, edges = len(walk.draws), list[Edges]()
    wide = replace(plan, roots=how.start, thin=None)
    state = walk.root(wide)
    for k, step in enumerate(plan.steps):
        if k in how.at:
            state.v = walk.look(state.x, step.sigma)
            x0 = state.x - step.sigma * state.v
            score = walk.reward(wide, index, x0, walk.prompt(x0)).view(draws, -1)
            kept = extremes(score, how.width(k)) + score.shape[1] * torch.arange(draws)[:, None]
            rows = sent(kept.flatten(), state.x.device)
            state, edges = state.rows(rows), [_taken(edge, rows) for edge in edges]
            wide = replace(wide, roots=how.width(k))
        state, edge = walk.advance(wide, index, k, state)
        edges += [edge] if edge is not None else []
    return state.x, tuple(edges)


def _taken(edges: Edges, rows: Tensor) -> Edges:
    mean, moved = (None if a is None else a[rows] for a in (edges.mean, edges.moved))
    x, x_next, logp = (a[rows] for a in (edges.x, edges.x_next, edges.logp))
    return Edges(edges.step, x, x_next, mean, logp, picked(edges.prompt, rows), moved)
