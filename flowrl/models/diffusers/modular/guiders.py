"""Guiders of modular pipelines: the passes that they make at each step, and those that a step's
density does not allow."""

import inspect
from typing import Any

from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.modular_pipelines.modular_pipeline import ModularPipeline

MOMENTUM, ZEROED = "momentum", "zero_init_steps"  # end settings of guiders
BUFFER = "MomentumBuffer"  # of a loop that guides by itself (ACE-Step)


def guider_passes(pipe: Any, scale: float | None, steps: int) -> list[int]:
    """Evaluations of the network for a row at each of a call's steps, from its guiders' settings.

    `scale` is that of the call; None: the guiders' own. Several guiders share their passes, or
    each has a denoiser of its own (Wan 2.2), so the most of one counts.
    """
    passes = [1] * steps
    with pipe.guided({} if scale is None else {"guidance_scale": scale}):
        for name, part in pipe.components.items():
            if not isinstance(part, BaseGuidance):
                continue
            guider = vars(pipe)[name]
            for step in range(steps):
                guider.set_state(step, steps, None)
                passes[step] = max(passes[step], guider.num_conditions)
    return passes


def remembering_guider(pipe: Any) -> str:
    """Name a guider that averages over earlier steps, and the setting that helps; empty without.

    Such a guider's velocity depends on the path to a state, so a step has no density of its own.
    """
    for name, part, key, value in _settings(pipe, MOMENTUM):
        if value is not None:
            return (
                f"its {name}, {type(part).__name__}, averages over earlier steps ({key}: "
                f"{value:g}), which a single step does not know: {_way(pipe, part, key, 'null')}"
            )
    return ""


def remembering_loop(pipe: Any) -> str:
    """Name what a classic loop averages over its earlier steps while it guides, as its code says;
    empty without."""
    names = getattr(inspect.unwrap(type(pipe).__call__), "__code__", _way.__code__).co_names
    named = [name for name in names if name.endswith(BUFFER)]
    if not named:
        return ""
    return (
        f"its guidance averages over earlier steps ({named[0]}), which a single step does not know:"
        " set model.guidance: none, which switches it off"
    )


def zeroing_guider(pipe: Any) -> str:
    """Name a guider that makes the first velocities zero, and the setting that helps; empty
    without."""
    for name, part, key, value in _settings(pipe, ZEROED):
        if value:
            return (
                f"its {name}, {type(part).__name__}, makes the velocities of the first steps zero "
                f"({key}: {value}): {_way(pipe, part, key, '0')}"
            )
    return ""


def _settings(pipe: Any, end: str) -> list[tuple[str, Any, str, Any]]:
    """(component, guider, setting, value) of the settings with this end."""
    return [
        (name, part, key, value)
        for name, part in pipe.components.items()
        if isinstance(part, BaseGuidance)
        for key, value in part.config.items()
        if key.endswith(end)
    ]


def _way(pipe: Any, guider: Any, key: str, value: str) -> str:
    if isinstance(pipe, ModularPipeline):
        return f"set model.guider: {{name: {type(guider).__name__}, {key}: {value}}}"
    return "set model.guidance: none, which switches it off"
