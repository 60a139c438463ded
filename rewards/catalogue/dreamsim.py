"""DreamSim, arXiv:2306.09344: human-perceived similarity of an image to a reference image.

score = the cosine of two embeddings, 1 for the same image: 1 minus the authors' distance. An image
is resized to 224 x 224 (bicubic, PIL, without its aspect). Three ViT-B/16 encode it, each with a
low-rank adapter in its attention: DINO (class token before the last norm), OpenAI's CLIP and
open_clip's (projected). Their vectors are concatenated, and the mean over the 1,792 dimensions is
subtracted. A column of the prompt file names the reference.

`folder` is the authors' unpacked zip for the ensemble: `clip_vitb16_pretrain.pth.tar`,
`open_clip_vitb16_pretrain.pth.tar`, `dino_vitb16_pretrain.pth`, and the adapters, in one folder
(`ensemble_lora`) or one per tower (`dino_vitb16_lora`, ...). In every release so far the DINO file
holds a training state without the backbone, which the authors take from facebookresearch/dino:
`dino_vitbase16_pretrain.pth`. It is read from `folder/checkpoints`, where their package puts it, or
from the file that `dino` names. 1 GB in float32. MIT.

Not tested with the published weights. From memory: the names inside `ensemble_lora`.
It rewards copying the reference; for edits, combine it with a reward for the instruction.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional

from rewards.catalogue.similarity import Similarity
from rewards.perception.embedding import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    OPENAI_MEAN,
    OPENAI_STD,
    Placement,
    standardised,
)
from rewards.perception.image_model import ImageModelSettings
from rewards.perception.media import to_tensor
from rewards.perception.plain_vit import PlainVit, blocks_in, vit_entries
from rewards.perception.weight_files import weights_of_file
from rewards.rights import ReadFile, Right, need
from rewards.types import Inline, Kind, NeededColumn, Reward

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

BACKBONE = "checkpoints/dino_vitbase16_pretrain.pth"  # where their package keeps DINO's own file
TOWERS = ("dino_vitb16", "clip_vitb16", "open_clip_vitb16")
_ADAPTER = re.compile(
    r"(?:.*extractor_list\.(\d+)\.)?.*?(blocks\..+)\.lora_([AB])(?:\.\w+)?\.weight"
)


@dataclass(frozen=True)
class Tower:
    """A ViT and, for the two CLIP models, the projection after it."""

    vit: PlainVit
    projection: Tensor | None

    def __call__(self, pixels: Float[Tensor, "n 3 s s"]) -> Float[Tensor, "n e"]:
        if self.projection is None:
            return self.vit.token(standardised(pixels, IMAGENET_MEAN, IMAGENET_STD), normed=False)
        token = self.vit.token(standardised(pixels, OPENAI_MEAN, OPENAI_STD), normed=True)
        return token @ self.projection


@dataclass(frozen=True)
class DreamSimTowers:
    towers: tuple[Tower, ...]
    placement: Placement

    def __call__(self, images: Sequence[Image.Image]) -> Float[Tensor, "n e"]:
        side = self.towers[0].vit.side
        size = (side, side)
        small = [image.convert("RGB").resize(size, Image.Resampling.BICUBIC) for image in images]
        pixels = torch.stack([to_tensor(image) for image in small])
        pixels = pixels.to(self.placement.device, self.placement.dtype)
        whole = torch.cat([tower(pixels) for tower in self.towers], -1).float()
        return functional.normalize(whole - whole.mean(-1, keepdim=True), dim=-1)


def adapters(folder: Path) -> list[tuple[dict[str, Tensor], float]]:
    """Read each tower's adapter: its entries `blocks....A` and `.B`, and alpha / r."""
    whole = folder / "ensemble_lora"
    places = [whole] * 3 if whole.is_dir() else [folder / f"{name}_lora" for name in TOWERS]
    pairs = []
    for number, place in enumerate(places):
        files = [place / name for name in ("adapter_model.safetensors", "adapter_model.bin")]
        present = [file for file in files if file.is_file()]
        if not present or not (place / "adapter_config.json").is_file():
            raise ValueError(f"dreamsim: {place} is not a folder with an adapter")
        config = json.loads((place / "adapter_config.json").read_text(encoding="utf-8"))
        scale = float(config["lora_alpha"]) / int(config["r"])
        matrices: dict[str, Tensor] = {}
        for name, value in weights_of_file("dreamsim", present[0]).items():
            match = _ADAPTER.fullmatch(name)
            if match is None:
                raise ValueError(f"dreamsim: {present[0]} has an unexpected entry {name}")
            if match[1] is None or int(match[1]) == number:
                matrices[f"{match[2]}.{match[3]}"] = value.float()
        pairs.append((matrices, scale))
    return pairs


def tower_of(
    file: Path, adapter: Mapping[str, Tensor], scale: float, placement: Placement
) -> Tower:
    """Build the tower of a file with its adapter added. ValueError for another layout."""
    if not file.is_file():
        raise ValueError(f"dreamsim: no such file: {file}")
    clip = "clip" in file.name
    way_out = "" if clip else f"; name the backbone's file, {Path(BACKBONE).name}, by `dino`"
    try:
        state = dict(weights_of_file("dreamsim", file, "state_dict"))
    except ValueError as error:
        raise ValueError(f"{error}{way_out}") from error
    projection = state.pop("proj", None)
    wanted = vit_entries(blocks_in(state), pre_norm=clip)
    differ = sorted((set(state) ^ wanted) - {"patch_embed.proj.bias"})
    if differ or (projection is None) == clip:
        entries = ", ".join(differ[:4]) or "proj"
        raise ValueError(
            f"dreamsim: {file} does not hold a ViT's weights: {entries} missing or "
            f"unexpected{way_out}"
        )
    names = {name.rpartition(".")[0] for name in adapter}
    for name in names:
        a, b = adapter.get(f"{name}.A"), adapter.get(f"{name}.B")
        if a is None or b is None or f"{name}.weight" not in state:
            raise ValueError(f"dreamsim: the adapter of {name} does not fit {file}")
        state[f"{name}.weight"] = state[f"{name}.weight"].float() + scale * b @ a
    if names != {f"blocks.{i}.attn.qkv" for i in range(blocks_in(state))}:
        raise ValueError(f"dreamsim: the adapter of {file} changes layers other than qkv")
    moved = {name: value.to(placement.device, placement.dtype) for name, value in state.items()}
    vit = PlainVit(moved, quick=clip and "open_clip" not in file.name, eps=1e-5 if clip else 1e-6)
    return Tower(
        vit, None if projection is None else projection.to(placement.device, placement.dtype)
    )


def load(
    folder: ReadFile,
    dino: ReadFile | None = None,
    column: NeededColumn = "reference",
    common: Inline[ImageModelSettings] = ImageModelSettings(),
) -> Reward:
    """Load the reward.

    folder  the authors' unpacked zip for the ensemble
    dino    file with DINO's backbone; null takes the folder's
    column  column of the prompt file with the reference image: a path or its bytes
    """
    for path in (folder, dino):
        if path is not None:
            need(Right.FILES, path, path=Path(path))
    if not Path(folder).is_dir():
        raise ValueError(f"dreamsim: no such folder: {folder}")
    backbone, published = Path(folder) / BACKBONE, Path(folder) / f"{TOWERS[0]}_pretrain.pth"
    files = [
        Path(dino) if dino else backbone if backbone.is_file() else published,
        *(Path(folder) / f"{name}_pretrain.pth.tar" for name in TOWERS[1:]),
    ]
    towers = tuple(
        tower_of(file, adapter, scale, common.placement)
        for file, (adapter, scale) in zip(files, adapters(Path(folder)), strict=True)
    )
    embed = DreamSimTowers(towers, common.placement)
    return common.over_frames("dreamsim", Similarity(embed, column, common.batch))
