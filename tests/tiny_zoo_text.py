"""Tiny encoders of texts and pictures, by the name of the class that a pipeline asks for."""

from collections.abc import Callable
from typing import Any

from transformers import (
    BertConfig,
    BertModel,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5EncoderModel,
)

from tests.tiny_pipelines_parts import SPECIAL, WORDS, clip_config, decoder, t5_config

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


class Texts:
    """Stands for a processor of texts and pictures, of which only texts are given."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer

    def __call__(self, text: list[str], images: None, videos: None, **named: Any) -> Any:
        return self.tokenizer(text, **named)

    def decode(self, tokens: Any) -> str:
        return self.tokenizer.decode(tokens)


def bert() -> BertModel:
    return BertModel(
        BertConfig(
            vocab_size=len(SPECIAL) + len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )


def clip_vision(kind: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: kind(CLIPVisionConfig(**VISION, projection_dim=16))


_LANGUAGE = (
    "LlamaModel", "LlamaForCausalLM", "GemmaPreTrainedModel", "Gemma2PreTrainedModel", "GlmModel",
    "SmolLM3ForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen2_5_VLTextModel", "Qwen3Model", "Qwen3ForCausalLM", "Qwen3VLModel", "PreTrainedModel",
    "Qwen3VLForConditionalGeneration", "T5GemmaEncoder", "T5Gemma2Encoder", "Mistral3Model",
    "Mistral3ForConditionalGeneration",
)  # fmt: skip

# a language model is read by its hidden states alone, so a small one of another class will do
ENCODERS: dict[str, Callable[..., Any]] = {
    "CLIPTextModel": lambda: CLIPTextModel(clip_config(77)),
    "CLIPTextModelWithProjection": lambda: CLIPTextModelWithProjection(clip_config(77)),
    "RobertaSeriesModelWithTransformation": lambda: CLIPTextModel(clip_config(77)),
    "T5EncoderModel": lambda: T5EncoderModel(t5_config()),
    "UMT5EncoderModel": lambda: T5EncoderModel(t5_config()),
    "BertModel": bert,
    "CLIPVisionModel": clip_vision(CLIPVisionModel),
    "CLIPVisionModelWithProjection": clip_vision(CLIPVisionModelWithProjection),
    "SiglipVisionModel": lambda: SiglipVisionModel(SiglipVisionConfig(**VISION)),
} | dict.fromkeys(_LANGUAGE, decoder)
