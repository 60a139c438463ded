"""Emu3 (arXiv:2409.18869), by transformers' own class.

Codes are tokens of the text vocabulary, `<|visual token ...|>`, of which alone the model may choose
one; the token `<|extra_200|>` ends each row of an image, and is forced. What its documented call
forces behind the last row (the ends of the image and of the text) no code depends on, so it is
left out here. Guidance's other row is a negative prompt with the same beginning of an image, as in
the authors' own script (baaivision/Emu3, image_generation.py).
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models.image_tokens.family import CodeLayout, PromptTokens, unnormalized
from flowrl.prompts import Chat
from flowrl.settings.model.image_tokens import ImageTokenSettings
from rewards.perception.unended import without_added_end

END_OF_ROW = "<|extra_200|>"


class Emu3Images:
    """An `ImageFamily`: an `Emu3ForConditionalGeneration` with its processor, the generation
    settings that it was published with, and the size of images. UserError for a size that the
    decoder does not make."""

    def __init__(
        self, model: Any, processor: Any, published: Any, settings: ImageTokenSettings
    ) -> None:
        self.model, self.processor, self.negative = model, processor, settings.negative
        mapping = model.vocabulary_mapping
        if mapping.eol_token_id is None or not mapping.img2bpe:
            raise UserError(
                f"model.image: config.json has no vocabulary_map with {END_OF_ROW} and the visual "
                "tokens, which Emu3 needs to write images"
            )
        side = processor.downsample_ratio
        self.size = _size(processor, settings, side)
        self.grid = self.size[0] // side, self.size[1] // side
        rows, width = self.grid
        self.layout = CodeLayout(rows * width, width, (mapping.eol_token_id,))
        codes = sorted(mapping.img2bpe)
        if codes != list(range(len(codes))):
            raise UserError("model.image: the visual tokens of config.json are not numbered from 0")
        self.vocabulary = torch.tensor([mapping.img2bpe[code] for code in codes])
        self.codebook = len(codes)
        self.guidance = float(published.guidance_scale or 1.0)

    @property
    def reads_chats(self) -> bool:
        return False

    @property
    def trained(self) -> Mapping[str, nn.Module]:
        return {"model.text_model": self.model.model.text_model, "lm_head": self.model.lm_head}

    def encode(self, prompt: str, system: str | None, template: Mapping[str, Any]) -> PromptTokens:
        del template
        if isinstance(prompt, Chat):
            raise UserError(
                f"{prompt.at}: the prompt is a list of chat messages, but Emu3 writes images of a "
                "text: name a column of texts (prompts.column)"
            )
        assert system is None, "the policy refuses it"
        ids = self._begun(prompt)
        without = ids[-1:] if self.negative is None else self._begun(self.negative)
        return PromptTokens(ids, without)

    def _begun(self, text: str) -> list[int]:
        """Tokens of a text and of the beginning of its image."""
        height, width = self.size
        outputs = self.processor(
            text=[text],
            return_for_image_generation=True,
            ratio=f"{width}:{height}",
            image_area=width * height,
        )
        assert tuple(outputs["image_sizes"][0]) == self.grid, "the processor keeps the size"
        ids = [int(i) for i in outputs["input_ids"][0]]
        return without_added_end(self.processor.tokenizer, text, ids)

    def embedded(
        self, ids: Int[Tensor, "m s"], codes: Bool[Tensor, "m s"]
    ) -> Float[Tensor, "m s d"]:
        visual = self.vocabulary.to(ids.device)[ids.masked_fill(~codes, 0)]
        return self.model.get_input_embeddings()(torch.where(codes, visual, ids))

    def states(self, embeddings: Float[Tensor, "m s d"], **more: Any) -> Any:
        return self.model.model.text_model(inputs_embeds=embeddings, **more)

    def head(self, states: Float[Tensor, "*m d"]) -> Float[Tensor, "*m v"]:
        return self.model.lm_head(states).index_select(-1, self.vocabulary.to(states.device))

    def decode(self, codes: Int[Tensor, "n c"]) -> Float[Tensor, "n 3 h w"]:
        images = self.processor.image_processor
        pixels = self.model.model.vqmodel.decode(codes.view(-1, *self.grid))
        return unnormalized(pixels, images.image_mean, images.image_std)


def _size(processor: Any, settings: ImageTokenSettings, side: int) -> tuple[int, int]:
    """Height and width in pixels: those of the settings, or of the processor's own call."""
    if settings.height is None and settings.width is None:
        rows, width = processor.calculate_generate_size(processor.ratio, processor.image_area, side)
        return rows * side, width * side
    height = settings.height or settings.width
    width = settings.width or settings.height
    assert height is not None and width is not None
    for name, pixels in (("height", height), ("width", width)):
        if pixels % side:
            raise UserError(
                f"model.image.{name}: Emu3's decoder makes multiples of {side} pixels, not "
                f"{pixels}: set {max(side, round(pixels / side) * side)}"
            )
    return height, width
