"""Start a run at the true size of SD3.5-medium's or Wan 2.1 1.3B's denoiser, on a CPU.

    python scripts/benchmarks/real_sizes.py sd35 --guidance 5 --height 512 --width 512
    python scripts/benchmarks/real_sizes.py wan --guidance 5 --height 160 --frames 5
    python scripts/benchmarks/real_sizes.py sd35 --neighbours 0.01     must be refused

The denoiser has its published configuration with random weights in bfloat16, adapters of rank 16;
text encoders are of the published width with one layer, and the decoder has the published factors
of size with few channels. `flowrl train` runs one iteration of few steps: its lines
show the proof and the noise floor. `--neighbours` adds a share of another row's output to each.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import diffusers  # noqa: E402
from transformers import (  # noqa: E402
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from flowrl.cli.app import exit_code  # noqa: E402
from flowrl.models.diffusers.policy import PipelinePolicy  # noqa: E402
from tests.support.tiny_models import model  # noqa: E402
from tests.support.tiny_pipelines_parts import SPECIAL, WORDS, clip_config, tokenizer  # noqa: E402
from tests.support.zoo.settings import FLOW  # noqa: E402

SD35 = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 24,
    "attention_head_dim": 64, "num_attention_heads": 24, "joint_attention_dim": 4096,
    "caption_projection_dim": 1536, "pooled_projection_dim": 2048, "out_channels": 16,
    "pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm",
}  # fmt: skip
WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 12, "attention_head_dim": 128,
    "in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960,
    "num_layers": 30, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6,
}  # fmt: skip
# the decoders' factors of size; the channels are few
EIGHTH = {
    "block_out_channels": (8, 8, 8, 8), "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "norm_num_groups": 4, "latent_channels": 16,
}  # fmt: skip
WAN_EIGHTH = {
    "dim_mult": [1, 1, 1, 1], "temperal_downsample": [False, True, True], "z_dim": 16,
    "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16,
    "scale_factor_temporal": 4, "scale_factor_spatial": 8,
}  # fmt: skip
TOKENS = 77


def t5() -> T5EncoderModel:
    words = len(SPECIAL) + len(WORDS)
    size = {"d_model": 4096, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5EncoderModel(T5Config(vocab_size=words, **size))


def clip(width: int, heads: int) -> CLIPTextModelWithProjection:
    config = clip_config(TOKENS).to_dict()
    config |= {"hidden_size": width, "projection_dim": width, "num_attention_heads": heads}
    return CLIPTextModelWithProjection(CLIPTextConfig(**config | {"num_hidden_layers": 1}))


def sd35() -> Any:
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(**SD35),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=model("AutoencoderKL", **EIGHTH),
        text_encoder=clip(768, 12),
        tokenizer=tokenizer(TOKENS),
        text_encoder_2=clip(1280, 20),
        tokenizer_2=tokenizer(TOKENS),
        text_encoder_3=t5(),
        tokenizer_3=tokenizer(TOKENS),
    )


def wan() -> Any:
    return diffusers.WanPipeline(
        transformer=diffusers.WanTransformer3DModel(**WAN),
        scheduler=diffusers.UniPCMultistepScheduler(**FLOW),
        vae=model("AutoencoderKLWan", **WAN_EIGHTH),
        text_encoder=t5(),
        tokenizer=tokenizer(TOKENS),
    )


def settings(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    prompts = folder / "prompts.jsonl"
    texts = ("a red ball", "a blue cube on the table left of a cat")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    call: dict[str, Any] = {"max_sequence_length": TOKENS}
    size = {"height": given.height, "width": given.width}
    if given.model == "wan":
        call |= {"num_frames": given.frames}
    return {
        "recipe": {"name": "flow_grpo", "steps": given.steps, "group": 2},
        "model": {
            "pipeline": str(folder / "model"), "dtype": "bfloat16", "lora": {"rank": 16},
            "device": "cpu", "guidance": {"sample": given.guidance, "train": given.guidance},
            "call": call, **size,
        },
        "prompts": {"train": str(prompts), "per_iteration": 1},
        "rewards": [{"name": "brightness"}],
        "train": {"iterations": 1, "rows_per_call": 2, "gradient_checkpointing": True},
    }  # fmt: skip


def mixed(share: float) -> None:
    """Let every pipeline that is loaded from now on mix a share of the next row into each."""
    load = PipelinePolicy.load.__func__  # type: ignore[attr-defined]

    def loaded(kind: Any, source: str, **how: Any) -> PipelinePolicy:
        policy = load(kind, source, **how)
        network = policy.denoisers[0]
        real = network.forward

        def forward(*args: Any, **named: Any) -> Any:
            output = real(*args, **named)[0]
            return (output + share * output.roll(1, 0),)

        vars(network)["forward"] = forward
        return policy

    vars_of: Any = PipelinePolicy
    vars_of.load = classmethod(loaded)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", choices=("sd35", "wan"))
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--frames", type=int, default=5)
    parser.add_argument("--height", type=int, default=256, help="pixels")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--neighbours", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(given.seed)
        torch.set_default_dtype(torch.bfloat16)
        {"sd35": sd35, "wan": wan}[given.model]().save_pretrained(folder / "model")
        torch.set_default_dtype(torch.float32)
        file = folder / "real_size.yaml"
        file.write_text(yaml.safe_dump(settings(given, folder)))
        if given.neighbours:
            mixed(given.neighbours)
        began, cpu = time.perf_counter(), time.process_time()
        code = exit_code(["train", str(file), "--folder", str(folder / "run"), "--no-cache"])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{given.model}, guidance {given.guidance:g}, {given.steps} steps: exit code {code}, "
            f"{time.perf_counter() - began:.0f} s, {time.process_time() - cpu:.0f} CPU s, peak "
            f"{peak:.1f} GiB, {torch.get_num_threads()} threads"
        )


if __name__ == "__main__":
    main()
