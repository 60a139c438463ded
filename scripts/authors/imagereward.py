"""ImageReward by the authors' code: python scripts/authors/imagereward.py CHECKOUT (ImageReward).

Their class with smaller networks, saved as a state and scored by `score`, which prepares images and
prompts. The tokenizer is a small BERT's; `clip`, which other scores of theirs need, is left out.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import PROMPTS, bert_words, checkout, fill, layout, pictures, png_files, save

SIZES = {"square": (64, 64), "wide": (90, 140)}
WIDTH = 64
TEXT = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 1}
TEXT |= {"intermediate_size": 96, "vocab_size": 140, "max_position_embeddings": 64}
TEXT |= {"type_vocab_size": 2, "add_cross_attention": True, "layer_norm_eps": 1e-12}
TEXT |= {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
TEXT |= {"pad_token_id": 0, "model_type": "bert", "encoder_width": WIDTH}


def images(kind):
    return pictures(len(PROMPTS), *SIZES[kind], seed=SIZES[kind][0])


def main():
    root = checkout()
    for name in ("ImageReward", "ImageReward.models", "clip"):
        sys.modules[name] = type(sys)(name)
        sys.modules[name].__path__ = [str(root / name.replace(".", "/"))]
    import ImageReward.ImageReward
    from ImageReward.models.BLIP import blip, blip_pretrain

    theirs = ImageReward.ImageReward

    folder = Path(tempfile.mkdtemp())
    words = bert_words(folder / "words")
    reader = blip.BertTokenizer
    blip.BertTokenizer = type(
        "Words", (), {"from_pretrained": lambda _: reader.from_pretrained(words)}
    )
    small = {"embed_dim": WIDTH, "depth": 2, "num_heads": 1, "mlp_ratio": 2}
    blip_pretrain.create_vit = lambda _, size, *__: (
        blip.VisionTransformer(img_size=size, patch_size=32, **small),
        WIDTH,
    )
    head = theirs.MLP
    theirs.MLP = lambda _: head(WIDTH)
    (folder / "text.json").write_text(json.dumps(TEXT))
    state = fill(theirs.ImageReward(str(folder / "text.json"))).state_dict()
    torch.save(state, folder / "ImageReward.pt")
    model = theirs.ImageReward(str(folder / "text.json"))
    model.load_state_dict(torch.load(folder / "ImageReward.pt"), strict=False)
    model.eval()
    scores = {}
    for kind in SIZES:
        shown = png_files(folder, images(kind))
        with torch.no_grad():
            found = [model.score(p, file) for p, file in zip(PROMPTS, shown, strict=True)]
        scores[kind] = np.array(found)
    save("imagereward", layout=layout(state), **scores)


if __name__ == "__main__":
    main()
