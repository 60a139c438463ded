"""The rollout tree on the page: node values, advantages, and the samples at its leaves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from flowrl.pages.html import media, number, page_section, signed
from flowrl.pages.records import LevelRecord, TreeRecord

STEP, LEAF, TOP, LEFT = 58.0, 46.0, 54.0, 26.0
LEAF_WIDTH = 40.0  # pixels of a leaf's copy
TEXT_STEP = 120.0


def tree_part(trees: Sequence[TreeRecord]) -> str:
    """The newest tree, and the first one in a fold."""
    if not trees:
        return ""
    first, last = trees[0], trees[-1]
    note = (
        "One prompt's group of one iteration. Time runs from left to right: each column is a "
        "decision, each dot a state after it, and samples that share a dot share its value, the "
        "mean of the leaves behind it unless the recipe says otherwise. Colour is the advantage, "
        "which the loss multiplies: blue is learned towards, orange away from, and a hollow dot "
        "teaches nothing. Thick lines are trained steps; the dots of others are small."
    )
    body = _tree(last, "last")
    if first.iteration != last.iteration:
        title = f"The first tree, of iteration {first.iteration}"
        body += f"<details><summary>{title}</summary>{_tree(first, 'first')}</details>"
    return page_section("tree", "Rollout tree", note, body)


@dataclass(frozen=True)
class Frame:
    """Places of a tree's nodes in its drawing."""

    tree: TreeRecord
    step: float

    @property
    def leaves(self) -> int:
        return len(self.tree.totals)

    def x(self, level: int) -> float:
        """`level` -1 is the start."""
        return LEFT + self.step * (level + 1)

    def y(self, level: LevelRecord, node: int) -> float:
        """The middle of a node's leaves."""
        places = [leaf for leaf, at in enumerate(level.node) if at == node]
        return TOP + LEAF * (sum(places) / len(places) + 0.5)

    def start(self, leaf: int) -> float:
        """The height of a leaf's first state: leaves share these in equal shares."""
        size = self.leaves / max(1, self.tree.roots)
        return TOP + LEAF * size * (int(leaf / size) + 0.5)

    @property
    def width(self) -> float:
        return self.x(len(self.tree.levels) - 1) + (16 if self.tree.kind != "text" else 36)

    @property
    def height(self) -> float:
        return TOP + LEAF * self.leaves + 8


def _tree(tree: TreeRecord, name: str) -> str:
    frame = Frame(tree, TEXT_STEP if tree.kind == "text" else STEP)
    most = max(
        (abs(a) for level in tree.levels for a in level.advantages if a is not None), default=0.0
    )
    parts = [*_heads(frame), *_edges(frame), *_nodes(frame, most or 1.0)]
    plans = f", the first of {tree.plans} plans" if tree.plans > 1 else ""
    label = (
        f"Tree of iteration {tree.iteration}: {frame.leaves} leaves, {len(tree.levels)} decisions"
    )
    drawing = (
        f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" width="{frame.width:g}" '
        f'height="{frame.height:g}" role="img" tabindex="0" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )
    leaves = "".join(_leaf(tree, leaf) for leaf in range(frame.leaves))
    return (
        f'<figure class="tree {tree.kind}" id="tree-{name}"><figcaption><b>Iteration '
        f'{tree.iteration}{plans}</b><span class="prompt" dir="auto">{escape(tree.prompt)}</span>'
        f'<output aria-live="polite"></output></figcaption>'
        f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><div class="canvas">'
        f'{drawing}<ol class="leaves" style="padding-top:{TOP:g}px">{leaves}</ol></div></div>'
        "</figure>"
    )


def _leaf(tree: TreeRecord, place: int) -> str:
    total, advantage = tree.totals[place], None
    if tree.levels:
        level = tree.levels[-1]
        advantage = level.advantages[level.node[place]]
    shown = "" if place >= len(tree.leaves) else media(tree.leaves[place], f"Leaf {place + 1}")
    change = "not learned from" if advantage is None else signed(advantage)
    sign = "up" if (advantage or 0) > 0 else "down" if (advantage or 0) < 0 else "none"
    return f'<li>{shown}<span><b>{number(total)}</b><i class="{sign}">{change}</i></span></li>'


def _heads(frame: Frame) -> Iterator[str]:
    tree = frame.tree
    start = "noise" if tree.kind != "text" else "prompt"
    yield f'<text x="{frame.x(-1):.1f}" y="14" text-anchor="middle">{start}</text>'
    for k, level in enumerate(tree.levels):
        at = f'x="{frame.x(k):.1f}" text-anchor="middle"'
        first = str(k) if tree.kind != "text" else _decision(len(tree.levels), k)
        yield f'<text {at} y="14">{first}</text>'
        if level.sigma is not None:
            yield f'<text {at} y="30" class="faint">{level.sigma:.2f}</text>'
        if tree.kind != "text":
            word = "trained" if level.trained else "noisy" if level.noisy else "ode"
            yield f'<text {at} y="45" class="faint {word}">{word}</text>'


def _decision(count: int, place: int) -> str:
    return "completion" if count == 1 else f"part {place + 1}"


def _edges(frame: Frame) -> Iterator[str]:
    before: LevelRecord | None = None
    for k, level in enumerate(frame.tree.levels):
        look = "trained" if level.trained else "noisy" if level.noisy else "ode"
        for node in dict.fromkeys(level.node):
            leaf = level.node.index(node)
            y0 = frame.start(leaf) if before is None else frame.y(before, before.node[leaf])
            x0, x1, y1 = frame.x(k - 1), frame.x(k), frame.y(level, node)
            middle = (x0 + x1) / 2
            path = (
                f"M{x0:.1f},{y0:.1f}C{middle:.1f},{y0:.1f} {middle:.1f},{y1:.1f} {x1:.1f},{y1:.1f}"
            )
            yield f'<path class="edge {look}" d="{path}"/>'
        before = level


def _nodes(frame: Frame, most: float) -> Iterator[str]:
    tree = frame.tree
    for y in dict.fromkeys(frame.start(leaf) for leaf in range(frame.leaves)):
        yield f'<circle class="node start" cx="{frame.x(-1):.1f}" cy="{y:.1f}" r="4"/>'
    for k, level in enumerate(tree.levels):
        last = k + 1 == len(tree.levels)
        splits = not last and len({*tree.levels[k + 1].node}) > len({*level.node})
        for node in dict.fromkeys(level.node):
            x, y = frame.x(k), frame.y(level, node)
            yield _node(tree, k, node, (x, y), most)
            if splits:
                value = number(level.values[node], 2)
                yield f'<text class="value" x="{x:.1f}" y="{y - 10:.1f}">{value}</text>'


def _node(tree: TreeRecord, k: int, node: int, at: tuple[float, float], most: float) -> str:
    """A dot, coloured by its advantage; small in a step that is not trained, where others are."""
    level = tree.levels[k]
    resting = not level.trained and any(each.trained for each in tree.levels)
    advantage = level.advantages[node]
    sign = "none" if not advantage else "up" if advantage > 0 else "down"
    depth = 0.15 + 0.85 * abs(advantage or 0.0) / most
    learned = "not learned from" if advantage is None else f"advantage {signed(advantage)}"
    if resting and advantage is not None:
        learned += ", in a step that is not trained"
    tip = f"{_where(tree, k)}, node {node + 1}: value {number(level.values[node])}, {learned}"
    return (
        f'<circle class="node {sign}" style="--depth:{depth:.2f}" cx="{at[0]:.1f}" '
        f'cy="{at[1]:.1f}" r="{3.5 if resting else 6}" data-tip="{tip}"><title>{tip}</title>'
        "</circle>"
    )


def _where(tree: TreeRecord, level: int) -> str:
    return f"step {level}" if tree.kind != "text" else _decision(len(tree.levels), level)
