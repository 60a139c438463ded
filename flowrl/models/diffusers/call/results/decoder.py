"""Decoded media: check that they are finite before a pipeline clamps them, and convert them to
tensors.

Infinity would become white. With gradient methods the decoder runs in the update, which waits for a
GPU once per optimizer step: results of the check stay on the device until then.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from diffusers.configuration_utils import ConfigMixin
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.patches import Patch
from flowrl.models.diffusers.call.inputs.columns import SoundForm
from flowrl.models.diffusers.call.results.made import made_kind
from flowrl.models.diffusers.call.results.proof_checks import NotFinitePartError, refuse_weights
from rewards.audio import Audio
from samplers.host import sent

CHANNELS = "audio_channels"  # the setting of a codec of sounds
RATES = ("output_sampling_rate", "sampling_rate", "sample_rate")  # a vocoder's is the last word
_unread: list[tuple[Tensor, Callable[[], NoReturn]]] = []  # spreads, and who raises the error


@dataclass(frozen=True)
class LateVerdicts:
    """Ranges of decoders' values, on the device, which are finite if all values are, each with the
    function that raises its error."""

    spreads: Sequence[Tensor]
    refuse: Sequence[Callable[[], NoReturn]]

    def judge(self, spreads: Sequence[float]) -> None:
        """NotFinitePartError for the first bad one of `spreads`, which were read from the
        device."""
        for spread, refuse in zip(spreads, self.refuse, strict=True):
            if not math.isfinite(spread):
                refuse()


def late_verdicts() -> LateVerdicts:
    """Results of the checks since the last call."""
    late, _unread[:] = tuple(_unread), []
    return LateVerdicts([spread for spread, _ in late], [refuse for _, refuse in late])


def finite_decoder(pipe: Any) -> list[Patch]:
    """Patches for each component's `decode` that raise NotFinitePartError for NaN or infinity."""
    patches: list[Patch] = []
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and callable(getattr(part, "decode", None)):
            patches.append(Patch(part, "decode", _checked(pipe, name, part)))
    return patches


def _checked(pipe: Any, name: str, part: Any) -> Any:
    real = part.decode

    def refuse() -> NoReturn:
        refuse_weights(type(pipe).__name__, {name: part})
        raise NotFinitePartError(
            f"{type(pipe).__name__}: its decoder {name} outputs NaN or infinity, which would be "
            "white or black: lower train.lr, or decode in float32 (model.dtype: float32)"
        )

    def decode(*args: Any, **named: Any) -> Any:
        output = real(*args, **named)
        for values in _tensors(output):
            if not values.numel():
                continue
            low, high = values.detach().aminmax()  # of NaN both are NaN
            spread = high.float() - low.float()
            if values.device.type == "cuda" and values.requires_grad:
                _unread.append((spread, refuse))
            elif not math.isfinite(spread):
                refuse()
        return output

    return decode


def _tensors(output: Any) -> Iterator[Tensor]:
    """The pixels of a decoder's output: a tensor, a tuple, or a record of them."""
    if isinstance(output, Tensor):
        output = (output,)
    for value in output if isinstance(output, tuple) else vars(output).values():
        if isinstance(value, Tensor):
            yield value


class Decoded(NamedTuple):
    """Images [n 3 h w] or videos [n f 3 h w], and their sound if the pipeline makes any; or the
    waveforms [n channels time] of sound alone, which are the sound too."""

    media: Tensor
    audio: Audio | None = None

    @classmethod
    def of(cls, pipe: Any, result: Any, double: bool = False) -> "Decoded":
        """Read the result of a pipeline's call."""
        if (rate := rate_alone(pipe)) is not None:
            return cls.of_sound(Audio(waveforms(result[0], double), rate))
        media = media_of(result[0], double)
        sound = result[1] if isinstance(result, tuple) and len(result) > 1 else None
        if isinstance(sound, np.ndarray):
            sound = torch.from_numpy(sound)
        if not isinstance(sound, Tensor) or not sound.is_floating_point():
            return cls(media)
        rate = sampling_rate(pipe)
        if rate is None or sound.ndim not in (2, 3) or len(sound) != len(media):
            return cls(media)
        waveform = sound[:, None] if sound.ndim == 2 else sound
        return cls(media, Audio(waveform.float(), rate))

    @classmethod
    def of_sound(cls, audio: Audio) -> "Decoded":
        """Sound alone."""
        return cls(audio.waveform, audio)

    @property
    def sound_alone(self) -> bool:
        return self.audio is not None and self.media is self.audio.waveform

    @classmethod
    def joined(cls, parts: Sequence["Decoded"]) -> "Decoded":
        """Concatenate rows."""
        if parts[0].sound_alone:
            return cls.of_sound(Audio.joined([p.audio for p in parts if p.audio is not None]))
        media, sounds = torch.cat([part.media for part in parts]), [p.audio for p in parts]
        present = [sound for sound in sounds if sound is not None]
        return cls(media, Audio.joined(present) if present else None)

    def take(self, rows: Tensor) -> "Decoded":
        if self.audio is not None and self.sound_alone:
            return Decoded.of_sound(self.audio.take(rows))
        media = self.media[sent(rows, self.media.device)]
        return Decoded(media, None if self.audio is None else self.audio.take(rows))

    @property
    def values(self) -> Tensor:
        """All numbers, for comparisons, each once."""
        if self.audio is None or self.sound_alone:
            return self.media
        return torch.cat([part.flatten(1) for part in (self.media, self.audio.waveform)], 1)


def rate_alone(pipe: Any) -> int | None:
    """The rate in Hz of a pipeline that makes sound alone; None for one that makes anything else.

    UserError if the configurations of its components name none.
    """
    if made_kind(type(pipe)) != "sound":
        return None
    rate = sampling_rate(pipe)
    if rate is None:
        raise UserError(
            f"{type(pipe).__name__} makes sound, but no configuration of its components has its "
            f"rate: add {RATES[1]} (Hz) to the one of its decoder or vocoder"
        )
    return rate


def sound_of(rate: int | None, media: Tensor) -> Audio | None:
    """The sound of decoded media at a `rate`, which are waveforms then; None without one."""
    return None if rate is None else Audio(media, rate)


def waveforms(result: Any, double: bool = False) -> Tensor:
    """Waveforms [n channels time] of a pipeline's result, in float32; `double` keeps float64."""
    sound = torch.from_numpy(result) if isinstance(result, np.ndarray) else result
    sound = torch.stack([*sound]) if isinstance(sound, list | tuple) else sound
    sound = sound if double and sound.dtype == torch.float64 else sound.float()
    return sound[:, None] if sound.ndim == 2 else sound


def sampling_rate(pipe: Any) -> int | None:
    """The rate in Hz of the sound that a pipeline makes, from its components' configurations; None
    if they have none. A vocoder may be one of transformers."""
    parts = list(pipe.components.values())
    configs = [dict(part.config) for part in parts if isinstance(part, ConfigMixin)]
    configs += [part.config.to_dict() for part in parts if isinstance(part, PreTrainedModel)]
    rates = (config[name] for name in RATES for config in configs if config.get(name) is not None)
    return next((int(rate) for rate in rates), None)


def sound_form(pipe: Any) -> SoundForm | None:
    """The form of the sounds that a pipeline is given, from the configurations of its components;
    None if they do not name it."""
    rate = sampling_rate(pipe)
    configs = [part.config for part in pipe.components.values() if isinstance(part, ConfigMixin)]
    named = [config[CHANNELS] for config in configs if config.get(CHANNELS) is not None]
    return SoundForm(rate, int(named[0])) if rate is not None and named else None


def media_of(result: Any, double: bool = False) -> Tensor:
    """Images as tensors; some pipelines return channels-last arrays for everything but PIL.

    A list has the images of each row (layers of one image). Transparent parts become white.
    `double` keeps float64, which otherwise becomes float32.
    """
    if isinstance(result, np.ndarray):
        result = torch.from_numpy(result).movedim(-1, -3)
    media = torch.stack([*result]) if isinstance(result, list | tuple) else result
    media = media if double and media.dtype == torch.float64 else media.float()
    if media.ndim > 3 and media.shape[-3] == 4:
        colours, seen = media.split((3, 1), -3)
        media = colours * seen + (1 - seen)
    return media
