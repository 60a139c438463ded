"""Temporal flickering by the authors' code: python scripts/authors/flicker.py CHECKOUT (VBench).

Their score of drawn frames, which come from memory in place of a file. Runs in flowrl's own
environment.
"""

import ast

import numpy as np
from common import checkout, pictures, save

SIZE = (6, 24, 40)  # frames, height, width


def videos():
    """Drawn frames, mixed with their first one by more and more: [n f h w 3]."""
    frames, height, width = SIZE
    drawn = pictures(3 * frames, height, width).reshape(3, frames, height, width, 3)
    share = np.array([0, 3, 10])[:, None, None, None, None]
    return ((drawn[:, :1] * (10 - share) + drawn.astype(np.int64) * share) // 10).astype(np.uint8)


def main():
    import cv2

    names = {"np": np, "cv2": cv2}
    path = checkout() / "vbench" / "temporal_flickering.py"
    source = ast.parse(path.read_text(encoding="utf-8"))
    source.body = [node for node in source.body if isinstance(node, ast.FunctionDef)]
    exec(compile(source, str(path), "exec"), names)
    names["get_frames"] = list
    save("flicker", scores=np.array([names["cal_score"](video) for video in videos()]))


if __name__ == "__main__":
    main()
