"""Verdicts of a token classifier on steps, against raw calls of one text each."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForTokenClassification,
    BertConfig,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForTokenClassification,
)

from rewards import Samples, load
from rewards.perception.strings import step_ends
from tests.rewards.test_reward_models_text import SIZES, token
from tests.support import tiny_lm
from tests.support.advice import advice
from tests.support.reward_contract import check_contract, texts

WHOLE = "b: ad: cab"  # three steps, which ":" ends
SETTINGS = {"separator": ":", "device": "cpu"}


def written(folder, *, bert=False, chat=False, labels=2, positions=64) -> str:
    torch.manual_seed(5)
    more: Any = {"num_labels": labels, "max_position_embeddings": positions, "pad_token_id": 0}
    more |= SIZES
    if bert:
        model = BertForTokenClassification(BertConfig(**more))
    else:
        model = LlamaForTokenClassification(LlamaConfig(**more, bos_token_id=None))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tiny_lm.tokenizer(chat=chat).save_pretrained(folder)
    return str(folder)


def of(texts, prompt="a") -> Samples:
    return Samples(list(texts), [prompt] * len(texts), torch.arange(len(texts)))


@torch.no_grad()
def verdicts(folder, prompt: list[int], steps: list[str], label=1) -> list[float]:
    """P(label) at the mark behind each step, by a call that ends there and has no padding."""
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    ids = list(prompt)
    found = []
    for step in steps:
        ids += token(f"{step}:")
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        found.append(float(logits.exp()[label] / logits.exp().sum()))
    return found


@pytest.mark.parametrize("batch", [1, 16])
def test_each_beginning_has_the_verdict_on_its_last_step(tmp_path, batch):
    folder = written(tmp_path)
    want = verdicts(folder, token("a"), ["b", "ad", "cab"])
    beginnings = ["b:", WHOLE, "b: ad:", "b: ad"]
    got = load("process_reward", model=folder, batch=batch, **SETTINGS)(of(beginnings))
    assert got.tolist() == pytest.approx([want[0], want[2], want[1], want[1]], abs=1e-6)
    assert min(abs(a - b) for a, b in pairwise(want)) > 1e-3


@pytest.mark.parametrize(
    ("reduce", "how"), [("least", min), ("mean", lambda v: sum(v) / 3), ("last", lambda v: v[-1])]
)
def test_verdicts_become_one_score_of_a_whole_text(tmp_path, reduce, how):
    folder = written(tmp_path)
    want = verdicts(folder, token("a"), ["b", "ad", "cab"], label=0)
    settings = {**SETTINGS, "label": 0, "reduce": reduce}
    got = load("process_reward", model=folder, **settings)(of([WHOLE]))
    assert got.tolist() == pytest.approx([how(want)], abs=1e-6)
    product = load("process_reward", model=folder, **(settings | {"reduce": "product"}))
    assert product(of([WHOLE])).item() == pytest.approx(want[0] * want[1] * want[2], abs=1e-6)


def test_the_prompt_is_the_user_s_turn_and_a_mark_may_be_another_text(tmp_path):
    """CHAT writes `u:PROMPT a:`; u is unknown to the tokenizer and becomes the pad."""
    folder = written(tmp_path, chat=True)
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    ids = [0, *token(":a a:"), *token("bj")]
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)[1]
    got = load("process_reward", model=folder, mark="j", **SETTINGS)(of(["b"]))
    assert got.item() == pytest.approx(float(want), abs=1e-6)


def test_a_model_that_looks_ahead_reads_each_beginning_by_itself(tmp_path):
    folder = written(tmp_path, bert=True)
    reward = load("process_reward", model=folder, **SETTINGS)
    alone = [float(reward(of([text]))) for text in ("b:", "b: ad:", WHOLE)]
    assert reward(of(["b:", "b: ad:", WHOLE])).tolist() == pytest.approx(alone, abs=1e-6)
    model = BertForTokenClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        want = model(input_ids=torch.tensor([token("ab:ad:cab:")])).logits[0, -1].softmax(-1)[1]
    assert alone[-1] == pytest.approx(float(want), abs=1e-6)


def test_steps_beyond_the_model_s_length_are_unscored(tmp_path):
    folder = written(tmp_path, positions=8)
    got = load("process_reward", model=folder, **SETTINGS)(of(["b: ad:", WHOLE]))
    assert got.isnan().tolist() == [False, True]
    want = verdicts(folder, token("a"), ["b", "ad"])
    assert float(got[0]) == pytest.approx(want[1], abs=1e-6)


def test_it_keeps_the_contract(tmp_path):
    check_contract(load("process_reward", model=written(tmp_path), **SETTINGS), texts)


def test_steps_end_behind_their_separators():
    text = "one\n\ntwo\n\n\n\nthree\n\n"
    assert [text[:end] for end in step_ends(text, "\n\n")] == [
        "one\n\n",
        "one\n\ntwo\n\n\n\n",
        text,
    ]
    assert step_ends("", ":") == [0] and step_ends(":a", ":") == [2] and step_ends("a", ":") == [1]


def test_what_cannot_judge_is_refused(tmp_path):
    folder = written(tmp_path / "token")
    with pytest.raises(ValueError, match="process_reward: `label` must be one of 0"):
        load("process_reward", model=folder, label="good", **SETTINGS)
    advice(
        "process_reward: `separator` is empty: name the text between steps",
        lambda: load("process_reward", model=folder, separator="", device="cpu"),
        lambda: load("process_reward", model=folder, separator=":", device="cpu"),
    )
    tiny_lm.write(tmp_path / "lm")
    with pytest.raises(ValueError, match="it is not a token classifier, and its scores would be"):
        load("process_reward", model=str(tmp_path / "lm"), **SETTINGS)
