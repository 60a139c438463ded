"""A tiny random CLAP, which hears a sound and reads its prompt."""

from pathlib import Path

import torch
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel

from tests.support.tiny_pipelines_parts import chat_tokenizer


def saved_clap(folder: Path) -> str:
    """Save one of the published architecture in a folder, with its own feature extractor."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer(64)
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 66,
        "projection_dim": 8, "pad_token_id": tokenizer.pad_token_id or 0,
    }  # fmt: skip
    audio = {
        "spec_size": 64, "num_mel_bins": 16, "patch_embeds_hidden_size": 16, "depths": [1, 1],
        "num_attention_heads": [2, 2], "hidden_size": 32, "patch_size": 4, "patch_stride": [4, 4],
        "num_classes": 4, "window_size": 4, "projection_dim": 8, "enable_fusion": False,
    }  # fmt: skip
    config = ClapConfig(text_config=text, audio_config=audio, projection_dim=8)
    ClapModel(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ClapFeatureExtractor(
        feature_size=16, sampling_rate=8000, hop_length=80, max_length_s=1, fft_window_size=256,
        frequency_max=4000, truncation="rand_trunc",
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)
