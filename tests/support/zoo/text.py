"""Tiny encoders of texts and pictures, by the name of the class that a pipeline asks for."""

from collections.abc import Callable
from typing import Any

from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder, LTX2VocoderWithBWE
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    Qwen3VLConfig,
    Qwen3VLModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5EncoderModel,
)

from tests.support.tiny_pipelines_parts import (
    SPECIAL,
    WORDS,
    clip_config,
    decoder,
    decoder_config,
    t5_config,
)

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


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


def connectors(**more: Any) -> LTX2TextConnectors:
    heads: dict[str, Any] = {
        f"{kind}_connector_{name}": value
        for kind in ("video", "audio")
        for name, value in (
            ("num_attention_heads", 2),
            ("attention_head_dim", 8),
            ("num_layers", 1),
            ("num_learnable_registers", 8),
        )
    }
    return LTX2TextConnectors(caption_channels=16, text_proj_in_factor=3, **heads, **more)


def vocoder() -> LTX2Vocoder:
    return LTX2Vocoder(
        in_channels=32,
        hidden_channels=8,
        upsample_kernel_sizes=[4],
        upsample_factors=[2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
    )


def wider_vocoder(_: Any) -> LTX2VocoderWithBWE:
    """LTX-2.3's: the spectrum of a first sound makes a second one of three times its rate."""
    return LTX2VocoderWithBWE(
        in_channels=32, hidden_channels=8, upsample_kernel_sizes=[4], upsample_factors=[2],
        resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], bwe_in_channels=8,
        bwe_hidden_channels=8, bwe_upsample_kernel_sizes=[12], bwe_upsample_factors=[6],
        bwe_resnet_kernel_sizes=[3], bwe_resnet_dilations=[[1, 3, 5]], filter_length=8,
        hop_length=2, window_length=8, num_mel_channels=4,
    )  # fmt: skip


def seeing() -> Qwen3VLModel:
    """Its text model is read layer by layer, with positions in time and space."""
    text = {"head_dim": 8, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
    return Qwen3VLModel(
        Qwen3VLConfig(
            text_config=decoder_config().to_dict() | text,
            vision_config=vision | {"intermediate_size": 16, "deepstack_visual_indexes": []},
        )
    )


_LANGUAGE = (
    "LlamaModel", "LlamaForCausalLM", "GemmaPreTrainedModel", "Gemma2PreTrainedModel", "GlmModel",
    "SmolLM3ForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen2_5_VLTextModel", "Qwen3Model", "Qwen3ForCausalLM", "Qwen3VLModel", "PreTrainedModel",
    "Qwen3VLForConditionalGeneration", "T5GemmaEncoder", "T5Gemma2Encoder", "Mistral3Model",
    "Mistral3ForConditionalGeneration", "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
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
    "LTX2TextConnectors": connectors,
    "LTX2Vocoder": vocoder,
    "LTX2VocoderWithBWE": vocoder,
} | dict.fromkeys(_LANGUAGE, decoder)
