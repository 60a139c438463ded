"""Cheap statistics of samples, and alarms on them and on the rewards.

A reward can rise while the samples degenerate; these numbers show it at a negligible cost.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

THUMBNAIL_SIZE = 64  # statistics are computed on images of at most this size


def image_statistics(media: Tensor, group: Tensor) -> dict[str, float]:
    """Statistics of images [n 3 h w] or videos [n f 3 h w] in 0..1; groups are contiguous rows.

    brightness    mean luma, 0..1
    saturation    mean of (max - min) / max over channels, 0..1
    edges         share of pixels whose luma gradient is above 0.1
    entropy       bits of each image's histogram of 4 x 4 x 4 colours, averaged
    diversity     root mean square distance per pixel between two samples of one group; 0 if equal
    """
    images = media[:, media.shape[1] // 2] if media.ndim == 5 else media
    if max(images.shape[-2:]) > THUMBNAIL_SIZE:  # on their device, so that few pixels are copied
        scale = THUMBNAIL_SIZE / max(images.shape[-2:])
        images = F.interpolate(images, scale_factor=scale, mode="area")
    images = images.float().cpu()
    luma = (images * images.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1)
    high, low = images.amax(1), images.amin(1)
    across = (luma[:, :, 1:] - luma[:, :, :-1])[:, :-1]
    down = (luma[:, 1:] - luma[:, :-1])[:, :, :-1]
    return {
        "brightness": float(luma.mean()),
        "saturation": float(((high - low) / high.clamp(min=1e-6)).mean()),
        "edges": float((across.hypot(down) > 0.1).float().mean()),
        "entropy": float(_entropy(images)),
        "diversity": _diversity(images, group),
    }


def _entropy(images: Tensor) -> Tensor:
    level = (images * 4).long().clamp(0, 3)
    code = (level[:, 0] * 16 + level[:, 1] * 4 + level[:, 2]).flatten(1)
    counts = torch.zeros(len(code), 64).scatter_add(1, code, torch.ones(code.shape))
    share = counts / counts.sum(1, keepdim=True)
    return -(share * share.clamp(min=1e-12).log2()).sum(1).mean()


def _diversity(images: Tensor, group: Tensor) -> float:
    flat = images.flatten(1)
    _, sizes = torch.unique_consecutive(group, return_counts=True)
    distances = [torch.pdist(part) for part in flat.split(sizes.tolist()) if len(part) > 1]
    if not distances:
        return 0.0
    return float(torch.cat(distances).mean()) / flat.shape[1] ** 0.5


def text_statistics(
    texts: Sequence[str], group: Tensor, lengths: Tensor, stopped: Tensor
) -> dict[str, float]:
    """Statistics of n texts, whose groups are contiguous.

    length     tokens, the stop token included
    stopped    share that ended by itself, and was not cut off
    empty      share of texts with nothing but white space
    distinct   share of pairs of a group whose texts differ: 0 if all are equal, 1 if none are
    """
    _, sizes = torch.unique_consecutive(group, return_counts=True)
    at, differ, pairs = 0, 0, 0
    for size in sizes.tolist():
        counts = Counter(texts[at : at + size]).values()
        pairs += size * (size - 1)
        differ += size * size - sum(count * count for count in counts)
        at += size
    return {
        "length": float(lengths.double().mean()),
        "stopped": float(stopped.double().mean()),
        "empty": sum(not text.strip() for text in texts) / max(len(texts), 1),
        "distinct": differ / pairs if pairs else 0.0,
    }


@dataclass
class Alarms:
    """Compares the means of a few iterations with those of the start and with the best so far.

    The signs of a collapse: the reward falls below its best by a third of the samples' spread at
    the start; samples of a group become alike; the images' statistics leave the range of the start;
    texts no longer end by themselves. The state is plain numbers, for checkpoints.
    """

    window: int = 5
    fall: float = 0.33  # of the samples' spread at the start
    alike: float = 0.6  # of the diversity at the start
    shift: float = 0.5  # relative change of brightness, saturation, edges or entropy
    history: list[dict[str, float]] = field(default_factory=list)
    best: float = -torch.inf
    raised: list[str] = field(default_factory=list)
    flat: dict[str, int] = field(default_factory=dict)  # iterations in a row without any spread

    def constant(self, metrics: Mapping[str, float]) -> list[str]:
        """Names of rewards with a single score for `window` iterations; each is returned once.

        Reads `reward_std/NAME` and `reward/NAME`.
        """
        names = []
        for key, spread in metrics.items():
            name = key.removeprefix("reward_std/")
            if name == key:
                continue
            none = spread <= 1e-9 * max(1.0, abs(metrics[f"reward/{name}"]))
            self.flat[name] = self.flat.get(name, 0) + 1 if none else 0
            if self.flat[name] >= self.window and key not in self.raised:
                self.raised.append(key)
                names.append(name)
        return names

    def watch(self, reward: float, spread: float, statistics: Mapping[str, float]) -> list[str]:
        """Add an iteration. Returns the new signs, each as a clause."""
        self.history.append({"reward": reward, "spread": spread, **statistics})
        first, last = self.history[: self.window], self.history[-self.window :]
        now, start = _means(last), _means(first)
        self.history = self.history[: self.window] + self.history[self.window :][-self.window :]
        if len(last) < self.window:
            return []
        self.best = max(self.best, now["reward"])
        signs = {
            name: text for name, text in self._signs(now, start).items() if name not in self.raised
        }
        self.raised += signs
        return list(signs.values())

    def _signs(self, now: Mapping[str, float], start: Mapping[str, float]) -> dict[str, str]:
        signs: dict[str, str] = {}
        if self.best - now["reward"] > self.fall * start["spread"]:
            signs["reward"] = f"the reward fell from {self.best:.3f} to {now['reward']:.3f}"
        for name in ("diversity", "brightness", "saturation", "edges", "entropy"):
            if name not in now or start[name] <= 0:
                continue
            change = now[name] / start[name]
            alike = name == "diversity" and change < self.alike
            if alike or (name != "diversity" and abs(change - 1) > self.shift):
                signs[name] = f"{name} went from {start[name]:.3f} to {now[name]:.3f}"
        if "stopped" in now and now["stopped"] < self.shift * start["stopped"]:
            shares = f"from {start['stopped']:.2f} to {now['stopped']:.2f}"
            signs["stopped"] = f"the share of texts that end by themselves fell {shares}"
        return signs

    def state(self) -> dict:
        return {
            "history": self.history,
            "best": self.best,
            "raised": self.raised,
            "flat": self.flat,
        }

    def restore(self, state: Mapping) -> None:
        self.history, self.best = list(state["history"]), float(state["best"])
        self.raised, self.flat = list(state["raised"]), dict(state["flat"])


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
