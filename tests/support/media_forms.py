"""Files of images and videos in the forms that cameras, phones and programs write, each with the
pixels that it shows."""

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from rewards.perception import profiles

HEIGHT, WIDTH = 24, 36
TURNS = {  # EXIF orientation: what was done to the shown picture before it was stored
    1: (),
    2: (Image.Transpose.FLIP_LEFT_RIGHT,),
    3: (Image.Transpose.ROTATE_180,),
    4: (Image.Transpose.FLIP_TOP_BOTTOM,),
    5: (Image.Transpose.TRANSPOSE,),
    6: (Image.Transpose.ROTATE_90,),
    7: (Image.Transpose.TRANSVERSE,),
    8: (Image.Transpose.ROTATE_270,),
}
P3 = (0.3127, 0.329, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06)
P3_TO_SRGB = np.array(
    [[1.22494, -0.22494, 0], [-0.04206, 1.04206, 0], [-0.01964, -0.07864, 1.09827]]
)
USUAL = 1 / 2.2


def scene() -> np.ndarray:
    """A picture [h w 3] that differs from itself however it is turned."""
    picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    picture[:, : WIDTH // 2], picture[:, WIDTH // 2 :] = (200, 90, 60), (40, 70, 180)
    picture[: HEIGHT // 3, : WIDTH // 3], picture[-6:, -6:] = (230, 220, 90), (20, 120, 60)
    return picture


def light(stored: np.ndarray) -> np.ndarray:
    stored = np.asarray(stored, float)
    return np.where(stored <= 0.04045, stored / 12.92, ((stored + 0.055) / 1.055) ** 2.4)


def stored(light: np.ndarray) -> np.ndarray:
    light = np.clip(light, 0, 1)
    return np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)


@dataclass(frozen=True)
class Form:
    """A file's suffix and bytes, and the pixels [h w 3] (or frames [f h w 3]) in 0..1 of it,
    within `near` of 255. `image` is what a door of single images reads of an animation."""

    suffix: str
    data: bytes
    shows: np.ndarray
    near: float = 0.0
    image: np.ndarray | None = None


def encoded(image: Image.Image, form: str, **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **more)
    return file.getvalue()


def png_chunks(width: int, height: int, depth: int, kind: int, rows: bytes, *more: bytes) -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    body = png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + body + png_chunk(b"IEND", b"")


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def deep_png(pixels: np.ndarray, *more: bytes) -> bytes:
    """A PNG of 16 bits per channel: gray [h w] or colours [h w 3]."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    height, width = pixels.shape[:2]
    return png_chunks(width, height, 16, 0 if pixels.ndim == 2 else 2, rows, *more)


def with_chunks(data: bytes, *chunks: bytes) -> bytes:
    """A PNG with more chunks after its header."""
    return data[:33] + b"".join(chunks) + data[33:]


def turned(orientation: int, form: str, **more: Any) -> bytes:
    image = Image.fromarray(scene())
    for turn in TURNS[orientation]:
        image = image.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, form, exif=exif, **more)


def preview(size: tuple[int, int]) -> bytes:
    big = Image.fromarray(scene())
    small = Image.new("RGB", size, "white")
    return encoded(big, "MPO", save_all=True, append_images=[small], quality=100, subsampling=0)


def gray_of(picture: np.ndarray) -> np.ndarray:
    return picture[..., 0]


def in_three(gray: np.ndarray) -> np.ndarray:
    return np.repeat(gray[..., None], 3, -1)


def over_white(colours: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return colours / 255 * share + 1 - share


def ink_profile() -> bytes:
    """A profile of CMYK: full cyan is L* 60, a* -30, b* -40, and the other inks are black."""
    lab = {0: (100, 0, 0), 8: (60, -30, -40)}
    corners = [lab.get(i, (0, 0, 0)) for i in range(16)]  # the first channel varies slowest
    table = b"".join(struct.pack("3B", round(L * 2.55), a + 128, b + 128) for L, a, b in corners)
    ramp = bytes(range(256))
    unit = struct.pack(">9i", *(65536 * (i % 4 == 0) for i in range(9)))
    look = b"mft1" + bytes(4) + bytes((4, 3, 2, 0)) + unit + 4 * ramp + table + 3 * ramp
    parts = {b"desc": b"desc" + bytes(4) + struct.pack(">I", 4) + b"ink\0" + bytes(78)}
    parts[b"A2B0"] = look
    body, index, start = b"", b"", 132 + 12 * len(parts)
    for name, part in parts.items():
        index += struct.pack(">4sII", name, start + len(body), len(part))
        body += part + bytes(-len(part) % 4)
    head = struct.pack(">I4sI4s4s4s", start + len(body), b"", 0x02400000, b"prtr", b"CMYK", b"Lab ")
    head += struct.pack(">6H4s", 2000, 1, 1, 0, 0, 0, b"acsp") + bytes(28)
    head += struct.pack(">3i", 63190, 65536, 54061) + bytes(48)
    return head + struct.pack(">I", len(parts)) + index + body


def of_lab(*lab: float) -> np.ndarray:
    """The sRGB of a colour L* a* b* of white D50, by the formulas."""
    y = (lab[0] + 16) / 116
    cube = np.array([y + lab[1] / 500, y, y - lab[2] / 200])
    xyz = np.where(cube > 6 / 29, cube**3, 3 * (6 / 29) ** 2 * (cube - 4 / 29))
    xyz = xyz * (0.9642, 1, 0.8249)
    inverse = ((3.1339, -1.6169, -0.4906), (-0.9788, 1.9161, 0.0335), (0.0719, -0.229, 1.4052))
    return stored(np.array(inverse) @ xyz)


def image_forms() -> dict[str, Form]:
    plain = scene()
    image, whole = Image.fromarray(plain), plain / 255
    gray = gray_of(plain)
    soft = np.full((HEIGHT, WIDTH), 128, np.uint8)
    soft[:, :8] = 0
    layered = Image.fromarray(np.dstack([plain, soft]))
    gray_soft = Image.merge("LA", [Image.fromarray(gray), Image.fromarray(soft)])
    palette = image.quantize(16, dither=Image.Dither.NONE)
    index = int(np.asarray(palette)[0, 0])
    hidden = np.asarray(palette) == index
    deep = (gray.astype(np.uint16) * 257) ^ 0x2D
    fine = plain.astype(np.uint16) * 257
    ink = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
    ink[:, :12, 0], ink[:, 12:20, 3] = 255, 255
    cmyk = Image.fromarray(ink, "CMYK")
    naive = np.ones((HEIGHT, WIDTH, 3))
    naive[:, :12], naive[:, 12:20] = (0, 1, 1), (0, 0, 0)
    inks = np.ones((HEIGHT, WIDTH, 3))
    inks[:, :12], inks[:, 12:20] = of_lab(60, -30, -40), (0, 0, 0)
    lab = Image.merge("LAB", [Image.new("L", (WIDTH, HEIGHT), v) for v in (153, 148, 108)])
    blue = np.broadcast_to(of_lab(60, 20, -20), (HEIGHT, WIDTH, 3))
    wide = profiles._written(USUAL, P3)
    narrow = stored(light(whole) @ P3_TO_SRGB.T)
    linear = stored(whole)
    gray_profile = linear_gray_profile()
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    gamma = png_chunk(b"gAMA", struct.pack(">I", 100000))
    usual = png_chunk(b"gAMA", struct.pack(">I", 45455))
    points = png_chunk(b"cHRM", struct.pack(">8I", *(round(v * 100000) for v in P3)))
    png = encoded(image, "PNG")
    exact = {"quality": 100, "subsampling": 0}
    forms = {
        "png": Form(".png", png, whole),
        "jpeg": Form(".jpg", encoded(image, "JPEG", **exact), whole, 4),
        "webp": Form(".webp", encoded(image, "WEBP", lossless=True), whole),
        "bmp": Form(".bmp", encoded(image, "BMP"), whole),
        "tiff": Form(".tif", encoded(image, "TIFF"), whole),
        "tiff of two pages": Form(
            ".tiff",
            encoded(image, "TIFF", save_all=True, append_images=[Image.new("RGB", (9, 9))]),
            whole,
        ),
        "still gif": Form(".gif", encoded(image, "GIF"), whole, 1),
        "jpeg with a preview": Form(".jpg", preview((12, 8)), whole, 4),
        "jpeg with a preview of its size": Form(".jpg", preview((WIDTH, HEIGHT)), whole, 4),
        "alpha": Form(".png", encoded(layered, "PNG"), over_white(plain, soft), 1),
        "alpha webp": Form(
            ".webp", encoded(layered, "WEBP", lossless=True, exact=True), over_white(plain, soft), 1
        ),
        "alpha tiff": Form(".tif", encoded(layered, "TIFF"), over_white(plain, soft), 1),
        "gray alpha": Form(".png", encoded(gray_soft, "PNG"), over_white(in_three(gray), soft), 1),
        "palette": Form(".png", encoded(palette, "PNG"), whole, 1),
        "palette with a clear entry": Form(
            ".png",
            encoded(palette, "PNG", transparency=index),
            np.where(hidden[..., None], 1, whole),
            1,
        ),
        "a clear colour": Form(
            ".png",
            encoded(image, "PNG", transparency=(200, 90, 60)),
            np.where((plain == (200, 90, 60)).all(-1, keepdims=True), 1, whole),
        ),
        "gray": Form(".png", encoded(Image.fromarray(gray), "PNG"), in_three(gray) / 255),
        "black and white": Form(
            ".png", encoded(Image.fromarray(gray > 99), "PNG"), in_three(gray > 99) * 1.0
        ),
        "gray of 16 bits": Form(".png", deep_png(deep), in_three(deep) / 65535, 0.51),
        "gray of 16 bits, tiff": Form(
            ".tif", encoded(Image.fromarray(deep), "TIFF"), in_three(deep) / 65535, 0.51
        ),
        "gray of 16 bits with a clear one": Form(
            ".png",
            deep_png(deep, png_chunk(b"tRNS", struct.pack(">H", int(deep[0, 0])))),
            np.where(in_three(deep == deep[0, 0]), 1, in_three(deep) / 65535),
            0.51,
        ),
        "colours of 16 bits": Form(".png", deep_png(fine), whole, 1),
        "cmyk jpeg": Form(".jpg", encoded(cmyk, "JPEG", **exact), naive, 4),
        "cmyk tiff": Form(".tif", encoded(cmyk, "TIFF"), naive),
        "cmyk with a profile": Form(
            ".jpg", encoded(cmyk, "JPEG", icc_profile=ink_profile(), **exact), inks, 6
        ),
        "lab tiff": Form(".tif", encoded(lab, "TIFF"), blue, 3),
        "sRGB profile": Form(".png", encoded(image, "PNG", icc_profile=srgb), whole),
        "sRGB profile, jpeg": Form(
            ".jpg", encoded(image, "JPEG", icc_profile=srgb, **exact), whole, 4
        ),
        "Display P3": Form(".png", encoded(image, "PNG", icc_profile=wide), narrow, 2),
        "Display P3, webp": Form(
            ".webp", encoded(image, "WEBP", lossless=True, icc_profile=wide), narrow, 2
        ),
        "Display P3, tiff": Form(".tif", encoded(image, "TIFF", icc_profile=wide), narrow, 2),
        "Display P3 and alpha": Form(
            ".png",
            encoded(layered, "PNG", icc_profile=wide),
            over_white(narrow * 255, soft),
            3,
        ),
        "Display P3 in a palette": Form(
            ".png", encoded(palette, "PNG", icc_profile=wide), narrow, 3
        ),
        "linear gray profile": Form(
            ".png",
            encoded(Image.fromarray(gray), "PNG", icc_profile=gray_profile),
            in_three(stored(gray / 255)),
            2,
        ),
        "linear gray profile and alpha": Form(
            ".png",
            encoded(gray_soft, "PNG", icc_profile=gray_profile),
            over_white(in_three(stored(gray / 255)) * 255, soft),
            2,
        ),
        "linear gray profile, 16 bits": Form(
            ".png",
            deep_png(gray.astype(np.uint16) * 257, profile_chunk(gray_profile)),
            in_three(stored(gray / 255)),
            2,
        ),
        "rgb profile on gray": Form(
            ".png",
            encoded(Image.fromarray(gray), "PNG", icc_profile=profiles._written(1.0, P3)),
            in_three(stored(gray / 255)),
            2,
        ),
        "gamma of a png": Form(".png", with_chunks(png, gamma), linear, 2),
        "usual gamma of a png": Form(".png", with_chunks(png, usual), whole),
        "primaries of a png": Form(".png", with_chunks(png, usual, points), narrow, 2),
        "a profile before the gamma": Form(
            ".png", with_chunks(png, profile_chunk(wide), gamma), narrow, 2
        ),
        "sRGB before the gamma": Form(
            ".png", with_chunks(png, png_chunk(b"sRGB", b"\0"), gamma), whole
        ),
    }
    for orientation in TURNS:
        lossless = {"PNG": {}, "WEBP": {"lossless": True}, "TIFF": {}, "JPEG": exact}
        for kind, more in lossless.items():
            suffix = {"JPEG": ".jpg", "TIFF": ".tif"}.get(kind, f".{kind.lower()}")
            near = 4 if kind == "JPEG" else 0
            forms[f"orientation {orientation}, {kind}"] = Form(
                suffix, turned(orientation, kind, **more), whole, near
            )
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    side = Image.fromarray(plain).transpose(Image.Transpose.ROTATE_90)
    forms["orientation in xmp"] = Form(".png", encoded(side, "PNG", pnginfo=text), whole)
    return forms


def profile_chunk(profile: bytes) -> bytes:
    return png_chunk(b"iCCP", b"profile\0\0" + zlib.compress(profile))


def linear_gray_profile() -> bytes:
    parts = {
        b"desc": b"desc" + bytes(4) + struct.pack(">I", 5) + b"gray\0" + bytes(78),
        b"wtpt": b"XYZ " + bytes(4) + struct.pack(">3i", 63190, 65536, 54061),
        b"kTRC": b"curv" + bytes(8),
    }
    body, index, start = b"", b"", 132 + 12 * len(parts)
    for name, part in parts.items():
        index += struct.pack(">4sII", name, start + len(body), len(part))
        body += part + bytes(-len(part) % 4)
    head = struct.pack(">I4sI4s4s4s", start + len(body), b"", 0x02400000, b"mntr", b"GRAY", b"XYZ ")
    head += struct.pack(">6H4s", 2000, 1, 1, 0, 0, 0, b"acsp") + bytes(28)
    head += struct.pack(">3i", 63190, 65536, 54061) + bytes(48)
    return head + struct.pack(">I", len(parts)) + index + body


def shades(count: int) -> list[np.ndarray]:
    """Pictures that differ in brightness, each brighter than the one before."""
    steps = np.linspace(0.1, 1, count)
    return [(scene() * share).round().astype(np.uint8) for share in steps]


def animation_forms() -> dict[str, Form]:
    """Animations; the frames of the last ones are shown for unequal times."""
    films = shades(5)
    whole = np.stack(films) / 255
    first, *rest = [Image.fromarray(film) for film in films]
    still = Image.new("RGB", first.size, "white")
    more = {"save_all": True, "append_images": rest}
    held = [100, 100, 300, 100, 100]  # the third frame is shown three times as long
    slow = whole[[0, 1, 2, 2, 2, 3, 4]]
    lossless = {"lossless": True, **more}
    side = {"save_all": True, "exif": turned_exif(6)}
    on_side = [image.transpose(Image.Transpose.ROTATE_90) for image in (first, *rest)]
    return {
        "gif": Form(".gif", encoded(first, "GIF", duration=100, **more), whole, 9, whole[0]),
        "webp film": Form(
            ".webp", encoded(first, "WEBP", duration=100, **lossless), whole, 0, whole[0]
        ),
        "png film": Form(".png", encoded(first, "PNG", duration=100, **more), whole, 0, whole[0]),
        "png film with a still": Form(
            ".png",
            encoded(
                still, "PNG", save_all=True, append_images=[first, *rest], default_image=True,
                duration=100,
            ),
            whole, 0, np.ones_like(whole[0]),
        ),
        "webp film on its side": Form(
            ".webp",
            encoded(
                on_side[0], "WEBP", duration=100, append_images=on_side[1:], lossless=True, **side
            ),
            whole, 0, whole[0],
        ),
        "held gif": Form(".gif", encoded(first, "GIF", duration=held, **more), slow, 9, whole[0]),
        "held webp": Form(
            ".webp", encoded(first, "WEBP", duration=held, **lossless), slow, 0, whole[0]
        ),
        "held png": Form(".png", encoded(first, "PNG", duration=held, **more), slow, 0, whole[0]),
    }  # fmt: skip


def turned_exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


VIDEO_HEIGHT, VIDEO_WIDTH = 48, 64


def video_pictures(count: int = 6) -> list[np.ndarray]:
    """Frames [48 64 3]; the position of a bar, and the shade, tell them apart."""
    films = []
    for k in range(count):
        film = np.full((VIDEO_HEIGHT, VIDEO_WIDTH, 3), 30 + 25 * k, np.uint8)
        film[:16], film[:, :16] = (220, 40, 40), (40, 60, 220)
        films.append(film)
    return films


def video(
    films: list[np.ndarray],
    *,
    suffix: str = "mp4",
    codec: str = "libx264",
    pixels: str = "yuv444p",
    times: list[int] | None = None,
    aspect: Fraction | None = None,
    matrix: Any = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """A nearly lossless video at 10 frames per second, or with frames at `times` in 1/10 s."""
    import av  # type: ignore[import-not-found]

    file = io.BytesIO()
    with av.open(file, "w", format={"mkv": "matroska"}.get(suffix, suffix)) as container:
        given = {"crf": "1", "bf": "0"} if codec == "libx264" else {}
        stream: Any = container.add_stream(codec, rate=10, options=given | (options or {}))
        stream.height, stream.width = films[0].shape[:2]
        stream.pix_fmt = pixels
        stream.codec_context.time_base = Fraction(1, 10)
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        for time, film in zip(times or range(len(films)), films, strict=True):
            channels = "rgba" if film.shape[-1] == 4 else "rgb24"
            frame = av.VideoFrame.from_ndarray(film, format=channels)
            frame.pts, frame.time_base = time, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    data = bytearray(file.getvalue())
    if matrix is not None:  # a, b, c, d of the track's header
        a, b, c, d = (65536 * value for value in matrix)
        at = data.find(b"tkhd") + 44
        data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return bytes(data)


# the matrix of a track's header, and what was done to the shown frames before they were stored
MATRICES: dict[tuple[int, int, int, int], Callable[[np.ndarray], np.ndarray]] = {
    (1, 0, 0, 1): lambda film: film,
    (0, 1, -1, 0): lambda film: np.rot90(film, 1),
    (-1, 0, 0, -1): lambda film: np.rot90(film, 2),
    (0, -1, 1, 0): lambda film: np.rot90(film, 3),
    (-1, 0, 0, 1): lambda film: film[:, ::-1],
    (1, 0, 0, -1): lambda film: film[::-1],
    (0, 1, 1, 0): lambda film: film.transpose(1, 0, 2),
    (0, -1, -1, 0): lambda film: np.rot90(film, 2).transpose(1, 0, 2),
}


def edited(data: bytes, media_time: int, duration: int) -> bytes:
    """A MP4 whose edit list begins at `media_time` (track's time scale), for `duration` ms."""
    made = bytearray(data)
    at = made.find(b"elst") + 12
    assert at > 12
    made[at : at + 8] = struct.pack(">Ii", duration, media_time)
    return bytes(made)


def video_forms() -> dict[str, Form]:
    films = video_pictures()
    whole = np.stack(films) / 255
    near, edges = 6, 42  # of the codec; of an interpolation at the edges of the bars
    forms = {
        f"matrix {matrix}": Form(
            ".mp4",
            video([np.ascontiguousarray(change(film)) for film in films], matrix=matrix),
            whole,
            near,
        )
        for matrix, change in MATRICES.items()
    }
    tall, broad = [film[::2] for film in films], [film[:, ::2] for film in films]
    clear = [np.dstack([film, np.full(film.shape[:2], 128, np.uint8)]) for film in films]
    plain = video(films)
    scale = 10240  # of the track's times: 1024 a frame
    assert struct.pack(">I", scale) in plain
    return forms | {
        "wide pixels": Form(".mp4", video(broad, aspect=Fraction(2)), whole, edges),
        "high pixels": Form(".mp4", video(tall, aspect=Fraction(1, 2)), whole, edges),
        "edit list": Form(".mp4", edited(plain, 2 * 1024, 400), whole[2:], near),
        "b-frames": Form(".mp4", video(films, options={"bf": "2"}), whole, near),
        "matroska": Form(".mkv", video(films, suffix="mkv"), whole, near),
        "quicktime": Form(".mov", video(films, suffix="mov"), whole, near),
        "avi": Form(".avi", video(films, suffix="avi", codec="ffv1", pixels="bgr0"), whole, near),
        "varying rate": Form(
            ".mp4", video(films, times=[0, 1, 2, 6, 7, 8]), whole[[0, 1, 2, 2, 2, 2, 3, 4, 5]], near
        ),
        "10 bits": Form(".mp4", video(films, pixels="yuv444p10le"), whole, near),
        "alpha": Form(
            ".mov",
            video(clear, suffix="mov", codec="qtrle", pixels="argb"),
            (whole + 1) / 2,
            near,
        ),
    }
