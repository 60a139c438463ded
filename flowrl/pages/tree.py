"""The rollout tree (or unbranched group) of a page, in the coordinates of its drawing."""

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.pages.records import LevelRecord, TreeRecord
from flowrl.pages.stack import count, number, sign, signed

STEP, TEXT_STEP, LEAF, TOP, LEFT = 58.0, 120.0, 46.0, 54.0, 26.0
TO_REWRITING = 240.0  # its text is written before its node, where no other line is
FITS = 40  # letters of a rewriting before its node; the node's own words have all


@dataclass(frozen=True)
class Head:
    """Text above a column: its step, noise level and kind."""

    x: float
    step: str
    sigma: float | None
    look: str


@dataclass(frozen=True)
class Dot:
    """A node: its position, radius, the sign and strength of its colour, and its text. `value` is
    shown at height `label` where the tree splits, before the `text` of a rewriting."""

    x: float
    y: float
    r: float
    sign: str
    depth: float
    words: str
    value: float | None
    label: float
    text: str = ""


class TreeView:
    """A tree with the positions of its nodes."""

    top = TOP

    def __init__(self, tree: TreeRecord) -> None:
        self.tree = tree
        self.text = tree.kind == "text"
        self.step = TEXT_STEP if self.text else STEP
        self.leaves = len(tree.totals)
        self.rewritten = bool(tree.levels and tree.levels[0].texts)
        self.width = self.x(len(tree.levels) - 1) + (36 if self.text else 16)
        self.height = TOP + LEAF * self.leaves + 8

    @property
    def branched(self) -> bool:
        """Whether samples share any state after the first step."""
        return any(len({*level.node}) < self.leaves for level in self.tree.levels)

    @property
    def words(self) -> str:
        tree = self.tree
        shape = f"{count(self.leaves, 'leaf').replace('leafs', 'leaves')}, "
        return f"Tree of iteration {tree.iteration}: {shape}{count(len(tree.levels), 'decision')}"

    def x(self, level: int) -> float:
        """Horizontal position of a level in pixels; `level` -1 is the start."""
        wide = TO_REWRITING - self.step if self.rewritten and level >= 0 else 0.0
        return LEFT + self.step * (level + 1) + wide

    def y(self, level: LevelRecord, node: int) -> float:
        """Vertical position of a node in pixels: the mean of its leaves' positions."""
        indices = [leaf for leaf, at in enumerate(level.node) if at == node]
        return TOP + LEAF * (sum(indices) / len(indices) + 0.5)

    def start(self, leaf: int) -> float:
        """Vertical position of a leaf's first state, evenly divided among leaves that share it."""
        size = self.leaves / max(1, self.tree.roots)
        return TOP + LEAF * size * (int(leaf / size) + 0.5)

    @property
    def starts(self) -> list[float]:
        return list(dict.fromkeys(self.start(leaf) for leaf in range(self.leaves)))

    def advantage(self, leaf: int) -> float | None:
        """Mean advantage of a leaf's trained decisions."""
        advantages = [level.advantages[level.node[leaf]] for level in self.tree.levels]
        numbers = [advantage for advantage in advantages if advantage is not None]
        return sum(numbers) / len(numbers) if numbers else None

    def last_advantage(self, leaf: int) -> float | None:
        levels = self.tree.levels
        return levels[-1].advantages[levels[-1].node[leaf]] if levels else None

    @property
    def heads(self) -> Iterator[Head]:
        for k, level in enumerate(self.tree.levels):
            look = "" if self.text or level.texts else _look(level)
            yield Head(self.x(k), self._step(k), level.sigma, look)

    def _step(self, k: int) -> str:
        if self.rewritten:
            return str(k - 1) if k else "rewriting"
        if not self.text:
            return str(k)
        return "completion" if len(self.tree.levels) == 1 else f"part {k + 1}"

    @property
    def edges(self) -> Iterator[tuple[str, str]]:
        """Style and path of each edge."""
        before: LevelRecord | None = None
        for k, level in enumerate(self.tree.levels):
            for node in dict.fromkeys(level.node):
                leaf = level.node.index(node)
                y0 = self.start(leaf) if before is None else self.y(before, before.node[leaf])
                x0, x1, y1 = self.x(k - 1), self.x(k), self.y(level, node)
                mid = (x0 + x1) / 2
                path = f"M{x0:.1f},{y0:.1f}C{mid:.1f},{y0:.1f} {mid:.1f},{y1:.1f} {x1:.1f},{y1:.1f}"
                yield _look(level), path
            before = level

    @property
    def dots(self) -> Iterator[Dot]:
        levels = self.tree.levels
        most = (
            max((abs(a or 0.0) for level in levels for a in level.advantages), default=0.0) or 1.0
        )
        any_trained = any(level.trained for level in levels)
        for k, level in enumerate(levels):
            splits = k + 1 < len(levels) and len({*levels[k + 1].node}) > len({*level.node})
            for node in dict.fromkeys(level.node):
                value = level.values[node] if splits else None
                yield self._dot(k, node, most, any_trained and not level.trained, value)

    def _dot(self, k: int, node: int, most: float, resting: bool, value: float | None) -> Dot:
        """A node's dot, coloured by its advantage; small in an untrained step if other steps are
        trained."""
        level = self.tree.levels[k]
        advantage = level.advantages[node]
        learned = "not trained on" if advantage is None else f"advantage {signed(advantage)}"
        if resting and advantage is not None:
            learned += ", in a step that is not trained"
        text_of_node = level.texts[node] if level.texts else ""
        where = self._step(k) if self.text or text_of_node else f"step {self._step(k)}"
        where = f"{where}, node {node + 1}" + (f" ({text_of_node})" if text_of_node else "")
        words = f"{where}: value {number(level.values[node])}, {learned}"
        depth = 0.15 + 0.85 * abs(advantage or 0.0) / most
        x, y, radius = self.x(k), self.y(level, node), 3.5 if resting else 6.0
        lower = bool(text_of_node) and y > self.start(0)  # its line comes from above
        value = level.values[node] if text_of_node else value
        label = y + 18 if lower else y - 10
        shown = text_of_node if len(text_of_node) <= FITS else f"{text_of_node[: FITS - 1]}…"
        return Dot(
            x=x,
            y=y,
            r=radius,
            sign=sign(advantage),
            depth=depth,
            words=words,
            value=value,
            label=label,
            text=shown,
        )


def _look(level: LevelRecord) -> str:
    return "trained" if level.trained else "noisy" if level.noisy else "ode"
