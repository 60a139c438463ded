"""The tree of one draw of an iteration, with the values and advantages of its nodes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.budget.groups import grouped
from flowrl.credit.advantages import Estimator
from flowrl.credit.values import Context, Credit, applying
from flowrl.iteration.credit import group_ranges
from flowrl.iteration.records import Iteration
from flowrl.iteration.units import StoredSamples
from flowrl.models.policy import RolloutLike
from flowrl.session.session import Session
from rewards import Samples, Scores
from samplers.mixed import plan_of


@dataclass(frozen=True)
class FirstTree:
    """Leaves [g] and decision points [k] of one prompt from an iteration's first plan.

    start       index of its first leaf among this process's samples
    node        index of each leaf's node at each decision point
    values      of these nodes, weighted over the rewards; NaN without a score
    advantages  of these nodes; NaN where they are not trained on
    sigmas      noise levels before each decision point; None for texts
    trained     whether a transition of that point is trained on
    roots       distinct states before the first decision
    texts       of the leaves' rewritings, if these are the first decision point; otherwise empty
    """

    start: int
    node: Tensor  # [g k]
    values: Tensor  # [g k]
    advantages: Tensor  # [g k]
    sigmas: tuple[float | None, ...] | None
    noisy: tuple[bool, ...]
    trained: tuple[bool, ...]
    roots: int
    plans: int
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class FirstSamples:
    """This process's samples of an iteration's first plan, with their credit.

    credit  advantages and mask [n k]
    plans   of the iteration
    """

    rollout: RolloutLike
    samples: Samples | StoredSamples
    scores: Scores
    credit: tuple[Tensor, Tensor]
    plans: int

    @classmethod
    def of(cls, session: Session, iteration: Iteration) -> "FirstSamples | None":
        """None if the samples were given, or if credit is of others that replace some."""
        if not iteration.scores.plans or session.run.budget.replay:
            return None
        samples, credit = iteration.scores.samples[0], iteration.credit.plans[0]
        n = len(samples.prompts)  # of the first round, where there are several
        scores = iteration.scores.plans[0].own.arranged(lambda column: column[:n])
        first_credit = credit.advantages[:n], credit.mask[:n]
        return cls(
            iteration.samples.rollouts[0],
            samples,
            scores,
            first_credit,
            len(iteration.credit.plans),
        )


def tree_of(session: Session, iteration: Iteration) -> FirstTree | None:
    """The tree of one draw of an iteration; None if pages show other samples than credit's."""
    first = FirstSamples.of(session, iteration)
    if first is None or session.prompt_writer is None:
        return None if first is None else first_tree(session, first)
    from flowrl.iteration.features.joint import WRITER  # a plain run does not import it

    texts = FirstSamples.of(session, iteration.rows.table[WRITER])
    assert texts is not None, "the texts are this process's own"
    return joint_tree(session, first, texts)


def first_tree(session: Session, first: FirstSamples) -> FirstTree:
    """Tree of this process's first draw with different scores, or of its first draw if all scores
    are equal, since equal scores teach nothing."""
    weights = session.weights(first.rollout.iteration)
    place = _with_spread(first.scores, weights, first.rollout.columns.group)
    return _of_draw(session, first, place)


def joint_tree(session: Session, images: FirstSamples, texts: FirstSamples) -> FirstTree:
    """Tree of one prompt's rewritings and their images: of the first prompt whose rewritings have
    different values, or else whose images have different scores. On the main process, where the
    draws of images begin with the first prompt's."""
    group, size = texts.rollout.columns.group, images.rollout.columns.group
    weights = session.weights(images.rollout.iteration)
    rewritings = texts.samples
    assert isinstance(rewritings, Samples), "the texts are this process's own"
    from flowrl.iteration.features.joint import neighbours  # a plain run does not import it

    order, equal = neighbours(list(rewritings.media), group)
    place = _with_spread(texts.scores, weights, group) or _with_spread(
        images.scores, weights, group * size
    )
    draws = range(place * group, (place + 1) * group)
    trees = [_of_draw(session, images, draw) for draw in draws]
    rows = [order[draw] for draw in draws]
    distinct = grouped(equal)[list(draws)]
    node = (distinct - distinct[0]).repeat_interleave(size)[:, None]
    last = torch.stack([tree.values[:, -1] for tree in trees]).flatten()
    values = torch.stack([last[node[:, 0] == n].nanmean() for n in node[:, 0].tolist()])[:, None]
    advantages, mask = (column[rows].double().cpu() for column in texts.credit)
    learned = advantages.masked_fill(mask == 0, torch.nan).nanmean(1)
    below = torch.cat([t.node + i * (t.node.amax(0) + 1) for i, t in enumerate(trees)])
    one = trees[0]
    return replace(
        one,
        node=torch.cat([node, below], 1),
        values=torch.cat([values, torch.cat([t.values for t in trees])], 1),
        advantages=torch.cat(
            [
                learned.repeat_interleave(size)[:, None],
                torch.cat([t.advantages for t in trees]),
            ],
            1,
        ),
        sigmas=(None, *(one.sigmas or ())),
        noisy=(True, *one.noisy),
        trained=(True, *one.trained),
        roots=1,
        texts=tuple(rewritings.media[row] for row in rows for _ in range(size)),
    )


def _of_draw(session: Session, first: FirstSamples, draw: int) -> FirstTree:
    rollout, columns = first.rollout, first.rollout.columns
    group, points = columns.group, len(columns.nodes)
    weights, fusion = session.weights(rollout.iteration), session.algorithm.advantage.fusion
    rows = slice(draw * group, (draw + 1) * group)
    scores = first.scores.of(range(len(first.scores.names))).arranged(lambda column: column[rows])
    ids = None if rollout.nodes is None else rollout.nodes[rows].cpu()
    logp = dict[int, Tensor]()
    for edge in rollout.edges if fusion == "path" else ():
        logp[edge.step] = edge.logp.view(-1, columns.nodes[edge.step])[draw]
    context = Context(columns, weights, logp, nodes=ids, scores=scores)
    value, valued = Estimator((), fusion).node_values(scores, context)
    total = (value * weights.to(value.dtype)).sum(-1)
    valued = (valued | ~applying(Credit(value, valued), context)) & valued.any(-1, keepdim=True)
    advantages, mask = (column[rows].double().cpu() for column in first.credit)
    if advantages.shape[1] != points:  # credit of single tokens has no nodes
        advantages, mask = torch.zeros(group, points).double(), torch.zeros(group, points)
    index = torch.arange(group)[:, None] * torch.tensor(columns.nodes) // group
    if ids is not None:
        index = torch.stack([torch.unique(column, return_inverse=True)[1] for column in ids.T], 1)
    plan = plan_of(rollout, draw)
    return FirstTree(
        start=draw * group,
        node=index,
        values=total.masked_fill(~valued.all(-1), torch.nan),
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
    return int((group_ranges(total, scores.complete, group) > 0).double().argmax())
