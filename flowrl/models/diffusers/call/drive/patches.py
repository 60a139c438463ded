"""Changes of a pipeline that last for one driven call: its class, its members, its progress bar."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from tqdm.auto import tqdm

_ABSENT = object()
POSITIONS = "_prepare_latent_image_ids"  # a static method of sizes, a device and a dtype
POSITION_SETS = 64
SILENT = tqdm(disable=True)


@contextmanager
def placed(pipe: Any, device: torch.device) -> Iterator[None]:
    """For one call, fix the pipeline's `_execution_device` by replacing its class, and use a
    silent progress bar.

    diffusers searches every module for hooks each time that it reads this property, several times
    per call: for a model with 500 modules this costs more than the rest of driving. Creating a bar
    costs 0.07 ms, whether or not it is shown.
    """
    kind = type(pipe)
    pipe.__class__ = _placed(kind, device)
    try:
        yield
    finally:
        pipe.__class__ = kind


@lru_cache
def _placed(kind: Any, device: torch.device) -> type:
    def progress_bar(self: Any, iterable: Any = None, total: Any = None) -> Any:
        return kind.progress_bar(self, iterable) if total is None else SILENT

    members: dict[str, Any] = {"_execution_device": device, "progress_bar": progress_bar}
    if real := getattr(kind, POSITIONS, None):
        members[POSITIONS] = staticmethod(_kept_positions(real))
    return type(kind.__name__, (kind,), members)


def _kept_positions(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """FLUX's kin compute positions of latents on the host in every call, and wait for their copy to
    the device. A clone of the first copy is returned, since some pipelines write to it."""
    cached = lru_cache(POSITION_SETS)(real)

    def positions(*args: Any) -> torch.Tensor:
        if any(isinstance(argument, torch.Tensor) for argument in args):
            return real(*args)
        return cached(*args).clone()

    return positions


@dataclass(frozen=True)
class Patch:
    """An instance attribute that is replaced during one call."""

    owner: Any
    name: str
    value: Any


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Set attributes in the body, then restore the previous ones, or remove them.

    Through `vars`, since a pipeline's own setattr would also rewrite its config.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for patch in patches:
            held = vars(patch.owner)
            before.append((held, patch.name, held.get(patch.name, _ABSENT)))
            held[patch.name] = patch.value
        yield
    finally:
        for held, name, value in reversed(before):
            if value is _ABSENT:
                del held[name]
            else:
                held[name] = value
