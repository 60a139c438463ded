"""HPSv3 by the authors' code: python scripts/authors/hpsv3.py CHECKOUT (HPSv3, of August 2025).

Their class on a Qwen2-VL, saved as their released file (safetensors) and scored by their inference
class, whose instruction is a short one here.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from common import (
    HEAD_SETTINGS,
    PROMPTS,
    base_weights,
    checkout,
    digest,
    fill,
    layout,
    pictures,
    png_files,
    qwen_base,
    save,
)

INSTRUCTION = "\nRate it.  \nTextual prompt - {text_prompt}\n\n\n"
SIZES = {"square": (64, 64), "wide": (140, 90)}


def images(kind):
    return pictures(len(PROMPTS), *SIZES[kind], seed=SIZES[kind][0])


def main():
    checkout()
    from hpsv3 import inference
    from hpsv3.train import create_model_and_processor
    from hpsv3.utils import parser
    from safetensors.torch import save_file
    from transformers import Qwen2VLForConditionalGeneration

    text = digest(inference.INSTRUCTION + inference.prompt_with_special_token)
    inference.INSTRUCTION = INSTRUCTION
    folder = Path(tempfile.mkdtemp())
    base = qwen_base(folder / "base", "qwen2_vl")
    base_weights(base, Qwen2VLForConditionalGeneration)
    settings = folder / "settings.yaml"
    settings.write_text(HEAD_SETTINGS.format(head="ranknet", base=base, folder=folder))
    kinds = (parser.DataConfig, parser.TrainingConfig, parser.ModelConfig, parser.PEFTLoraConfig)
    (_, training, model, lora), _ = parser.parse_args_with_yaml(
        kinds, str(settings), is_train=False
    )
    made, _, _ = create_model_and_processor(model, lora, training)
    state = fill(made).state_dict()
    save_file(state, folder / "HPSv3.safetensors")
    scorer = inference.HPSv3RewardInferencer(
        str(settings), str(folder / "HPSv3.safetensors"), device="cpu"
    )
    scores = {}
    for kind in SIZES:
        with torch.no_grad():
            found = scorer.reward(png_files(folder, images(kind)), list(PROMPTS))
        scores[kind] = np.array(found[:, 0])
    save("hpsv3", layout=layout(state), text=text, **scores)


if __name__ == "__main__":
    main()
