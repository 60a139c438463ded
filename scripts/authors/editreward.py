"""EditReward by the authors' code: python scripts/authors/editreward.py CHECKOUT (EditReward).

Their class with two heads on a Qwen2.5-VL, with Qwen's system sentence and with MiMo-VL's, saved as
a state in `model.pth` and scored by their inference class, whose questions are short ones here.
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

SYSTEM = {"qwen": "You are a helpful assistant."}
SYSTEM["mimo"] = "You are MiMo, an AI assistant developed by Xiaomi."
QUESTIONS = ("\nDoes it follow?  \n{text_prompt}\n", "\nIs it good? \n{text_prompt}\n")
SIZES = ((60, 52), (140, 90))  # of the sources, of the edits


def images():
    return [pictures(len(PROMPTS), *size, seed=size[0]) for size in SIZES]


def main():
    checkout()
    from EditReward import inference_edit
    from EditReward.train_qwen2_5_edit import create_model_and_processor
    from EditReward.utils import parser
    from transformers import Qwen2_5_VLForConditionalGeneration

    names = ("INSTRUCTION_EDIT_FOLLOWING", "INSTRUCTION_EDIT_QUALITY")
    texts = {name: digest(getattr(inference_edit, name)) for name in names}
    for name, question in zip(names, QUESTIONS, strict=True):
        setattr(inference_edit, name, question)
    for kind, system in SYSTEM.items():
        folder = Path(tempfile.mkdtemp())
        base = qwen_base(folder / "base", "qwen2_5_vl", system)
        base_weights(base, Qwen2_5_VLForConditionalGeneration)
        sources, edits = (png_files(Path(tempfile.mkdtemp()), shown) for shown in images())
        scores = {}
        for pooling in ("mean", "min", "sum"):
            settings = folder / "settings.yaml"
            settings.write_text(
                HEAD_SETTINGS.format(head="ranknet_multi_head", base=base, folder=folder)
                + f"pooling_strategy: {pooling}\n"
            )
            kinds = (parser.DataConfig, parser.TrainingConfig, parser.ModelConfig)
            kinds = (*kinds, parser.PEFTLoraConfig)
            (_, training, model, lora), _ = parser.parse_args_with_yaml(
                kinds, str(settings), is_train=False
            )
            made, _, _ = create_model_and_processor(model, lora, training)
            state = fill(made).state_dict()
            torch.save(state, folder / "model.pth")
            scorer = inference_edit.EditRewardInferencer(str(settings), str(folder), "cpu")
            with torch.no_grad():
                found = scorer.reward(list(PROMPTS), sources, edits)
            scores[pooling] = np.array(found[:, 0])
        save(f"editreward_{kind}", layout=layout(state), **texts, **scores)


if __name__ == "__main__":
    main()
