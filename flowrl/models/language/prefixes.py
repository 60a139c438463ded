"""Prefix sharing: a common prefix is evaluated once.

A pack is one sequence of a call that holds a tree of tokens: the part that texts share, such as a
group's prompt or a tree's trunk, occurs once. A token attends only to its ancestors, and its
position is its depth, so that its hidden state is the same as for the text alone. p packs of s
tokens each, padded on the right; b texts of at most w tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.errors import UserError
from samplers.host import uploaded

# pairs of tokens whose attention costs as much as the layers of one token, over the width: of 0.25
# to 4, 1 was never slower than texts by themselves on a CPU, at widths of 128 and 512
PAIRS_PER_WIDTH = 1.0
FULL = {"full_attention"}
ATTENTION = {"sdpa", "eager"}  # transformers' kinds of attention that take a mask of pairs


@dataclass(frozen=True)
class Packed:
    """Packed texts of one call. `positions` are indices of the p * s tokens; 0 at padding."""

    ids: Int[Tensor, "p s"]
    depths: Int[Tensor, "p s"]
    ancestors: Bool[Tensor, "p s s"]  # [., i, j]: token i attends to token j
    positions: Int[Tensor, "b w"]

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The arguments of a causal model's call."""
        blocked = torch.zeros(self.ancestors.shape, dtype=dtype, device=self.ids.device)
        blocked.masked_fill_(~self.ancestors, torch.finfo(dtype).min)
        return {
            "input_ids": self.ids,
            "position_ids": self.depths,
            "attention_mask": blocked[:, None],
        }

    def of_texts(self, hidden: Float[Tensor, "p s d"]) -> Float[Tensor, "b w d"]:
        """Gather the hidden states of each text's tokens from the packed tokens."""
        # index_select: on a CPU its backward adds in one order, whatever the threads
        flat = hidden.flatten(0, 1).index_select(0, self.positions.flatten())
        return flat.unflatten(0, self.positions.shape)


@dataclass
class _Pack:
    """A tree of tokens in the order of their first text: a parent comes before its children."""

    ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    child: dict[tuple[int, int], int] = field(default_factory=dict)  # of a node (-1: root), a token
    paths: list[list[int]] = field(default_factory=list)  # the nodes of each text

    def shared(self, text: Sequence[int]) -> list[int]:
        """Tree nodes of the text's first tokens, as far as they are in the tree."""
        nodes: list[int] = []
        for token in text:
            node = self.child.get((nodes[-1] if nodes else -1, token))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def add(self, text: Sequence[int], path: list[int]) -> None:
        for depth in range(len(path), len(text)):
            node = len(self.ids)
            self.child[(path[-1] if path else -1, text[depth])] = node
            self.ids.append(text[depth])
            self.depths.append(depth)
            path.append(node)
        self.paths.append(path)

    def ancestors(self, width: int) -> np.ndarray:
        """Attention mask [width width]. Padding attends to itself, since softmax needs at least
        one entry."""
        mask = np.eye(width, dtype=bool)
        done = 0
        for path in self.paths:
            new = [node for node in path if node >= done]
            triangle = np.tril(np.ones((len(new), len(path)), dtype=bool), len(path) - len(new))
            mask[np.ix_(new, path)] = triangle
            done += len(new)
        return mask


@dataclass(frozen=True)
class Packing:
    """Rule for packing texts: neighbours share a pack if that lowers the cost per text.

        cost of a pack of s tokens = s pairs + s^2

    in pairs of tokens that attend to each other; `pairs` is the cost of a token besides attention.
    A larger pack has fewer tokens and more pairs.
    """

    pairs: float

    @classmethod
    def of(cls, model: Any) -> "Packing":
        """Packing for a transformers model. UserError for an unsuitable model."""
        refuse_windows(model)
        return cls(PAIRS_PER_WIDTH * model.config.get_text_config().hidden_size)

    def packs(self, texts: Sequence[Sequence[int]]) -> list[_Pack]:
        packs: list[_Pack] = []
        for text in texts:
            if packs and self._joins(packs[-1], text):
                packs[-1].add(text, packs[-1].shared(text))
            else:
                packs.append(_Pack())
                packs[-1].add(text, [])
        return packs

    def _joins(self, pack: _Pack, text: Sequence[int]) -> bool:
        before, count = len(pack.ids), len(pack.paths)
        after = before + len(text) - len(pack.shared(text))
        return self._cost(after) / (count + 1) <= self._cost(before) / count

    def _cost(self, tokens: int) -> float:
        return tokens * (self.pairs + tokens)

    def __call__(self, texts: Sequence[Sequence[int]], device: torch.device) -> Packed | None:
        """Pack texts, each of at least one token, in their order. None if no two share a pack."""
        packs = self.packs(texts)
        if len(packs) == len(texts):
            return None
        width = max(len(pack.ids) for pack in packs)
        positions = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
        row = 0
        for number, pack in enumerate(packs):
            for path in pack.paths:
                positions[row, : len(path)] = torch.tensor(path) + number * width
                row += 1
        masks = [pack.ancestors(width) for pack in packs]
        return Packed(
            uploaded(_padded([pack.ids for pack in packs], width), device),
            uploaded(_padded([pack.depths for pack in packs], width), device),
            uploaded(torch.from_numpy(np.stack(masks)), device),
            uploaded(positions, device),
        )


def _padded(rows: Sequence[Sequence[int]], width: int) -> Int[Tensor, "p s"]:
    whole = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(whole, dtype=torch.int64)


def refuse_windows(model: Any) -> None:
    """UserError for a model with windowed attention, or whose attention takes no mask."""
    text = model.config.get_text_config()
    settings = text.to_dict()
    kinds = set(settings.get("layer_types") or FULL)
    if kinds != FULL:
        other_kinds = ", ".join(sorted(kinds - FULL))
        raise _refusal(f"{type(model).__name__} has layers of another kind ({other_kinds})")
    if "layer_types" not in settings and settings.get("sliding_window") is not None:
        raise _refusal(f"{type(model).__name__} attends within a window of tokens")
    if text._attn_implementation not in ATTENTION:
        raise _refusal(f"{text._attn_implementation} attention takes no mask for pairs of tokens")


def refuse_moved(model: Any, moved: float, tolerance: float) -> None:
    """UserError if packing changes the model's predictions, in total variation."""
    if not moved <= tolerance:
        raise _refusal(
            f"it changes the next-token distribution of {type(model).__name__} by {moved:.1e} "
            "(total variation)"
        )


def _refusal(reason: str) -> UserError:
    return UserError(f"train.share_prompts: {reason}; set train.share_prompts: false")
