"""What single classes of pipelines of videos need beside the tables."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ClassifierFreeGuidance
from torch import nn

from flowrl.models.diffusers.call.inputs import columns
from tests.support.tiny_pipelines_edit import Looker, Reader
from tests.support.tiny_pipelines_parts import tokenizer
from tests.support.zoo.calls import other, prefix
from tests.support.zoo.pipelines import Special, part
from tests.support.zoo.settings import NOISE
from tests.support.zoo.text import wider_vocoder
from tests.support.zoo.vision import resized


class Unworried(nn.Module):
    """Stands for a safety checker that another library brings."""

    device = torch.device("cpu")
    dtype = torch.float32

    def check_text_safety(self, text: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def watching(given: Mapping[str, Any]) -> nn.Module:
    """A language model with a tower for pictures."""
    model = part("text_encoder", ["T5Gemma2Encoder"], {})
    model.vision_tower = part("image_encoder", ["SiglipVisionModel"], {})
    return model


def one_bucket(pipe: Any) -> None:
    """A pipeline's megapixel, made 16 x 16."""
    vars(sys.modules[type(pipe.vae_image_processor).__module__])["BUCKETS"][1024] = [(16, 16)]


def unworried(given: Mapping[str, Any]) -> nn.Module:
    return Unworried()


VIDEO_SPECIALS: dict[str, Special] = {
    "AnimateDiff.*|PIA.*|I2VGen.*|TextToVideoSD.*|VideoToVideoSD.*": Special(
        call={"num_frames": 2}
    ),
    "LattePipeline": Special(call={"video_length": 2, "mask_feature": False}),
    "LTX.*": Special(call={"height": 32, "width": 32, "num_frames": 9}),
    "CogVideoX(ImageToVideo|FunControl)Pipeline|ConsisID.*": Special(
        {"transformer": {"in_channels": 8}}
    ),
    "Hunyuan(Video|Skyreels)(?!15).*": Special(
        {"tokenizer": lambda given: tokenizer(64)},
        {"prompt_template": {"template": "{}", "crop_start": 0}},
    ),
    "HunyuanSkyreels.*": Special({"transformer": {"in_channels": 8}}),
    "Cosmos.*": Special({"safety_checker": unworried}),
    "Cosmos2.*": Special({"scheduler": {"use_karras_sigmas": True}}, after=resized),
    "Cosmos2_5_Transfer.*": Special({"transformer": {"controlnet_block_every_n": 1}}),
    "Cosmos2_5.*": Special(
        {
            "transformer": {"text_embed_dim": 32},
            "controlnet": {"text_embed_dim": 32},
            "scheduler": {"use_karras_sigmas": False},
        },
        {
            "controls": columns.placeholder_images(["video"], 16, 16, 5)["video"],
            "num_frames_per_chunk": 5,
        },
    ),
    "Cosmos2VideoToWorldPipeline|CosmosVideoToWorldPipeline|Cosmos2_5.*": Special(
        {"transformer": {"in_channels": 5}}
    ),
    "WanImageToVideoPipeline|SkyReelsV2ImageToVideo.*|ChronoEdit.*": Special(
        {
            "transformer": {"in_channels": 10, "image_dim": 16, "added_kv_proj_dim": 24},
        }
    ),
    "LucyEditPipeline": Special({"transformer": {"in_channels": 8}}),
    "MochiPipeline": Special({"scheduler": {"invert_sigmas": True}}, {"num_frames": 7}),
    "AllegroPipeline": Special(
        {"scheduler": NOISE}, {"num_frames": 8}, lambda pipe: pipe.vae.enable_tiling()
    ),
    "EasyAnimate.*": Special(call={"negative_prompt": "bad"}),
    "Kandinsky5.*": Special(
        {"tokenizer": lambda given: Looker(tokenizer(512))},
        after=prefix(prompt_template="{}", prompt_template_encode_start_idx=0),
    ),
    "Kandinsky5I2I.*": Special(after=prefix(resolutions=[(16, 16)], vae_scale_factor_spatial=2)),
    "Kandinsky5I2.*": Special({"transformer": {"visual_cond": True, "in_visual_dim": 4}}),
    "HunyuanVideo15.*": Special(
        {
            "guider": lambda given: ClassifierFreeGuidance(),
            "feature_extractor": other("feature_extractor"),
            "image_encoder": other("SiglipVisionModel"),
            "transformer": {"target_size": 16},
        },
        after=prefix(system_message="", prompt_template_encode_start_idx=0),
    ),
    "HunyuanVideo15Image.*": Special({"transformer": {"task_type": "i2v"}}),
    "HunyuanVideoFramepack.*": Special(
        call={"num_frames": 5, "latent_window_size": 2, "height": 64, "width": 64}
    ),
    "MotifVideoImage2.*": Special({"text_encoder": watching}),
    "Kandinsky6.*": Special(
        {"tokenizer": lambda given: Looker(tokenizer(512))}, {"sample_audio": False}
    ),
    "Kandinsky5I2V.*": Special(call={"num_frames": 25}),
    "JoyImage.*": Special(after=one_bucket),
    "MotifVideo.*": Special({"guider": lambda given: ClassifierFreeGuidance()}),
    "Sana(Video|Image).*": Special({"vae": other("AutoencoderKLWan")}),
    "SanaWM.*": Special(
        call={
            "action": "w-8",
            "intrinsics": [32.0, 32.0, 16.0, 16.0],
            "height": 64,
            "width": 64,
            "num_frames": 9,
        }
    ),
    "HunyuanVideoImageTo.*": Special(
        {
            "transformer": {"image_condition_type": "token_replace"},
            "text_encoder": lambda given: Reader(),
        },
        {
            "prompt_template": {
                "template": "{}",
                "crop_start": 0,
                "image_emb_len": 4,
                "image_emb_start": 1,
                "image_emb_end": 5,
            }
        },
    ),
    "SkyReelsV2DiffusionForcingVideo.*": Special(call={"overlap_history": 3}),
    "TextToVideoZero.*": Special(call={"video_length": 2, "t0": 0, "t1": 1}),
    "WanAnimate.*": Special(
        {"vae": {"temperal_downsample": [True, True], "scale_factor_temporal": 4}},
        {"segment_frame_length": 9},
    ),
    "HeliosPipeline": Special(
        {"scheduler": {"stages": 1, "stage_range": [0, 1]}}, {"num_latent_frames_per_chunk": 3}
    ),
    "LTX2.*": Special(
        {"transformer": {"perturbed_attn": True}},
        {"spatio_temporal_guidance_blocks": [0], "height": 64, "width": 64},
    ),
}

_GATED = {"gated_attn": True, "audio_gated_attn": True}
LTX23 = {  # LTX-2.3 is LTX2Pipeline with parts of other settings
    "LTX2.*": Special(
        {
            "transformer": _GATED
            | {"perturbed_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True}
            | {"use_prompt_embeddings": False, "rope_type": "split"},
            "connectors": {"video_gated_attn": True, "audio_gated_attn": True, "proj_bias": True}
            | {"per_modality_projections": True, "video_hidden_dim": 16, "audio_hidden_dim": 16}
            | {"rope_type": "split"},
            "vocoder": wider_vocoder,
        },
        VIDEO_SPECIALS["LTX2.*"].call,
    )
}
