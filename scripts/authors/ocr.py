"""Flow-GRPO's OCR reward: python scripts/authors/ocr.py CHECKOUT (flow_grpo).

CHECKOUT is at ac4c86e. Their `OcrScorer`, which reads drawn lines in place of PaddleOCR's. Runs in
flowrl's own environment. `Levenshtein.distance` is the textbook's recursion here.
"""

import ast

import numpy as np
import torch
from common import checkout, save
from PIL import Image

WORDS = ("SALE", "sale", "S A", "Open 24h", "le", "x", "Hello World", "HELLO", "wor ld", "!")
WANTED = ("Sale", "Hello World", "open", "x y", "HELLO")
SAMPLES = 60


def cases():
    """Per sample, the lines of an image and a prompt with a quoted text."""
    rng = np.random.RandomState(0)
    made = []
    for sample in range(SAMPLES):
        lines = [WORDS[i] for i in rng.randint(0, len(WORDS), sample % 4)]
        made.append((lines, f'a sign that says "{WANTED[rng.randint(len(WANTED))]}", "and" more'))
    return made


def distance(a, b):
    """Edit distance of two texts."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def main():
    path = checkout() / "flow_grpo" / "ocr.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef)]

    class Reader:
        def __init__(self, **_):
            pass

        def ocr(self, image, **_):
            lines = cases()[int(image.max())][0]
            return [[(None, (line, 0.9)) for line in lines] or None]

    names = {"torch": torch, "np": np, "Image": Image, "distance": distance, "PaddleOCR": Reader}
    exec("from typing import List, Union", names)
    exec(compile(tree, str(path), "exec"), names)
    images = [np.full((4, 4, 3), sample, np.uint8) for sample in range(SAMPLES)]
    scores = names["OcrScorer"]()(images, [prompt for _, prompt in cases()])
    save("ocr", scores=np.array(scores))


if __name__ == "__main__":
    main()
