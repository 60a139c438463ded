"""EditReward, arXiv:2509.26346: how well an image was edited, by a Qwen2.5-VL with two heads.

The source image, the edit and a text go through the network twice, once with the text about
instruction following and `head_0`, once with the text about quality and `head_1`. Each head maps
the state at `<|Reward|>` through three linear layers with ReLUs to (mu, log sigma); the score is
mu: the mean of both passes (`kind: mean`), their minimum, their sum, or a single pass. Images have
about 200,704 pixels; positions are sequential (`rewards.perception.qwen`).

`checkpoint` is a folder with `model.safetensors` or `model.pth`, of EditReward on Qwen2.5-VL-7B or
MiMo-VL-7B-SFT; `base` names that model, whose chat template frames the question. The Qwen3-VL
release computes the image grid's positions and is refused. 15.5 GB in bfloat16. The two texts, of
1,820 and 1,724 characters, are the authors' and do not come with flowrl.

Not tried on the published weights; the authors' code gave the same scores for tiny random weights
(`scripts/authors/editreward.py`). The pooling differs per release and cannot be inferred from the
weights; the release's configuration file states it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rewards.judging.published_texts import PublishedText
from rewards.perception.embedding import in_batches
from rewards.perception.hub import HubName, model_path
from rewards.perception.media import expect, items, to_pil
from rewards.perception.qwen import QwenBackbone, QwenSettings, Turn, image_patches
from rewards.perception.references import check_image_column, column_images
from rewards.perception.scalar_heads import INSTRUCTION_TAIL, PIXELS, open_scalar_model
from rewards.rights import ReadFile, Right, need
from rewards.types import Inline, Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image",)

_SOURCE = "EditReward/dataset/prompts.py of github.com/TIGER-AI-Lab/EditReward"
FOLLOWING_TEXT = PublishedText(
    "EditReward's text on instruction following", 1820, "da5bfc26898cc8e0", _SOURCE
)
QUALITY_TEXT = PublishedText("EditReward's text on quality", 1724, "89bbc5c2ac1bbea9", _SOURCE)
HEADS = ("rm_heads.head_0.", "rm_heads.head_1.")
Pooling = Literal["mean", "min", "sum", "following", "quality"]


@dataclass(frozen=True)
class EditReward:
    """EditReward's network, with a text and a head each for instruction following and for
    quality."""

    backbone: QwenBackbone
    heads: tuple[nn.Sequential, nn.Sequential]
    texts: tuple[str, str]
    kind: Pooling
    column: str
    batch: int

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "editreward", "image")
        sources = column_images("editreward", samples, self.column)
        values = torch.full((len(sources),), torch.nan)
        rows_with_source = [
            (row, source) for row, source in enumerate(sources) if source is not None
        ]
        if not rows_with_source:
            return values
        media = items(samples)
        triples = [(source, media[row], samples.prompts[row]) for row, source in rows_with_source]
        scores = in_batches(self._both, triples, self.batch)
        values[[row for row, _ in rows_with_source]] = {
            "mean": scores.mean(1),
            "min": scores.amin(1),
            "sum": scores.sum(1),
            "following": scores[:, 0],
            "quality": scores[:, 1],
        }[self.kind]
        return values

    def _both(self, triples: Sequence[tuple[Tensor, Tensor, str]]) -> Float[Tensor, "m 2"]:
        shown = [
            tuple(image_patches(to_pil(image), PIXELS) for image in (source, edit))
            for source, edit, _ in triples
        ]
        columns = []
        for text, head in zip(self.texts, self.heads, strict=True):
            turns = [
                Turn(pair, text.replace(PublishedText.field, prompt) + INSTRUCTION_TAIL)
                for pair, (_, _, prompt) in zip(shown, triples, strict=True)
            ]
            columns.append(head(self.backbone.hidden(turns)[:, 0])[:, 0])
        return torch.stack(columns, 1)

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        check_image_column("editreward", self.column, prompts, meta)


def load(
    checkpoint: ReadFile,
    base: HubName = "Qwen/Qwen2.5-VL-7B-Instruct",
    following: ReadFile | None = None,
    quality: ReadFile | None = None,
    kind: Pooling = "mean",
    column: str = "source",
    common: Inline[QwenSettings] = QwenSettings(),
) -> Reward:
    """Load EditReward. ValueError if the checkpoint's folder has no weights.

    checkpoint  folder of a published checkpoint, with model.safetensors or model.pth
    base        model that was fine-tuned, for its configuration and tokenizer: a folder or a name
                on the hub
    following   file with the authors' text on instruction following, or their Python file with both
                texts, which is not run; needed, since no address of it is known
    quality     file with the authors' text on quality, or their Python file; needed too
    kind        mean, min or sum of the scores of both passes, or the score of one: following or
                quality
    column      column of the prompt file with the path of the source image
    """
    need(Right.FILES, checkpoint, path=Path(checkpoint))
    files = [Path(checkpoint) / name for name in ("model.safetensors", "model.pth")]
    present = [file for file in files if file.is_file()]
    if not present:
        raise ValueError(f"editreward: {checkpoint} has neither model.safetensors nor model.pth")
    folder = model_path(base)
    texts = (
        FOLLOWING_TEXT.read("editreward", "following", following),
        QUALITY_TEXT.read("editreward", "quality", quality),
    )
    backbone, (first, second) = open_scalar_model(
        "editreward", present[0], folder, HEADS, common.placement
    )
    return EditReward(backbone, (first, second), texts, kind, column, common.batch)
