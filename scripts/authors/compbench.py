"""T2I-CompBench's BLIP-VQA: python scripts/authors/compbench.py CHECKOUT (T2I-CompBench).

CHECKOUT is at 1b70949. Their questions, their probability of yes and their product over phrases,
with drawn logits in place of BLIP and phrases between semicolons in place of spaCy's. Runs in
flowrl's own environment. Their scores have four digits.
"""

import ast
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from common import checkout, pictures, png_files, save

YES, NO, START = 2748, 2053, 30522  # of BERT's vocabulary, as their code names them
LEFT_OUT = ("top", "the side", "the left", "the right")
PHRASES = ("a green bench", "a red ball", "the left", "two cats", "top", "a blue bowl", "the side")
SAMPLES = 24


def prompts():
    """Prompts as phrases between semicolons; some have more than eight, some that are left out."""
    rng = np.random.RandomState(0)
    own = [f"{name} {i}" for i in range(3) for name in ("a bench", "a {ball}", "an old dog")]
    every = [*PHRASES, *own]
    counts = 1 + np.arange(SAMPLES) % 11
    found = ["; ".join(every[i] for i in rng.choice(len(every), n, False)) for n in counts]
    return [f"a cup; {prompt}" for prompt in found]


def logits(sample, question):
    """Drawn logits of yes and no, where yes is likely."""
    rng = np.random.RandomState([sample, *question.encode()])
    return rng.standard_normal(2) + np.array((3.0, 0.0))


def defined(path, *names):
    """Functions and classes of a file of theirs, by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [n for n in tree.body if getattr(n, "name", None) in names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value == "cuda":
            node.value = "cpu"
    return compile(tree, str(path), "exec")


def main():
    folder = checkout() / "BLIPvqa_eval"
    net = {"torch": torch, "nn": torch.nn, "np": np, "F": torch.nn.functional}
    exec(defined(folder / "models" / "blip_vqa.py", "BLIP_VQA"), net)

    def phrases(text):
        return SimpleNamespace(noun_chunks=[SimpleNamespace(text=p) for p in text.split("; ")])

    def answer(annotations, results):
        rows = json.loads(Path(annotations, "vqa_test.json").read_text())
        Path(results, "result").mkdir(exist_ok=True)
        scale = torch.full((len(rows), 1, START + 2), -40.0)
        for place, row in enumerate(rows):
            scale[place, 0, [YES, NO]] = torch.from_numpy(logits(place, row["question"])).float()
        model = SimpleNamespace(text_decoder=lambda *_, **__: SimpleNamespace(logits=scale))
        chances = net["BLIP_VQA"].vqa_prob(model, torch.zeros(len(rows), 1), None)
        found = [{"answer": float(p)} for p in chances]
        Path(results, "result", "vqa_result.json").write_text(json.dumps(found))

    names = {"os": os, "json": json, "torch": torch, "tqdm": lambda rows: rows}
    names |= {"spacy": SimpleNamespace(load=lambda _: phrases), "VQA_main": answer}
    exec(defined(folder / "BLIP_vqa.py", "Create_annotation_for_BLIP", "main"), names)
    with tempfile.TemporaryDirectory() as out:
        names["parse_args"] = lambda: SimpleNamespace(out_dir=out, np_num=8)
        images = Path(out, "samples")
        images.mkdir()
        files = png_files(images, pictures(SAMPLES, 8, 8))
        for place, (file, prompt) in enumerate(zip(files, prompts(), strict=True)):
            Path(file).rename(images / f"{prompt}_{place:06}.png")
        names["main"]()
        last = Path(out, "annotation_blip", "vqa_result.json")
        save(
            "compbench", scores=np.array([float(r["answer"]) for r in json.loads(last.read_text())])
        )


if __name__ == "__main__":
    main()
