"""One reader of media: each form of file shows the same pixels through every door."""

import base64
import io
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.api.parts import _saved_image
from flowrl.errors import UserError
from flowrl.evaluation.folders import find_items
from flowrl.evaluation.measure import Gallery
from flowrl.evaluation.preferences import ReadOptions, load_preferences
from flowrl.evaluation.sources import Source, read_media
from flowrl.models.diffusers.call.inputs.columns import GivenForm, extras
from flowrl.models.language.vision import row_images
from flowrl.prompts import DataSource, PromptSet
from flowrl.session.given_file import GivenItem, _header_size, read_sample
from rewards.perception.files import read_images
from rewards.perception.media import to_rgb, to_tensor
from rewards.perception.moving import frames_in_time
from rewards.perception.references import column_images
from rewards.serving import wire
from rewards.types import Samples
from tests.support import media_forms
from tests.support.advice import advice

IMAGES = media_forms.image_forms()
ANIMATIONS = media_forms.animation_forms()
REFUSED = (".bmp", ".tif", ".tiff", ".gif")  # by the doors of prompts


def reference(path: Path, value: object) -> torch.Tensor:
    samples = Samples(torch.zeros(1, 3, 2, 2), ["p"], torch.zeros(1).long(), [{"source": value}])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*are unscored")
        try:
            return column_images("r", samples, "source")[0]
        except UserWarning as error:
            raise ValueError(str(error)) from error


def cell(data: bytes) -> dict:
    return {"bytes": data, "path": "photo"}


def scored(path: Path) -> torch.Tensor:
    """As `flowrl score` reads it."""
    found = find_items(path.parent, None, "auto")
    return Gallery(found.items).samples([0]).media[0]


def compared(path: Path, cell: object, *, parquet: bool) -> torch.Tensor:
    """As `flowrl evaluate-rewards` reads a pair."""
    rows = [{"prompt": "p", "chosen": cell, "rejected": cell}]
    table = path.parent / ("pairs.parquet" if parquet else "pairs.jsonl")
    if parquet:
        from datasets import Dataset

        Dataset.from_list(rows).to_parquet(table)
    else:
        table.write_text(json.dumps(rows[0]))
    items = load_preferences(table, ReadOptions()).items
    table.unlink()
    return Gallery(items).samples([0]).media[0]


def prompt_image(path: Path, value: object) -> torch.Tensor:
    """As a pipeline gets the image of a prompt's row."""
    (row,) = extras([{"prompt": "p", "image": value}], ["image"], GivenForm())
    image = row["image"]
    return to_tensor(image[0] if isinstance(image, list) else image)


def prompt_file(path: Path) -> torch.Tensor:
    """As a pipeline gets the image of a prompt file, whose paths are relative to it."""
    table = path.parent / "prompts.jsonl"
    table.write_text(json.dumps({"prompt": "p", "image": {"bytes": None, "path": path.name}}))
    rows = PromptSet.of(DataSource(str(table), "prompt"), "prompts").meta
    table.unlink()
    return prompt_image(path, rows[0]["image"])


def from_python(path: Path) -> torch.Tensor:
    """An image object in a list of prompts, which is saved and read."""
    name = _saved_image(Image.open(path), "image", 1, path.parent / "p.jsonl", "prompts")
    return to_tensor(Image.open(path.parent / name))


def served(path: Path) -> torch.Tensor:
    """As a reward server reads a client's payload."""
    text = base64.b64encode(path.read_bytes()).decode()
    batch = wire.WireSamples(kind="image", media=[text], prompts=["p"], group=[0])
    wire.count_pixels(batch, 10**9)
    return wire.decode_samples(batch).media[0]


def sheet(path: Path) -> str:
    return f"{path}#xywh=0,0,{media_forms.WIDTH},{media_forms.HEIGHT}"


def one(source: Source) -> torch.Tensor:
    read = read_media([source])
    if read.broken:
        raise ValueError(str(read.broken))
    return read.media[0]


def image_file(path: Path) -> torch.Tensor:
    read = read_images([path])
    if read.broken:
        raise ValueError(str(read.broken))
    return read.media[0]


def source_of(path: Path, value: object) -> Source:
    return Source.of(value, path.parent, "row 1")


MEDIA_DOORS = {  # take animations and videos as frames
    "score": scored,
    "evaluate-rewards": lambda p: compared(p, p.name, parquet=False),
    "evaluate-rewards, parquet": lambda p: compared(p, cell(p.read_bytes()), parquet=True),
    "a cell's bytes": lambda p: one(source_of(p, p.read_bytes())),
    "given sample": lambda p: read_sample(GivenItem(source_of(p, p.name), "row 1"), 16),
}
SHEET_DOORS = {
    "a part of a sheet": lambda p: one(source_of(p, sheet(p))),
}
PROMPT_DOORS = {  # read PNG, JPEG and WebP alone
    "image file of a reward": image_file,
    "part of a file of a reward": lambda p: image_file(sheet(p)),
    "reward's column, path": lambda p: reference(p, str(p)),
    "reward's column, bytes": lambda p: reference(p, p.read_bytes()),
    "reward's column, parquet": lambda p: reference(p, cell(p.read_bytes())),
    "prompt's image, path": lambda p: prompt_image(p, str(p)),
    "prompt's image, bytes": lambda p: prompt_image(p, p.read_bytes()),
    "prompt's image, parquet": lambda p: prompt_image(p, cell(p.read_bytes())),
    "prompt's images, paths": lambda p: prompt_image(p, [str(p), str(p)]),
    "prompt's images, parquet": lambda p: prompt_image(p, [cell(p.read_bytes())]),
    "prompt file": prompt_file,
    "vision, path": lambda p: to_tensor(row_images({"image": str(p)}, "row 1")[0]),
    "vision, parquet": lambda p: to_tensor(row_images({"images": [cell(p.read_bytes())]}, "r")[0]),
}
OBJECT_DOORS = {  # an image object of Python
    "image from Python": from_python,
    "vision, image": lambda p: to_tensor(row_images({"image": Image.open(p)}, "row 1")[0]),
    "reward's column, image": lambda p: reference(p, Image.open(p)),
    "8 bits": lambda p: to_tensor(to_rgb(to_rgb(Image.open(p)))),
}


def written(folder: Path, form: media_forms.Form) -> Path:
    path = folder / f"photo{form.suffix}"
    path.write_bytes(form.data)
    return path


def check(pixels: torch.Tensor, shows: np.ndarray, near: float) -> None:
    wanted = torch.from_numpy(np.array(shows)).movedim(-1, -3)
    assert pixels.shape == wanted.shape
    assert float((pixels - wanted).abs().max()) * 255 <= near + 1e-3


@pytest.mark.parametrize(
    "door", [*MEDIA_DOORS, *SHEET_DOORS, *PROMPT_DOORS, *OBJECT_DOORS, "serve"]
)
def test_an_image_has_the_same_pixels_through_every_door(tmp_path, door):
    doors = MEDIA_DOORS | SHEET_DOORS | PROMPT_DOORS | OBJECT_DOORS | {"serve": served}
    for number, (name, form) in enumerate(IMAGES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = written(folder, form)
        closed = (door in PROMPT_DOORS and form.suffix in REFUSED) or (
            door == "serve" and form.suffix not in (".png", ".webp")
        )
        if closed:
            with pytest.raises((ValueError, UserError), match=r"PNG, JPEG or WebP|PNG nor WebP"):
                doors[door](path)
            continue
        try:
            check(doors[door](path), form.shows, max(form.near, 0.51 if "16" in name else 0))
        except (AssertionError, ValueError, UserError) as error:
            raise AssertionError(f"{name} through {door}") from error


@pytest.mark.parametrize("door", [*MEDIA_DOORS, *PROMPT_DOORS, "serve"])
def test_an_animation_is_frames_or_its_first_image(tmp_path, door):
    doors = MEDIA_DOORS | PROMPT_DOORS | {"serve": served}
    for number, (name, form) in enumerate(ANIMATIONS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = written(folder, form)
        shows = form.shows if door in MEDIA_DOORS else form.image
        if form.suffix == ".gif" and door not in MEDIA_DOORS:
            continue
        try:
            check(doors[door](path), shows, form.near)
        except (AssertionError, ValueError, UserError) as error:
            raise AssertionError(f"{name} through {door}") from error


def served_video(path: Path) -> torch.Tensor:
    text = base64.b64encode(path.read_bytes()).decode()
    entry = wire.WireVideo(mp4=text)
    batch = wire.WireSamples(kind="video", media=[entry], prompts=["p"], group=[0])
    wire.count_pixels(batch, 10**9)
    return wire.decode_samples(batch).media[0]


@pytest.mark.parametrize("door", [*MEDIA_DOORS, "serve"])
def test_a_video_shows_what_a_player_shows(tmp_path, door):
    pytest.importorskip("av")
    doors = MEDIA_DOORS | {"serve": served_video}
    for number, (name, form) in enumerate(media_forms.video_forms().items()):
        if door == "serve" and (form.suffix != ".mp4" or name in ("varying rate", "edit list")):
            continue  # a server is sent frames, whatever their times
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            check(doors[door](written(folder, form)), form.shows, form.near)
        except (AssertionError, ValueError, UserError) as error:
            raise AssertionError(f"{name} through {door}") from error


@pytest.mark.parametrize("name", IMAGES)
def test_the_header_has_the_size_of_the_decoded_image(tmp_path, name):
    """Beyond the first files only headers are read: a photo on its side has its upright size."""
    path = written(tmp_path, IMAGES[name])
    assert _header_size(GivenItem(Source.of(path.name, tmp_path, ""), "")) == (24, 36)


def test_plain_files_have_the_bits_of_pillow(tmp_path):
    """Eight-bit sRGB without alpha: nothing is converted."""
    for name in ("png", "jpeg", "webp", "sRGB profile", "sRGB profile, jpeg", "gray", "cmyk jpeg"):
        path = written(tmp_path, IMAGES[name])
        bits = np.asarray(Image.open(path).convert("RGB"), np.float32) / 255
        assert torch.equal(image_file(path), torch.from_numpy(bits).permute(2, 0, 1)), name


@pytest.mark.parametrize("profile", [b"no profile", b"\0" * 200])
def test_a_damaged_profile_is_told_and_left_out(tmp_path, profile):
    path = tmp_path / "a.png"
    Image.fromarray(media_forms.scene()).save(path, icc_profile=profile)
    with pytest.warns(UserWarning, match="colour profile cannot be read"):
        check(image_file(path), media_forms.scene() / 255, 0)


def test_a_profile_of_other_channels_is_told_and_left_out(tmp_path):
    path = tmp_path / "a.png"
    image = Image.fromarray(media_forms.scene())
    image.save(path, icc_profile=media_forms.linear_gray_profile())
    with pytest.warns(UserWarning, match="an image of RGB has a colour profile for GRAY"):
        check(image_file(path), media_forms.scene() / 255, 0)


def test_numbers_without_a_white_are_refused(tmp_path):
    path = tmp_path / "a.tif"
    floats = np.full((4, 4), 0.5, np.float32)
    for bits, kind in ((8, np.uint8), (16, np.uint16)):
        Image.fromarray(floats).save(path)
        whole = Image.fromarray((floats * (2**bits - 1)).astype(kind))
        image = advice(
            "its pixels are floating-point numbers, whose white is not known: save it with 8 or 16 "
            "bits",
            lambda: one(Source.of("a.tif", tmp_path, "")),
            lambda whole=whole: (whole.save(path), one(Source.of("a.tif", tmp_path, "")))[1],
        )
        assert abs(image.mean() - 0.5) < 0.01


def test_frames_are_evenly_spaced_in_time():
    """By hand: the frame shown at each time; rounded times of an even rate count as even."""
    assert frames_in_time([0, 1, 2, 3, 4], 3) == [0, 2, 4]
    assert frames_in_time([0, 33, 67, 100, 133], 16) == [0, 1, 2, 3, 4]
    assert frames_in_time([5, 6, 7, 13], 16) == [0, 1, 2, 2, 2, 2, 2, 2, 3]
    assert frames_in_time([5, 6, 7, 13], 3) == [0, 2, 3]
    assert frames_in_time([0, 8, 9, 10], 1) == [0]
    assert frames_in_time([None, 1, 2], 2) == [0, 2]
    assert frames_in_time([0, 0, 0, 0], 2) == [0, 3]
    assert frames_in_time([0.0, 1e-9, 1000.0], 4) == [0, 1, 1, 2]


def test_bytes_of_a_video_need_no_name(tmp_path):
    """A video in a table is told by its first bytes."""
    pytest.importorskip("av")
    data = media_forms.video(media_forms.video_pictures(3))
    source = Source.of({"bytes": data, "path": None}, tmp_path, "row 1, a")
    assert read_media([source]).media[0].shape == (3, 3, 48, 64)
    (tmp_path / "a.mp4").write_bytes(data)
    broken = read_media([Source.of("a.mp4#xywh=0,0,4,4", tmp_path, "")]).broken
    assert "a part of a video cannot be read" in next(iter(broken.values()))


def test_a_png_that_is_a_program_of_postscript_is_not_started(tmp_path):
    """PIL's reader of EPS starts a program: no name brings a file there."""
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "EPS")
    (tmp_path / "a.png").write_bytes(file.getvalue())
    assert read_media([Source.of("a.png", tmp_path, "")]).media == [None]
