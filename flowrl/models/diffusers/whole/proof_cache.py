"""A cache of proofs by digest, so that later starts need not repeat them.

The digest covers everything that a proof depends on:

configurations  of the pipeline and every component, with their classes; the source files of classes
                outside released libraries (your own pipeline or attention processor)
versions        of torch, diffusers, transformers and peft, and flowrl's own code of models and
                samplers, file by file
settings        the model's, dtype, steps, guidance, the processes, the device
traits          of the pipeline, as far as its arguments and trials at load show them
prompts         the prompts that the proof uses, with their images, pixel by pixel
weights         of the base, as the file digests that a run records. They do not change the
structure, but the effect of rounding, which sets the bounds for independent rows and whole samples;
other weights are proven again

Trained weights are not part of it: a proof is about the base, and resumed runs use it too. Refusals
are not cached. A damaged or unreadable entry counts as missing.
"""

import hashlib
import inspect
import json
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import samplers
from flowrl import models
from flowrl.bounded_files import bounded_json
from flowrl.json_text import json_text
from flowrl.models.diffusers.modular.face import block_classes, form_of
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.replay.replay import Replay
from flowrl.models.diffusers.whole.whole_proof import Deviation, WholeProof
from flowrl.paths import cache_folder

MOST_PROOF = 2**24  # bytes
LIBRARIES = ("torch", "diffusers", "transformers", "peft")


@dataclass(frozen=True)
class CachedProof:
    """Proofs of one start: the printed text, and how each (steps, guidance) is driven.

    `traits` are found only by the proof's own call, as is whether the decoder takes one sample at a
    time (`sliced`). `whole` are the proofs over whole samples, which `flowrl prove` makes.
    """

    made: str  # local time
    sentences: tuple[str, ...]
    replays: tuple[Replay, ...]
    traits: Mapping[str, Any]
    sliced: bool | None = None
    whole: tuple[WholeProof, ...] = ()

    @classmethod
    def of(
        cls, policy: PipelinePolicy, sentences: Sequence[str], whole: Sequence[WholeProof] = ()
    ) -> "CachedProof":
        time = datetime.now().isoformat(" ", "minutes")
        loop, replays = policy.loop, tuple(policy.known_proofs.values())
        return cls(time, tuple(sentences), replays, loop.traits.proven, loop.sliced, tuple(whole))

    def use(self, policy: PipelinePolicy) -> None:
        """Put a policy into its state after these proofs."""
        if self.sliced:
            policy.loop.slice_decoder()
        policy.loop.show(**self.traits)
        for replay in self.replays:
            policy.known_proofs[replay.steps, replay.guidance] = replay

    @property
    def line(self) -> str:
        over = " and over whole samples" if self.whole else ""
        return f"proven at load{over} on {self.made}; --no-cache proves it again"


def folder() -> Path:
    """Folder of the proofs in flowrl's cache."""
    return cache_folder() / "proofs"


def read(digest: str) -> CachedProof | None:
    """Read the proof of a digest; None if it is missing or damaged."""
    try:
        written = bounded_json(_file(digest), MOST_PROOF)
        if written["sum"] != _sum(written["proof"]):
            return None
        record = written["proof"]
        return CachedProof(
            record["made"],
            tuple(record["sentences"]),
            tuple(_replay(values) for values in record["replays"]),
            record["traits"],
            record["sliced"],
            tuple(_whole(values) for values in record["whole"]),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def keep(digest: str, proof: CachedProof) -> None:
    """Store a proof, completely or not at all. Does nothing if the folder cannot be written."""
    path, plain = _file(digest), json.loads(json_text(asdict(proof)))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_text(json_text({"sum": _sum(plain), "proof": plain}), encoding="utf-8")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def digest(
    policy: PipelinePolicy,
    settings: Mapping[str, Any],
    prompts: Sequence[str],
    meta: Sequence[Mapping[str, Any]],
) -> str:
    """Digest of a start. `settings`: everything that is not part of the policy itself."""
    loop, classes = policy.loop, {type(policy.pipe), *block_classes(policy.pipe)}
    parts: dict[str, Any] = {}
    for name, component in policy.pipe.components.items():
        if isinstance(component, nn.Module):
            classes |= {type(module) for module in component.modules()}
            classes |= {type(processor) for processor in _processors(component)}
        classes.add(type(component))
        parts[name] = [_class(type(component)), _configuration(component)]
    gpu = torch.cuda.get_device_name() if policy.device.type == "cuda" else ""
    holds = {
        "pipeline": [
            _class(type(policy.pipe)),
            form_of(policy.pipe),
            {**policy.pipe.config},
            parts,
        ],
        "sources": sorted({*_sources(classes)}),
        "versions": [metadata.version(name) for name in LIBRARIES] + [sys.version, _own_code()],
        "device": [str(policy.device), gpu, torch.backends.cpu.get_cpu_capability()],
        "settings": [settings, policy.guidance, policy.rows_per_call],
        "traits": loop.traits.key,
        "prompts": [prompts, loop.row_extras(meta)],
    }
    return _sum(holds)


def _file(digest: str) -> Path:
    return folder() / f"{digest}.json"


def _replay(values: Mapping[str, Any]) -> Replay:
    lists = {name: tuple(values[name]) for name in ("together", "parts", "data")}  # of JSON
    return Replay(**{**values, **lists})


def _whole(values: Mapping[str, Any]) -> WholeProof:
    nested = {
        name: None if values[name] is None else Deviation(**values[name])
        for name in ("own", "flowrl", "alone", "rounding")
    }
    return WholeProof(**{**values, **nested})


def _processors(module: nn.Module) -> Iterator[Any]:
    """Attention processors, which are not modules."""
    for inner in module.modules():
        if (processor := vars(inner).get("processor")) is not None:
            yield processor


def _configuration(component: Any) -> Any:
    config = getattr(component, "config", None)
    if isinstance(component, nn.Module):
        kinds = {str(p.dtype) for p in component.parameters()}
        shapes = [[n, list(p.shape)] for n, p in component.named_parameters()]
        return [config if isinstance(config, Mapping) else repr(config), sorted(kinds), shapes]
    if isinstance(config, Mapping):
        return {**config}
    return repr(component)


def _class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _sources(kinds: set[type]) -> Iterator[str]:
    """Digests of the source files of classes outside the libraries, including their base
    classes."""
    for kind in {base for derived in kinds for base in derived.__mro__}:
        if kind.__module__.partition(".")[0] in (*LIBRARIES, *sys.stdlib_module_names):
            continue
        try:
            yield f"{_class(kind)} {_read(inspect.getfile(kind))}"
        except (TypeError, OSError):  # made without a file: its code is in no digest
            yield f"{_class(kind)} {secrets.token_hex(8)}"


@cache
def _own_code() -> str:
    """Digest of flowrl's code of models and samplers."""
    roots = [Path(root) for package in (models, samplers) for root in package.__path__]
    files = [path for root in roots for path in sorted(root.rglob("*.py"))]
    return _sum([[path.name, _read(str(path))] for path in files])


def _read(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _sum(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Convert values that JSON does not have: images and tensors to digests, others to text."""
    if isinstance(value, Image.Image):
        return [value.mode, value.size, hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, Tensor):
        value = value.detach().cpu().float().numpy()
    if isinstance(value, np.ndarray):
        return [list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    return [*value] if isinstance(value, set | frozenset) else str(value)
