"""Images in prompts of a vision-language model, through its own transformers processor.

The processor writes placeholder tokens for each image into the prompt, and returns tensors that the
model takes in addition to the tokens. Token columns (`mm_token_type_ids`, `token_type_ids`) have
one number per token of the prompt and are padded with it; image columns (`pixel_values`,
`image_grid_thw`, `image_sizes`) run over images or patches, and are concatenated over a call's
rows. Models that need other columns are refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from flowrl.errors import UserError
from flowrl.models.language.chat import chat_turns, prompt_place, rendered
from flowrl.prompts.prompt_set import PromptRow
from flowrl.prompts.source import of_given
from rewards.perception.files import open_image_cell
from rewards.perception.media import to_rgb
from rewards.perception.unended import added_end
from samplers.host import uploaded

TOKEN_COLUMNS = ("mm_token_type_ids", "token_type_ids")
ARRAY_COLUMNS = ("pixel_values", "image_grid_thw", "image_sizes")
_BY_TOKEN = ("input_ids", "attention_mask", *TOKEN_COLUMNS)
ROW_COLUMNS = ("images", "image")  # of the prompt file
MARK = "<image>"  # in texts of data sets, the place of an image


@dataclass(frozen=True)
class PromptImages:
    """Inputs of the model besides a prompt's tokens: numbers per token, and tensors whose first
    dimension runs over images or patches."""

    tokens: Mapping[str, Sequence[int]]
    arrays: Mapping[str, Tensor]


def reads_images(config: Any) -> bool:
    """Whether a transformers configuration belongs to a vision-language model."""
    return config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def model_class(config: Any) -> Any:
    """The transformers class that loads a language model, or a vision-language model."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


@dataclass(frozen=True)
class Vision:
    """The processor of a vision-language model, and its placeholder tokens.

    Placeholders of images and videos are never sampled: the image of a sampled placeholder would
    not exist. Their logits are the lowest number, in sampling and in training.
    """

    processor: Any
    placeholders: tuple[int, ...]

    @classmethod
    def of(cls, model: Any, source: str) -> "Vision":
        """Load the processor. UserError if it cannot be loaded, or if the model has no head."""
        try:
            processor = AutoProcessor.from_pretrained(source)
        except (ImportError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"model.language: {source} reads images, but its processor cannot be loaded: "
                f"{reason}"
            ) from error
        return cls.made(model, processor)

    @classmethod
    def made(cls, model: Any, processor: Any) -> "Vision":
        """Set up a processor, and hide its placeholders from the model's head."""
        config, head = model.config, model.get_output_embeddings()
        name = type(model).__name__
        if getattr(processor, "image_processor", None) is None:
            raise UserError(f"model.language: the processor of {name} does not read images")
        if head is None:
            raise UserError(f"model.language: {name} has no separate head, which images need")
        ids = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")]
        ids = [i for i in ids if isinstance(i, int) and i < head.weight.shape[0]]
        head.register_forward_hook(_Hidden(tuple(ids)))
        return cls(processor, tuple(ids))

    def encode(
        self,
        prompt: str,
        row: Mapping[str, Any],
        system: str | None,
        template: Mapping[str, Any],
    ) -> tuple[list[int], PromptImages | None]:
        """Tokens of a prompt and its images, from the row's column `images` or `image`, or from the
        messages themselves.

        An image's place is its part of a message, or the mark <image> in a text; images without a
        place go to the start of the user's first message. UserError for an image that cannot be
        read, and if the numbers of places and images differ.
        """
        at = row.place if isinstance(row, PromptRow) else prompt_place(prompt)
        images = row_images(row, at)
        turns, shown = _placed(chat_turns(prompt, system), images, at)
        if self.processor.chat_template is not None:
            text = rendered(self.processor, turns, prompt, template)
        else:
            text = "".join(self._plain(part) for turn in turns for part in turn["content"])
        mark = self.processor.image_token
        if (places := text.count(mark)) != len(shown):
            raise UserError(
                f"{at}: the prompt has {len(shown)} images, but {places} places for them in the "
                f"model's input: its chat template leaves some out, or a text contains {mark}"
            )
        columns = self.processor(
            text=[text],
            images=[shown] if shown else None,
            add_special_tokens=self.processor.chat_template is None,
            return_tensors="pt",
        )
        if self.processor.chat_template is None:
            ended = added_end(self.processor.tokenizer, text, columns["input_ids"][0].tolist())
            columns = {
                name: value[:, : value.shape[1] - len(ended)] if name in _BY_TOKEN else value
                for name, value in columns.items()
            }
        ids = columns.pop("input_ids")[0].tolist()
        return ids, self._columns(columns, len(ids)) if shown else None

    def _plain(self, part: Mapping[str, Any]) -> str:
        return self.processor.image_token if part["type"] == "image" else part["text"]

    def _columns(self, columns: Mapping[str, Any], length: int) -> PromptImages:
        """Sort the processor's columns. UserError for an unsupported column."""
        rest = {name: value for name, value in columns.items() if name != "attention_mask"}
        tokens = {name: rest.pop(name)[0].tolist() for name in TOKEN_COLUMNS if name in rest}
        arrays = {name: torch.as_tensor(rest.pop(name)) for name in ARRAY_COLUMNS if name in rest}
        if rest or any(len(column) != length for column in tokens.values()):
            raise UserError(
                f"model.language: {type(self.processor).__name__} returns "
                f"{', '.join(rest or tokens)}, but only models with the columns "
                f"{', '.join((*ARRAY_COLUMNS, *TOKEN_COLUMNS))} are supported, such as Qwen2.5-VL "
                "and LLaVA"
            )
        return PromptImages(tokens, arrays)


@dataclass(frozen=True)
class _Hidden:
    """A forward hook of a head that makes certain tokens impossible."""

    ids: tuple[int, ...]

    def __call__(self, head: nn.Module, inputs: Any, logits: Float[Tensor, "*n v"]) -> Tensor:
        del head, inputs
        ids = torch.tensor(self.ids, device=logits.device, dtype=torch.long)
        return logits.index_fill(-1, ids, torch.finfo(logits.dtype).min)


def row_images(row: Mapping[str, Any], at: str) -> list[Image.Image]:
    """Images of a row's column `images` or `image`. UserErrors begin with `at`."""
    names = [name for name in ROW_COLUMNS if row.get(name) is not None]
    if len(names) > 1:
        if of_given(at):
            raise UserError(f"{at} has the columns images and image: take one out of the file")
        raise UserError(f"{at} has the columns images and image: leave one out (keep)")
    if not names:
        return []
    values = row[names[0]]
    several = values if isinstance(values, list | tuple) else [values]
    return [opened(value, f"{at}, {names[0]}") for value in several]


def opened(value: Any, at: str) -> Image.Image:
    """Open an image in RGB: a path, bytes, a PIL image, or parquet's form {bytes, path}."""
    try:
        return to_rgb(open_image_cell(value))
    except ValueError as error:
        raise UserError(f"{at}: {error}") from error


def _placed(
    turns: Sequence[Mapping[str, Any]], images: Sequence[Image.Image], at: str
) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """Messages with contents as parts, and the images in the order of their places."""
    parts = [_parts(turn["content"], bool(images)) for turn in turns]
    if images and not any(part["type"] == "image" for turn_parts in parts for part in turn_parts):
        first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), 0)
        parts[first] = [*({"type": "image"} for _ in images), *parts[first]]
    row_images, shown = iter(images), list[Image.Image]()
    for part in (part for turn_parts in parts for part in turn_parts if part["type"] == "image"):
        source = part.pop("image", None)
        image = opened(source, at) if source is not None else next(row_images, None)
        if image is None:
            raise UserError(f"{at}: the prompt has a place for an image that the row lacks")
        shown.append(image)
    if left := len(list(row_images)):
        raise UserError(
            f"{at}: the row has {len(images)} images, but its prompt has places for "
            f"{len(images) - left}: add {MARK} to the prompt where each belongs, and to a list of "
            'parts {"type": "image"}'
        )
    return [
        {**turn, "content": turn_parts} for turn, turn_parts in zip(turns, parts, strict=True)
    ], shown


def _parts(content: Any, marked: bool) -> list[dict[str, Any]]:
    """A message's content as parts. `marked`: <image> in a text is the place of an image."""
    if not isinstance(content, str):
        return [dict(part) for part in content]
    pieces = content.split(MARK) if marked else [content]
    parts: list[dict[str, Any]] = []
    for i, piece in enumerate(pieces):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": piece}] if piece or len(pieces) == 1 else []
    return parts


def call_inputs(
    images: Sequence[PromptImages | None],
    starts: Sequence[int],
    width: int,
    model: Any,
) -> dict[str, Tensor]:
    """Inputs of a call besides the tokens [b width]; row i's prompt begins at `starts[i]`.

    UserError if the rows' images differ in more than their number.
    """
    present = [
        (image, start) for image, start in zip(images, starts, strict=True) if image is not None
    ]
    inputs: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for image, _ in present for name in image.tokens):
        whole = torch.zeros(len(images), width, dtype=torch.int64)
        for row, (image, start) in enumerate(zip(images, starts, strict=True)):
            if image is not None:
                column = image.tokens[name]
                whole[row, start : start + len(column)] = torch.tensor(column)
        inputs[name] = uploaded(whole, model.device)
    for name in dict.fromkeys(name for image, _ in present for name in image.arrays):
        parts = [image.arrays[name] for image, _ in present]
        if len({part.shape[1:] for part in parts}) > 1:
            raise UserError(
                f"model.language: {name} has different shapes for different images "
                f"({', '.join(str(list(part.shape)) for part in parts[:3])}), so they cannot "
                "share a call: set train.rows_per_call: 1"
            )
        whole = torch.cat(parts)
        whole = whole.to(model.dtype) if whole.is_floating_point() else whole
        inputs[name] = uploaded(whole, model.device)
    return inputs


def outside_of(model: Any) -> str:
    """A regular expression of the modules outside the language part of a vision-language model."""
    language = model.get_decoder()
    children = [name for name, child in model.base_model.named_children() if child is not language]
    return rf"(.+\.)?({'|'.join(map(re.escape, children))})\..+"
