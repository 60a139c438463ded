"""Settings that make models of diffusers tiny: 1 or 2 layers, width 8 to 32, 4 latent channels."""

from typing import Any

Settings = dict[str, Any]

# as Stable Diffusion's checkpoints say
TRAINED: Settings = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}

FLOW: Settings = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
COG: Settings = {
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "snr_shift_scale": 1.0,
    "timestep_spacing": "trailing",
}
NOISE: Settings = {**TRAINED, "clip_sample": False}
# as an annotation says: (class, settings)
SCHEDULERS: dict[str, tuple[str, Settings]] = {
    "KarrasDiffusionSchedulers": ("DDIMScheduler", NOISE),
    "DDIMScheduler": ("DDIMScheduler", NOISE),
    "DDIMParallelScheduler": ("DDIMParallelScheduler", NOISE),
    "LMSDiscreteScheduler": ("LMSDiscreteScheduler", TRAINED),
    "PiflowScheduler": ("PiflowScheduler", {}),
    "VQDiffusionScheduler": ("VQDiffusionScheduler", {"num_vec_classes": 12}),
    "DDPMScheduler": ("DDPMScheduler", NOISE),
    "PNDMScheduler": ("PNDMScheduler", {**TRAINED, "skip_prk_steps": True}),
    "LCMScheduler": ("LCMScheduler", NOISE),
    "CogVideoXDDIMScheduler": ("CogVideoXDDIMScheduler", COG),
    "CogVideoXDPMScheduler": ("CogVideoXDPMScheduler", COG),
    "DPMSolverMultistepScheduler": ("DPMSolverMultistepScheduler", FLOW),
    "UniPCMultistepScheduler": ("UniPCMultistepScheduler", FLOW),
    "FlowMatchEulerDiscreteScheduler": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    "SchedulerMixin": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    "FlowMapEulerDiscreteScheduler": ("FlowMapEulerDiscreteScheduler", {}),
    "EDMEulerScheduler": ("EDMEulerScheduler", {"sigma_schedule": "karras"}),
    "HeliosScheduler": ("HeliosScheduler", {}),
    "DDIMInverseScheduler": ("DDIMInverseScheduler", NOISE),
    "UnCLIPScheduler": ("UnCLIPScheduler", {}),
    "DDPMWuerstchenScheduler": ("DDPMWuerstchenScheduler", {}),
    "AmusedScheduler": ("AmusedScheduler", {"mask_token_id": 31}),
}

UNET: Settings = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 16,
    "norm_num_groups": 4,
    "attention_head_dim": 2,
}
XL: Settings = {
    "cross_attention_dim": 32,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
    "use_linear_projection": True,
}
DOWN = {
    name: value for name, value in UNET.items() if name not in ("sample_size", "up_block_types")
}
CUBES: Settings = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "cross_attention_dim": 16,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
SMALL_VAE: Settings = {
    "block_out_channels": (8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 4,
    "sample_size": 16,
}
WAN: Settings = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
PIXELS: Settings = {  # transformers with one text width
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
}
PACKED: Settings = {  # FLUX and what came of it
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": (4, 4, 8),
}
STATISTICS: Settings = {"latents_mean": [0.1] * 4, "latents_std": [1.5] * 4}
WAN_VAE: Settings = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True],
    "scale_factor_temporal": 2,
    "scale_factor_spatial": 4,
    **STATISTICS,
}
ADA: Settings = {
    "caption_channels": 16,
    "cross_attention_dim": 16,
    "out_channels": 8,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "in_channels": 4,
    "sample_size": 8,
    "patch_size": 2,
}
SANA: Settings = {
    **PIXELS,
    "in_channels": 4,
    "out_channels": 4,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 16,
    "sample_size": 16,
}
DIT: Settings = {
    **PIXELS,
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_attention_heads": 3,
    "hidden_size": 24,
    "cross_attention_dim": 16,
    "cross_attention_dim_t5": 16,
    "pooled_projection_dim": 16,
    "activation_fn": "gelu-approximate",
}
COG_VIEW: Settings = {
    **PIXELS,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "text_embed_dim": 16,
    "time_embed_dim": 8,
    "condition_dim": 4,
    "pos_embed_max_size": 8,
    "sample_size": 8,
}
SD3: Settings = {
    **PIXELS,
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "joint_attention_dim": 32,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 32,
    "pos_embed_max_size": 8,
}
QWEN: Settings = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}
COGS: Settings = {
    **PIXELS,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 16,
    "sample_width": 2,
    "sample_height": 2,
    "sample_frames": 5,
    "max_text_seq_length": 16,
}
LTX_VAE: Settings = {
    "latent_channels": 8,
    "block_out_channels": (8, 8, 8, 8),
    "decoder_block_out_channels": (8, 8, 8, 8),
    "layers_per_block": (1,) * 5,
    "decoder_layers_per_block": (1,) * 5,
    "spatio_temporal_scaling": (True, True, False, False),
    "decoder_spatio_temporal_scaling": (True, True, False, False),
    "patch_size": 2,
}
COSMOS: Settings = {
    **PIXELS,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "mlp_ratio": 2,
    "text_embed_dim": 16,
    "adaln_lora_dim": 4,
    "max_size": (4, 32, 32),
    "rope_scale": (2.0, 1.0, 1.0),
}
