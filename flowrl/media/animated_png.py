"""Videos as animated PNGs, without loss: https://www.w3.org/TR/png-3/#animation-information.

Pillow joins equal frames into one; here each frame stays one, so a video is read back with as many
frames as it had.
"""

import struct
import zlib
from collections.abc import Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MOST_SECONDS = 60.0  # of a frame: the file has two bytes for its milliseconds


def video_bytes(video: Float[Tensor, "f 3 h w"], seconds: float) -> bytes:
    """The content of an animated PNG of a video in 0..1, rounded to 8 bits, which loops in so many
    seconds."""
    whole = (video.detach().float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    frames = list(whole.permute(0, 2, 3, 1).cpu())
    height, width = frames[0].shape[:2]
    milliseconds = round(1000 * min(seconds / len(frames), MOST_SECONDS))
    parts = [SIGNATURE, _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))]
    parts.append(_chunk(b"acTL", struct.pack(">II", len(frames), 0)))
    number = 0
    for index, frame in enumerate(frames):
        control = struct.pack(">IIIIIHHBB", number, width, height, 0, 0, milliseconds, 1000, 0, 0)
        parts.append(_chunk(b"fcTL", control))
        number += 1
        if index == 0:
            parts.append(_chunk(b"IDAT", _packed(frame)))
        else:
            parts.append(_chunk(b"fdAT", struct.pack(">I", number) + _packed(frame)))
            number += 1
    parts.append(_chunk(b"IEND", b""))
    return b"".join(parts)


def _packed(frame: UInt8[Tensor, "h w 3"]) -> bytes:
    """The rows of a frame, each after its filter's number (0: none)."""
    rows: Sequence[Tensor] = list(frame.flatten(1))
    return zlib.compress(b"".join(b"\0" + bytes(row.numpy().tobytes()) for row in rows), 1)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )
