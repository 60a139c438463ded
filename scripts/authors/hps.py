"""HPSv2 by the authors' code: python scripts/authors/hps.py CHECKOUT (HPSv2).

Their fork of open_clip with a smaller architecture of the same kind, saved as a state and scored by
`score` of `img_score.py`, in float32 as their code computes on a CPU.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import PROMPTS, checkout, fill, layout, pictures, png_files, save

SIZES = {"square": (32, 32), "small": (20, 20), "wide": (45, 70), "tall": (70, 33)}
SIDE = 32
NAME = "authors-tiny"
CONFIG = {
    "embed_dim": 24,
    "vision_cfg": {
        "image_size": SIDE,
        "layers": 2,
        "width": 32,
        "head_width": 16,
        "patch_size": 8,
    },
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def images(kind):
    return pictures(len(PROMPTS), *SIZES[kind], seed=SIZES[kind][0])


def main():
    checkout()
    sys.modules.setdefault("clint.textui", type(sys)("clint.textui")).progress = None
    from hpsv2 import img_score
    from hpsv2.src import open_clip

    folder = Path(tempfile.mkdtemp())
    (folder / f"{NAME}.json").write_text(json.dumps(CONFIG))
    open_clip.add_model_config(folder / f"{NAME}.json")
    state = fill(open_clip.create_model(NAME)).state_dict()
    torch.save({"epoch": 1, "state_dict": state}, folder / "HPS.pt")
    make, words = img_score.create_model_and_transforms, img_score.get_tokenizer
    img_score.create_model_and_transforms = lambda *_, **own: make(NAME, **own)
    img_score.get_tokenizer = lambda _: words(NAME)
    scores = {}
    for kind in SIZES:
        shown = png_files(folder, images(kind))
        pairs = zip(PROMPTS, shown, strict=True)
        scores[kind] = np.array(
            [img_score.score([f], p, str(folder / "HPS.pt"))[0] for p, f in pairs]
        )
    save("hps", layout=layout(state), **scores)


if __name__ == "__main__":
    main()
