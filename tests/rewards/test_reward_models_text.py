"""Sequence-classification reward models of tiny random weights, against raw calls one by one."""

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from rewards import Samples, load
from tests.support import tiny_lm
from tests.support.reward_contract import check_contract, texts

CLOSE = {"rtol": 0, "atol": 1e-5}
PROMPTS = ["a:", "cab :", "bead", "a b c d e f g", "hid:"]
TEXTS = ["b", "", "face a head", "jjj", "a" * 20]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "vocab_size": 2 + len(tiny_lm.LETTERS)}


def written(folder, labels=1, *, chat=False, pad=True, bert=False, positions=64):
    """A random model in a folder, spread enough that tokens matter."""
    torch.manual_seed(3)
    more = {"num_labels": labels, "max_position_embeddings": positions}
    if bert:
        model = BertForSequenceClassification(BertConfig(**SIZES, **more, pad_token_id=0))
    else:
        config = LlamaConfig(**SIZES, **more, pad_token_id=0 if pad else None, bos_token_id=None)
        model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tokenizer = tiny_lm.tokenizer(pad=pad, chat=chat)
    if bert:  # a pair with the stop token between and after, of two types
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <end>", pair="$A <end> $B:1 <end>:1", special_tokens=[("<end>", 1)]
        )
    tokenizer.save_pretrained(folder)
    return str(folder)


def of(prompts=PROMPTS, media=TEXTS) -> Samples:
    return Samples(list(media), list(prompts), torch.arange(len(prompts)))


def token(letters: str) -> list[int]:
    return [2 + tiny_lm.LETTERS.index(letter) for letter in letters]


def alone(folder, rows, types=None) -> torch.Tensor:
    """Logits [n labels] by raw calls of one row each, with no padding and no mask."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    with torch.no_grad():
        for i, row in enumerate(rows):
            more = {} if types is None else {"token_type_ids": torch.tensor([types[i]])}
            found.append(model(input_ids=torch.tensor([row]), **more).logits[0])
    return torch.stack(found)


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("pad", [True, False])
def test_a_decoder_without_a_template_reads_the_prompt_then_the_text(tmp_path, batch, pad):
    folder = written(tmp_path, pad=pad)
    rows = [token(p + t) for p, t in zip(PROMPTS, TEXTS, strict=True)]
    got = load("sequence_classifier", model=folder, batch=batch, device="cpu")(of())
    torch.testing.assert_close(got, alone(folder, rows)[:, 0], **CLOSE)
    assert got.unique().numel() == len(PROMPTS)


def test_a_chat_template_has_both_turns(tmp_path):
    """CHAT writes `u:PROMPT a:TEXT `; u is unknown to the tokenizer and becomes the pad."""
    folder = written(tmp_path, chat=True)
    rows = [[0, *token(f":{p} a:{t} ")] for p, t in zip(PROMPTS, TEXTS, strict=True)]
    got = load("sequence_classifier", model=folder, device="cpu")(of())
    torch.testing.assert_close(got, alone(folder, rows)[:, 0], **CLOSE)


@pytest.mark.parametrize(("label", "place"), [("LABEL_2", 2), (0, 0), ("label_1", 1)])
def test_an_encoder_reads_a_pair_and_a_label_is_chosen(tmp_path, label, place):
    folder = written(tmp_path, labels=3, bert=True)
    pairs = [(token(p), token(t)) for p, t in zip(PROMPTS, TEXTS, strict=True)]
    rows = [[*p, 1, *t, 1] for p, t in pairs]
    types = [[0] * (len(p) + 1) + [1] * (len(t) + 1) for p, t in pairs]
    logits = alone(folder, rows, types).numpy().astype(np.float64)
    settings = {"model": folder, "label": label, "batch": 2, "device": "cpu"}
    got = load("sequence_classifier", **settings)(of())
    np.testing.assert_allclose(got, logits[:, place], **CLOSE)
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    got = load("sequence_classifier", kind="softmax", **settings)(of())
    np.testing.assert_allclose(got, share[:, place], **CLOSE)
    got = load("sequence_classifier", kind="sigmoid", **settings)(of())
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-logits[:, place])), **CLOSE)


def test_what_is_too_long_is_unscored_or_cut_where_it_is_said(tmp_path):
    folder = written(tmp_path, positions=16)
    rows = [token(p + t) for p, t in zip(PROMPTS, TEXTS, strict=True)]
    long = torch.tensor([len(row) > 16 for row in rows])
    assert long.tolist() == [False, False, False, False, True] or long.sum() == 1
    reward = load("sequence_classifier", model=folder, device="cpu")
    torch.testing.assert_close(reward(of()).isnan(), long)
    assert reward.report() == {"long": 1.0} and reward.report() == {"long": 0.0}
    for how, part in (("cut_start", slice(-8, None)), ("cut_end", slice(8))):
        made = load("sequence_classifier", model=folder, most=8, long=how, device="cpu")
        want = alone(folder, [row[part] for row in rows])[:, 0]
        torch.testing.assert_close(made(of()), want, **CLOSE)
    with pytest.raises(ValueError, match="at most 16 tokens, not 17"):
        load("sequence_classifier", model=folder, most=17)


def test_nothing_at_all_is_unscored(tmp_path):
    reward = load("sequence_classifier", model=written(tmp_path), device="cpu")
    assert reward(of(["", "a"], ["", "b"])).isnan().tolist() == [True, False]


def test_half_precision_is_near(tmp_path):
    folder = written(tmp_path)
    whole = load("sequence_classifier", model=folder, device="cpu")(of())
    half = load("sequence_classifier", model=folder, device="cpu", dtype="bfloat16")
    got = half(of())
    assert half.model.dtype == torch.bfloat16 and got.dtype == torch.float32
    torch.testing.assert_close(got, whole, atol=0.1, rtol=0.1)


def test_a_model_without_a_trained_head_is_refused(tmp_path):
    tiny_lm.write(tmp_path)
    with pytest.raises(ValueError, match=r"no trained score\.weight"):
        load("sequence_classifier", model=str(tmp_path), device="cpu")


def test_wrong_settings_are_told(tmp_path):
    folder = written(tmp_path, labels=2)
    with pytest.raises(ValueError, match=r"`label` must be one of 0 \(LABEL_0\), 1 .*not None"):
        load("sequence_classifier", model=folder)
    with pytest.raises(ValueError, match="not 'good'"):
        load("sequence_classifier", model=folder, label="good")
    with pytest.raises(ValueError, match="greater than or equal to 1, not 0"):
        load("sequence_classifier", model=folder, batch=0)
    with pytest.raises(ValueError, match="needs the setting 'model'"):
        load("sequence_classifier")


@pytest.mark.parametrize("bert", [False, True])
def test_it_keeps_the_contract(tmp_path, bert):
    """Among its prompts is one of 2,000 characters: too long, so unscored."""
    reward = load("sequence_classifier", model=written(tmp_path, bert=bert), device="cpu")
    scores = check_contract(reward, texts, tolerance=1e-5)
    assert scores.isnan().sum() == 2
