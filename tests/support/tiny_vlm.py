"""Tiny random vision-language models with processors, made without any download."""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flowrl.session.session import Session
from tests.support import runs, text_runs, tiny_qwen
from tests.support.tiny_lm import LETTERS, sharpened

CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}:{% for p in m['content'] %}"
    "{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
PATCH, SIDE = 4, 8  # pixels: an image has four patches


def picture(seed: int, width: int = 8, height: int = 8) -> Image.Image:
    pixels = torch.randint(
        0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed)
    )
    return Image.fromarray(pixels.byte().numpy())


def tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """A token a letter: 0 pad, 1 the stop token, then `LETTERS`, and a placeholder of images."""
    words = {word: i for i, word in enumerate(("<pad>", "<end>", *LETTERS))}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    made.chat_template = CHAT if chat else None
    return made


def llava(seed: int = 0) -> LlavaForConditionalGeneration:
    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=SIDE, patch_size=PATCH,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=3 + len(LETTERS), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=96, pad_token_id=0, bos_token_id=None,
        eos_token_id=1,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=2 + len(LETTERS),
        vision_feature_layer=-1, image_seq_length=(SIDE // PATCH) ** 2,
    )  # fmt: skip
    made: Any = sharpened(LlavaForConditionalGeneration(config))
    made.generation_config.eos_token_id = 1
    return made


def llava_processor(chat: bool = True) -> LlavaProcessor:
    size = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False)
    return LlavaProcessor(
        image_processor=images, tokenizer=tokenizer(chat), patch_size=PATCH,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=CHAT if chat else None,
    )  # fmt: skip


class ImagesAlone(Qwen2_5_VLProcessor):
    """The processor without its part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor":
            return type(argument)
        return super().check_argument_for_proper_class(argument_name, argument)


def qwen(folder: Path) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]:
    """A Qwen2.5-VL and its processor of images; the configuration is written into `folder`."""
    from transformers import AutoConfig, AutoTokenizer

    tiny_qwen.base_folder(folder, "qwen2_5_vl")
    words = AutoTokenizer.from_pretrained(folder)
    words.eos_token = "<|im_end|>"
    config: Any = AutoConfig.from_pretrained(folder)
    config.text_config.eos_token_id = words.eos_token_id
    config.text_config.bos_token_id = config.text_config.pad_token_id = None
    config.text_config.vocab_size = len(words)
    torch.manual_seed(3)
    model: Any = sharpened(Qwen2_5_VLForConditionalGeneration(config))
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)
    made = ImagesAlone(image_processor=images, tokenizer=words, chat_template=words.chat_template)
    return model, made


def write(folder: Path, chat: bool = True) -> Path:
    """A LLaVA with its processor, as published models are."""
    llava().save_pretrained(folder)
    llava_processor(chat).save_pretrained(folder)
    return folder


def tree(model: Path, folder: Path, **train: Any) -> dict[str, Any]:
    """Settings of a run whose rows have one image, two at marks, or none."""
    settings = text_runs.tree(model, folder, text_runs.GRPO, **train)
    for i in range(4):
        picture(i, 8 + 2 * i, 8).save(folder / f"{i}.png")
    rows: list[dict[str, Any]] = [
        {"prompt": "a:", "image": "0.png"},
        {"prompt": "c<image>b<image>d", "images": ["1.png", "2.png"]},
        {"prompt": "bead :"},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text(text)
    return settings


def session(model: Path, folder: Path, **train: Any) -> Session:
    return runs.opened(tree(model, folder, **train), folder)
