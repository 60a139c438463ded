"""A tiny Qwen-VL with the real chat tokens, and its state under the names of published files."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2VLConfig,
    Qwen2VLModel,
)

from scripts.authors.common import chat_template

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
SPECIAL = (*SPECIAL, "<|image_pad|>", "<|video_pad|>")
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
SEEN = {"qwen2_vl": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32}}
SEEN["qwen2_5_vl"] = {
    **{"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32},
    **{"intermediate_size": 48, "fullatt_block_indexes": [1], "window_size": 112},
}
KINDS = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLModel),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLModel),
}


def base_folder(folder: Path, kind: str = "qwen2_vl") -> Path:
    """The configuration and tokenizer: characters, and the chat tokens."""
    letters = [chr(i) for i in range(10, 127)]
    tokens = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, [], unk_token=" "))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokens.decoder = decoders.Fuse()
    tokens.add_special_tokens(list(SPECIAL))
    words = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token=SPECIAL[0])
    words.chat_template = chat_template("You are a helpful assistant.")
    words.save_pretrained(folder)
    ids = {f"{name}_token_id": tokens.token_to_id(f"<|{name}_pad|>") for name in ("image", "video")}
    config = KINDS[kind][0](
        text_config={**TEXT, "vocab_size": 500}, vision_config=SEEN[kind], **ids
    )
    config.save_pretrained(folder)
    return folder


def whole_tokenizer(folder: Path, tokens: tuple[str, ...]) -> PreTrainedTokenizerFast:
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    words.add_special_tokens({"additional_special_tokens": list(tokens)})
    return words


def tiny_model(folder: Path, vocabulary: int):
    """The model of the folder's configuration, with weights that are spread enough to matter."""
    from transformers import AutoConfig

    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(folder)
    config.text_config.vocab_size = vocabulary
    model = KINDS[config.model_type][1](config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.add_(0.15 * torch.randn_like(weight))
    return model


def old_names(model) -> dict[str, Tensor]:
    """The names of transformers up to 4.46."""
    return {
        name.replace("language_model.", "model.", 1) if "language_model." in name else name: value
        for name, value in model.state_dict().items()
    }


def new_names(model) -> dict[str, Tensor]:
    return {f"model.{name}": value for name, value in model.state_dict().items()}


def head(prefix: str, *sizes: int) -> dict[str, Tensor]:
    """Linear layers at the places 0, 3, 5, as a dropout stands at 2."""
    rng = torch.Generator().manual_seed(5)
    state = {}
    for place, fan_in, fan_out in zip((0, 3, 5), sizes, sizes[1:], strict=False):
        state[f"{prefix}{place}.weight"] = torch.randn(fan_out, fan_in, generator=rng) / fan_in**0.5
        state[f"{prefix}{place}.bias"] = torch.randn(fan_out, generator=rng)
    return state
