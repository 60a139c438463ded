"""A language model that sees pictures, and what prepares its inputs: a mean colour each prompt."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchFeature, PreTrainedTokenizerFast

from tests.support.tiny_pipelines_parts import decoder


class Looker:
    """Stands for a processor such as Qwen2.5-VL's: tokens, and the mean colour of its pictures."""

    merge_size = 1

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer

    @property
    def image_processor(self) -> "Looker":
        return self

    def __call__(
        self, text: Any = None, images: Any = None, videos: None = None, **named: Any
    ) -> BatchFeature:
        tokens = {} if text is None else self.tokenizer(text, **named)
        if images is None or images == []:
            return BatchFeature(dict(tokens))
        images = images if isinstance(images, list) else [images]
        colours = [list(image.resize((1, 1)).getpixel((0, 0))) for image in images]
        rows = len(text) if isinstance(text, list) else 1
        seen = torch.tensor(colours).reshape(min(rows, len(colours)), -1, 3).float().mean(1) / 255
        grid = torch.ones(len(images), 3, dtype=torch.long)
        whole = {"pixel_values": seen.expand(rows, 3), "image_grid_thw": grid}
        return BatchFeature({**tokens, **whole})

    def apply_chat_template(self, messages: Any, **named: Any) -> Any:
        tokens = self.tokenizer.apply_chat_template(messages, **named)
        return [tokens] if named.get("tokenize") and not named.get("return_dict") else tokens

    def decode(self, tokens: Any) -> str:
        return self.tokenizer.decode(tokens)


class Reader(nn.Module):
    """Stands for Qwen2.5-VL: a small decoder whose states are moved by the picture's colour."""

    def __init__(self, **settings: int) -> None:
        super().__init__()
        self.language_model = decoder(**settings)
        self.look = nn.Linear(3, 16)

    @property
    def model(self) -> "Reader":
        return self

    @property
    def norm(self) -> nn.Module:
        return self.language_model.norm

    @property
    def config(self) -> Any:
        return SimpleNamespace(
            text_config=self.language_model.config, image_token_index=3, pad_token_id=0
        )

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
        pixel_values: Tensor | None = None,
        **named: Any,
    ) -> Any:
        words = self.language_model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            pixel_values = (
                pixel_values.flatten(2).mean(2) if pixel_values.ndim == 4 else pixel_values
            )
            words = words + self.look(pixel_values.to(self.dtype))[:, None]
        return self.language_model(
            inputs_embeds=words, attention_mask=attention_mask, output_hidden_states=True
        )
