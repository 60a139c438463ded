"""VQAScore by the authors' code: python scripts/authors/vqascore.py CHECKOUT (t2v_metrics).

CHECKOUT is at 6ecb74f. Their class for Qwen3-VL, with a model that answers by drawn logits over a
few words. Runs in flowrl's own environment.
"""

import sys
import tempfile
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from common import checkout, png_files, save

WORDS = ("<|im_end|>", "Yes", "yes", " Yes", "No", "no", " no", "The")
PROMPTS = ("a red ball", 'two "cats"', "", "a ball\non a hill")
LEVEL = 60  # between the grey values of the samples, by which the model knows them


def images():
    grey = np.arange(len(PROMPTS), dtype=np.uint8)[:, None, None, None] * LEVEL
    return np.broadcast_to(grey, (len(PROMPTS), 8, 8, 3)).copy()


def drawn_logits(sample, question):
    """Logits of the first token; never the end of the answer."""
    rng = np.random.RandomState([sample, *question.encode()])
    logits = torch.from_numpy(2 * rng.standard_normal(len(WORDS))).float()
    logits[0] = -20
    return logits


class Inputs(dict):
    input_ids = torch.zeros(1, 3, dtype=torch.long)

    def to(self, _):
        return self


class Judge:
    """Their processor and their model."""

    image_processor = SimpleNamespace(patch_size=16)
    tokenizer = SimpleNamespace(eos_token_id=0, bos_token_id=None, pad_token_id=0)
    tokenizer.encode = lambda text, **_: [WORDS.index(text)]
    tokenizer.decode = lambda ids, **_: "".join(WORDS[i] for i in ids)

    def apply_chat_template(self, messages, **_):
        image, text = messages[0]["content"]
        self.shown = [round(np.asarray(image["image"]).mean() / LEVEL), text["text"]]
        return text["text"]

    def __call__(self, **_):
        return Inputs()

    def generate(self, **_):
        logits = drawn_logits(*self.shown)[None]
        whole = torch.cat([Inputs.input_ids, logits.argmax(-1, keepdim=True)], 1)
        return SimpleNamespace(scores=[logits], sequences=whole)


def main():
    root = checkout()
    for name in ("t2v_metrics", "t2v_metrics.models", "t2v_metrics.models.vqascore_models"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(root / name.replace(".", "/"))]
    sys.modules["qwen_vl_utils"] = ModuleType("qwen_vl_utils")
    sys.modules["qwen_vl_utils"].process_vision_info = lambda *_, **__: (None, None, {})
    from t2v_metrics.models.vqascore_models import qwen3vl_model

    scorer = object.__new__(qwen3vl_model.Qwen3VLModel)
    scorer.model_name, scorer.device = "qwen3-vl-8b", "cpu"
    scorer.model_info = qwen3vl_model.QWEN3_VL_MODELS[scorer.model_name]
    scorer.processor = scorer.model = Judge()
    files = png_files(tempfile.mkdtemp(), images())
    save("vqascore", scores=scorer.forward(files, list(PROMPTS)).numpy())


if __name__ == "__main__":
    main()
