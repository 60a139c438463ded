"""MPS by the authors' code: python scripts/authors/mps.py CHECKOUT (MPS).

Their class with a smaller cross model, saved as a pickled module and scored by the function of
their evaluation script, in float32: `half` is left out, which a CPU need not have.
"""

import sys
import tempfile
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from common import PROMPTS, checkout, clip_base, fill, pictures, png_files, save

SIZES = {"square": (64, 64), "wide": (140, 90)}
TEXTS = (*PROMPTS[:2], "a cat in soft light, fine texture")
WIDTH = 8


def images(kind):
    return pictures(len(TEXTS), *SIZES[kind], seed=SIZES[kind][0])


def main():
    checkout()
    sys.modules["fire"] = type(sys)("fire")
    sys.modules["fire"].Fire = None
    from eval_overall_mps_on_hpdv2 import infer_one_sample
    from trainer.models import clip_model
    from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor

    folder = Path(tempfile.mkdtemp())
    base = clip_base(folder / "base", WIDTH, 64, WIDTH, patch=16)
    made = clip_model.XCLIPModel(CLIPConfig.from_pretrained(base))
    made.save_pretrained(base)
    whole_size = clip_model.Cross_model
    clip_model.Cross_model = lambda **_: whole_size(WIDTH, 2, heads=1)
    model = fill(clip_model.CLIPModel(str(base)))
    with torch.no_grad():
        model.model.logit_scale.fill_(2.5)
    file = BytesIO()
    torch.save(model, file)
    model = torch.load(BytesIO(file.getvalue()), weights_only=False).eval()
    torch.Tensor.half = lambda tensor: tensor
    parts = (CLIPImageProcessor.from_pretrained(base), AutoTokenizer.from_pretrained(base), "cpu")
    scores = {}
    for kind in SIZES:
        shown = png_files(folder, images(kind))
        found = [infer_one_sample(a, b, model, *parts) for a, b in zip(shown, TEXTS, strict=True)]
        scores[kind] = np.array(torch.cat(found))
    save("mps", pickled=np.frombuffer(file.getvalue(), dtype=np.uint8), **scores)


if __name__ == "__main__":
    main()
