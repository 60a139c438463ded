"""Tiny settings of the models of sound alone: 4 latent channels, 800 numbers of sound a second."""

from tests.support.zoo.settings import UNET, Settings

ACE: Settings = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 8,
}
# of a tiny vae each: some 100 numbers of sound for 12 to 25 numbers of time in the latents
SOUNDS: dict[str, Settings] = {
    "AutoencoderOobleck": {
        "encoder_hidden_size": 8,
        "downsampling_ratios": [2, 4],
        "channel_multiples": [1, 2],
        "decoder_channels": 6,
        "decoder_input_channels": 4,
        "sampling_rate": 800,
    },
    "StableAudioDiTModel": {
        "sample_size": 16,
        "in_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "num_key_value_attention_heads": 1,
        "out_channels": 4,
        "cross_attention_dim": 8,
        "time_proj_dim": 8,
        "global_states_input_dim": 32,
        "cross_attention_input_dim": 16,
    },
    "StableAudioProjectionModel": {
        "text_encoder_dim": 16,
        "conditioning_dim": 16,
        "min_value": 0.0,
        "max_value": 32.0,
    },
    "AutoencoderSAME": {
        "patch_size": 4,
        "encoder_channels": 4,
        "encoder_c_mults": (2,),
        "encoder_strides": (2,),
        "encoder_transformer_depths": (1,),
        "latent_dim": 4,
        "dim_heads": 4,
        "ff_mult": 2,
        "sampling_rate": 800,
    },
    "StableAudio3DiTModel": {
        "io_channels": 4,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "cond_token_dim": 16,
        "global_cond_dim": 16,
        "local_add_cond_dim": 5,
        "timestep_features_dim": 8,
        "ff_mult": 2.0,
        "num_memory_tokens": 2,
    },
    "StableAudio3DurationEmbedder": {"output_dim": 16, "fourier_dim": 8},
    "LongCatAudioDiTTransformer": {
        "dit_dim": 16,
        "dit_depth": 2,
        "dit_heads": 2,
        "dit_text_dim": 16,
        "latent_dim": 4,
        "ff_mult": 2.0,
    },
    "LongCatAudioDiTVae": {
        "channels": 8,
        "c_mults": [1, 2],
        "strides": [2],
        "latent_dim": 4,
        "encoder_latent_dim": 8,
        "downsampling_ratio": 2,
        "sample_rate": 800,
    },
    "AceStepTransformer1DModel": ACE
    | {"num_hidden_layers": 2, "in_channels": 12, "audio_acoustic_hidden_dim": 4},
    "AceStepConditionEncoder": ACE
    | {
        "text_hidden_dim": 16,
        "timbre_hidden_dim": 4,
        "num_lyric_encoder_hidden_layers": 1,
        "num_timbre_encoder_hidden_layers": 1,
    },
    "AudioLDM2UNet2DConditionModel": {
        **{name: UNET[name] for name in ("layers_per_block", "norm_num_groups", "sample_size")},
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": [None, 16],
        "attention_head_dim": 2,
        "transformer_layers_per_block": 1,
    },
    "AudioLDM2ProjectionModel": {
        "text_encoder_dim": 16,
        "text_encoder_1_dim": 16,
        "langauge_model_dim": 16,
    },
}
