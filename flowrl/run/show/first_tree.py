"""The tree of one draw of an iteration: values of its nodes, and their advantages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.credit.values import Context, node_values
from flowrl.run.experience.collect import FirstSamples
from flowrl.run.state.session import Session
from rewards import Scores
from samplers import Rollout


@dataclass(frozen=True)
class FirstTree:
    """Leaves [g] and decision points [k] of one draw from an iteration's first plan.

    start       place of its first leaf among this process's samples
    node        place of each leaf's node at each decision point
    values      of these nodes, weighted over the rewards; NaN without a score
    advantages  of these nodes; NaN where they are not learned from
    sigmas      noise levels before each decision point; None for texts
    trained     whether a transition of that point is trained on
    roots       distinct states before the first decision
    """

    start: int
    node: Tensor  # [g k]
    values: Tensor  # [g k]
    advantages: Tensor  # [g k]
    sigmas: tuple[float, ...] | None
    noisy: tuple[bool, ...]
    trained: tuple[bool, ...]
    roots: int
    plans: int


def first_tree(session: Session, first: FirstSamples) -> FirstTree:
    """Tree of this process's first draw whose scores differ, or of its first draw if none do,
    since equal scores teach nothing."""
    part = first.part
    rollout, columns = part.rollout, part.rollout.columns
    group, points = columns.group, len(columns.nodes)
    weights, fusion = session.weights(rollout.iteration), session.algorithm.advantage.fusion
    draw = _with_spread(part.scores, weights, group)
    own = slice(draw * group, (draw + 1) * group)
    scores = Scores(part.scores.values[own], part.scores.scored[own], part.scores.names)
    ids = None if rollout.nodes is None else rollout.nodes[own].cpu()
    logp = dict[int, Tensor]()
    for edge in rollout.edges if fusion == "path" else ():
        logp[edge.step] = edge.logp.view(-1, columns.nodes[edge.step])[draw]
    value, known = node_values(scores, Context(columns, weights, logp, nodes=ids), fusion)
    total = (value * weights.to(value.dtype)).sum(-1)
    advantages, mask = (each[own].double().cpu() for each in first.credit)
    if advantages.shape[1] != points:  # credit of single tokens has no nodes
        advantages, mask = torch.zeros(group, points).double(), torch.zeros(group, points)
    place = torch.arange(group)[:, None] * torch.tensor(columns.nodes) // group
    if ids is not None:
        place = torch.stack([torch.unique(column, return_inverse=True)[1] for column in ids.T], 1)
    plan = rollout.plan if isinstance(rollout, Rollout) else None
    return FirstTree(
        start=draw * group,
        node=place,
        values=total.masked_fill(~known.all(-1), torch.nan),
        advantages=advantages.masked_fill(mask == 0, torch.nan),
        sigmas=None if plan is None else plan.sigmas[:-1],
        noisy=columns.noisy,
        trained=(True,) * points if plan is None else tuple(step.train for step in plan.steps),
        roots=1 if plan is None else plan.states[0],
        plans=first.plans,
    )


def _with_spread(scores: Scores, weights: Tensor, group: int) -> int:
    """The first draw whose weighted scores differ, or 0."""
    total = (scores.values * scores.scored) @ weights.to(scores.values.dtype)
    by_draw = total.view(-1, group)
    return int((by_draw.amax(1) > by_draw.amin(1)).double().argmax())
