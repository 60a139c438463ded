"""VBench's rule of dynamic degree: python scripts/authors/motion.py CHECKOUT (VBench).

CHECKOUT is at 45e79ec. Their score of a flow and their vote, on drawn flows in place of RAFT's.
Runs in flowrl's own environment. Videos have at least three compared frames: with two, theirs says
that anything moves, since no pair needs to.
"""

import ast

import numpy as np
import torch
from common import checkout, save

FRAMES = (3, 4, 6, 9, 16, 24)
SIDE = (48, 64)


def flows():
    """Per video, flows [f-1 h w 2] in pixels: small ones everywhere, some large on a few pixels."""
    rng = np.random.RandomState(0)
    made = []
    for frames in FRAMES:
        for size in (0.5, 1.0, 1.2, 2.0):
            flow = rng.standard_normal((frames - 1, *SIDE, 2)).astype(np.float32)
            large = rng.random((frames - 1, 1, 1, 1)) < 0.4
            made.append(flow * np.where(large, size, 0.2).astype(np.float32))
    return made


def main():
    path = checkout() / "vbench" / "dynamic_degree.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    names = {"np": np, "torch": torch}
    exec(compile(tree, str(path), "exec"), names)
    rule = object.__new__(names["DynamicDegree"])
    amounts, votes = [], []
    for flow in flows():
        frame = torch.zeros(1, 3, *SIDE)
        rule.set_params(frame=frame, count=len(flow) + 1)
        found = [rule.get_score(frame, torch.from_numpy(f).movedim(-1, 0)[None]) for f in flow]
        amounts.append(float(np.mean(np.array(found) / rule.params["thres"])))
        votes.append(float(rule.check_move(found)))
    save("motion", amounts=np.array(amounts), votes=np.array(votes))


if __name__ == "__main__":
    main()
