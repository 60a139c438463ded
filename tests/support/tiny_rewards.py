"""Tiny random reward models, saved in folders as the published ones are; and pictures for them."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

from rewards import Samples
from rewards.perception.embedding import OPENAI_MEAN, OPENAI_STD
from tests.support.tiny_pipelines import WORDS

SIDE, LIMIT = 16, 12
PROMPTS = ["a red ball", "a red ball", "two cat on the wide table", "", "one photo of a blue dog"]


def tokenizer(limit: int = LIMIT) -> PreTrainedTokenizerFast:
    """As CLIP's: the end has the highest number and pads too."""
    vocabulary = {word: i for i, word in enumerate(("<unk>", "<start>", *WORDS, "<end>"))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(token, vocabulary[token]) for token in ("<start>", "<end>")]
    words.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=ends
    )
    names = {"unk_token": "<unk>", "bos_token": "<start>"}
    names |= {"eos_token": "<end>", "pad_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=limit, **names)


def clip_folder(folder: Path) -> Path:
    """A CLIPModel with its tokenizer and processor; its weights are spread enough to matter."""
    torch.manual_seed(1)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2}
    text = {"vocab_size": len(WORDS) + 3, "max_position_embeddings": LIMIT, "eos_token_id": 2}
    text |= {"bos_token_id": 1, "pad_token_id": 1}
    vision = {"image_size": SIDE, "patch_size": 4}
    config = CLIPConfig(text_config=small | text, vision_config=small | vision, projection_dim=24)
    config.initializer_factor = 3.0
    model = CLIPModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        model.logit_scale.fill_(2.5)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    CLIPImageProcessor(**size).save_pretrained(folder)
    return folder


def pixels(n: int, height: int = 20, width: int = 27) -> Tensor:
    """Pictures [n 3 h w] in 0..1, not of whole 255ths, with edges."""
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(height))


def samples(media, prompts=PROMPTS, meta=()) -> Samples:
    return Samples(media, prompts, torch.arange(len(prompts)), meta)


def bytes_of(image: Tensor) -> Image.Image:
    whole = np.rint(image.numpy().astype(np.float64) * 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(whole.transpose(1, 2, 0)))


def prepared(image: Tensor, side: int = SIDE) -> Tensor:
    """By hand: 8 bits, the shorter side resized in PIL, the middle, CLIP's mean and spread.

    The sizes used here leave an even number of pixels to cut, where all libraries agree.
    """
    picture = bytes_of(image)
    scale = side / min(picture.size)
    picture = picture.resize([int(length * scale) for length in picture.size], Image.BICUBIC)
    left, top = ((length - side) // 2 for length in picture.size)
    array = np.asarray(picture.crop((left, top, left + side, top + side))) / 255
    array = (array - np.array(OPENAI_MEAN)) / np.array(OPENAI_STD)
    return torch.from_numpy(array.transpose(2, 0, 1)).float()
