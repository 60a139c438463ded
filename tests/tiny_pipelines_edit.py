"""A language model that sees an image, and what prepares its inputs: for Qwen-Image-Edit."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchFeature, PreTrainedTokenizerFast

from tests.tiny_pipelines_parts import decoder


class Looker:
    """Stands for Qwen2.5-VL's processor: tokens, and the mean colour of an image a prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer

    def __call__(self, text: list[str], images: Any, **named: Any) -> BatchFeature:
        tokens = self.tokenizer(text, padding=True, return_tensors="pt")
        images = images if isinstance(images, list) else [images]
        pixels = [torch.tensor(list(image.resize((1, 1)).getdata()[0])) / 255 for image in images]
        seen = torch.stack(pixels).expand(len(text), 3) if len(pixels) == 1 else torch.stack(pixels)
        return BatchFeature({**tokens, "pixel_values": seen})


class Reader(nn.Module):
    """Stands for Qwen2.5-VL: a small decoder whose states are moved by the image's colour."""

    def __init__(self) -> None:
        super().__init__()
        self.language = decoder()
        self.look = nn.Linear(3, 16)

    @property
    def dtype(self) -> torch.dtype:
        return self.look.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.look.weight.device

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor,
        image_grid_thw: None,
        output_hidden_states: bool,
    ) -> Any:
        seen = self.look(pixel_values.to(self.dtype))[:, None]
        words = self.language.get_input_embeddings()(input_ids)
        return self.language(
            inputs_embeds=words + seen, attention_mask=attention_mask, output_hidden_states=True
        )
