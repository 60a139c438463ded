"""What single classes of pipelines of sound need beside the tables."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from diffusers import EDMDPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from torch import nn
from transformers import (
    ClapConfig,
    ClapModel,
    ClapTextModelWithProjection,
    GPT2Config,
    GPT2LMHeadModel,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
)

from tests.support.tiny_pipelines_parts import SPECIAL, WORDS, tokenizer
from tests.support.zoo.pipelines import Special, part

WORD_COUNT = len(SPECIAL) + len(WORDS)


def solver(_: Any) -> EDMDPMSolverMultistepScheduler:
    """Of Stable Audio's formulation (v, data of size 1), without the SDE's noise."""
    return EDMDPMSolverMultistepScheduler(
        prediction_type="v_prediction", sigma_data=1.0, sigma_min=0.3, sigma_max=50.0
    )


def few_steps(_: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=1.0, num_train_timesteps=1)


def clap_config() -> ClapConfig:
    text = {
        "vocab_size": WORD_COUNT, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 80,
        "projection_dim": 16,
    }  # fmt: skip
    heard = {
        "spec_size": 64, "num_mel_bins": 16, "patch_embeds_hidden_size": 8, "hidden_size": 8,
        "depths": [1, 1], "num_attention_heads": [1, 1], "window_size": 4, "patch_size": 4,
        "patch_stride": [4, 4], "num_classes": 2, "projection_dim": 16,
    }  # fmt: skip
    return ClapConfig(text_config=text, audio_config=heard, projection_dim=16)


def roberta(_: Any) -> Any:
    """Its class decides how a pipeline pads."""
    made = tokenizer(77)
    made.__class__ = transformers.RobertaTokenizer
    return made


def t5_words(_: Any) -> Any:
    made = tokenizer(32)
    made.__class__ = transformers.T5Tokenizer
    return made


def gpt(_: Any) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=16,
            n_layer=1,
            n_head=2,
            vocab_size=64,
            n_ctx=64,
            max_new_tokens=4,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def hifi(_: Any) -> nn.Module:
    return SpeechT5HifiGan(
        SpeechT5HifiGanConfig(
            model_in_dim=8, sampling_rate=800, upsample_initial_channel=8, upsample_rates=[2, 2],
            upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1]],
            normalize_before=False, initializer_range=0.4,
        )
    )  # fmt: skip


def mel_vae(_: Any) -> nn.Module:
    return part("vae", ["AutoencoderKL"], {"in_channels": 1, "out_channels": 1})


def silent(pipe: Any) -> None:
    """The learned silence of a timbre encoder, and the condition without a prompt."""
    torch.manual_seed(3)
    encoder = pipe.condition_encoder
    encoder.silence_latent = 0.1 * torch.randn(1, 20, 4)
    encoder.null_condition_emb = nn.Parameter(torch.randn(1, 1, 16))


def waveform(_: Mapping[str, Any] = {}) -> torch.Tensor:
    draws = torch.Generator().manual_seed(0)
    return 0.3 * torch.randn(1, 2, 96, generator=draws)


CLASSED_UNET = {  # the sound's text is a class
    "class_embed_type": "simple_projection",
    "projection_class_embeddings_input_dim": 16,
    "class_embeddings_concat": True,
}
SOUND_SPECIALS: dict[str, Special] = {
    "StableAudioPipeline": Special({"scheduler": solver}, {"audio_end_in_s": 0.125}),
    "StableAudio3.*": Special(
        {"scheduler": few_steps, "text_encoder": lambda given: part("t", ["T5EncoderModel"], {})},
        {"duration": 0.125},
    ),
    "LongCatAudio.*": Special(call={"audio_duration_s": 0.05}),
    "AceStep.*": Special(
        {"scheduler": few_steps, "text_encoder": lambda given: part("t", ["Qwen3Model"], {})},
        {"audio_duration": 0.125, "lyrics": ""},
        silent,
    ),
    "AudioLDM2Pipeline": Special(
        {
            "vae": mel_vae,
            "text_encoder": lambda given: ClapModel(clap_config()),
            "tokenizer": roberta,
            "tokenizer_2": t5_words,
            "language_model": gpt,
            "vocoder": hifi,
            "feature_extractor": lambda given: None,
        },
        {"audio_length_in_s": 0.08},
    ),
    "AudioLDMPipeline": Special(
        {
            "vae": mel_vae,
            "text_encoder": lambda given: ClapTextModelWithProjection(clap_config().text_config),
            "tokenizer": roberta,
            "unet": CLASSED_UNET,
            "vocoder": hifi,
        },
        {"audio_length_in_s": 0.08},
    ),
    "MusicLDMPipeline": Special(
        {
            "vae": mel_vae,
            "text_encoder": lambda given: ClapModel(clap_config()),
            "tokenizer": roberta,
            "unet": CLASSED_UNET,
            "vocoder": hifi,
            "feature_extractor": lambda given: None,
        },
        {"audio_length_in_s": 0.08},
    ),
}

_GIVEN = {"audio": waveform()}
_PART = _GIVEN | {"mask_start_seconds": 0.03, "mask_end_seconds": 0.08}
# of each class: further arguments of its call by what they are, and whether guidance is tried
INPUTS: dict[str, dict[str, tuple[Mapping[str, Any], bool]]] = {
    "StableAudioPipeline": {
        "prompt": ({}, True),
        "prompt, negative prompt": ({"negative_prompt": "bad"}, True),
        "prompt, initial_audio_waveforms": (
            {"initial_audio_waveforms": waveform(), "initial_audio_sampling_rate": 800},
            True,
        ),
    },
    "StableAudio3Pipeline": {
        "prompt": ({}, True),
        "prompt, negative prompt": ({"negative_prompt": "bad"}, True),
    },
    "StableAudio3InpaintPipeline": {"prompt, waveform, seconds to fill": (_PART, True)},
    "StableAudio3AudioToAudioPipeline": {
        "prompt, waveform, init_noise_level 1": (_GIVEN, True),
        "prompt, waveform, init_noise_level 0.7": (_GIVEN | {"init_noise_level": 0.7}, True),
    },
    "AceStepPipeline": {
        "prompt, lyrics, guided": ({}, True),
        "prompt, lyrics": ({}, False),
        "prompt, lyrics, src_audio to repaint": (
            {
                "src_audio": waveform()[0],
                "task_type": "repaint",
                "repainting_start": 0.03,
                "repainting_end": 0.08,
            },
            False,
        ),
        "prompt, lyrics, reference_audio": ({"reference_audio": waveform()[0]}, False),
    },
}
