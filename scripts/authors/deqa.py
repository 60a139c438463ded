"""DeQA-Score by the authors' code: python scripts/authors/deqa.py CHECKOUT (DeQA-Score).

CHECKOUT is at 8e4abc8. Their `Scorer` with drawn logits of the five words in place of mPLUG-Owl2,
without half precision. Runs in flowrl's own environment. The question is kept as a digest.
"""

import ast

import numpy as np
import torch
from common import checkout, digest, save
from PIL import Image

SAMPLES = 12
WORDS = ("excellent", "good", "fair", "poor", "bad")


def images():
    """Images [n 4 4 3] of one grey each, which stand for the samples."""
    return np.broadcast_to(
        np.arange(SAMPLES, dtype=np.uint8)[:, None, None, None] * 20, (SAMPLES, 4, 4, 3)
    )


def logits(sample):
    """Logits of the five words, in their order."""
    return 2 * np.random.RandomState(sample).standard_normal(len(WORDS))


def main():
    path = checkout() / "src" / "evaluate" / "scorer.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    asked = []

    def tokens(text, *_, **__):
        asked.append(text)
        return torch.zeros(3, dtype=torch.long)

    class Tokenizer:
        def __call__(self, words):
            assert tuple(words) == WORDS
            return {"input_ids": [[1, 10 + i] for i in range(len(words))]}

    class Model:
        device = "cpu"

        def __call__(self, images, **_):
            found = torch.zeros(len(images), 2, 20)
            for row, image in enumerate(images):
                found[row, -1, 10:15] = torch.from_numpy(logits(int(image.max()) // 20)).float()
            return {"logits": found}

    class Processor:
        image_mean = (0.0, 0.0, 0.0)

        def preprocess(self, pil, **_):
            return {
                "pixel_values": torch.stack([torch.from_numpy(np.array(p)).float() for p in pil])
            }

    names = {"torch": torch, "nn": torch.nn, "Image": Image, "List": list}
    names |= {"IMAGE_TOKEN_INDEX": -200, "tokenizer_image_token": tokens}
    names["load_pretrained_model"] = lambda *_, **__: (Tokenizer(), Model(), Processor(), None)
    torch.Tensor.half = torch.Tensor.float
    exec(compile(tree, str(path), "exec"), names)
    scores = names["Scorer"](device="cpu")([Image.fromarray(image) for image in images()])
    save("deqa", scores=scores.numpy(), question=digest(asked[0]))


if __name__ == "__main__":
    main()
