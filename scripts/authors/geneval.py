"""GenEval's rules by the authors' code: python scripts/authors/geneval.py CHECKOUT (geneval).

The functions of evaluate_images.py that judge found objects, on drawn boxes, without their detector
and CLIP: colours are drawn too. Verdicts of many rows, two classes each.
"""

import ast
import json

import numpy as np
from common import checkout, save

CASES = 400
CLASSES = ("cup", "tie", "dog")
COLOURS = ("red", "blue")
PLACES = ("left of", "right of", "above", "below")


def cases():
    """(metadata, boxes [k 5] with falling scores by class, colours by class) of each case."""
    rng = np.random.RandomState(0)
    for _ in range(CASES):
        found, colours = {}, {}
        for name in CLASSES[: rng.randint(1, 4)]:
            corner, size = rng.randint(0, 60, (4, 2)), rng.randint(2, 50, (4, 2))
            scores = np.sort(rng.uniform(0.31, 0.99, 4))[::-1]
            boxes = np.concatenate([corner, corner + size, scores[:, None]], 1)
            found[name] = boxes[: rng.randint(1, 5)]
            colours[name] = [COLOURS[i] for i in rng.randint(0, 2, 4)]
        include = [{"class": "cup", "count": int(rng.randint(1, 4))}]
        if rng.rand() < 0.4:
            include[0]["color"] = "red"
        if rng.rand() < 0.6:
            include.append({"class": "tie", "count": int(rng.randint(1, 3))})
            if rng.rand() < 0.7:
                include[1]["position"] = [PLACES[rng.randint(4)], 0]
        row = {"include": include, "tag": "position"}
        if rng.rand() < 0.3:
            row["exclude"] = [{"class": "dog", "count": int(rng.randint(1, 4))}]
        yield row, found, colours


def main():
    script = checkout() / "evaluation" / "evaluate_images.py"
    tree = ast.parse(script.read_text(encoding="utf-8"))
    own = [n for n in tree.body if getattr(n, "name", "") in ("relative_position", "evaluate")]
    verdicts = []
    for row, found, colours in cases():
        objects = {name: [(box, None) for box in boxes] for name, boxes in found.items()}
        names = {"np": np, "POSITION_THRESHOLD": 0.1, "COLORS": list(COLOURS)}
        names["color_classification"] = lambda _, boxes, name, c=colours: c[name][: len(boxes)]
        exec(compile(ast.Module(own, []), str(script), "exec"), names)
        verdicts.append(names["evaluate"](None, objects, json.loads(json.dumps(row)))[0])
    save("geneval", verdicts=np.array(verdicts, dtype=bool))
    print(sum(verdicts), "of", len(verdicts), "right")


if __name__ == "__main__":
    main()
