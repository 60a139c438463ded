"""Conditioning images and negative prompts from the prompt file; states that are fixed in part."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive import image_cache
from flowrl.models.diffusers.call.drive.image_cache import ImageSet, Memo, Posterior
from flowrl.models.diffusers.call.drive.patches import patched, placed
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.inputs.columns import GivenForm
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.prompts import PromptSet
from flowrl.prompts.prompt_set import PromptRow
from rewards.perception.files import read_images
from rewards.perception.media import to_tensor
from tests.support.advice import advice
from tests.support.driving import PROMPTS, STEPS
from tests.support.tiny_pipelines import NAMED, SQUARE, sd3
from tests.support.tiny_pipelines_parts import vae

torch.set_num_threads(1)


def pictures(folder: Path) -> list[str]:
    paths = []
    for i, colour in enumerate(["red", "blue"]):
        path = folder / f"{colour}.png"
        Image.new("RGB", (24 + i, 20), colour).save(path)
        paths.append(str(path))
    return paths


def policy(name: str) -> PipelinePolicy:
    return PipelinePolicy(NAMED[name].build(), call=NAMED[name].call)


def test_rows_keep_their_own_image(tmp_path: Path) -> None:
    """Several images in one batch give what each gives alone, in every order."""
    made = policy("FLUX.1-Kontext")
    meta = [{"image": path} for path in pictures(tmp_path)]
    both = made.encode(PROMPTS, meta)
    x = torch.randn(3, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    sigma, prompt = torch.full((3,), 0.6), torch.tensor([1, 0, 1])
    together = made.bind(both, steps=STEPS, guidance=3.5)(x, sigma, prompt)
    media = made.decode(x, both.take(prompt), steps=STEPS, guidance=3.5)
    for row in range(3):
        at = int(prompt[row])
        alone = made.encode([PROMPTS[at]], [meta[at]])
        velocity = made.bind(alone, steps=STEPS, guidance=3.5)
        own = velocity(x[row : row + 1], sigma[:1], torch.tensor([0]))
        torch.testing.assert_close(together[row], own[0], rtol=1e-5, atol=1e-5)
        shown = made.decode(x[row : row + 1], alone, steps=STEPS, guidance=3.5)
        torch.testing.assert_close(media[row], shown[0], rtol=1e-5, atol=1e-5)
    other = made.encode(PROMPTS, [meta[1], meta[0]])
    swapped = made.bind(other, steps=STEPS, guidance=3.5)(x, sigma, prompt)
    assert (swapped - together).abs().max() > 1e-4  # the image matters


@pytest.mark.slow
def test_a_sampled_posterior_is_one_and_the_same(tmp_path: Path) -> None:
    """CogVideoX's image model draws from its posterior in each call; ratios must be 1."""
    meta = [{"image": path} for path in pictures(tmp_path)]
    found = []
    for _ in range(2):  # in another process the same, too
        made = policy("CogVideoX with an image")
        conditioning = made.encode(PROMPTS, meta)
        velocity = made.bind(conditioning, steps=STEPS, guidance=4.5)
        x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
        sigma = torch.full((2,), made.schedule(STEPS).sigmas[1])
        found += [velocity(x, sigma, torch.tensor([0, 1])) for _ in range(2)]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_memo_encodes_an_image_once() -> None:
    class Pipe:
        pass

    pipe: Any = Pipe()
    pipe.vae = vae().eval()
    memo, real, calls = Memo(pipe), pipe.vae.encode, []

    def counted(x: torch.Tensor) -> Any:
        calls.append(len(x))
        return real(x)

    pipe.vae.encode = counted
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    patches = memo.patches()
    assert len(patches) == 1
    with patched(patches):
        first = pipe.vae.encode(images).latent_dist
        again = pipe.vae.encode(images[[2, 0]]).latent_dist
    assert calls == [1, 1, 1] and isinstance(first, Posterior)
    assert torch.equal(first.sample()[[2, 0]], again.sample())
    assert torch.equal(first.mode()[0], real(images[:1]).latent_dist.mode()[0])
    noise = (first.sample() - first.mean) / first.std
    assert noise.std() == pytest.approx(1, abs=0.1) and not torch.equal(noise[0], noise[1])
    assert pipe.vae.encode is counted


def test_the_content_of_known_images_is_not_read_again(monkeypatch) -> None:
    """Reading a tensor waits for its device. Images in another order are other ones, and so are
    those of a call with another number (a strength, a height)."""
    pipe: Any = type("Pipe", (), {})()
    pipe.vae = vae().eval()
    memo, read, digests = Memo(pipe), [], image_cache._digests

    def counted(rows: torch.Tensor) -> list[str]:
        read.append(len(rows))
        return digests(rows)

    monkeypatch.setattr(image_cache, "_digests", counted)
    monkeypatch.setattr(image_cache, "COMPARED_ENCODINGS", 0)
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    pictures = [Image.new("RGB", (16, 16)) for _ in pixels]

    def encoded(order: list[int], number: float = 1.0) -> torch.Tensor:
        given = {"image": [pictures[i] for i in order], "strength": number, "prompt": ["a"]}
        memo.begin(ImageSet(given))
        with patched(memo.patches()):
            return pipe.vae.encode(pixels[order] * number).latent_dist.sample()

    first = encoded([0, 1])
    assert torch.equal(encoded([0, 1]), first) and read == [2]
    assert torch.equal(encoded([1, 0]), first.flip(0)) and read == [2, 2]
    assert not torch.equal(encoded([0, 1], 0.5), first) and read == [2, 2, 2]
    pictures[0] = Image.new("RGB", (16, 16))  # another object, maybe at the same address
    pixels[0] = 1 - pixels[0]
    assert not torch.equal(encoded([0, 1])[0], first[0]) and read == [2, 2, 2, 2]
    memo.begin(None)  # unknown: read in every call
    with patched(memo.patches()):
        pipe.vae.encode(pixels), pipe.vae.encode(pixels)
    assert read == [2] * 6


def test_each_encoding_of_a_call_is_compared() -> None:
    """Those of the images alone say nothing of one that follows the state (the last frames of a
    video's segment), whose content would be taken for that of the call before."""
    pipe: Any = type("Pipe", (), {})()
    pipe.vae = vae().eval()
    memo, picture = Memo(pipe), Image.new("RGB", (16, 16))
    draws = torch.Generator().manual_seed(1)
    still = torch.rand(1, 3, 16, 16, generator=draws)

    def encoded(state: torch.Tensor | None) -> torch.Tensor:
        memo.begin(ImageSet({"image": picture}))
        with patched(memo.patches()), torch.no_grad():
            first = pipe.vae.encode(still).latent_dist.mode()
            return first if state is None else pipe.vae.encode(state).latent_dist.mode()

    for _ in range(image_cache.COMPARED_ENCODINGS + 2):
        encoded(None)
    one, other = (torch.rand(1, 3, 16, 16, generator=draws) for _ in range(2))
    assert not torch.equal(encoded(one), encoded(other))


def test_memo_is_bounded_by_bytes_and_keeps_the_encodings_of_its_call(monkeypatch) -> None:
    class Pipe:
        pass

    pipe: Any = Pipe()
    pipe.vae = vae().eval()
    memo = Memo(pipe)
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    patches = memo.patches()
    assert len(patches) == 1
    with patched(patches), torch.no_grad():
        pipe.vae.encode(images[:1])
        each = memo.bytes
        assert each > 0
        monkeypatch.setattr(image_cache, "CACHED_BYTES", 2 * each)
        for i in range(4):
            pipe.vae.encode(images[i : i + 1])
        assert memo.bytes == 2 * each and len(memo.kept) == 2
        pipe.vae.encode(images)  # one call needs all four
        assert memo.bytes == 4 * each
        pipe.vae.encode(images[:1])
        assert memo.bytes == 2 * each


def test_fixed_frames_are_no_part_of_the_state(tmp_path: Path) -> None:
    """LTX steps all frames but the image's; ours are those, and the first frame stays."""
    path = pictures(tmp_path)[0]
    made, text = policy("LTX-Video with an image"), policy("LTX-Video")
    (tokens, _), (channels, frames, *_) = text.shape(STEPS), made.shape(STEPS)
    assert (channels, frames) == (8, 2) and tokens == 3 * 16
    entry = made.loop.traits.entry
    assert entry.index is not None
    prepared = torch.zeros(1, tokens, channels)
    x = torch.randn(1, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    filled = entry.fill(prepared, x)
    assert not filled[:, :16].any() and torch.equal(
        filled[:, 16:].sort()[0], filled[:, 16:].sort()[0]
    )
    torch.testing.assert_close(filled[0, 16:].T.reshape(x[0].shape), x[0])
    conditioning = made.encode(PROMPTS, [{"image": path}] * 2)
    shown = made.decode(x.repeat(2, 1, 1, 1, 1), conditioning, steps=STEPS, guidance=3.0)
    assert shown.shape == (2, 9, 3, 32, 32)
    with pytest.raises(UserError, match="do not fit"):
        entry.fill(torch.zeros(2, tokens, channels), x)


@pytest.mark.slow
def test_negative_prompts_by_row() -> None:
    """A column of the file is what the pipeline's own argument would be, row by row."""
    made = PipelinePolicy(sd3(), call=SQUARE)
    meta = [{"negative_prompt": "bad blurry"}, {"negative_prompt": None}]
    rows = made.encode(PROMPTS, meta)
    x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    sigma, both = torch.full((2,), 0.6), torch.tensor([0, 1])
    ours = made.bind(rows, steps=STEPS, guidance=4.5)(x, sigma, both)
    for row, negative in enumerate(["bad blurry", ""]):
        one = PipelinePolicy(sd3(), call=SQUARE | {"negative_prompt": negative})
        velocity = one.bind(one.encode(PROMPTS), steps=STEPS, guidance=4.5)
        torch.testing.assert_close(ours[row], velocity(x, sigma, both)[row], rtol=1e-5, atol=1e-5)


def test_columns(tmp_path: Path) -> None:
    paths, names = pictures(tmp_path), ["prompt", "negative_prompt", "image", "height"]
    assert columns.extras([{"prompt": "a", "height": 3, "answer": 1}], names, GivenForm()) == ()
    two = columns.extras([{"image": paths[0]}, {"image": paths}], names, GivenForm())
    assert two[0]["image"] is columns.open_images((paths[0],))[0] and len(two[1]["image"]) == 2
    three = [{"image": paths[0]}, {"image": paths[1]}, {"image": paths[0]}]
    again = columns.extras(three, names, GivenForm())
    assert columns.by_image(again) == [[0, 2], [1]]
    with pytest.raises(UserError, match="prompt 2 of the batch has no image"):
        columns.extras([{"image": paths[0]}, {}], names, GivenForm())
    assert columns.shared_images({"image": paths[0], "mask": None, "height": 3}) == {
        "image": columns.open_images((paths[0],))[0]
    }


def test_an_image_that_cannot_be_read_is_named_with_its_row(tmp_path: Path) -> None:
    """Missing, damaged, huge or of another format: one sentence with the file and the row."""
    good = Path(pictures(tmp_path)[0])
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:-30])
    Image.new("1", (8200, 8200)).save(tmp_path / "huge.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "old.bmp")
    reasons = {
        "none.png": "no such file",
        "cut.png": "not a readable image",
        "huge.png": "8200 x 8200 pixels; the limit is 67108864",
        "old.bmp": "not a PNG, JPEG or WebP image",
    }
    prompts = tmp_path / "prompts.jsonl"
    for name, reason in reasons.items():
        rows = [{"prompt": "a", "image": image} for image in (good.name, name)]
        prompts.write_text("\n".join(map(json.dumps, rows)))
        _, meta = PromptSet.read(str(prompts), "prompt", "train.prompts").take([1, 0])
        with pytest.raises(UserError, match=reason) as refused:
            columns.extras(meta, ["prompt", "image"], GivenForm())
        said = str(refused.value)
        assert said.startswith(f"train.prompts: {prompts}, line 2, image: ") and name in said
        with pytest.raises(UserError, match=rf"^prompt 1 of the batch, images: .*({reason})"):
            columns.extras([{"images": [str(good), str(tmp_path / name)]}], ["images"], GivenForm())
        with pytest.raises(UserError, match=rf"^model.call, image: .*{name}: .*({reason})"):
            columns.shared_images({"image": str(tmp_path / name)})


SEVERAL = {"FLUX.1-Kontext": False, "FLUX.2": True}  # whether it takes several


@pytest.mark.parametrize("name", SEVERAL)
def test_several_images_for_a_pipeline_of_one_are_named_with_their_row(
    name: str, tmp_path: Path
) -> None:
    made, both = policy(name), [str(tmp_path / f"{i}.png") for i in range(2)]
    for path in both:
        Image.effect_noise((64, 64), 80).convert("RGB").save(path)
    rows = [PromptRow({"image": both[0]}, "rows, 1"), PromptRow({"image": both}, "rows, 2")]
    if SEVERAL[name]:
        made.row_arguments(rows, PROMPTS)
        return
    with pytest.raises(UserError) as told:
        made.row_arguments(rows, PROMPTS)
    assert str(told.value) == (
        "rows, 2, image: 2 images, and FluxKontextPipeline takes one there: give each row one"
    )


IMAGE_CALLS = ("FLUX.1-Kontext", "Qwen-Image-Edit", "LTX-Video with an image",
               "CogVideoX with an image", "Wan 2.1 image to video")  # fmt: skip


@pytest.mark.quick_cases("Kontext")
@pytest.mark.parametrize("name", IMAGE_CALLS)
def test_several_images_in_the_call_of_a_pipeline_of_one_are_named(
    name: str, tmp_path: Path
) -> None:
    """As those of a row are, with both ways out, and the place of an entry that is no image."""
    call, pipe = NAMED[name].call, NAMED[name].build()
    both = [str(tmp_path / f"{i}.png") for i in range(2)]
    for path in both:
        Image.effect_noise((32, 32), 80).convert("RGB").save(path)
    with pytest.raises(UserError) as told:
        PipelinePolicy(pipe, call={**call, "image": both})
    assert str(told.value) == (
        f"model.call, image: 2 images, and {type(pipe).__name__} takes one there: give it one, or "
        "leave it out, with one in each row of the prompts (column image)"
    )
    PipelinePolicy(pipe, call={**call, "image": both[0]})
    PipelinePolicy(pipe, call=call).row_arguments([{"image": both[1]}], ["a"])
    with pytest.raises(UserError, match=r"^model\.call, image: entry 2 of 2: no file"):
        PipelinePolicy(pipe, call={**call, "image": [both[0], 3]})
    with pytest.raises(UserError, match=r"^model.call, image: .*none\.png"):
        PipelinePolicy(pipe, call={**call, "image": [both[0], str(tmp_path / "none.png")]})


def test_conditioning_images_are_upright(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (24, 20)).save(tmp_path / "turned.jpg", exif=turned)
    assert columns.open_images((str(tmp_path / "turned.jpg"),))[0].size == (20, 24)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16", "L"])
def test_the_model_is_given_the_image_that_rewards_read(tmp_path: Path, mode: str) -> None:
    """Transparent parts are white for both, and gray of 16 bits is no plain white."""
    noise = np.asarray(Image.effect_noise((8, 6), 80).convert("L"))
    image = Image.fromarray(noise.astype("uint16") * 257 if mode == "I;16" else noise)
    if mode in ("RGBA", "LA"):
        image = image.convert(mode)
        image.putalpha(Image.fromarray(255 * (noise > 128).astype("uint8")))
    image.save(tmp_path / "image.png")
    (read,) = read_images([tmp_path / "image.png"]).media
    given = columns.open_images((str(tmp_path / "image.png"),))[0]
    assert read is not None and given.mode == "RGB" and read.std() > 0.1
    torch.testing.assert_close(to_tensor(given), read, rtol=0, atol=0.002)


def test_a_changed_image_is_read_again(tmp_path: Path) -> None:
    path, other = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    for name in (path, other):
        Image.new("RGB", (8, 8)).save(name)
    piece = path + "#xywh=0,0,4,4"
    before = [columns.open_images(files)[0] for files in ((path,), (piece,), (path, other))]
    assert columns.open_images((path,))[0] is before[0]
    Image.new("RGB", (8, 9), "white").save(path)
    after = [columns.open_images(files)[0] for files in ((path,), (piece,), (path, other))]
    seen = [image.getpixel((0, 0)) for image in (*before, *after)]
    assert seen == [(0,) * 3] * 3 + [(255,) * 3] * 3


@pytest.mark.slow
def test_pictures_that_all_prompts_share_come_by_the_call(tmp_path: Path) -> None:
    path = pictures(tmp_path)[0]
    family = NAMED["FLUX.1-Kontext"]
    velocities = []
    for call, meta in ((family.call | {"image": path}, []), (family.call, [{"image": path}] * 2)):
        made = PipelinePolicy(family.build(), call=call)
        x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
        velocity = made.bind(made.encode(PROMPTS, meta), steps=STEPS, guidance=3.5)
        velocities.append(velocity(x, torch.full((2,), 0.6), torch.tensor([0, 1])))
    assert torch.equal(*velocities)
    made = policy("Wan 2.1 image to video")
    shared = PipelinePolicy(made.pipe, call=made.call | {"image": path})
    for policy_of, rows in ((made, [{"image": path}] * 2), (shared, [])):
        advice(
            "needs {}: add a prompt column, or set it in `call`",
            lambda: made.encode(PROMPTS),
            lambda policy_of=policy_of, rows=rows: policy_of.encode(PROMPTS, rows),
        )


@pytest.mark.slow
def test_a_pipeline_with_images_calls_its_denoiser_no_more_than_needed(tmp_path: Path) -> None:
    """Kontext begins at noise alone: finding that calls no denoiser, only its stub."""
    pipe, rows = NAMED["FLUX.1-Kontext"].build(), []
    forward = pipe.transformer.forward

    def counted(*args: Any, **named: Any) -> Any:
        rows.append(len(named["hidden_states"]))
        return forward(*args, **named)

    pipe.transformer.forward = counted  # a stub stands in its place, and is not counted
    made = PipelinePolicy(pipe, call=NAMED["FLUX.1-Kontext"].call)
    assert rows == [2, 1]  # a batch of two without images; where a state enters
    rows.clear()
    conditioning = made.encode(PROMPTS, [{"image": path} for path in pictures(tmp_path)])
    assert rows == [2]  # a batch of two with them
    rows.clear()
    assert made.begin(conditioning, STEPS) is None and not rows
    meta = [{"image": path} for path in pictures(tmp_path)]
    made.prove(PROMPTS, steps=STEPS, guidance=3.5, meta=meta)
    steps = [2] * 3 * STEPS  # the pipeline's own, ours, and rows of several sigmas
    neighbours, other_images = [1, 1, 3, 3, 3, 3], [2] * 6
    # another guidance, a gradient, and what a guided row costs
    assert rows == [*steps, *neighbours, *other_images, 2, 1, 2, 2]


def test_a_pipeline_that_encodes_more_than_its_images_is_found_out(monkeypatch) -> None:
    """Cosmos 2.5's transfer, for one."""
    pipe: Any = type("Pipe", (), {})()
    pipe.vae = vae().eval()
    memo = Memo(pipe)
    picture = Image.new("RGB", (16, 16))
    draws = torch.Generator().manual_seed(1)
    for _ in range(2):
        pixels = torch.rand(1, 3, 16, 16, generator=draws)
        memo.begin(ImageSet({"image": picture}))
        with patched(memo.patches()):
            kept = pipe.vae.encode(pixels).latent_dist.mean
        assert torch.equal(kept, pipe.vae.encode(pixels).latent_dist.mean)
    assert not memo.trusted


def test_positions_are_computed_once_and_handed_out_as_copies() -> None:
    """FluxKontextPipeline writes into what it gets."""
    made: list[tuple[Any, ...]] = []

    class Pipe:
        @staticmethod
        def _prepare_latent_image_ids(*args: Any) -> torch.Tensor:
            made.append(args)
            return torch.arange(6.0).view(2, 3)

    pipe: Any = Pipe()
    sizes = (1, 2, 3, torch.device("cpu"), torch.float32)
    with placed(pipe, torch.device("cpu")):
        first = pipe._prepare_latent_image_ids(*sizes)
        first[:] = 0
        again = pipe._prepare_latent_image_ids(*sizes)
        assert torch.equal(again, torch.arange(6.0).view(2, 3)) and made == [sizes]
        pipe._prepare_latent_image_ids(2, *sizes[1:])
        for _ in range(2):
            pipe._prepare_latent_image_ids(again, 8)  # of an image: not remembered
    assert len(made) == 4 and type(pipe) is Pipe
