"""One iteration of a run with adapters, for pipelines whose class neither writes nor reads them:
what the run saves is read by plain diffusers, by the lines that it prints, with equal outputs."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

import flowrl
from flowrl.cli.model_card import adapter_lines
from tests.models.test_lora_everywhere import built, velocity, without_writer
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import VIDEO_SPECIALS
from tests.support.zoo.pipelines import tiny

torch.set_num_threads(1)
PROMPTS = ("a red cube", "two blue cat")
# their tiny parts are no run: by what stands in the way
UNSHOWN = {
    "AllegroPipeline": "its tiny decoder makes frames of one brightness, which score the same",
    "Cosmos2_5_TransferPipeline": "its controls are objects in Python",
    "DreamLiteMobilePipeline": "its tiny text encoder is not loaded from files",
    "DreamLitePipeline": "its tiny text encoder is not loaded from files",
    "I2VGenXLPipeline": "its tiny text encoder is not loaded from files",
    "JoyImageEditPipeline": "its tiny processor is not loaded from files",
    "Kandinsky6TI2VAPipeline": "its tiny transformer has no token of an image, which a row has",
    "KandinskyInpaintPipeline": "its embeddings of images are tensors, which no file has",
    "KandinskyPipeline": "its embeddings of images are tensors, which no file has",
    "LongCatImageEditPipeline": "its tiny processor is not loaded from files",
    "NucleusMoEImagePipeline": "its tiny processor is not loaded from files",
    "StableDiffusionGLIGENTextImagePipeline": "its image_project has sizes that no file has",
}
# guided by a part: their runs need `guidance: none`, with which none was run to its end
UNTRIED = (
    "HunyuanImagePipeline", "HunyuanVideo15ImageToVideoPipeline", "HunyuanVideo15Pipeline",
    "MotifVideoImage2VideoPipeline", "MotifVideoPipeline",
)  # fmt: skip
RUNS = [name for name in without_writer() if name not in (*UNSHOWN, *UNTRIED)]
RECIPE = {"name": "nft", "steps": 3, "group": 2}


def rows(folder: Path, call: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """A file of prompts with the images of a call in its columns, and the other arguments."""
    shown, others = dict[str, Any](), dict[str, Any]()
    for name, value in call.items():
        pictures = value if isinstance(value, list) else [value]
        if not all(isinstance(picture, Image.Image) for picture in pictures):
            others[name] = value
            continue
        places = [f"{name}-{k}.png" for k in range(len(pictures))]
        for place, picture in zip(places, pictures, strict=True):
            picture.save(folder / place)
        shown[name] = places if isinstance(value, list) else places[0]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, **shown}) + "\n" for text in PROMPTS))
    return file, others


def test_what_no_run_shows_is_of_the_list() -> None:
    assert {*UNSHOWN, *UNTRIED} <= set(without_writer())


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_saves_adapters_that_plain_diffusers_reads(name: str, tmp_path: Path) -> None:
    made = tiny(getattr(diffusers, name), SPECIALS | VIDEO_SPECIALS, SIZES)
    policy = built(name)
    file, call = rows(tmp_path, {**policy.loop.traits.required, **made.call})
    sizes = {side: call.pop(side) for side in ("height", "width") if side in call}
    scale = None if policy.loop.guidance is None else {"sample": 4.5}
    run = flowrl.train(
        made.pipe, rewards=["brightness"], prompts=str(file), recipe=RECIPE, lora=2, iterations=1,
        lr=0.05, folder=tmp_path / "run",
        settings={
            "model": {"call": call, "guidance": scale, **sizes},
            "prompts": {"per_iteration": 2},
            "track": {"panel": False},
        },
    )  # fmt: skip
    (line,) = [line for line in run.metrics if line.get("iteration") == 1]
    assert line["grad_norm"] > 0 and run.weights is not None

    again = built(name)
    base = velocity(again)
    again.begin_from(str(run.weights))
    want = velocity(again)
    assert not torch.allclose(want, base, atol=1e-5)

    plain = built(name)
    files = [path.name for path in run.weights.iterdir()]
    roots = list(plain.roots())
    lines = [*adapter_lines(type(plain.pipe), roots, None, files, str(run.weights))]
    exec("\n".join(lines), {"pipe": plain.pipe})  # as a run prints them
    torch.testing.assert_close(velocity(plain), want, atol=1e-5, rtol=1e-5)  # other fused products
