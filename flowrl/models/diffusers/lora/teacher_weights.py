"""Weights of a teacher with the names and shapes of the student's trained parameters.

A student with adapters takes adapters: those of smaller rank are padded with zeros, at the
student's scale. A student with full weights takes full weights, or its own initial weights with an
adapter added.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.adapters import ADAPTER, LENGTHS, has_lengths
from flowrl.models.diffusers.lora.lora import LORA_FILE, has_lora, lora_files
from flowrl.models.diffusers.lora.lora_formats import METADATA
from flowrl.models.diffusers.lora.weights import DenoiserWeights
from flowrl.models.saved_weights import tensors_and_settings


@dataclass(frozen=True)
class Delta:
    """Adapter of one linear layer: scale up down is added to its weight."""

    down: Tensor  # [rank in]
    up: Tensor  # [out rank]
    scale: float


def teacher_weights(policy: DenoiserWeights, folder: Path, place: str) -> dict[str, Tensor]:
    """The teacher's values of all trained parameters by name. UserErrors begin with `place`."""
    trained = {name: p.detach() for name, p in policy.trainable().items()}
    if has_lengths(trained):
        raise UserError(
            "model.lora.dora: a student takes its teachers' weights as products alone: leave it out"
        )
    adapters = has_lora(policy.roots())
    if not (folder / LORA_FILE).is_file():
        assert not adapters, "settings refuse full weights for a student with adapters"
        return _whole(policy, trained, folder, place)
    deltas = dict(_deltas(policy, folder, place))
    ends = (".lora_A.default.weight",) if adapters else (".weight",)
    layers = {name.removesuffix(end) for name in trained for end in ends if name.endswith(end)}
    if beyond := sorted(set(deltas) - layers):
        raise UserError(
            f"{place}: {folder} has an adapter on {beyond[0]}, but this run's student has none "
            "there: set model.lora.targets as in the teacher's run"
        )
    return (
        _into_adapters(policy, trained, deltas, place)
        if adapters
        else _merged(trained, deltas, place)
    )


def _deltas(policy: DenoiserWeights, folder: Path, place: str) -> Iterator[tuple[str, Delta]]:
    """The adapters of a folder by layer, as `save_lora` writes them. UserError for DoRA's."""
    for names, file, slot in lora_files(policy.pipe, policy.roots()):
        tensors, about = tensors_and_settings(folder / file, METADATA, place)
        if any(LENGTHS in key for key in tensors):
            raise UserError(
                f"{place}: {folder} has adapters of DoRA, whose change of a weight is no product: "
                "write the whole model with `flowrl export --merged`, and name that with "
                "model.lora: null"
            )
        for name in names:
            prefix = f"{slot or name}."
            for key, down in tensors.items():
                if not (key.startswith(prefix) and key.endswith(".lora_A.weight")):
                    continue
                layer = key.removeprefix(prefix).removesuffix(".lora_A.weight")
                up = tensors[f"{prefix}{layer}.lora_B.weight"]
                rank = len(down)
                alpha = about.get(f"{prefix}lora_alpha", rank)  # without it a reader takes the rank
                yield f"{name}.{layer}", Delta(down, up, alpha / rank)


def _into_adapters(
    policy: DenoiserWeights, trained: Mapping[str, Tensor], deltas: Mapping[str, Delta], place: str
) -> dict[str, Tensor]:
    """The teacher's adapters, padded with zeros to the student's rank; 0 where the teacher has
    none."""
    roots: list[Any] = [*policy.roots().values()]  # peft gives them `peft_config`
    configs = [root.peft_config[ADAPTER] for root in roots]
    (scale,) = {config.lora_alpha / config.r for config in configs}
    weights: dict[str, Tensor] = {}
    for name, mine in trained.items():
        down = name.endswith(".lora_A.default.weight")
        layer = name.rsplit(".lora_", 1)[0]
        value = torch.zeros_like(mine)
        if layer in deltas:
            delta = deltas[layer]
            block = delta.down if down else delta.up * (delta.scale / scale)
            block = block.to(value)
            if any(a > b for a, b in zip(block.shape, value.shape, strict=True)):
                raise UserError(
                    f"{place}: its adapters have rank {len(delta.down)}, but model.lora.rank is "
                    f"smaller: set it to at least {len(delta.down)}"
                )
            value[: block.shape[0], : block.shape[1]] = block
        weights[name] = value
    return weights


def _merged(
    trained: Mapping[str, Tensor], deltas: Mapping[str, Delta], place: str
) -> dict[str, Tensor]:
    """The student's initial weights with an adapter added."""
    weights = {name: value.clone() for name, value in trained.items()}
    for layer, delta in deltas.items():
        whole = weights[f"{layer}.weight"]
        added = delta.scale * (delta.up.double() @ delta.down.double())
        if added.shape != whole.shape:
            raise UserError(f"{place}: its adapter of {layer} belongs to another architecture")
        weights[f"{layer}.weight"] = (whole.cpu().double() + added).to(whole.dtype).to(whole)
    return weights


def _whole(
    policy: DenoiserWeights, trained: Mapping[str, Tensor], folder: Path, place: str
) -> dict[str, Tensor]:
    """The weights of the denoisers in a pipeline's folder."""
    weights: dict[str, Tensor] = {}
    for name, denoiser in policy.roots().items():
        if not (folder / name).is_dir():
            raise UserError(f"{place}: {folder} has no {name}, which this run trains")
        dtype = next(denoiser.parameters()).dtype
        saved = type(denoiser).from_pretrained(folder, subfolder=name, dtype=dtype)  # type: ignore
        weights |= {f"{name}.{key}": p.detach() for key, p in saved.named_parameters()}
    differ = [n for n, p in trained.items() if n not in weights or weights[n].shape != p.shape]
    if differ or len(weights) != len(trained):
        first_name = (differ or sorted(set(weights) - set(trained)))[0]
        raise UserError(f"{place}: {folder} has another architecture: {first_name} differs")
    return {name: weights[name].to(p.device) for name, p in trained.items()}
