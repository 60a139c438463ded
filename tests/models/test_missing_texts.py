"""A row of a prompt file means the same beside any other row: texts that it lacks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.errors import UserError
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.inputs.conditioning import Conditioning
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.prompts import PromptSet
from tests.support.advice import advice
from tests.support.driving import PROMPTS
from tests.support.tiny_pipelines import FAMILIES, NAMED, SQUARE, sd3
from tests.support.tiny_pipelines_image import qwen_image
from tests.support.tiny_pipelines_unet import sdxl

OTHERS: list[dict[str, str]] = [
    {"negative_prompt": "bad blurry"},
    {"prompt_2": "a red cube"},
    {"negative_prompt": "bad blurry", "negative_prompt_2": "a table", "prompt_3": "blue cat"},
]


def second(conditioning: Conditioning) -> list[torch.Tensor]:
    """The encodings of the second row."""
    return [v for v in conditioning.take([1]).values if isinstance(v, torch.Tensor)]


@pytest.mark.quick_cases("own1-two blue cat")
@pytest.mark.parametrize("negative", [None, "two blue cat"])
@pytest.mark.parametrize("own", [{}, {"negative_prompt": "on the table"}])
def test_a_row_is_encoded_beside_others_as_the_pipeline_encodes_it_alone(
    negative: str | None, own: Mapping[str, Any]
) -> None:
    call = SQUARE if negative is None else SQUARE | {"negative_prompt": negative}
    made = PipelinePolicy(sd3(), call=call)
    plain = PipelinePolicy(sd3(), call=call | own)  # all rows have the same arguments
    expected = second(plain.encode(PROMPTS))
    for other in OTHERS:
        found = second(made.encode(PROMPTS, [other, own]))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_missing_text_that_nothing_stands_for_is_refused_at_the_start(tmp_path: Path) -> None:
    """Qwen-Image guides only where there is a negative prompt."""
    call = {key: value for key, value in FAMILIES["qwen"][1].items() if key != "negative_prompt"}
    made, file = PipelinePolicy(qwen_image(), call=call), tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a", "negative_prompt": "bad"}, {"prompt": "b"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    _, meta = PromptSet.read(str(file), "prompt", "train.prompts").take([0, 1])
    whole = [dict(meta[0]), {**meta[1], "negative_prompt": "dark"}]
    advice(
        "{} has no {}, but other rows have one, and {} does not treat a missing text as an empty "
        "one: add one to every row, or set model.call.{}",
        lambda: made.check_rows(meta),
        lambda: made.check_rows(whole),
    )
    with pytest.raises(UserError, match=r"line 2 has no negative_prompt.*model.call.negative_"):
        made.check_rows(meta)
    with pytest.raises(UserError, match="does not treat a missing text as an empty one"):
        made.encode(PROMPTS, meta)
    given = PipelinePolicy(qwen_image(), call=call | {"negative_prompt": "bad"})
    given.check_rows(meta)
    found, expected = second(given.encode(PROMPTS, meta)), second(given.encode(PROMPTS))
    assert all(map(torch.equal, found, expected)) and found


def test_rows_with_images_lack_texts_too() -> None:
    family = NAMED["FLUX.1-Kontext"]
    made = PipelinePolicy(family.build(), call=family.call)
    image = columns.placeholder_images(["image"], 32, 32)
    expected = second(made.encode(PROMPTS, [image, image]))
    found = second(made.encode(PROMPTS, [{**image, "prompt_2": "a table"}, image]))
    assert found and all(a.shape == b.shape for a, b in zip(found, expected, strict=True))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_no_negative_prompt_is_not_always_an_empty_one() -> None:
    """SDXL's own call has zeros for none."""
    made = PipelinePolicy(sdxl(), call=NAMED["SDXL"].call)
    with pytest.raises(UserError, match="prompt 2 of the batch has no negative_prompt"):
        made.encode(PROMPTS, [{"negative_prompt": "bad blurry"}, {}])
