"""Differences between a run's evaluations and its training."""

from typing import Any

from flowrl.settings.model.pipeline import PipelineSettings
from flowrl.settings.sections.run import RunSettings

_SIZE_WORDS = {"height": "height", "width": "width", "num_frames": "frames"}


def unlike_training(run: RunSettings) -> str:
    """The settings of a pipeline's evaluations that differ from training's, in words; empty if none
    does."""
    if not isinstance(run.model, PipelineSettings):
        return ""
    steps, size = run.algorithm().steps, run.trained_size
    scale, trained_scale = run.evaluation_guidance, run.guidance.sample
    pairs: list[tuple[str, Any, Any]] = [("steps", run.evaluation_steps, steps)]
    pairs += [(_SIZE_WORDS[k], v, size[k] or "its own") for k, v in run.evaluation_size.items()]
    pairs += [("guidance", scale, trained_scale)]
    called = run.evaluate.call.items()
    pairs += [(name, value, run.model.call.get(name, "its own")) for name, value in called]
    return ", ".join(f"{word} {a} instead of {b}" for word, a, b in pairs if a != b)
