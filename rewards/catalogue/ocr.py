"""Agreement of the text in an image with the texts that its prompt quotes, by an OCR engine.

The engine is rapidocr (PP-OCR on onnxruntime); its weights come with the package. `pip install
"flowrl[ocr]"`. All recognised lines are joined and compared without whitespace and case:

* graded     1 - sum_i d_i / sum_i len_i over the quoted texts i, where d_i is the edit distance of
             text i from the nearest part of the recognised text. Other text in the image costs
             nothing;
* strict     1 if the recognised text is the quoted texts, in any order, otherwise 0;
* published  Flow-GRPO's (arXiv:2505.05470, its code): the first quoted text only; 1 if it is part
of the recognised text, otherwise 1 - min(d, len) / len with d from all of the recognised text.
Videos: every fourth frame, without the rule for parts, averaged over frames that score above 0.

A prompt that quotes nothing is unscored. An image full of text can fool graded and published; use
`strict` as a held-out reward to detect it.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from rewards.perception.media import expect, items, to_pil
from rewards.perception.packages import needs_ocr
from rewards.perception.strings import distance_within, edit_distance, normalise, quoted
from rewards.types import Kind, OneOrMore, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

OcrKind = Literal["graded", "strict", "published"]
Side = Annotated[int, Field(ge=32)]  # pixels
ImageReader = Callable[[Float[Tensor, "3 h w"]], list[str]]  # lines of text, top to bottom
MOST_PERMUTED = 5  # texts whose orders `strict` tries


def score_texts(lines: Sequence[str], wanted: Sequence[str], kind: OcrKind = "graded") -> float:
    """Apply the formulas above to the lines of one image; `wanted` holds at least one text."""
    read = normalise("".join(lines))
    texts = [normalise(text) for text in wanted]
    if kind == "graded":
        missed = sum(distance_within(text, read) for text in texts)
        return 1 - missed / sum(map(len, texts))
    if kind == "strict":
        return float(_is_all(read, texts))
    return 1.0 if texts[0] in read else _from_all(read, texts[0])


def score_frames(frames: Sequence[Sequence[str]], wanted: Sequence[str], kind: OcrKind) -> float:
    """Score a video by the mean over some of its frames, each given as its lines.

    The published rule leaves out frames that score 0, so a single right frame is enough.
    """
    if kind != "published":
        return float(np.mean([score_texts(lines, wanted, kind) for lines in frames]))
    text = normalise(wanted[0])
    scores = [_from_all(normalise("".join(lines)), text) for lines in frames]
    return float(np.mean([score for score in scores if score > 0] or [0.0]))


def _from_all(read: str, text: str) -> float:
    return 1 - min(edit_distance(read, text), len(text)) / len(text)


def _is_all(read: str, texts: list[str]) -> bool:
    if len(read) != sum(map(len, texts)):
        return False
    orders = itertools.permutations(texts) if len(texts) <= MOST_PERMUTED else [texts]
    return any("".join(order) == read for order in orders)


@dataclass(frozen=True)
class Ocr:
    """Reads text in images. `every`: distance between the video frames that are read."""

    reader: ImageReader
    kind: OcrKind
    every: int

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        video = expect(samples, "ocr", "image", "video") == "video"
        scores = []
        for item, prompt in zip(items(samples), samples.prompts, strict=True):
            wanted = quoted(prompt)
            if not wanted:
                scores.append(torch.nan)
            elif video:
                frames = [self.reader(frame) for frame in item[:: self.every]]
                scores.append(score_frames(frames, wanted, self.kind))
            else:
                scores.append(score_texts(self.reader(item), wanted, self.kind))
        return torch.tensor(scores, dtype=torch.float64)

    def examples(self) -> Samples:
        """An image of the quoted word, and an image without it."""
        from PIL import Image, ImageDraw, ImageFont

        from rewards.perception.media import to_tensor

        page, blank = (Image.new("RGB", (256, 96), "white") for _ in range(2))
        ImageDraw.Draw(page).text((40, 24), "HELLO", "black", ImageFont.load_default(40))
        media = torch.stack([to_tensor(page), to_tensor(blank)])
        return Samples(media, ['the word "HELLO"'] * 2, torch.zeros(2, dtype=torch.long))


def reader(side: int) -> ImageReader:
    """Load the OCR engine. Images whose shorter side is below `side` pixels are enlarged to it
    first."""
    needs_ocr({})
    from rapidocr import RapidOCR  # an extra

    threads = torch.get_num_threads()
    engine = RapidOCR(
        params={
            "Global.log_level": "error",
            "Det.limit_side_len": side,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
        }
    )

    def read(image: Float[Tensor, "3 h w"]) -> list[str]:
        return list(engine(to_pil(image)).txts or ())  # type: ignore[union-attr]

    return read


def load(kind: OcrKind = "graded", every: OneOrMore = 4, side: Side = 320) -> Reward:
    """Load the reward.

    kind   graded: 1 minus the share of wrong letters in the quoted texts; strict: 1 if the text is
           exactly the quoted texts, otherwise 0; published: Flow-GRPO's, of the first quoted text
    every  distance between the frames of a video that are read, in frames, at least 1
    side   pixels to which the shorter side of a smaller image is enlarged first, at least 32; below
           736 large text is read faster and small text worse
    """
    return Ocr(reader(side), kind, every)
