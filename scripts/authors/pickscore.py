"""PickScore by the authors' example: python scripts/authors/pickscore.py CHECKOUT (PickScore).

The function of their README, run on a tiny CLIP; it returns probabilities, so its scores are taken
before the softmax.
"""

import re
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import PROMPTS, checkout, clip_base, fill, layout, pictures, png_files, save
from PIL import Image

SIZES = {"square": (64, 64), "wide": (90, 140)}


def images(kind):
    return pictures(len(PROMPTS), *SIZES[kind], seed=SIZES[kind][0])


def main():
    readme = (checkout() / "README.md").read_text(encoding="utf-8")
    from transformers import AutoModel, AutoProcessor, CLIPConfig, CLIPModel

    folder = Path(tempfile.mkdtemp())
    base = clip_base(folder / "base")
    made = CLIPModel(CLIPConfig.from_pretrained(base))
    fill(made).save_pretrained(base)
    (example,) = re.findall(r"(def calc_probs.*?\n    return [^\n]*\n)", readme, re.DOTALL)
    names = {"torch": torch, "device": "cpu", "scores": []}
    names["processor"] = AutoProcessor.from_pretrained(base)
    names["model"] = AutoModel.from_pretrained(base).eval()
    exec(example.replace("probs = torch.softmax(scores, dim=-1)", "probs = scores"), names)
    scores = {}
    for kind in SIZES:
        shown = [Image.open(file) for file in png_files(folder, images(kind))]
        found = [names["calc_probs"](p, [i])[0] for p, i in zip(PROMPTS, shown, strict=True)]
        scores[kind] = np.array(found)
    save("pickscore", layout=layout(made.state_dict()), **scores)


if __name__ == "__main__":
    main()
