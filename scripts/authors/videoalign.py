"""VideoReward by the authors' code: python scripts/authors/videoalign.py CHECKOUT (VideoAlign).

Their class with the three outputs of the training script and with the one output of the released
file, wrapped by peft and saved whole as their trainer does; scored by their inference class. Frames
come from memory in place of decord, and the instruction is a short one with their three tokens.
"""

import json
import sys
import tempfile
import types
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from common import PROMPTS, base_weights, checkout, digest, fill, layout, pictures, qwen_base, save

TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
INSTRUCTION = (
    f"\nRate the looks: {TOKENS[0]}\nEND\n\nRate the motion: {TOKENS[1]}\nEND\n\n"
    f"Textual prompt - {{text_prompt}}\nRate the match: {TOKENS[2]}\nEND\n"
)
NORMS = {"VQ_mean": 0.1, "VQ_std": 2.0, "MQ_mean": -0.2, "MQ_std": 0.5, "TA_mean": 0.3}
NORMS["TA_std"] = 1.5
FPS = 8.0
SIZES = {"even": (12, 280, 392), "resized": (12, 96, 160)}  # frames, height, width


def videos(kind):
    frames, height, width = SIZES[kind]
    whole = pictures(len(PROMPTS) * frames, height, width, seed=height)
    return whole.reshape(len(PROMPTS), frames, height, width, 3)


class Reader:
    """decord's VideoReader, of frames in memory."""

    kept: ClassVar[dict] = {}

    def __init__(self, path):
        self.frames = self.kept[path.replace("file://", "")]

    def __len__(self):
        return len(self.frames)

    def get_avg_fps(self):
        return FPS

    def get_batch(self, places):
        chosen = self.frames[list(places)]
        return types.SimpleNamespace(asnumpy=lambda: chosen)


def plain_attention(create):
    """Their inference asks for flash attention, which a CPU has not."""

    def created(model_config, peft_lora_config, training_args):
        training_args.disable_flash_attn2 = True
        return create(model_config, peft_lora_config, training_args)

    return created


def main():
    checkout()
    import inference
    import prompt_template
    import vision_process
    from data import DataConfig
    from train_reward import create_model_and_processor
    from transformers import Qwen2VLForConditionalGeneration
    from utils import ModelConfig, PEFTLoraConfig, TrainingConfig

    sys.modules["decord"] = types.SimpleNamespace(VideoReader=Reader)
    vision_process.get_video_reader_backend = lambda: "decord"
    inference.create_model_and_processor = plain_attention(create_model_and_processor)
    own = digest(prompt_template.DETAILED_PROMPT_WITH_SPECIAL_TOKEN)
    prompt_template.DETAILED_PROMPT_WITH_SPECIAL_TOKEN = INSTRUCTION
    for outputs in (1, 3):
        folder = Path(tempfile.mkdtemp())
        base = qwen_base(folder / "base", "qwen2_vl")
        base_weights(base, Qwen2VLForConditionalGeneration)
        data = DataConfig(max_frame_pixels=200704, eval_dim=["VQ", "MQ", "TA"])
        data.prompt_template_type = "detailed_special"
        model = ModelConfig(str(base), output_dim=outputs, use_special_tokens=True)
        model.torch_dtype, model.reward_token, model.loss_type = "float32", "special", "btt"
        lora = PEFTLoraConfig(lora_enable=True, lora_r=4, lora_alpha=8)
        lora.lora_namespan_exclude = ["lm_head", "rm_head", "embed_tokens", "visual"]
        training = TrainingConfig(output_dir=str(folder), disable_flash_attn2=True)
        config = {"data_config": asdict(data), "model_config": asdict(model)}
        config |= {"peft_lora_config": asdict(lora), "training_args": {"bf16": False}}
        made, _, _ = create_model_and_processor(model, lora, training)
        state = fill(made).state_dict()
        (folder / "checkpoint-10").mkdir()
        torch.save(state, folder / "checkpoint-10" / "model.pth")
        written = json.dumps({**config, "inference_config": NORMS})
        (folder / "model_config.json").write_text(written)
        scorer = inference.VideoVLMRewardInference(str(folder), device="cpu", dtype=torch.float32)
        arrays = {"layout": layout(state), "config": written, "instruction": INSTRUCTION}
        for kind in SIZES:
            Reader.kept = {f"/{i}.mp4": video for i, video in enumerate(videos(kind))}
            with torch.no_grad():
                found = scorer.reward(list(Reader.kept), list(PROMPTS), use_norm=True)
            rows = [[row[part] for part in ("VQ", "MQ", "TA", "Overall")] for row in found]
            arrays[kind] = np.array(rows)
        save(f"videoalign_{outputs}", text=own, **arrays)


if __name__ == "__main__":
    main()
