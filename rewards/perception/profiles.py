"""Colours of an image in sRGB, from what its file says of them.

An embedded ICC profile is applied (perceptual intent, as in browsers). A PNG without one may state
its gamma and primaries instead (chunks gAMA and cHRM); they are turned into such a profile. A
profile that moves no colour by more than SAME_COLOUR of 255 is sRGB under another name, and the
pixels stay as they are.
"""

import io
import struct
import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from PIL import Image, ImageCms

SAME_COLOUR = 2  # of 255
_LEVELS = tuple(range(0, 256, 15))  # of each channel, in the comparison with sRGB
_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK", "LAB": "LAB"}  # of an ICC colour space
_GRAY = ("1", "L", "LA", "La", "I;16", "I;16L", "I;16B", "I;16N", "I")
_USUAL_GAMMA, _NEAR = 1 / 2.2, 0.05  # written by programs that mean sRGB's curve
_SRGB_PRIMARIES = (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)  # white, red, green, blue: x y
_D50 = (0.9642, 1.0, 0.8249)  # the white of profiles
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)


def has_profile(image: Image.Image) -> bool:
    """Whether an image's colours are to be converted: by its profile, its gamma or its mode."""
    return image.mode == "LAB" or _transform(image) is not None


def in_srgb(image: Image.Image) -> Image.Image:
    """Convert an image without transparency to RGB, with its colours in sRGB.

    CMYK without a profile is converted as ink on white. A profile that is damaged or of other
    channels than the image's is ignored, with a warning.
    """
    transform = _transform(image)
    if transform is None:
        return image.convert("RGB")
    converted = ImageCms.applyTransform(image.convert(transform.input_mode), transform)
    assert converted is not None  # a new image is returned unless the change is in place
    return converted


def _transform(image: Image.Image) -> ImageCms.ImageCmsTransform | None:
    """The conversion of this image's colours; None where they are sRGB already."""
    if image.mode == "LAB":
        return _of_lab()
    gray = image.mode in _GRAY
    channels = "GRAY" if gray else "CMYK" if image.mode == "CMYK" else "RGB"
    if profile := image.info.get("icc_profile"):
        return _of_profile(profile, channels)
    if channels == "CMYK" or image.info.get("srgb") is not None:
        return None
    gamma, primaries = image.info.get("gamma"), image.info.get("chromaticity")
    if not gamma and not primaries:
        return None
    spans = not gray and primaries is not None and _sound(primaries)
    points = tuple(primaries) if spans and primaries is not None else _SRGB_PRIMARIES
    return _of_profile(_written(gamma or _USUAL_GAMMA, points), "RGB")


@lru_cache(maxsize=1)
def _of_lab() -> ImageCms.ImageCmsTransform:
    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    return ImageCms.buildTransform(lab, srgb, "LAB", "RGB")


@lru_cache(maxsize=64)
def _of_profile(profile: bytes, channels: str) -> ImageCms.ImageCmsTransform | None:
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        header: Any = opened.profile  # its stubs take it for the opened file
        space = header.xcolor_space.strip().upper()
        if space != channels and not (space == "RGB" and channels == "GRAY"):
            warnings.warn(
                f"an image of {channels} has a colour profile for {space}, which is ignored: its "
                "colours are read as sRGB",
                stacklevel=2,
            )
            return None
        mode = _MODES[space]
        transform = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB")
        return None if _changes_nothing(transform, mode) else transform
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(
            f"an image's colour profile cannot be read ({error}), so its colours are read as sRGB",
            stacklevel=2,
        )
        return None


def _changes_nothing(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    if mode not in ("RGB", "L"):
        return False
    if mode == "L":
        colours = np.arange(256, dtype=np.uint8)[None]
        wanted = colours[..., None]
    else:
        colours = wanted = np.array([[*product(_LEVELS, repeat=3)]], dtype=np.uint8)
    converted = ImageCms.applyTransform(Image.fromarray(colours), transform)
    return int(np.abs(np.asarray(converted).astype(int) - wanted).max()) <= SAME_COLOUR


def _sound(primaries: Sequence[float]) -> bool:
    """Whether four points x, y span colours: none with y = 0, and no three primaries on a line."""
    if len(primaries) != 8 or min(primaries[1::2]) <= 0:
        return False
    return abs(np.linalg.det(_columns(primaries[2:]))) > 1e-6


def _columns(points: Sequence[float]) -> np.ndarray:
    """XYZ at Y = 1 of points x, y, as columns."""
    pairs = zip(points[::2], points[1::2], strict=True)
    return np.array([(x / y, 1.0, (1 - x - y) / y) for x, y in pairs]).T


def _written(gamma: float, primaries: tuple[float, ...]) -> bytes:
    """An ICC profile (version 2, matrix and curve) of a PNG's gamma and primaries."""
    white = _columns(primaries[:2])[:, 0]
    columns = _columns(primaries[2:])
    columns = columns * np.linalg.solve(columns, white)
    scale = (_BRADFORD @ _D50) / (_BRADFORD @ white)
    adapted = np.linalg.inv(_BRADFORD) @ np.diag(scale) @ _BRADFORD @ columns
    curve = _curve(gamma)
    parts = {
        b"desc": b"desc" + bytes(4) + struct.pack(">I", 4) + b"PNG\0" + bytes(78),
        b"cprt": b"text" + bytes(4) + b"none\0",
        b"wtpt": _xyz(_D50),
        **{
            b"rXYZ": _xyz(adapted[:, 0]),
            b"gXYZ": _xyz(adapted[:, 1]),
            b"bXYZ": _xyz(adapted[:, 2]),
        },
        **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve),
    }
    table, body, start = b"", b"", 128 + 4 + 12 * len(parts)
    for name, part in parts.items():
        table += struct.pack(">4sII", name, start + len(body), len(part))
        body += part + bytes(-len(part) % 4)
    size = start + len(body)
    header = struct.pack(">I4sI4s4s4s", size, b"", 0x02400000, b"mntr", b"RGB ", b"XYZ ")
    header += struct.pack(">6H4s", 2000, 1, 1, 0, 0, 0, b"acsp") + bytes(28)
    header += struct.pack(">3i", *(round(value * 65536) for value in _D50)) + bytes(48)
    return header + struct.pack(">I", len(parts)) + table + body


def _xyz(point: Iterable[float]) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(float(v) * 65536) for v in point))


def _curve(gamma: float) -> bytes:
    """Light of a stored value: its power 1 / gamma; sRGB's own curve for the usual gamma."""
    stored = np.linspace(0, 1, 1024)
    if abs(gamma / _USUAL_GAMMA - 1) <= _NEAR:
        light = np.where(stored <= 0.04045, stored / 12.92, ((stored + 0.055) / 1.055) ** 2.4)
    else:
        light = stored ** (1 / gamma)
    numbers = (light * 65535).round().astype(">u2").tobytes()
    return b"curv" + bytes(4) + struct.pack(">I", 1024) + numbers
