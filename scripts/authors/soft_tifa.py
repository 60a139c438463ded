"""Soft-TIFA by the authors' code: python scripts/authors/soft_tifa.py CHECKOUT (GenEval2).

Their functions, with a model that answers each question by drawn probabilities and a tokenizer of
single bytes. Runs in flowrl's own environment. Every question of their file is sorted as theirs.
"""

import ast
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from common import checkout, qwen_base, save

SAMPLES = 40
SIZE = 264  # of the vocabulary: bytes, and special tokens


def cases():
    """Per sample, pairs of a question and its answer."""
    rng = np.random.RandomState(0)
    numbers = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    counts = [[f"How many cups {i} are there?", number] for i, number in enumerate(numbers)]
    others = [[f"Is cup {i} red?", "Yes"] for i in range(6)]
    every = [*counts, *others]
    return [
        [every[i] for i in rng.choice(len(every), 1 + sample % 5, replace=False)]
        for sample in range(SAMPLES)
    ]


def drawn_scores(sample, question):
    """Logits of the first token of an answer."""
    rng = np.random.RandomState([sample, *question.encode()])
    return torch.from_numpy(3 * rng.standard_normal((1, SIZE))).float()


class Judge:
    """Their processor and their model: what is shown and asked, and the drawn answer."""

    device = "cpu"

    def __init__(self, tokenizer):
        self.tokenizer, self.shown = tokenizer, []

    def apply_chat_template(self, messages, **_):
        image, text = messages[0]["content"]
        self.shown = [image["image"], text["text"]]
        return type("Inputs", (dict,), {"to": lambda inputs, _: inputs})()

    def batch_decode(self, ids):
        return [self.tokenizer.decode(ids[0])]

    def generate(self, **_):
        return SimpleNamespace(scores=[drawn_scores(*self.shown)])


def main():
    root = checkout()
    from transformers import AutoTokenizer

    from rewards.catalogue.soft_tifa import YES, forms_of

    tokenizer = AutoTokenizer.from_pretrained(qwen_base(tempfile.mkdtemp(), "qwen2_vl"))
    names = {"torch": torch, "qwen_processor": Judge(tokenizer)}
    names["qwen_model"] = names["qwen_processor"]
    source = ast.parse((root / "evaluation.py").read_text(encoding="utf-8"))
    source.body = [node for node in source.body if isinstance(node, ast.FunctionDef)]
    exec(compile(source, "evaluation.py", "exec"), names)
    found = [names["soft_tifa"](pairs, i) for i, pairs in enumerate(cases())]
    means = [np.exp(np.mean(np.log(each))) for _, each in found]
    for line in (Path(root) / "geneval2_data.jsonl").read_text(encoding="utf-8").splitlines():
        for question, answer in json.loads(line)["vqa_list"]:
            forms = forms_of(question, answer)
            assert (forms == YES) != question.startswith("How many") and len(forms) in (4, 6)
    save("soft_tifa", arithmetic=np.array([mean for mean, _ in found]), geometric=np.array(means))


if __name__ == "__main__":
    main()
