"""A modular pipeline with the face of a classic one, so that one driver and one proof serve both.

A modular pipeline (`diffusers.modular_pipelines`) is a tree of blocks with declared inputs and
outputs, which read and write one state by name. A classic one is a `__call__`. What the driver of
classic pipelines finds by trial is declared here:

arguments        of the call: what blocks read before any block writes it, and the guiders' scales
encode_prompt    runs the blocks named text_encoder, and returns what they declare to write
prepare_latents  returns `latents` as they enter the loop, or as each chunk begins in a loop of
                 chunks; prepare_audio_latents the same of sound
result           (images or videos, sound) or (sound,), under the names that the blocks declare

Blocks in front that rewrite the prompt (upsamplers, enhancers) are left out: a prompt stands for
itself. The others run unchanged, in the tree's order, each by its own `__call__` without the
decorator that switches gradients off. `faced` copies the pipeline's object, not its components: the
class of the copy keeps its name, its adapters' methods and its way of saving.
"""

import copy
import inspect
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.modular_pipelines.modular_pipeline import (
    ConditionalPipelineBlocks,
    LoopSequentialPipelineBlocks,
    ModularPipeline,
    ModularPipelineBlocks,
    PipelineState,
    SequentialPipelineBlocks,
)
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from flowrl.models.diffusers.modular.own_levels import (
    LEVELS_INPUT,
    OF_SOUND,
    SCHEDULER,
    STEPS_ARGUMENT,
    follows_levels,
    levels_setting,
    listed,
    own_levels,
    renoised,
    renoising_loop,
    renoising_scheduler,
    scheduled,
)
from flowrl.settings.model.form import PipelineForm
from rewards.types import Kind

TEXT_BLOCK = "text_encoder"  # in the name of a top-level block
OF_THE_BATCH = ("batch_size", "dtype")  # outputs of text blocks that have no row per prompt
STEPPED = ("latents", "audio_latents", "sound_latents")  # that loops step
NEEDED_IMAGES = ("image", "driving_video")  # images without which no branch runs, where required
VIDEO_OUTPUT = "videos"
MEDIA, SOUND = ("images", VIDEO_OUTPUT), ("audio", "sound", "audios")
SCALE = "guidance_scale"
SCHEDULE = "guidance_schedule"  # of blocks that take a scale for each step
TEXT_SCALE = 2.0  # of guiders, while texts are encoded
BAR = "tqdm"  # the name by which a block's module knows bars (Helios)
BEGINS_INSIDE = "_begins_inside"  # of the pipeline: samples of a loop that no state enters, or 0
GUIDER_OFF = 0.0  # the scale that stands for guiders which are switched off
# loggers that print a trace for each failed trial, and a word on each new guider
TALKATIVE = (
    "diffusers.modular_pipelines.modular_pipeline",
    "diffusers.guiders.guider_utils",
)  # fmt: skip


class ClassicFace(ModularPipeline):
    """The members of a classic pipeline, on top of a modular pipeline's class."""

    _blocks: Any
    modules: tuple[str, ...] = ()  # of its blocks
    makes: Kind | None = None  # the kind of its media, where outputs of its blocks say it

    @property
    def own_levels(self) -> tuple[float, ...] | None:
        """Levels that its blocks list, without the final 0; None if a scheduler's are its own."""
        return own_levels(self, list(loops_of(self._blocks)))

    def encode_prompt(self, state: PipelineState) -> tuple[Any, ...]:
        """Return what the text blocks declare to write, after they read this state.

        Their guiders are on, whatever the scale: negative prompts are encoded too, so encodings
        have one form. Some blocks fail without (Wan, LTX), though their loops run so.
        """
        with self.guided(dict.fromkeys(self.guiders(), TEXT_SCALE)):
            for _, block in self.text_blocks():
                run_blocks(self, block, state)
        return tuple(state.get(name) for name, _ in self.encoded_names())

    def text_blocks(self) -> Iterator[tuple[str, Any]]:
        return (item for item in self._blocks.sub_blocks.items() if TEXT_BLOCK in item[0])

    def encoded_names(self) -> list[tuple[str, Any]]:
        """(name, kind of keyword) of each value that text blocks write."""
        outputs = [out for _, block in self.text_blocks() for out in block.intermediate_outputs]
        named = {out.name: (out.name, out.kwargs_type) for out in outputs}
        return [pair for name, pair in named.items() if name not in OF_THE_BATCH]

    def put_encoded(self, state: PipelineState, values: Sequence[Any]) -> None:
        """Write what the text blocks wrote, and their facts about the batch (LTX-2)."""
        for (name, kind), value in zip(self.encoded_names(), values, strict=True):
            state.set(name, value, kind)
        prompt, tensors = state.get("prompt"), [v for v in values if isinstance(v, Tensor)]
        rows = len(prompt) if isinstance(prompt, list) else 1
        facts = {"batch_size": rows, "dtype": tensors[0].dtype if tensors else None}
        outputs = [out for _, block in self.text_blocks() for out in block.intermediate_outputs]
        for out in outputs:
            if out.name in OF_THE_BATCH:
                state.set(out.name, facts[out.name], out.kwargs_type)

    def prepare_latents(self, latents: Tensor) -> Tensor:
        """The latents that enter the loop."""
        return latents

    def prepare_audio_latents(self, latents: Tensor) -> Tensor:
        """The sound's latents that enter the loop."""
        return latents

    def set_progress_bar_config(self, **settings: Any) -> None:
        for loop in loops_of(self._blocks):
            loop.set_progress_bar_config(**settings)

    def save_pretrained(self, save_directory: Any, **more: Any) -> None:  # type: ignore[override]
        """Save all components with an index that names this folder."""
        arguments: dict[str, Any] = {"overwrite_modular_index": True, **more}
        super().save_pretrained(str(save_directory), **arguments)

    def guiders(self) -> dict[str, tuple[str, Any]]:
        """The guiders with a scale, by the argument that sets it (guidance_scale_2 of guider_2)."""
        guiders = {}
        for name, part in self.components.items():
            if isinstance(part, BaseGuidance) and SCALE in part.config and "guider" in name:
                guiders[name.replace("guider", SCALE)] = name, part
        return guiders

    def run(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Run all blocks on a new state, and return the media and its sound, or sound alone."""
        names = [parameter.name for parameter in self._blocks.inputs]
        wanted = with_schedule(arguments) if SCHEDULE in names else dict(arguments)
        state = PipelineState()
        with (
            untalkative(self.modules),
            self.guided(wanted),
            listed(self, self.own_levels, wanted) as inputs,
        ):
            for parameter in self._blocks.inputs:
                if parameter.name is not None:
                    value = inputs.get(parameter.name, parameter.default)
                    state.set(parameter.name, value, parameter.kwargs_type)
            texts = [name for name, _ in self.text_blocks()]
            for name, block in self._blocks.sub_blocks.items():
                if name not in texts:
                    run_blocks(self, block, state)
                elif name == texts[0]:
                    self.put_encoded(state, self.encode_prompt(state))
        media, sound = (
            next((state.get(name) for name in names if state.get(name) is not None), None)
            for names in (MEDIA, SOUND)
        )
        if (
            isinstance(media, Tensor | np.ndarray)
            and media is state.get(VIDEO_OUTPUT)
            and media.ndim == 4
        ):
            media = media[None]  # of one prompt (Cosmos 3): frames are no rows
        return tuple(part for part in (media, sound) if part is not None)

    @contextmanager
    def guided(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Guiders with the scales of a call, for one call. GUIDER_OFF switches all of them off,
        with the other terms that they may have (LTX-2's perturbed and isolated passes)."""
        unscaled = {}
        first = arguments.get(SCALE)
        for argument, (name, guider) in self.guiders().items():
            scale = arguments.get(argument)
            scale = first if scale is None else scale  # as the classic form of two experts does
            unscaled[name] = guider
            vars(self)[name] = scaled(guider, GUIDER_OFF if first == GUIDER_OFF else scale)
        try:
            yield
        finally:
            vars(self).update(unscaled)


def with_schedule(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments for blocks that take a scale for each step (Ideogram 4): its scale at all
    of them; without one, the blocks' own list."""
    if arguments.get(SCALE) is None:
        return dict(arguments)
    return {**arguments, SCHEDULE: [float(arguments[SCALE])] * arguments["num_inference_steps"]}


def scaled(guider: Any, scale: float | None) -> Any:
    """A copy of a guider, without what earlier calls left in it, at a scale; None: its own;
    GUIDER_OFF: it leaves the prompt's prediction as it is.

    A scale switches on a guider that its class leaves off (Z-Image).
    """
    with untalkative():  # it says so of each new guider
        if scale == GUIDER_OFF:
            return guider.new(enabled=False)
        return guider.new() if scale is None else guider.new(**{SCALE: scale, "enabled": True})


def run_blocks(pipe: Any, block: Any, state: PipelineState) -> None:
    """Run a block and those in it, with the pipeline's own states at the loop's door."""
    if isinstance(block, ConditionalPipelineBlocks):
        triggers = {name: state.get(name) for name in block.block_trigger_inputs if name}
        chosen = block.select_block(**triggers) or block.default_block_name
        if chosen is not None:
            run_blocks(pipe, block.sub_blocks[chosen], state)
    elif isinstance(block, SequentialPipelineBlocks):
        for member in block.sub_blocks.values():
            run_blocks(pipe, member, state)
    else:
        if not isinstance(block, LoopSequentialPipelineBlocks):
            block(pipe, state)
            return
        enter(pipe, state)
        if renoising_loop([block]) is not None:
            scheduled(pipe, state)
        vars(pipe)[BEGINS_INSIDE] = _samples(state) if state.get(STEPPED[0]) is None else 0
        try:
            block(pipe, state)
        finally:
            vars(pipe).pop(BEGINS_INSIDE)
            vars(pipe).pop(OF_SOUND, None)


def enter(pipe: Any, state: PipelineState) -> None:
    """Hand the states to the methods of the pipeline that prepare them, at the loop's door.

    They have a row per sample there. In MiniMax-H3's loop the rows of a state are its tokens.
    """
    samples = _samples(state)
    for name in STEPPED:
        latents: Any = state.get(name)
        prepare = getattr(pipe, f"prepare_{name}", None)
        if latents is None or prepare is None:
            continue
        tokens = latents.ndim == 2 and len(latents) % samples == 0
        rows = latents.reshape(samples, -1, latents.shape[-1]) if tokens else latents
        state.set(name, prepare(rows).reshape(latents.shape))


def _samples(state: PipelineState) -> int:
    prompt = state.get("prompt")
    return len(prompt) if isinstance(prompt, list) else 1


def loops_of(block: ModularPipelineBlocks) -> Iterator[LoopSequentialPipelineBlocks]:
    if isinstance(block, LoopSequentialPipelineBlocks):
        yield block
    else:
        for member in block.sub_blocks.values():
            yield from loops_of(member)


def schedulers_beside(pipe: Any) -> dict[str, Any]:
    """The schedulers beside `scheduler` that the loops of a modular pipeline step, by component."""
    if not isinstance(pipe, ModularPipeline):
        return {}
    loops = loops_of(vars(pipe)["_blocks"])
    declared = {str(part.name) for loop in loops for part in loop.expected_components}
    parts = {name: vars(pipe).get(name) for name in sorted(declared - {"scheduler"})}
    return {name: part for name, part in parts.items() if isinstance(part, SchedulerMixin)}


def run_order(
    block: ModularPipelineBlocks, arguments: Collection[str] = ()
) -> Iterator[ModularPipelineBlocks]:
    """The blocks that run for a prompt and these arguments of the call, in order."""
    if isinstance(block, ConditionalPipelineBlocks):
        triggers = {n: True if n in arguments else None for n in block.block_trigger_inputs if n}
        chosen = block.select_block(**triggers) or block.default_block_name
        if chosen is None and "prompt" in triggers:  # which the prompt itself sets
            chosen = block.select_block(**{**triggers, "prompt": True})
        if chosen is not None:
            yield from run_order(block.sub_blocks[chosen], arguments)
    elif isinstance(block, SequentialPipelineBlocks):
        for member in block.sub_blocks.values():
            yield from run_order(member, arguments)
    else:
        yield block


def reads_and_writes(block: ModularPipelineBlocks) -> Iterator[tuple[list[Any], set[str]]]:
    """(names, or inputs, that are read; names that are written) of each block of all branches, in
    order. A block that chooses among others reads what it chooses by."""
    if isinstance(block, ConditionalPipelineBlocks):
        yield [name for name in block.block_trigger_inputs if name], set()
    if isinstance(block, ConditionalPipelineBlocks | SequentialPipelineBlocks):
        for member in block.sub_blocks.values():
            yield from reads_and_writes(member)
    else:
        yield block.inputs, {output.name for output in block.intermediate_outputs}


def arguments_of(blocks: ModularPipelineBlocks) -> dict[str, Any]:
    """The user's arguments with their defaults: what blocks read before any block writes it.

    `inspect.Parameter.empty` is the default of an image that every branch needs.
    """
    declared = {
        parameter.name: parameter for parameter in blocks.inputs if parameter.name is not None
    }
    written, arguments = set[str](), dict[str, Any]()
    for reads, writes in reads_and_writes(blocks):
        for name in (
            parameter if isinstance(parameter, str) else parameter.name for parameter in reads
        ):
            if name in declared and name not in written and name not in arguments:
                needed = declared[name].required and name in NEEDED_IMAGES
                arguments[name] = inspect.Parameter.empty if needed else declared[name].default
        written |= writes
    return arguments


def without_rewriting(blocks: ModularPipelineBlocks) -> ModularPipelineBlocks:
    """Remove the first blocks of a tree that write the prompt."""
    for name, block in list(blocks.sub_blocks.items()):
        if TEXT_BLOCK in name:
            break
        if "prompt" in block.intermediate_output_names:
            blocks.sub_blocks.pop(name)
    return blocks


def graded(block: ModularPipelineBlocks, loop: Any = None) -> ModularPipelineBlocks:
    """Change the class of a block and of those in it, so that they run without `no_grad`, and so
    that those of a loop hand on the states that they begin (`begins`), or step them by the
    scheduler that a loop lacks."""
    kind = type(block)
    call = inspect.unwrap(kind.__call__)
    if loop is not None and renoising_loop([loop]) is not None and follows_levels(block):
        call = renoised(call, STEPPED)
    members = {"__call__": call if loop is None else begins(call), "__module__": kind.__module__}
    block.__class__ = type(kind.__name__, (kind,), members)
    for member in block.sub_blocks.values():
        graded(member, block if isinstance(block, LoopSequentialPipelineBlocks) else None)
    return block


def begins(call: Any) -> Any:
    """A block's `__call__` in a loop that no state enters (Helios and Wan-Animate 2, whose chunks
    begin inside): the latents that a block writes without reading any are handed to the pipeline's
    method."""

    @wraps(call)
    def run(self: Any, pipe: Any, state: Any, *args: Any, **named: Any) -> Any:
        name, before = STEPPED[0], vars(state).get(STEPPED[0])
        result = call(self, pipe, state, *args, **named)
        after = vars(state).get(name)
        samples = vars(pipe).get(BEGINS_INSIDE, 0)
        reads = name in [parameter.name for parameter in self.inputs]
        if samples and after is not None and after is not before and not reads:
            # a loop that makes one sample may step it without a dimension of rows
            batched = len(after) == samples
            rows = pipe.prepare_latents(after if batched else after[None])
            vars(state)[name] = rows if batched else rows[0]
        return result

    return run


@contextmanager
def untalkative(modules: Sequence[str] = ()) -> Iterator[None]:
    """Without traces of trials that are meant to fail, and without warnings and bars of each call:
    what fails is raised. `modules` are those of blocks."""
    loggers = [logging.getLogger(name) for name in (*TALKATIVE, *modules)]
    before = [logger.disabled for logger in loggers]
    bars = [names for name in modules if BAR in (names := vars(sys.modules[name]))]
    shown = [names[BAR] for names in bars]
    try:
        for logger in loggers:
            logger.disabled = True
        for names, bar in zip(bars, shown, strict=True):
            names[BAR] = partial(bar, disable=True)
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
        for names, bar in zip(bars, shown, strict=True):
            names[BAR] = bar


def faced(pipe: Any) -> Any:
    """A copy of a modular pipeline, with its components, that has the face of a classic one."""
    if isinstance(pipe, ClassicFace):
        return pipe
    pipe = copy.copy(pipe)
    vars(pipe)["_blocks"] = graded(without_rewriting(copy.deepcopy(pipe._blocks)))
    kind = type(pipe)
    modules = sorted({cls.__module__ for cls in _classes(pipe._blocks)})
    members = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "modules": tuple(modules),
        "makes": declared_media(pipe._blocks),
    }
    pipe.__class__ = type(kind.__name__, (ClassicFace, kind), members)
    arguments = arguments_of(pipe._blocks)
    if SCHEDULE in arguments:
        arguments[SCALE] = None
    if renoising_loop(list(loops_of(pipe._blocks))) is not None:
        vars(pipe)[SCHEDULER] = renoising_scheduler()
    levels = own_levels(pipe, list(loops_of(pipe._blocks)))
    if levels is not None:
        arguments |= {STEPS_ARGUMENT: len(levels), LEVELS_INPUT: None}
        if levels_setting(pipe._blocks) is not None:
            arguments.pop(SCALE, None)  # guidance is in the weights: the blocks take no other scale
    for argument, (_, guider) in pipe.guiders().items():  # type: ignore[attr-defined]
        arguments[argument] = guider.config[SCALE] if argument == SCALE else None
    type(pipe).__call__ = torch.no_grad()(_call_with(arguments))  # type: ignore[method-assign]
    return pipe


def declared_media(blocks: Any) -> Kind | None:
    """The kind of media that blocks declare to write; None if they declare images and videos, or
    neither."""
    written = {output.name for output in blocks.outputs}
    images, videos = (name in written for name in MEDIA)
    if images or videos:
        return None if images and videos else "image" if images else "video"
    return "sound" if written & set(SOUND) else None


def form_of(pipe: Any) -> PipelineForm:
    """The form in which a pipeline is driven."""
    return "modular" if isinstance(pipe, ModularPipeline) else "classic"


def block_classes(pipe: Any) -> set[type]:
    """Classes of all blocks, whose code a proof depends on; none of a classic pipeline."""
    return set(_classes(vars(pipe)["_blocks"])) if isinstance(pipe, ModularPipeline) else set()


def _classes(block: ModularPipelineBlocks) -> Iterator[type]:
    yield type(block)
    for member in block.sub_blocks.values():
        yield from _classes(member)


def modules_of(pipe: Any) -> list[str]:
    """Names of the modules that define the methods of a pipeline's class, or its blocks."""
    blocks = pipe.modules if isinstance(pipe, ClassicFace) else ()
    return list(dict.fromkeys((*(kind.__module__ for kind in type(pipe).__mro__), *blocks)))


def listed_levels(pipe: Any) -> tuple[float, ...] | None:
    """The levels that a modular pipeline's blocks list; None where its scheduler's are its own."""
    return pipe.own_levels if isinstance(pipe, ClassicFace) else None


def guider_named(pipe: Any) -> str:
    """The class of a modular pipeline's guider; empty without one."""
    if not isinstance(pipe, ModularPipeline):
        return ""
    kinds = [type(p).__name__ for p in pipe.components.values() if isinstance(p, BaseGuidance)]
    return next(iter(kinds), "")


def _call_with(arguments: Mapping[str, Any]) -> Any:
    """A `__call__` with these arguments, which the driver reads from its signature."""

    def call(self: Any, **values: Any) -> tuple[Any, ...]:
        return self.run(values)

    kinds = inspect.Parameter
    leading = [kinds("self", kinds.POSITIONAL_OR_KEYWORD)]
    named = {**arguments, "return_dict": False}
    rest = [
        kinds(name, kinds.POSITIONAL_OR_KEYWORD if value is kinds.empty else kinds.KEYWORD_ONLY,
              default=value)
        for name, value in sorted(named.items(), key=lambda item: item[1] is not kinds.empty)
    ]  # fmt: skip
    vars(call)["__signature__"] = inspect.Signature([*leading, *rest])
    return call
