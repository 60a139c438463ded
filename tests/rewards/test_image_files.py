"""The one reader of image files: damage, bombs and other formats become one sentence."""

import io
import random
import struct
import warnings
import zlib

import pytest
from PIL import Image

from rewards.perception.files import MOST_FILE_PIXELS, open_image_file, read_images
from tests.support import fuzz


def encoded(form: str, mode: str = "RGB", **more) -> bytes:
    file = io.BytesIO()
    image = Image.effect_noise((24, 16), 80).convert(mode)
    image.save(file, format=form, **more)
    return file.getvalue()


EXIF = Image.Exif()
EXIF[0x0112], EXIF[0x010E] = 6, "a description"
GOOD = {
    "png": encoded("PNG"),
    "gray.png": encoded("PNG", "L"),
    "palette.png": encoded("PNG", "P"),
    "jpg": encoded("JPEG", exif=EXIF),
    "webp": encoded("WEBP", exif=EXIF),
}


def chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def png(width: int, height: int, *more: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + body + chunk(b"IEND", b"")


@pytest.mark.parametrize("name", GOOD)
def test_the_three_formats_are_read(tmp_path, name):
    path = tmp_path / f"image.{name}"
    path.write_bytes(GOOD[name])
    turned = name in ("jpg", "webp")  # by the orientation in their EXIF data
    assert open_image_file(path).size == ((16, 24) if turned else (24, 16))
    assert read_images([path]).broken == {}


@pytest.mark.parametrize("form", ["GIF", "TIFF", "BMP", "PPM", "EPS", "ICO", "SGI", "DDS", "IM"])
def test_other_formats_are_refused_whatever_their_name(tmp_path, form):
    path = tmp_path / "image.png"
    path.write_bytes(encoded(form))
    with pytest.raises(ValueError, match=r"image.png: not a PNG, JPEG or WebP image$"):
        open_image_file(path)


def test_large_images_are_refused_before_they_are_decoded(tmp_path):
    path = tmp_path / "bomb.png"
    for side in (8193, 30_000, 200_000, 2**31 - 1):
        path.write_bytes(png(side, side))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = read_images([path])
        assert found.media == [None] and "bomb.png" in found.broken[str(path)]
    path.write_bytes(GOOD["png"])
    with pytest.raises(ValueError, match=r"24 x 16 pixels; the limit is 383"):
        open_image_file(path, 24 * 16 - 1)
    assert MOST_FILE_PIXELS == 8192**2


def test_missing_empty_and_folders_are_named(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    for name, what in (
        ("empty.png", "an empty file"),
        ("none.png", "no such file"),
        (".", "a fol"),
        ("empty.png#xywh=-3,0,2,2", "not a part of an image: write #xywh=LEFT,TOP"),
        ("empty.png#xyhw=3,0,2,2", "not a part of an image"),
        ("none.png#xyhw=3,0,2,2", "no such file"),
    ):
        with pytest.raises(ValueError, match=what):
            open_image_file(tmp_path / name)
    with pytest.raises(ValueError, match="not a readable image"):
        open_image_file("a\0b.png")
    with pytest.raises(ValueError, match="an empty path"):
        open_image_file("")


def test_a_piece_of_a_sheet_is_read(tmp_path):
    """The pixels of that place; a changed sheet is read again; a piece outside is one sentence."""
    path = tmp_path / "sheet.png"
    for seed in (1, 2):
        sheet = Image.effect_noise((24, 16 + seed), 80).convert("RGB")
        sheet.save(path)
        piece = open_image_file(f"{path}#xywh=8,2,6,4")
        assert piece.size == (6, 4) and piece.tobytes() == sheet.crop((8, 2, 14, 6)).tobytes()
    (whole,) = read_images([f"{path}#xywh=pixel:0,0,24,18"]).media
    assert whole.shape == (3, 18, 24)
    names = [f"{path}#xywh={box}" for box in ("20,0,5,5", "0,0,0,5", "0,15,4,4")]
    names.append(f"{tmp_path}/none.png#xywh=0,0,4,4")
    broken = read_images(names).broken
    assert list(broken) == names and broken[names[3]].endswith("none.png: no such file")
    for name in names[:3]:
        assert broken[name] == f"{name}: the part lies outside the image of 24 x 18 pixels"


@pytest.mark.slow
def test_text_bombs_inside_a_png_are_refused(tmp_path):
    path = tmp_path / "text.png"
    text = b"Comment\0\0" + zlib.compress(b"a" * 2**27)
    path.write_bytes(png(4, 4, chunk(b"zTXt", text)))
    with pytest.raises(ValueError, match=r"text\.png: not a readable image"):
        open_image_file(path)


@fuzz.COUNTS
def test_damage_is_one_sentence_or_an_image(count, tmp_path):
    pieces = (*fuzz.PIECES, b"IEND", b"IHDR", b"\xff\xda", b"\xff\xe1", b"VP8X", b"\xff" * 4)

    def check(rng: random.Random) -> None:
        data = GOOD[rng.choice(sorted(GOOD))]
        if rng.random() < 0.2 and b"Exif" in data:
            place = data.index(b"Exif") + rng.randint(4, 60)
            data = data[:place] + rng.randbytes(2) + data[place + 2 :]
        path = tmp_path / "damaged"
        path.write_bytes(fuzz.damaged(data, rng, pieces))
        found = read_images([path])
        if found.media[0] is None:
            fuzz.one_sentence(found.broken[str(path)])

    fuzz.cases(count, check)
