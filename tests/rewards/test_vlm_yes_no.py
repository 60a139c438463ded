"""P(yes) by a local vision-language model, against the model's own call on one image."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rewards import check_reward, load
from rewards.perception.media import to_pil
from tests.support import tiny_vlm
from tests.support.reward_contract import check_contract, images, mixed_images, videos

SETTINGS = {"question": "ab {prompt}", "yes": "c", "no": "d", "device": "cpu", "batch": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny_vlm.write(tmp_path_factory.mktemp("vlm")))


@pytest.mark.quick_cases("mixed_images")
@pytest.mark.parametrize("factory", [images, mixed_images, videos])
def test_it_keeps_the_contract(folder, factory):
    scores = check_contract(load("vlm_yes_no", model=folder, **SETTINGS), factory)
    assert (scores > 0).all() and (scores < 1).all() and scores.std() > 1e-3


@torch.no_grad()
def test_it_is_the_share_of_yes_among_both_answers(folder):
    samples = images(["a b", "cab", "hid a bead"])
    found = load("vlm_yes_no", model=folder, **SETTINGS)(samples)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor: Any = tiny_vlm.llava_processor()
    yes, no = (processor.tokenizer(word).input_ids[0] for word in "cd")
    for score, image, prompt in zip(found, samples.media, samples.prompts, strict=True):
        given = processor(
            text=[f"u:<image>ab {prompt} a:"], images=[[to_pil(image)]], return_tensors="pt"
        )
        chances = model(**given).logits[0, -1].softmax(-1)
        assert float(score) == pytest.approx(float(chances[yes] / (chances[yes] + chances[no])))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"question": "what?"}, "the question must contain {prompt}"),
        ({"yes": "ab"}, "'ab' is 2 tokens in .*, not one"),
    ],
)
def test_what_cannot_be_asked_is_refused(folder, settings, message):
    check_reward("vlm_yes_no", {"model": folder, **SETTINGS, **settings})
    with pytest.raises(ValueError, match=message):
        load("vlm_yes_no", model=folder, **(SETTINGS | settings))


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no chat template"):
        load("vlm_yes_no", model=str(tiny_vlm.write(tmp_path, chat=False)), **SETTINGS)
