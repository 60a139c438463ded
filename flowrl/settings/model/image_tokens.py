"""`model: {language: ..., image: ...}`: images that a language model writes as tokens."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from flowrl.settings.base import OnResume, Settings


class ImageTokenSettings(Settings):
    """Images of a language model whose tokens are entries of a codebook, which its own decoder
    turns into pixels: transformers' Janus and Emu3."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "height": OnResume.NEVER,
        "width": OnResume.NEVER,
    }
    guidance: float | None = Field(default=None, ge=1)
    """Scale of classifier-free guidance. Above 1 each token needs a second row, without the prompt,
    in sampling and in training. 1: no guidance. null: the scale of the model's own `generate`."""
    negative: str | None = None
    """Text of guidance's second row, for Emu3; null: that row begins with the last token of the
    prompt, as in `generate` without a negative prompt. Janus replaces the prompt by padding."""
    height: int | None = Field(default=None, ge=1)
    """Pixels of an image, for Emu3; null: its processor's own size. Janus has one size."""
    width: int | None = Field(default=None, ge=1)
    """As height."""
