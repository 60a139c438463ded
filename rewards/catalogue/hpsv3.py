"""HPSv3: human preference for an image and a prompt by a Qwen2-VL, arXiv:2508.03789.

A Qwen2-VL-7B whose state at the token `<|Reward|>` goes through three linear layers with ReLUs to
(mu, log sigma); the score is mu, without normalisation, roughly 0 to 15 on real images. Images have
about 200,704 pixels (448 x 448). Positions are sequential, as in the authors' code
(`rewards.perception.qwen`); ports that compute the image grid's positions return other scores.

`HPSv3.safetensors` on the hub has all weights; only the configuration and the tokenizer are read
from `base`. The network runs in bfloat16 (15.5 GB), the head in float32. The instruction, 2,590
characters, is the authors'; it is fetched at the first use, or read from a file, and its digest is
checked. HPSv3++ is another model and is refused by the names of its weights.

Not tried on the published weights; the authors' code gave the same scores for tiny random weights
(`scripts/authors/hpsv3.py`). From memory: the score's range.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from rewards.judging.published_texts import PublishedText
from rewards.perception.embedding import in_pair_batches
from rewards.perception.frames import Aggregate, Frames, OverFrames
from rewards.perception.hub import HubName, model_path, weights_file
from rewards.perception.qwen import QwenBackbone, QwenSettings, Turn, image_patches
from rewards.perception.scalar_heads import INSTRUCTION_TAIL, PIXELS, open_scalar_model
from rewards.rights import ReadFile
from rewards.types import Inline, Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

REPOSITORY, FILE = "MizzenAI/HPSv3", "HPSv3.safetensors"
RM_HEAD = "rm_head."
INSTRUCTION = PublishedText(
    "HPSv3's instruction",
    2590,
    "f6ee57479d4e9eee",
    "hpsv3/dataset of github.com/MizzenAI/HPSv3",
    "https://raw.githubusercontent.com/RE-N-Y/imscore/"
    "a2bc6595f9a0a9dd39ce6292a3ee8470d7874ee2/src/imscore/hpsv3/utils.py",
    INSTRUCTION_TAIL,
)


@dataclass(frozen=True)
class Hpsv3:
    backbone: QwenBackbone
    head: nn.Sequential
    instruction: str
    batch: int

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        return in_pair_batches(self._score, samples, self.batch)

    def _score(self, pairs: Sequence[tuple[Image.Image, str]]) -> Float[Tensor, " m"]:
        field = PublishedText.field
        turns = [
            Turn((image_patches(image, PIXELS),), self.instruction.replace(field, prompt))
            for image, prompt in pairs
        ]
        return self.head(self.backbone.hidden(turns)[:, 0])[:, 0]


def load(
    checkpoint: ReadFile | None = None,
    base: HubName = "Qwen/Qwen2-VL-7B-Instruct",
    instruction: ReadFile | None = None,
    frames: Frames = "all",
    aggregate: Aggregate = "mean",
    common: Inline[QwenSettings] = QwenSettings(),
) -> Reward:
    """Load the reward.

    checkpoint   file in the form of HPSv3.safetensors; null takes the hub's
    base         model whose configuration and tokenizer are read: a folder or a name on the hub
    instruction  file with the authors' instruction, or their Python file that has it, which is not
                 run; null fetches it at the first use
    """
    placement, folder = common.placement, model_path(base)
    text = INSTRUCTION.read("hpsv3", "instruction", instruction)
    file = Path(weights_file("hpsv3", "checkpoint", checkpoint, (REPOSITORY, FILE)))
    backbone, (head,) = open_scalar_model("hpsv3", file, folder, (RM_HEAD,), placement)
    return OverFrames(Hpsv3(backbone, head, text, common.batch), "hpsv3", frames, aggregate)
