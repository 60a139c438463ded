"""Modular pipelines whose noise levels are a list of their own, not those of a scheduler.

A few-step model is distilled for its levels. Blocks read them from a setting of the pipeline
(Cosmos 3 Distilled's `distilled_sigmas`) or have them as the default of an input (Echo's `sigmas`,
which end at 0), and take no other number of steps. Trial calls, which need other numbers, take
levels between these; a run takes these, or levels of its user.

Echo has no scheduler: the last block of its loop puts fresh noise on the network's clean
prediction, x' = (1 - s') x0 + s' e. A scheduler with these steps takes its place, so that they are
observed and measured as those of any other. The prediction is what that block itself returns at a
next level of 0, and is handed to `step` as a velocity: samples equal the block's own to rounding.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.modular_pipelines.modular_pipeline import (
    LoopSequentialPipelineBlocks,
    ModularPipelineBlocks,
    PipelineState,
)
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor

from flowrl.errors import UserError

LEVELS_INPUT = "sigmas"  # an input of blocks, and the end of the name of a setting
STEPS_ARGUMENT = "num_inference_steps"
SCHEDULER = "scheduler"
OF_SOUND = "_renoising_sound"  # of the pipeline, while its loop runs
_CONFIG = "_internal_dict"  # where diffusers keeps a pipeline's settings


def levels_setting(blocks: ModularPipelineBlocks) -> str | None:
    """The name of the setting that holds levels; None without one."""
    names = [spec.name for spec in blocks.expected_configs]
    return next((name for name in names if name.endswith(LEVELS_INPUT)), None)


def renoising_loop(loops: Sequence[Any]) -> Any | None:
    """The loop without a scheduler that goes through levels which it is given; None without one."""
    for loop in loops:
        parts = [str(spec.name) for spec in loop.expected_components]
        inputs = [parameter.name for parameter in loop.loop_inputs]
        if LEVELS_INPUT in inputs and not any(SCHEDULER in name for name in parts):
            return loop
    return None


def own_levels(pipe: Any, loops: Sequence[Any]) -> tuple[float, ...] | None:
    """The pipeline's own levels without the final 0; None if a scheduler's are its levels."""
    setting = levels_setting(pipe._blocks)
    if setting is not None:
        return tuple(float(level) for level in pipe.config[setting] or ()) or None
    loop = renoising_loop(loops)
    if loop is None:
        return None
    listed = next(
        parameter.default for parameter in loop.loop_inputs if parameter.name == LEVELS_INPUT
    )
    return tuple(float(level) for level in listed[:-1])


def levels_between(levels: Sequence[float], steps: int) -> tuple[float, ...]:
    """As many levels as steps, evenly along these and the final 0, between which lines run."""
    if steps == len(levels):
        return tuple(levels)
    places = np.linspace(0, len(levels), steps + 1)[:-1]
    return tuple(np.interp(places, range(len(levels) + 1), [*levels, 0.0]).tolist())


@contextmanager
def listed(
    pipe: Any, listed_levels: Sequence[float] | None, arguments: dict[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Arguments of blocks for one call: the levels that are given, or as many as its steps, stand
    in the pipeline's setting or in the input."""
    if listed_levels is None:
        yield arguments
        return
    of_user = arguments.pop(LEVELS_INPUT, None)
    levels = list(of_user or levels_between(listed_levels, arguments[STEPS_ARGUMENT]))
    setting = levels_setting(pipe._blocks)
    if setting is None:
        yield {**arguments, LEVELS_INPUT: [*levels, 0.0]}
        return
    before = vars(pipe)[_CONFIG]
    vars(pipe)[_CONFIG] = FrozenDict({**before, setting: levels})
    try:
        yield arguments
    finally:
        vars(pipe)[_CONFIG] = before


def renoising_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Steps that put fresh noise on the clean prediction, at times that are levels."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, stochastic_sampling=True)


def scheduled(pipe: Any, state: PipelineState) -> None:
    """At the door of a loop without a scheduler: it goes through the times of the one that stands
    for it, which a driven call pins. They are the loop's own numbers, not those rounded to
    float32."""
    levels = [float(level) for level in state.get(LEVELS_INPUT)]  # type: ignore[union-attr]
    pipe.scheduler.set_timesteps(sigmas=levels[:-1])
    vars(pipe)[OF_SOUND] = copy.deepcopy(pipe.scheduler)  # its steps are counted by themselves
    unrounded = {float(torch.tensor(level, dtype=torch.float32)): level for level in levels}
    times = [float(time) for time in pipe.scheduler.timesteps]
    state.set(LEVELS_INPUT, [*(unrounded.get(time, time) for time in times), levels[-1]])


def renoised(call: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The `__call__` of a block that puts fresh noise on clean predictions of the states of these
    names, with the steps of the scheduler that stands for it."""

    @wraps(call)
    def run(self: Any, pipe: Any, state: Any, i: int, **named: Any) -> Any:
        _refuse_fixed(self, pipe, state, names)
        before = {name: vars(state)[name] for name in names if vars(state).get(name) is not None}
        levels = vars(state)[LEVELS_INPUT]
        vars(state)[LEVELS_INPUT] = [*levels[: i + 1], 0.0]
        result = call(self, pipe, state, i=i, **named)
        vars(state)[LEVELS_INPUT] = levels
        for name, sample in before.items():
            scheduler = pipe.scheduler if name == names[0] else vars(pipe)[OF_SOUND]
            clean: Tensor = vars(state)[name]
            velocity = (sample.float() - clean.float()) / levels[i]
            vars(state)[name] = scheduler.step(
                velocity,
                scheduler.timesteps[i],
                sample,
                generator=vars(state).get("generator"),
                return_dict=False,
            )[0].to(clean)
        return result

    return run


def _refuse_fixed(block: Any, pipe: Any, state: Any, names: Sequence[str]) -> None:
    """UserError where a block fixes entries of the states by tensors that it reads besides (Echo's
    first frame)."""
    reads = [parameter.name for parameter in block.inputs if parameter.name not in names]
    for name in reads:
        if isinstance(vars(state).get(name), Tensor):
            raise UserError(
                f"{type(pipe).__name__}: {name} fixes entries of the state between steps, which "
                "fresh noise would leave: leave the image of the first frame out"
            )


def follows_levels(block: ModularPipelineBlocks) -> bool:
    """Whether a block of a loop reads the levels: it makes the loop's next states."""
    names = [parameter.name for parameter in block.inputs]
    return LEVELS_INPUT in names and not isinstance(block, LoopSequentialPipelineBlocks)
