"""The common face of the models that write images, and the places of an image's codes.

A *code* is an entry of the codebook; an image is a fixed number of them, row by row. The model
chooses every code. What else stands behind a prompt (the end of each row, in Emu3) is forced: it
has probability 1, so it is input of the model, but no part of a completion.

n images, m rows of a call, r rows of guidance (1 or 2), s tokens, c codes, v codebook entries, d
hidden width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from flowrl.models.precision import HALF


class PromptTokens(NamedTuple):
    """Text tokens before an image: of the prompt, and of guidance's row without it."""

    prompt: Sequence[int]
    without: Sequence[int]


@dataclass(frozen=True)
class CodeLayout:
    """Places of an image's codes behind its prompt.

    codes    number of codes of an image
    width    number of codes in a row of the image
    between  text tokens that stand behind each row, forced
    """

    codes: int
    width: int
    between: tuple[int, ...] = ()

    def offset(self, code: Int[Tensor, " m"]) -> Int[Tensor, " m"]:
        """Index behind the prompt of the codes with these numbers."""
        return code + code // self.width * len(self.between)

    def tokens(self, codes: Sequence[int], first: int = 0) -> tuple[list[int], list[bool]]:
        """The tokens of an image's codes from number `first` on, with the forced ones behind them,
        and whether each is a code."""
        tokens: list[int] = []
        kinds: list[bool] = []
        for number, code in enumerate(codes, first + 1):
            ends = number % self.width == 0
            tokens += [code, *self.between] if ends else [code]
            kinds += [True, *[False] * len(self.between)] if ends else [True]
        return tokens, kinds


@runtime_checkable
class ImageFamily(Protocol):
    """A class of transformers that writes images.

    layout    where codes stand
    codebook  number of entries of the codebook
    guidance  the scale of the model's own `generate`; 1: none
    """

    @property
    def layout(self) -> CodeLayout: ...

    @property
    def codebook(self) -> int: ...

    @property
    def guidance(self) -> float: ...

    @property
    def size(self) -> tuple[int, int]: ...  # height and width of an image in pixels

    @property
    def reads_chats(self) -> bool: ...  # whether prompts go through a chat template

    @property
    def trained(self) -> Mapping[str, nn.Module]: ...  # parts that write images, by their names

    def encode(self, prompt: str, system: str | None, template: Mapping[str, Any]) -> PromptTokens:
        """Tokens of a prompt. UserError for a prompt that the model cannot take."""
        ...

    def embedded(
        self, ids: Int[Tensor, "m s"], codes: Bool[Tensor, "m s"]
    ) -> Float[Tensor, "m s d"]:
        """Embeddings of text tokens, and of entries of the codebook where `codes` is True."""
        ...

    def states(self, embeddings: Float[Tensor, "m s d"], **more: Any) -> Any:
        """The language model's own output for embeddings; `more`: its mask, positions, cache."""
        ...

    def head(self, states: Float[Tensor, "*m d"]) -> Float[Tensor, "*m v"]:
        """Logits over the codebook."""
        ...

    def decode(self, codes: Int[Tensor, "n c"]) -> Float[Tensor, "n 3 h w"]:
        """Images in 0..1."""
        ...


@dataclass(frozen=True)
class GuidedCodes:
    """Logits of a family at a scale of guidance: those without the prompt, plus `scale` times what
    the prompt adds (classifier-free guidance, arXiv:2207.12598; of logits, arXiv:2306.17806)."""

    family: ImageFamily
    scale: float

    @property
    def rows(self) -> int:
        """Rows of the model per row of a call: 2 with guidance."""
        return 2 if self.scale > 1 else 1

    def contexts(self, prompts: Sequence[PromptTokens]) -> list[Sequence[int]]:
        """The text tokens of a call's rows: all prompts, and then all rows without them."""
        without = [prompt.without for prompt in prompts] if self.rows == 2 else []
        return [*(prompt.prompt for prompt in prompts), *without]

    def logits(self, states: Float[Tensor, "m r d"]) -> Float[Tensor, "m v"]:
        """Guided logits, in float32 at least: a scale multiplies what half precision rounds."""
        logits = self.family.head(states)
        logits = logits.float() if logits.dtype in HALF else logits
        if self.rows == 1:
            return logits[:, 0]
        conditional, without = logits.unbind(1)
        return without + (conditional - without) * self.scale


def unnormalized(
    pixels: Float[Tensor, "n 3 h w"], mean: Sequence[float], std: Sequence[float]
) -> Float[Tensor, "n 3 h w"]:
    """Pixels in 0..1 of those that an image processor has normalized."""
    shape = (1, len(mean), 1, 1)
    moved = pixels.float() * torch.tensor(std, device=pixels.device).view(shape)
    return (moved + torch.tensor(mean, device=pixels.device).view(shape)).clamp(0, 1)
