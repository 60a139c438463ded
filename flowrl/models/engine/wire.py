"""Requests as JSON, and samples as safetensors with their version in the header: what a served
engine and its client exchange (docs/engines.md)."""

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flowrl.models.engine.protocol import EngineRequest, EngineSamples

_STATE, _LOGP, _VERSION = "state.", "logp.", "version"
_HEADER_BYTES = 2**20  # of names and shapes
_REQUEST = TypeAdapter(EngineRequest)


def request_body(request: EngineRequest) -> dict[str, Any]:
    """A request as JSON values."""
    return asdict(request)


def read_request(body: Any) -> EngineRequest:
    """Read a request. ValueError, with the place, for anything else."""
    try:
        return _REQUEST.validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(key) for key in first["loc"])
        raise ValueError(f"{place}: {first['msg']}") from error


def answer_bytes(samples: EngineSamples) -> bytes:
    """Samples as bytes."""
    tensors = {f"{_STATE}{k}": tensor for k, tensor in samples.states.items()}
    tensors |= {f"{_LOGP}{k}": tensor for k, tensor in samples.logp.items()}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(plain, {_VERSION: samples.version})


def read_answer(content: bytes) -> EngineSamples:
    """Read samples. ValueError for bytes that are none."""
    try:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        version = header["__metadata__"][_VERSION]
        tensors = load(content)
    except (struct.error, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError("its answer is no safetensors file with the metadata `version`") from error
    return EngineSamples(str(version), _numbered(tensors, _STATE), _numbered(tensors, _LOGP))


def _numbered(tensors: Mapping[str, Tensor], prefix: str) -> dict[int, Tensor]:
    numbered = dict[int, Tensor]()
    for name, tensor in tensors.items():
        number = name.removeprefix(prefix)
        if name.startswith(prefix) and number.isdecimal():
            numbered[int(number)] = tensor
    return numbered


def most_answer_bytes(request: EngineRequest) -> int:
    """Bytes that the answer may have: of its numbers in float64, and of its header."""
    numbers = torch.Size(request.shape).numel() * len(request.levels) + len(request.trained)
    return _HEADER_BYTES + 8 * len(request.seeds) * numbers
