"""The kind of media that a pipeline makes, as its class says."""

import inspect
from typing import Any

from rewards.types import Kind

SOUND_OUTPUT = "AudioPipelineOutput"  # the record that diffusers' pipelines of sound return


def made_kind(kind: type) -> Kind:
    """The kind of media that pipelines of a class make: "sound" of sound alone, "video" with sound
    or without, or "image".

    A pipeline's own call names the record that it returns. A modular one declares its outputs, and
    its face has their kind (`makes`).
    """
    declared: Any = getattr(kind, "makes", None)
    if declared is not None:
        return declared
    call = inspect.unwrap(kind.__call__)
    if SOUND_OUTPUT in getattr(call, "__code__", made_kind.__code__).co_names:
        return "sound"
    moving = "Video" in kind.__name__ or "num_frames" in inspect.signature(call).parameters
    return "video" if moving else "image"
