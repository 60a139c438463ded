"""Human preference score v2 and v2.1: arXiv:2306.09341.

An open_clip ViT-H-14 with fine-tuned weights; the score is the cosine, about 0.2 to 0.4 on real
samples (`kind: percent` is 100 times that, as in the benchmark's tables). Images are resized as
floats, the longer side to the model's size, and the rest is filled with black before colours are
normalised. At the time torchvision resized floats without antialiasing; this code antialiases, as
torchvision does since 0.17.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional

from rewards.perception.embedding import (
    OPENAI_MEAN,
    OPENAI_STD,
    Cosine,
    OpenClipTowers,
    clip_normalised,
    open_clip_library,
)
from rewards.perception.hub import weights_file
from rewards.perception.image_model import ImageModelSettings
from rewards.perception.media import to_tensor
from rewards.perception.pixels import PixelPreparation
from rewards.perception.weight_files import stored_in
from rewards.rights import NameInFolder, ReadFile, Right, is_bare, need
from rewards.types import Inline, Kind, Reward

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

REPOSITORY = "xswu/HPSv2"
FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}
FACTORS = {"cosine": 1.0, "percent": 100.0}


@dataclass(frozen=True)
class Letterbox:
    """Convert an image to [3 size size]: resize the longer side to `size`, pad with black,
    normalise."""

    size: int

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 size size"]:
        pixels = to_tensor(image)
        shape = pixels.shape[-2:]
        if max(shape) != self.size:
            height, width = (round(side * self.size / max(shape)) for side in shape)
            pixels = functional.interpolate(
                pixels[None], (height, width), mode="bicubic", antialias=True
            )[0]
        below, beside = (self.size - side for side in pixels.shape[-2:])
        edges = (beside // 2, beside - beside // 2, below // 2, below - below // 2)
        pixels = functional.pad(pixels, edges)
        return clip_normalised(pixels)


def weights_of(version: str, checkpoint: str | None) -> dict[str, Any]:
    """Read the weights from the published file, or from `checkpoint`."""
    file = Path(weights_file("hps", "checkpoint", checkpoint, (REPOSITORY, FILES[version])))
    stored = stored_in("hps", file)
    if not isinstance(stored, dict) or "state_dict" not in stored:
        raise ValueError(f"hps: {file} has no entry state_dict, unlike HPSv2's files")
    return stored["state_dict"]


def load(
    version: Literal["v2.0", "v2.1"] = "v2.1",
    checkpoint: ReadFile | None = None,
    architecture: NameInFolder = "ViT-H-14",
    kind: Literal["cosine", "percent"] = "cosine",
    common: Inline[ImageModelSettings] = ImageModelSettings(),
) -> Reward:
    """Load the reward.

    version       release of the weights
    checkpoint    file with the weights; null takes the release's from the hub
    architecture  open_clip's name of the network
    kind          cosine: of image and prompt; percent: 100 times that, as in the benchmark's tables
    """
    if not is_bare(architecture):
        need(Right.FILES, architecture)
    open_clip = open_clip_library()
    model = open_clip.create_model(architecture, load_weights=False)
    model.load_state_dict(weights_of(version, checkpoint))
    side = model.visual.image_size
    prepare = Letterbox(side if isinstance(side, int) else max(side))
    tokenizer = open_clip.get_tokenizer(architecture)
    pixels = PixelPreparation(
        (prepare.size, prepare.size), OPENAI_MEAN, OPENAI_STD, "longer", clipped=False
    )
    towers = OpenClipTowers(
        common.placement.put(model), tokenizer, prepare, common.placement, pixels
    )
    return common.over_frames("hps", Cosine(towers, FACTORS[kind], batch=common.batch))
