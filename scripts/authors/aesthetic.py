"""LAION's aesthetic score: python scripts/authors/aesthetic.py CHECKOUT.

CHECKOUT is one of christophschuhmann/improved-aesthetic-predictor. The network and the
normalisation are their script's; the CLIP is transformers', since OpenAI's package has no tiny one:
what is shown is the head, and what is done before it.
"""

import ast
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import PROMPTS, checkout, clip_base, fill, layout, pictures, png_files, save
from PIL import Image

SIZES = {"square": (64, 64), "wide": (90, 140)}
WIDTH = 24


def images(kind):
    return pictures(len(PROMPTS), *SIZES[kind], seed=SIZES[kind][0])


def main():
    script = checkout() / "simple_inference.py"
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    tree = ast.parse(script.read_text(encoding="utf-8"))
    own = [n for n in tree.body if getattr(n, "name", "") in ("MLP", "normalized")]
    names = {"np": np, "nn": torch.nn, "torch": torch}
    names["pl"] = type("Lightning", (), {"LightningModule": torch.nn.Module})
    exec(compile(ast.Module(own, []), str(script), "exec"), names)
    folder = Path(tempfile.mkdtemp())
    base = clip_base(folder / "base", embedding=WIDTH)
    clip = fill(CLIPModel(CLIPConfig.from_pretrained(base)))
    prepare = CLIPImageProcessor.from_pretrained(base)
    state = fill(names["MLP"](WIDTH)).state_dict()
    torch.save(state, folder / "head.pth")
    head = names["MLP"](WIDTH)
    head.load_state_dict(torch.load(folder / "head.pth"))
    scores = {}
    for kind in SIZES:
        shown = [Image.open(file) for file in png_files(folder, images(kind))]
        with torch.no_grad():
            vectors = clip.get_image_features(**prepare(shown, return_tensors="pt"))
            unit = torch.from_numpy(names["normalized"](vectors.numpy())).float()
            scores[kind] = np.array(head.eval()(unit)[:, 0])
    save("aesthetic", layout=layout(state), clip=layout(clip.state_dict()), **scores)


if __name__ == "__main__":
    main()
