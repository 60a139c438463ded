"""Sizes of a model, from its configuration and the headers of its files: no weights are read."""

import inspect
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from flowrl.models.diffusers.driver import DENOISERS
from flowrl.models.diffusers.lora import OTHER, default_targets
from flowrl.models.open import place
from flowrl.models.savings import outer_lists
from flowrl.settings import ModelSettings

PROMPT = 64  # tokens of a text's prompt, assumed
# linears of blocks that see the prompt's tokens, which are few beside an image's
TEXT_MODULES = re.compile(r"(^|\.)(add_|to_add|context|txt|ff_context)|attn2\.to_[kv]")
SPATIAL = ("scale_factor_spatial", "spatial_compression_ratio")
TEMPORAL = ("scale_factor_temporal", "temporal_compression_ratio")
LEVELS = ("block_out_channels", "decoder_block_out_channels", "encoder_block_out_channels")


@dataclass(frozen=True)
class Sizes:
    """Numbers are counts of weights or of activations, whatever their bytes.

    adapters  weights per unit of rank
    tokens    of a row, in the trained blocks; None for a model without tokens (a UNet)
    inside    inputs and outputs of the blocks' linears per token, over all blocks
    between   inputs of the blocks per token, over all blocks
    latent    of a row
    decoding  of a row's image at the decoder's last level, one layer
    unknown   components whose weights could not be counted
    """

    trained: int
    frozen: Mapping[str, int]  # by component
    adapters: int
    tokens: int | None
    inside: int
    between: int
    blocks: int
    latent: int = 0
    decoding: int = 0
    unknown: tuple[str, ...] = ()


def local_folder(source: str) -> Path | None:
    """Return a model's local folder: as given, below the project, or in the hub's cache."""
    here = Path(place(source))
    if here.is_dir():
        return here
    try:
        return Path(snapshot_download(source, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None


def of(m: ModelSettings, length: int) -> Sizes | None:
    """Return the sizes, None if the model is not here. `length`: tokens of a completion."""
    folder = local_folder(m.pipeline or m.language or "")
    if folder is None or m.gguf_file is not None:
        return None
    return _pipeline(folder, m) if m.pipeline else _language(folder, length)


def _language(folder: Path, length: int) -> Sizes:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    head = model.get_output_embeddings()
    targets = [x for x in model.modules() if isinstance(x, nn.Linear) and x is not head]
    inside, between, blocks = _work([model])
    return Sizes(_count(model), {}, _ends(targets), PROMPT + length, inside, between, blocks)


def _pipeline(folder: Path, m: ModelSettings) -> Sizes:
    index = json.loads((folder / "model_index.json").read_text())
    parts = [n for n, v in index.items() if not n.startswith("_") and (folder / n).is_dir()]
    denoisers = {n: _denoiser(folder / n) for n in parts if n in DENOISERS}
    counted = {n: _numbers(folder / n) for n in parts if n not in DENOISERS}
    models = {n for n in counted if (folder / n / "config.json").is_file()}
    shape = _Shape.of(folder, index["_class_name"], next(iter(denoisers.values())), m)
    targets = [
        module
        for model in denoisers.values()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and any(f".{name}".endswith(f".{e}") for e in _targets(m, model))
    ]
    inside, between, blocks = _work(list(denoisers.values())[:1])
    return Sizes(
        trained=sum(map(_count, denoisers.values())),
        frozen={n: c for n, c in counted.items() if c is not None},
        adapters=_ends(targets),
        tokens=shape.tokens,
        inside=inside,
        between=between,
        blocks=blocks,
        latent=shape.latent,
        decoding=shape.decoding,
        unknown=tuple(sorted(n for n in models if counted[n] is None)),
    )


def _denoiser(folder: Path) -> nn.Module:
    config = json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        return getattr(diffusers, config["_class_name"]).from_config(config)


def _targets(m: ModelSettings, denoiser: nn.Module) -> Iterable[str]:
    own = m.lora.targets if m.lora is not None else None
    return own or default_targets(denoiser)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _ends(linears: Iterable[nn.Linear]) -> int:
    return sum(linear.in_features + linear.out_features for linear in linears)


def _work(models: Iterable[nn.Module]) -> tuple[int, int, int]:
    inside = between = blocks = 0
    for model in models:
        for block in (block for listed in outer_lists(model) for block in listed):
            linears = {n: x for n, x in block.named_modules() if isinstance(x, nn.Linear)}
            kept = [
                x for n, x in linears.items() if not OTHER.search(n) and not TEXT_MODULES.search(n)
            ]
            inside += _ends(kept)
            between += min((x.in_features for x in kept), default=0)
            blocks += 1
    return inside, between, blocks


def _numbers(folder: Path) -> int | None:
    """Count the numbers of all tensors in a folder's safetensors; None where it has none."""
    files = list(folder.glob("*.safetensors"))
    files = [f for f in files if "." not in f.stem] or files  # not the half-precision variants
    total = 0
    for path in files:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
        total += sum(math.prod(shape) for shape in shapes)
    return total if files else None


@dataclass(frozen=True)
class _Shape:
    tokens: int | None
    latent: int
    decoding: int

    @classmethod
    def of(cls, folder: Path, pipeline: str, denoiser: Any, m: ModelSettings) -> "_Shape":
        """Read the sizes of one row from diffusers' configurations."""
        path = folder / "vae" / "config.json"
        vae = json.loads(path.read_text()) if path.is_file() else {}
        config = denoiser.config
        levels = next((vae[n] for n in LEVELS if vae.get(n)), [1])
        spatial = next((vae[n] for n in SPATIAL if vae.get(n)), 2 ** (len(levels) - 1))
        temporal = next((vae[n] for n in TEMPORAL if vae.get(n)), 1)
        side = config.get("sample_size")
        height, width = _size("height", pipeline, m), _size("width", pipeline, m)
        height = height or (side * spatial if isinstance(side, int) else 512)
        width = width or (side * spatial if isinstance(side, int) else 512)
        frames = _size("num_frames", pipeline, m) or 1
        latent_frames = (frames - 1) // temporal + 1
        channels = config.get("in_channels", 4)
        places = latent_frames * (height // spatial) * (width // spatial)
        own = vae.get("latent_channels") or vae.get("z_dim") or channels
        patch = config.get("patch_size")
        tokens = None
        if patch is not None:
            sizes = list(patch) if isinstance(patch, list | tuple) else [patch]
            packed = 2 if channels == 4 * own and sizes[-1] == 1 else 1  # FLUX, Qwen-Image
            deep = sizes[0] if len(sizes) == 3 else config.get("patch_size_t") or 1
            tokens = max(1, places // (deep * (sizes[-1] * packed) ** 2))
        return cls(tokens, places * own, frames * height * width * levels[0])


def _size(name: str, pipeline: str, m: ModelSettings) -> int | None:
    """Return a size that the run sets, or the pipeline's own default."""
    given = m.call.get(name, getattr(m, name, None))
    if given is not None:
        return int(given)
    parameters = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
    default = parameters[name].default if name in parameters else None
    return default if isinstance(default, int) else None
