"""Rows with conditioning images of one size share a call, and each is as in a call of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.replay.proof_images import OtherImages
from tests.support.driving import PROMPTS, STEPS
from tests.support.tiny_pipelines import NAMED

torch.set_num_threads(1)
FAMILIES = pytest.mark.parametrize("name", ["FLUX.1-Kontext", "Qwen-Image-Edit"])
SCALE = 3.5


def images(folder: Path, sizes: list[tuple[int, int]]) -> list[dict[str, str]]:
    rows = []
    for i, size in enumerate(sizes):
        path = folder / f"{i}.png"
        Image.effect_noise(size, 80).convert("RGB").rotate(90 * i).save(path)
        rows.append({"image": str(path)})
    return rows


def counted(made: PipelinePolicy) -> list[int]:
    """The rows of each call of the denoiser from now on."""
    rows: list[int] = []
    made.denoisers[0].register_forward_hook(
        lambda _, args, named, out: rows.append(len(named["hidden_states"])), with_kwargs=True
    )
    return rows


def own_prediction(pipe: Any, call: dict[str, Any], given: dict[str, Any]) -> Any:
    """(first prediction, sample) of the pipeline's own call for one row, without flowrl."""
    seen: list[torch.Tensor] = []
    step = pipe.scheduler.step

    def watched(output: Any, *args: Any, **named: Any) -> Any:
        seen.append(output)
        return step(output, *args, **named)

    pipe.scheduler.step = watched
    try:
        sample = pipe(
            **{**call, **given}, num_inference_steps=STEPS, output_type="pt", return_dict=False
        )[0]
    finally:
        del pipe.scheduler.step
    return seen[0], sample


@pytest.mark.quick_cases("Kontext")
@FAMILIES
def test_images_of_one_size_share_a_call(name, tmp_path):
    """Four rows with three images of one size are one call (two with guidance); each row is what
    the pipeline's own call makes of its prompt, its image and its noise."""
    family = NAMED[name]
    made = PipelinePolicy(family.build(), call=family.call)
    meta = images(tmp_path, [(16, 16)] * 3)
    prompts = [*PROMPTS, "a"]
    made.prove(prompts[:2], steps=STEPS, guidance=SCALE, meta=meta[:2])
    assert made.known_proofs[STEPS, SCALE].together == ("image",)
    whole = made.encode(prompts, meta)
    x = torch.randn(4, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    at = torch.tensor([2, 0, 1, 0])
    sigma = torch.full((4,), made.schedule(STEPS).sigmas[0])
    velocity, rows = made.bind(whole, steps=STEPS, guidance=SCALE), counted(made)
    together = velocity(x, sigma, at)
    assert set(rows) == {4} and len(rows) == (1 if name == "FLUX.1-Kontext" else 2)
    scale = "guidance_scale" if family.embedded else "true_cfg_scale"
    for row in range(4):
        (image,) = columns.open_images((meta[at[row]]["image"],))
        given = {"prompt": prompts[at[row]], "image": image}
        given |= {"latents": x[row : row + 1], scale: SCALE}
        output, _ = own_prediction(made.pipe, family.call, given)
        torch.testing.assert_close(together[row], output[0], rtol=1e-4, atol=1e-5)
        alone = velocity(x[row : row + 1], sigma[:1], at[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], rtol=1e-4, atol=1e-5)
    # its image matters
    assert (velocity(x, sigma, at.roll(1)) - together).flatten(1).abs().amax(1).min() > 1e-4


@pytest.mark.parametrize(
    "name", ["FLUX.1-Kontext", pytest.param("Qwen-Image-Edit", marks=pytest.mark.slow)]
)
def test_decoded_rows_share_a_call_too(name, tmp_path):
    family = NAMED[name]
    made = PipelinePolicy(family.build(), call=family.call)
    meta = images(tmp_path, [(16, 16)] * 2)
    made.prove(PROMPTS, steps=STEPS, guidance=SCALE, meta=meta)
    whole = made.encode(PROMPTS, meta)
    x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    calls = []
    real = made.loop.decode
    made.loop.decode = lambda x0, *rest, **how: (calls.append(len(x0)), real(x0, *rest, **how))[1]
    both = made.decode(x, whole, steps=STEPS, guidance=SCALE)
    assert calls == [2]
    for row in range(2):
        alone = made.decode(x[[row]], whole.take([row]), steps=STEPS, guidance=SCALE)
        torch.testing.assert_close(both[row], alone[0], rtol=1e-4, atol=1e-5)


def test_rows_are_split_by_the_size_of_their_images_and_by_rows_per_call(tmp_path):
    family = NAMED["FLUX.1-Kontext"]
    made = PipelinePolicy(family.build(), call=family.call)
    meta = images(tmp_path, [(16, 16), (32, 16), (16, 16), (16, 16)])
    made.prove(PROMPTS, steps=STEPS, guidance=SCALE, meta=meta[:2])
    whole = made.encode([*PROMPTS, *PROMPTS], meta)
    x = torch.randn(4, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    sigma, at = torch.full((4,), 0.6), torch.arange(4)
    velocity, rows = made.bind(whole, steps=STEPS, guidance=SCALE), counted(made)
    together = velocity(x, sigma, at)
    assert rows == [3, 1]
    made.rows_per_call = 2
    rows.clear()
    torch.testing.assert_close(velocity(x, sigma, at), together, rtol=1e-4, atol=1e-5)
    assert rows == [2, 1, 1]


def test_a_pipeline_that_mixes_images_keeps_a_call_for_each(tmp_path):
    """A list read in another order, or as images of all rows: the proof notices, rows split."""
    family = NAMED["FLUX.1-Kontext"]
    pipe = family.build()
    real = pipe.image_processor.preprocess

    def reversed_rows(image: Any, *rest: Any) -> torch.Tensor:
        return real(image, *rest).flip(0)

    pipe.image_processor.preprocess = reversed_rows
    made = PipelinePolicy(pipe, call=family.call)
    meta = images(tmp_path, [(16, 16)] * 2)
    made.prove(PROMPTS, steps=STEPS, guidance=SCALE, meta=meta)
    assert made.known_proofs[STEPS, SCALE].together == ()
    whole = made.encode(PROMPTS, meta)
    x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    velocity, rows = made.bind(whole, steps=STEPS, guidance=SCALE), counted(made)
    velocity(x, torch.full((2,), 0.6), torch.arange(2))
    assert rows == [1, 1]


def test_a_loop_that_only_begins_at_its_image_shows_nothing(tmp_path):
    """Predictions that do not depend on the image are equal for any images."""
    family = NAMED["FLUX.1-Kontext"]
    made = PipelinePolicy(family.build(), call=family.call)
    extras = made.loop.extras(images(tmp_path, [(16, 16)]) * 2, PROMPTS)
    made.prove(PROMPTS, steps=STEPS, guidance=SCALE)
    way = made.known_proofs[STEPS, SCALE].to_way
    x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    subject = OtherImages(made.loop, PROMPTS, extras, [(x, 0.6)], way)
    assert subject.shared() == ("image",)
    same = made.pipe.image_processor.preprocess
    made.pipe.image_processor.preprocess = lambda *a: torch.zeros_like(same(*a))
    assert subject.shared() == ()


def test_the_rows_of_a_trial_have_the_first_prompts_image(tmp_path):
    """The second one is of another size, which no batch can have beside it."""
    family = NAMED["FLUX.1-Kontext"]
    loop = PipelinePolicy(family.build(), call=family.call).loop
    first, second = loop.extras(images(tmp_path, [(16, 16), (24, 16)]), PROMPTS)
    assert [row["image"] is first["image"] for row in loop.tried((first, second))] == [True] * 2
    assert loop.tried((second,))[0]["image"] is second["image"]


def test_groups_of_images():
    one, two, wide = (Image.new("RGB", size) for size in ((4, 4), (4, 4), (8, 4)))
    rows = [{"image": each, "negative_prompt": "a"} for each in (one, wide, two, one)]
    assert columns.by_image(rows) == [[0, 3], [1], [2]]
    assert columns.by_image(rows, ("image",)) == [[0, 2, 3], [1]]
    assert columns.by_image(rows, ("image", "mask_image")) == [[0, 3], [1], [2]]
    several = [{"image": [one, wide]}, {"image": [two, wide]}, {"image": [wide, one]}]
    assert columns.by_image(several, ("image",)) == [[0, 1], [2]]
    assert columns.by_image([{"image": torch.ones(2)}] * 2, ("image",)) == [[0, 1]]
    given = columns.merged_call([rows[0], rows[2]], per_row=False)
    assert given["image"] == [one, two]
    assert columns.merged_call([rows[0], rows[3]], per_row=False)["image"] is one
