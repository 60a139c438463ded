"""DPG-Bench by the authors' code: python scripts/authors/dpg_bench.py CHECKOUT (ELLA).

Their functions on a drawn csv of questions that depend on each other, with drawn answers in place
of mPLUG's. Runs in flowrl's own environment. Their reader leaves out the first row; here that row
is a prompt of its own.
"""

import ast
import csv
import os.path as osp
import tempfile
from argparse import Namespace
from collections import defaultdict
from pathlib import Path

import numpy as np
from common import checkout, save
from PIL import Image

SAMPLES = 30
COLUMNS = ("item_id", "text", "keywords", "proposition_id", "dependency", "category_broad")
COLUMNS += ("category_detailed", "tuple", "question_natural_language")
KINDS = ("entity - whole", "attribute - color", "relation - spatial", "global", "other - count")


def yes(question):
    """Whether the drawn judge answers yes; about two of three times."""
    return np.random.RandomState(list(question.encode())).rand() < 0.65


def write(file):
    """The drawn csv, in the published columns."""
    rng = np.random.RandomState(0)
    with Path(file).open("w", newline="", encoding="utf-8") as stream:
        table = csv.DictWriter(stream, COLUMNS)
        table.writeheader()
        for item in range(SAMPLES + 1):
            count = 2 + item % 9
            for place in range(1, count + 1) if item else (1,):
                others = [i for i in range(1, count + 1) if i != place] or [0]
                parents = rng.choice(others, min(len(others), rng.randint(1, 3)), replace=False)
                parents = parents if rng.rand() < 0.6 and item else [0]
                row = {"item_id": f"item{item}", "text": f"prompt {item}", "keywords": "k"}
                row |= {"proposition_id": place, "dependency": ",".join(map(str, parents))}
                row |= {"category_broad": "b", "category_detailed": "d"}
                row["tuple"] = f"{KINDS[rng.randint(len(KINDS))]} (thing {place})"
                table.writerow({**row, "question_natural_language": f"Is {item}.{place} there?"})


def main():
    import pandas

    names = {"defaultdict": defaultdict, "Image": Image, "osp": osp, "pd": pandas}
    text = (checkout() / "dpg_bench" / "compute_dpg_bench.py").read_text(encoding="utf-8")
    source = ast.parse(text)
    source.body = [node for node in source.body if isinstance(node, ast.FunctionDef)]
    exec(compile(source, "compute_dpg_bench.py", "exec"), names)
    folder = Path(tempfile.mkdtemp())
    write(folder / "dpg_bench.csv")
    own = Namespace(csv=folder / "dpg_bench.csv", pic_num=1, res_path=str(folder / "results.txt"))
    questions = names["prepare_dpg_data"](own)
    judge = Namespace(vqa=lambda _, question: "yes" if yes(question) else "no")
    found, kinds = [], defaultdict(list)
    for item in range(1, SAMPLES + 1):
        Image.new("RGB", (8, 8)).save(folder / f"item{item}.png")
        image = str(folder / f"item{item}.png")
        score, kind, before = names["compute_dpg_one_sample"](own, questions, image, judge, 8)
        found.append(score)
        for place, name in kind.items():
            kinds[name.split("(")[0].strip()].append(before[place])
    means = np.array([np.mean(kinds[kind]) for kind in KINDS])
    save("dpg_bench", scores=np.array(found), kinds=means)


if __name__ == "__main__":
    main()
