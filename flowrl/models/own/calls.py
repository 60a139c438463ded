"""Calls of a user's own model: encoded prompts, predictions and samples, each checked.

Errors of the user's code become UserErrors that name the method and the line.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.out_of_memory import out_of_memory
from flowrl.models.own.protocol import Decodes, Drawable, EncodedPrompts
from flowrl.settings.parts.trials import own_error
from rewards.types import MediaForm
from samplers.host import on_host


@dataclass(frozen=True)
class OwnConditioning:
    """n encoded prompts: tensors [n *c] by name, with the name "" for a single tensor."""

    parts: Mapping[str, Tensor]
    extras: tuple[Any, ...] = ()  # no columns that the rows of a call must share

    @property
    def encoded(self) -> EncodedPrompts:
        """The rows as `encode` returned them."""
        return self.parts.get("", self.parts)

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def take(self, rows: Tensor) -> "OwnConditioning":
        at = on_host(rows)
        return OwnConditioning({n: part[at.to(part.device)] for n, part in self.parts.items()})


@dataclass(frozen=True)
class ModelCalls:
    """The methods of a user's own model, by its name in messages."""

    name: str
    model: Any

    def encode(
        self, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """Encoded prompts by name. UserError for anything but tensors with one row per prompt."""
        with self._named("encode"):
            encoded = self.model.encode(list(prompts), list(rows))
        parts = dict(encoded) if isinstance(encoded, Mapping) else {"": encoded}
        for name, part in parts.items():
            if not isinstance(part, Tensor) or part.ndim < 1 or len(part) != len(prompts):
                of = f" {name!r}" if name else ""
                raise UserError(
                    f"{self.name}.encode:{of} expected a tensor with one row for each of "
                    f"{len(prompts)} prompts, not {_shown(part)}"
                )
        return parts

    def forward(self, x: Tensor, sigma: Tensor, conditioning: OwnConditioning) -> Tensor:
        """A prediction [n *d]. UserError if `forward` raises, or returns another shape."""
        with self._named("forward"):
            prediction = self.model(x, sigma, conditioning.encoded)
        if not isinstance(prediction, Tensor) or prediction.shape != x.shape:
            raise UserError(
                f"{self.name}.forward: expected a prediction with the states' shape "
                f"{list(x.shape)}, not {_shown(prediction)}"
            )
        return prediction

    def decode(self, x0: Tensor, conditioning: OwnConditioning, dtype: torch.dtype) -> Tensor:
        """Samples of clean states [n *d]: the states themselves for a model without `decode`."""
        if not isinstance(self.model, Decodes):
            return x0
        with self._named("decode"):
            media: Any = self.model.decode(x0.to(dtype), conditioning.encoded)
        if not isinstance(media, Tensor) or media.ndim < 2 or len(media) != len(x0):
            raise UserError(
                f"{self.name}.decode: expected a tensor [{len(x0)} ...], not {_shown(media)}"
            )
        return media

    def waveforms(self, media: Tensor) -> Tensor:
        """Decoded sounds [n t] or [n channels t] as [n channels t]. UserError for another shape."""
        if media.ndim not in (2, 3):
            raise UserError(
                f"{self.name}.decode: a model with a `rate` makes sound: expected waveforms [n t] "
                f"or [n channels t], not {list(media.shape)}"
            )
        return media[:, None] if media.ndim == 2 else media

    def form(self, media: Tensor, rate: int | None = None) -> MediaForm:
        """The form of decoded samples, which are sound at a `rate`. UserError for what no reward
        can see."""
        if rate is not None:
            return MediaForm("sound")
        try:
            return MediaForm.of(media[0])
        except ValueError as error:
            raise UserError(f"{self.name}: its samples: {error}") from error

    def image(self, sample: Tensor) -> Image | None:
        """The model's own image of a sample; None if it does not draw images."""
        return self.model.image(sample) if isinstance(self.model, Drawable) else None

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        """Turn an exception of the user's method into a UserError with its line. Out-of-memory
        errors stay, since calls can be made smaller."""
        try:
            yield
        except Exception as error:  # the user's code
            if isinstance(error, UserError) or out_of_memory(error):
                raise
            file = vars(sys.modules[type(self.model).__module__]).get("__file__") or ""
            said = own_error(f"{file}:{self.name}.{method}", error)
            raise UserError(said.removeprefix(f"{file}:")) from error


def _shown(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__
