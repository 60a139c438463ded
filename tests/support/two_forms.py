"""Calls of a pipeline in its classic and in its modular form, recorded without any of flowrl."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.driving import PROMPTS

DENOISERS = ("transformer", "transformer_2", "unet")


@dataclass
class Seen:
    """What the denoisers and the scheduler's step received, in order, and the media."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    steps: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    media: Tensor = field(default_factory=lambda: torch.zeros(0))


@contextmanager
def watched(pipe: Any, seen: Seen) -> Iterator[None]:
    """Record while the body runs."""
    parts = [pipe.components.get(name) for name in DENOISERS]
    hooks = []
    for part in parts:
        if not isinstance(part, nn.Module):
            continue
        signature = inspect.signature(part.forward)

        def before(_: Any, args: Any, named: Any, signature: Any = signature) -> None:
            given = signature.bind(*args, **named).arguments
            seen.calls.append({name: _kept(value) for name, value in given.items()})

        hooks.append(part.register_forward_pre_hook(before, with_kwargs=True))
    scheduler, real = pipe.scheduler, pipe.scheduler.step
    signature = inspect.signature(real)

    def step(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        names = ("model_output", "timestep", "sample")
        output, time, sample = (torch.as_tensor(given[name]).clone() for name in names)
        seen.steps.append((output, time, sample))
        return real(*args, **named)

    vars(step)["__signature__"] = signature
    vars(scheduler)["step"] = step
    try:
        yield
    finally:
        del vars(scheduler)["step"]
        for hook in hooks:
            hook.remove()


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_kept(each) for each in value] if isinstance(value, list) else value


def classic_call(pipe: Any, call: Mapping[str, Any], steps: int) -> Seen:
    """The pipeline's own call of two prompts."""
    seen = Seen()
    pipe.set_progress_bar_config(disable=True)
    with watched(pipe, seen):
        result = pipe(
            prompt=list(PROMPTS), num_inference_steps=steps, output_type="pt", return_dict=False,
            generator=torch.Generator().manual_seed(0), **call,
        )  # fmt: skip
    seen.media = result[0]
    return seen


def modular_call(pipe: Any, call: Mapping[str, Any], steps: int, scale: float | None) -> Seen:
    """A plain modular pipeline's own call, with its guider at a scale."""
    seen = Seen()
    guiders = [name for name in ("guider", "guider_2") if name in pipe.components]
    if scale is not None:
        new = {name: getattr(pipe, name).new(guidance_scale=scale) for name in guiders}
        pipe.update_components(**new)
    for name in guiders:
        getattr(pipe, name).enable()
    output = "videos" if "videos" in pipe.blocks.output_names else "images"
    with watched(pipe, seen):
        seen.media = pipe(
            prompt=list(PROMPTS), num_inference_steps=steps, output_type="pt", output=output,
            generator=torch.Generator().manual_seed(0), **call,
        )  # fmt: skip
    return seen
