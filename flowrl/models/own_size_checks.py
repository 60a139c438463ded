"""Sizes that a pipeline's own code refuses, asked of its class without weights.

The pipeline is built of its components on torch's meta device, so that its factors are those of its
decoder and denoiser. Its `check_inputs` is called as its loop would call it; of a class without
one, the call itself, which checks sizes first and ends at the encoders that are not there.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from flowrl.errors import UserError
from flowrl.models.description import Description
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.traits.checks import OURS, needed_images
from flowrl.models.out_of_memory import raise_memory
from flowrl.settings.sections.run import SIZES

_ANY = 1024  # pixels: a multiple of what all pipelines ask for
_SIDE = 128  # pixels of an image whose latents are prepared
_USUAL_FRAMES = (17, 33, 49)  # one of them is right for every factor that decoders have
_MOST_FRAMES = 1001  # whose latents are prepared: each takes a call of the encoder's layers
_TEMPORAL_FACTORS = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
# pipelines whose image is the first frame of latents, of which the loop moves only the others
_FIRST_FRAME_HELD = ("LTXImageToVideoPipeline", "LTX2ImageToVideoPipeline")
_PROMPT = "a"


class OwnSizeChecks:
    """The checks of sizes in a pipeline's own code.

    answers  whether they could be asked: the class has such checks, and they pass at some size
    """

    def __init__(self, described: Description, call: Mapping[str, Any]) -> None:
        """`call`: arguments of the pipeline's call, without sizes."""
        self.name = described.pipeline or ""
        self._channels = _latent_channels(described)
        self._pipe = _skeleton(described)
        self._given: dict[str, Any] = {}
        self._anyway: str | None = None  # what the call says at any size
        self._check: Any = None
        if "check_inputs" in dir(self._pipe):
            self._check = self._pipe.check_inputs
            self.answers = self._finds_arguments(call)
        else:
            self._check = self._pipe
            self.answers = self._pipe is not None and self._call_answers()

    def refusal(self, sizes: Mapping[str, int | None]) -> str | None:
        """Why the pipeline refuses these sizes, in its own words; None if it does not, or cannot be
        asked. None for a size stands for the pipeline's own."""
        if not self.answers:
            return None
        named = {name: value for name, value in sizes.items() if value is not None}
        error = self._tried(named)
        if error is None or str(error) == self._anyway:
            error = self._tried_frames(named.get("num_frames"))
        if error is None:
            return None
        return f"{self.name} refuses {_shown(named)}: {' '.join(str(error).split())[:300]}"

    def _finds_arguments(self, call: Mapping[str, Any]) -> bool:
        """Look for arguments with which the checks pass at a size that any model has."""
        taken = self._taken
        parameters = inspect.signature(type(self._pipe).__call__).parameters
        if not {"height", "width"} <= set(taken):
            return False
        defaults = {n: parameters[n].default for n in taken if n in parameters}
        empty = inspect.Parameter.empty
        plain: dict[str, Any] = {n: None if v is empty else v for n, v in defaults.items()}
        plain |= {n: None for n, p in taken.items() if n not in plain and p.default is empty}
        plain |= {n: v for n, v in call.items() if n in taken and n not in (*SIZES, *OURS)}
        plain["prompt"] = _PROMPT
        for names in ([], *needed_images(taken)):
            images = columns.placeholder_images(names, 64, 64)
            self._given = {n: v for n, v in {**plain, **images}.items() if n in taken}
            if self._tried({"height": _ANY, "width": _ANY}) is None:
                return True
        return False

    def _call_answers(self) -> bool:
        """Whether the call says of an odd size what it does not say of another: it has a check."""
        if not {"height", "width", "prompt"} <= set(self._taken):
            return False
        self._given = {"prompt": _PROMPT}
        plain = self._tried({})
        odd = self._tried({"height": _ANY + 1, "width": _ANY + 1})
        self._anyway = str(plain)
        return plain is not None and isinstance(odd, ValueError) and str(odd) != self._anyway

    def _tried_frames(self, frames: int | None) -> Exception | None:
        """The error of this number of frames beside an image, whose latents the pipeline prepares
        without weights. None where it could not prepare those of a usual number."""
        if frames is None or frames > _MOST_FRAMES:
            return None
        factor = next(
            (getattr(self._pipe, n) for n in _TEMPORAL_FACTORS if n in dir(self._pipe)), 1
        )
        if self.name in _FIRST_FRAME_HELD and (frames - 1) // factor < 1:
            return ValueError(
                f"the image is the first frame of its latents, and {frames} frames have no other: "
                f"`num_frames` has to be at least {factor + 1}"
            )
        error = self._prepared(frames)
        if error is None or all(self._prepared(usual) is not None for usual in _USUAL_FRAMES):
            return None
        return error

    def _prepared(self, frames: int) -> Exception | None:
        """The error of preparing latents of these frames and an image, on the meta device."""
        if "prepare_latents" not in dir(self._pipe):
            return None
        parameters = inspect.signature(self._pipe.prepare_latents).parameters
        factor = getattr(self._pipe, _TEMPORAL_FACTORS[0], 0)
        if not {"image", "num_frames", "height", "width"} <= set(parameters) or not factor:
            return None
        if frames % factor != 1:  # as the call rounds it
            frames = frames // factor * factor + 1
        meta = torch.device("meta")
        arguments: dict[str, Any] = {
            "image": torch.zeros(1, 3, _SIDE, _SIDE, device=meta),
            "batch_size": 1,
            "num_channels_latents": self._channels,
            "height": _SIDE,
            "width": _SIDE,
            "num_frames": frames,
            "dtype": torch.float32,
            "device": meta,
            "generator": None,
        }
        try:
            self._pipe.prepare_latents(**{n: v for n, v in arguments.items() if n in parameters})
        except (*FAILURES, RuntimeError) as error:
            raise_memory(error)
            return error
        return None

    @property
    def _taken(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self._check).parameters

    def _tried(self, sizes: Mapping[str, int]) -> Exception | None:
        """The error of the checks at these sizes; other sizes are those of any model."""
        any_size = {"height": _ANY, "width": _ANY, **sizes}
        named = {n: v for n, v in any_size.items() if n in self._taken}
        try:
            self._check(**self._given | named)
        except FAILURES as error:
            raise_memory(error)
            return error
        return None


def _latent_channels(described: Description) -> int:
    """The channels of a decoder's latents; 16 where its configuration does not say."""
    config = described.configs.get("vae", {})
    channels = (config.get(name) for name in ("z_dim", "latent_channels"))
    return next((value for value in channels if isinstance(value, int)), 16)


def _skeleton(described: Description) -> Any:
    """The pipeline of its components on torch's meta device, without tokenizers and encoders; None
    for one that cannot be built so."""
    if described.pipeline is None or described.in_blocks:
        return None
    kind = described.kind
    parts: dict[str, Any] = {}
    try:
        for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
            config = described.configs.get(name, {})
            if name in described.denoisers:
                parts[name] = described.denoisers[name]
            elif "_class_name" in config:
                parts[name] = described.component(name)
            elif parameter.default is inspect.Parameter.empty:
                parts[name] = None
        return kind(**parts)
    except (*FAILURES, UserError) as error:  # a class's own constructor, which may ask for more
        raise_memory(error)
        return None


def _shown(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())
