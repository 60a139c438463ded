"""The folder of a fitted reward: numbers as safetensors, and what they were made from as YAML.

    fitted.yaml       features with their settings, digests, the fit, and hashes of its prompts
    head.safetensors  centre, scale, weight, basis, spread (`rewards.fitted.heads`), float64
    README.md         a card

No code and no pickle is read, and no file beside these three is opened for the head. The models
behind the features are named in the YAML and loaded like any reward's; their digests must fit.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors import SafetensorError
from safetensors.numpy import load as read_tensors
from safetensors.numpy import save as tensors_of
from torch import Tensor, nn

from rewards.fitted.davidson import VoteModel
from rewards.fitted.heads import LinearHead
from rewards.perception.features import FeatureReward
from rewards.perception.files import READER
from rewards.perception.reachable import reachable
from rewards.perception.weight_files import damage_of
from rewards.serving.wire import finite_number
from rewards.types import parts_of

FITTED_FORMAT = 1
RECORD, HEAD, CARD = "fitted.yaml", "head.safetensors", "README.md"
MOST_RECORD, MOST_HEAD = 2**24, 2**28  # bytes
_MOST_VALUES = 500_000  # of the YAML, each of which takes a thousand bytes while it is read
ARRAYS = {"centre": 1, "scale": 1, "weight": 1, "basis": 2, "spread": 2}  # dimensions
_PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class FeatureSource:
    """A reward of the catalogue whose features a head uses, and the digest of its weights."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""

    def check(self, reward: FeatureReward) -> None:
        """ValueError for weights with another digest than the recorded one."""
        if self.digest and self.digest != (digest := weights_digest(reward)):
            raise ValueError(
                f"features: {self.name}: its weights have changed since the fit (digest "
                f"{digest[:12]}, not {self.digest[:12]}): use the model of the fit, or fit again"
            )


def weights_digest(reward: FeatureReward) -> str:
    """SHA-256 of all weights and buffers of a reward's models, with their names and types."""
    total = hashlib.sha256()
    for model in parts_of(reward, nn.Module):
        for name, value in sorted(model.state_dict().items()):
            if isinstance(value, Tensor):
                plain = value.detach().cpu().contiguous()
                total.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
                total.update(plain.view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def prompt_hash(prompt: str) -> str:
    """A prompt in the record of a fit: enough to know it again, not to read it."""
    return hashlib.sha256(f"seen {prompt}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class FittedFolder:
    """A fitted reward as its folder holds it.

    sources  of the features, in the order of their columns
    head     of all columns
    seen     hashes of the prompts of the votes
    about    what else the YAML says: the votes with their digest, the fit, its accuracy
    """

    sources: Sequence[FeatureSource]
    head: LinearHead
    seen: frozenset[str] = frozenset()
    about: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, card: str) -> None:
        """Write the three files into an existing folder."""
        model = self.head.model
        arrays = {
            "centre": self.head.centre, "scale": self.head.scale, "weight": model.weight,
            "basis": model.basis, "spread": model.spread,
        }  # fmt: skip
        data = tensors_of({k: np.ascontiguousarray(v, np.float64) for k, v in arrays.items()})
        record = {
            "format": FITTED_FORMAT,
            "features": [
                {"name": source.name, "settings": dict(source.settings), "digest": source.digest}
                for source in self.sources
            ],
            "reader": READER,
            "head": {
                "digest": hashlib.sha256(data).hexdigest(),
                "ridge": model.ridge,
                "left_side": model.beta,
                "log_nu": None if np.isneginf(model.log_nu) else model.log_nu,
            },
            **self.about,
            "seen": sorted(self.seen),
        }
        (folder / HEAD).write_bytes(data)
        text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
        (folder / RECORD).write_text(text, encoding="utf-8")
        (folder / CARD).write_text(card, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "FittedFolder":
        """Read a folder. ValueError, which names the file, for anything that `write` does not
        write."""
        with reachable("fitted", folder):
            return cls._read(folder)

    @classmethod
    def _read(cls, folder: Path) -> "FittedFolder":
        record = _record(folder / RECORD)
        head = record.get("head")
        wanted = record.get("features")
        seen = record.get("seen", [])
        if not isinstance(head, dict) or not isinstance(wanted, list) or not wanted:
            raise ValueError(f"{folder / RECORD}: it has no features or no head")
        if not isinstance(seen, list) or not all(isinstance(prompt, str) for prompt in seen):
            raise ValueError(f"{folder / RECORD}: seen is not a list of hashes")
        sources = [_source(entry, folder / RECORD) for entry in wanted]
        arrays = _arrays(folder / HEAD, str(head.get("digest")))
        ridge, beta = (_real(head.get(name), name, folder) for name in ("ridge", "left_side"))
        log_nu = head.get("log_nu")
        log_nu = -np.inf if log_nu is None else _real(log_nu, "log_nu", folder)
        if ridge <= 0:
            raise ValueError(f"{folder / RECORD}: ridge must be above 0, not {ridge}")
        model = VoteModel(arrays["weight"], beta, log_nu, ridge, arrays["basis"], arrays["spread"])
        names = {"format", "features", "reader", "head", "seen"}
        about = {name: value for name, value in record.items() if name not in names}
        return cls(
            sources, LinearHead(arrays["centre"], arrays["scale"], model), frozenset(seen), about
        )

    @property
    def digest(self) -> str:
        """Digest of the whole reward: its features with their weights, and its head."""
        model = self.head.model
        total = hashlib.sha256()
        for source in self.sources:
            total.update(json.dumps([source.name, dict(source.settings), source.digest]).encode())
        for array in (self.head.centre, self.head.scale, model.weight):
            total.update(np.ascontiguousarray(array, np.float64).tobytes())
        return total.hexdigest()


def fitted_path(path: str) -> Path:
    """A folder as given, or below the project's folder, as those that come with flowrl. ValueError
    if it is not one of a fitted reward."""
    near, ours = Path(path).expanduser(), _PROJECT / path
    chosen = near if near.is_dir() or not ours.is_dir() else ours
    if not (chosen / RECORD).is_file():
        raise ValueError(
            f"{path} is not the folder of a fitted reward: it has no {RECORD}; "
            "`flowrl fit-reward votes.jsonl --out NAME` writes one"
        )
    return chosen


def _record(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST_RECORD:
            raise ValueError(f"more than {MOST_RECORD} bytes")
        if damage := damage_of(path):
            raise ValueError(f"it {damage}")
        text = path.read_text(encoding="utf-8")
        if sum(map(text.count, ("\n", ",", "[", "{"))) > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES} values")
        record = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not readable ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(record, dict) or record.get("format") != FITTED_FORMAT:
        raise ValueError(f"{path}: not the record of a fitted reward in format {FITTED_FORMAT}")
    return record


def _source(entry: Any, path: Path) -> FeatureSource:
    settings = entry.get("settings", {}) if isinstance(entry, dict) else None
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise ValueError(f"{path}: features must be mappings with name, settings and digest")
    name, digest = entry.get("name"), entry.get("digest")
    if not isinstance(name, str) or not isinstance(digest, str) or not digest:
        raise ValueError(f"{path}: features must have a name and a digest")
    return FeatureSource(name, settings, digest)


def _arrays(path: Path, digest: str) -> dict[str, np.ndarray]:
    try:
        if path.stat().st_size > MOST_HEAD:
            raise ValueError(f"more than {MOST_HEAD} bytes")
        if damage := damage_of(path):
            raise ValueError(f"it {damage}")
        data = path.read_bytes()
        arrays = read_tensors(data)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path}: not readable ({' '.join(str(error).split())[:200]})") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"{path}: its digest is not the one in {RECORD}: the folder was changed")
    for name, dimensions in ARRAYS.items():
        array = arrays.get(name)
        if array is None or array.ndim != dimensions or array.dtype != np.float64:
            raise ValueError(f"{path}: {name} is missing, or has another shape or type")
        if not np.isfinite(array).all():
            raise ValueError(f"{path}: {name} has a value that is not finite")
    d, r = arrays["basis"].shape
    if arrays["spread"].shape != (r, r) or any(
        len(arrays[name]) != d for name in ("centre", "scale", "weight")
    ):
        raise ValueError(f"{path}: its arrays do not fit together")
    if not (arrays["scale"] > 0).all():
        raise ValueError(f"{path}: scale has a value that is not above 0")
    return arrays


def _real(value: Any, name: str, folder: Path) -> float:
    number = finite_number(value)
    if number is None:
        raise ValueError(f"{folder / RECORD}: {name} must be a finite number, not {value!r:.50}")
    return number
