"""Run a pipeline's own loop up to a state and a timestep, and return the arguments of its scheduler
step.

The pipeline's `__call__` runs unchanged. There are two ways to reach a timestep: *pinned*, the
loop's `timesteps` is that one value; *forward*, the full list stays, and a stubbed denoiser returns
zeros until the wanted index. `step()` ends the call with an exception. Pipelines share no other
interface, so this takes three tricks, which each call undoes:

Swapped classes   The scheduler is replaced by a deep copy whose class is a subclass of its own, so
                  that `isinstance`, its config, signatures and later settings still work
                  (`scheduler_standin.stand_in`). `patches.placed` does the same with the pipeline.
Patched members   `forward` of denoisers, `encode_prompt`, `prepare_latents`, `randn_tensor` and
                  similar members are set in `vars(owner)` for one call (`patches.Patch`): a
                  pipeline's or module's own setattr would rewrite its config or refuse them.
A shared control  Some pipelines deep-copy their scheduler. So the mode is not stored in the
                  scheduler: the members of the swapped class close over one `Control`, which
                  copies share, and each call writes its settings into that object.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.models.cache_utils import CacheMixin
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.clocked import Clockwork, PartOrder
from flowrl.models.diffusers.call.drive.clocked_entry import ClockedEntry, entry_of, marked
from flowrl.models.diffusers.call.drive.image_cache import ImageSet, Memo
from flowrl.models.diffusers.call.drive.image_to_image import RecordedNoise
from flowrl.models.diffusers.call.drive.latents import (
    PREPARE,
    Doors,
    Entry,
    PartEntries,
    PipelineCall,
    Target,
    entered,
    injected,
)
from flowrl.models.diffusers.call.drive.patches import Patch, patched, placed
from flowrl.models.diffusers.call.drive.received import (
    MAIN_SCHEDULER,
    LevelPerRow,
    OneStep,
    PerRow,
    Received,
)
from flowrl.models.diffusers.call.drive.scheduler_standin import (
    FAILURES,
    Control,
    Stop,
    data_size,
    stand_in,
)
from flowrl.models.diffusers.call.drive.stubs import Stubs
from flowrl.models.diffusers.call.inputs.conditioning import Calls
from flowrl.models.diffusers.modular.face import schedulers_beside
from flowrl.models.out_of_memory import raise_memory
from samplers.layout import Layout

DENOISERS = ("transformer", "transformer_2", "unet")
ENCODERS = ("encode_prompt", "_encode_prompt")  # methods that encode prompts, the newer name first
GUIDER = "guider"  # a component that guides, in place of an argument of the call
NEVER_STOP = 2**31  # of a denoiser that stays stubbed


class Driver:
    """Runs a pipeline's `__call__` with a stand-in for `scheduler`, which may differ from the
    pipeline's own, and for the schedulers beside it, and always restores the pipeline."""

    def __init__(self, pipe: Any, scheduler: Any) -> None:
        self.pipe, self.real = pipe, scheduler
        parts = {name: vars(pipe).get(name) for name in DENOISERS}
        self.denoisers = {n: part for n, part in parts.items() if isinstance(part, nn.Module)}
        self.parameters = inspect.signature(type(pipe).__call__).parameters
        self.raw: Callable[..., Any] = inspect.unwrap(type(pipe).__call__)  # without torch.no_grad
        self.logger = logging.getLogger(type(pipe).__module__)
        self.control = Control()
        self.scheduler = stand_in(scheduler, self.control)
        beside = schedulers_beside(pipe)
        self.beside = {name: stand_in(real, self.control, name) for name, real in beside.items()}
        self.real_beside = beside
        guider = vars(pipe).get(GUIDER)
        self.guider = guider if isinstance(guider, BaseGuidance) else None
        self.memo: Memo | None = Memo(pipe)  # None: no call encodes images
        self.behind = 0  # times that the loop cuts off at the end of its list
        self.stubs = Stubs(self.denoisers)
        self.layout: Layout | None = None  # of the loop's state, if it has parts
        self.steppers: tuple[str, ...] = ()  # the schedulers of its parts
        self.clockwork: Clockwork | None = None  # if its steps move some parts of its state
        self.counts: list[int] = []  # calls of `step` after each evaluation, in the last visit
        self.encoder = next(name for name in ENCODERS if name in dir(pipe))
        self.cut = getattr(pipe, "get_timesteps", None)  # by a `strength`
        self.seed = 0  # of the noise that calls draw themselves
        self._place: tuple[torch.device, torch.device] | None = None

    def keep_no_images(self) -> None:
        """Keep no encoded images or sounds between calls, if no call so far has encoded any."""
        if self.memo is not None and not self.memo.kept:
            self.memo = None

    def cut_behind(self, times: int) -> None:
        """Note how many times the loop cuts off at the end of its list."""
        self.behind = times

    def encoded(self, arguments: Mapping[str, Any]) -> Calls:
        """Outputs of the real `encode_prompt`; the call ends when it reaches a denoiser."""

        def stop(*_: Any, **__: Any) -> Any:
            raise Stop

        outputs, patch = self._kept_of(self.encoder)
        stops = [Patch(denoiser, "forward", stop) for denoiser in self.denoisers.values()]
        with torch.no_grad():
            self._run(self.raw, self._seeded(arguments), Control(), [patch, *stops])
        return tuple(outputs)

    def first(self, call: PipelineCall, draws: RecordedNoise, *, native_scale: bool) -> Received:
        """Arguments of the loop's first `step`; the denoiser is stubbed.

        Noise comes from `draws`. With `native_scale` the real scheduler scales the noise and the
        denoiser's input, as in the pipeline's own call, and `state` is this input.
        """
        control = Control(native_scale=native_scale)
        stop = self._driven(call, control, draws.patches(self.pipe), until=NEVER_STOP)
        assert isinstance(stop, Stop) and stop.received is not None
        return stop.received

    def after_first(self, call: PipelineCall, draws: RecordedNoise, value: float) -> Tensor:
        """States at the second step if the first returns `value` everywhere."""
        control = Control(stop_at=1, moved=value)
        stop = self._driven(call, control, draws.patches(self.pipe), until=NEVER_STOP)
        assert isinstance(stop, Stop) and stop.received is not None
        return stop.received.sample

    def received(self, call: PipelineCall, target: Target | None) -> Received:
        """Arguments of `step` at the target, or at the first step without a target.

        If the target is None the denoiser is a stub: only the state matters.
        """
        state_encoded = self.clockwork is not None and self.clockwork.reads_decoded
        if target is not None and self.memo is not None and not state_encoded:
            self.memo.begin(ImageSet(call.arguments))
        if target is None:
            stop = self._driven(call, Control(), [], until=NEVER_STOP)
        elif target.index is not None:
            clockwork = self.clockwork
            decodes = clockwork is None or clockwork.reads_decoded
            silent = [] if decodes else self.stubs.of_decoders(self.pipe.components)
            stop = self._driven(call, Control(stop_at=target.index), silent, until=target.index)
        else:
            levels, count = target.levels, 1 + self.behind
            if levels is not None:
                levels = OneStep([LevelPerRow(levels)] * count) if levels.ndim else [levels] * count
            cut = [] if self.cut is None else [self._whole_list(self.cut)]
            pinned = Control(
                pinned=self._pinned(target.times),
                beside={name: self._pinned(times) for name, times in target.beside.items()},
                levels=levels,
            )
            stop = self._driven(call, pinned, cut)
        if not isinstance(stop, Stop) or stop.received is None:
            raise UserError(
                f"{type(self.pipe).__name__} ended without the expected call of scheduler.step: "
                "it cannot be driven"
            )
        return stop.received

    def _pinned(self, times: Tensor) -> Any:
        """A scheduler's list of times [] or [n] for one step."""
        count = 1 + self.behind
        return OneStep([PerRow(times)] * count) if times.ndim else times.expand(count)

    def finished(self, call: PipelineCall, *, decodes_in_loop: bool, graded: bool = False) -> Any:
        """Result of a call whose state never changes, so that the given state is decoded.

        The loop is skipped, or runs with stubbed denoisers if a pipeline needs that. `graded` keeps
        the gradient with respect to the state.
        """
        with torch.set_grad_enabled(graded):
            if decodes_in_loop:
                return self._driven(call, Control("visit"), [], until=NEVER_STOP)
            return self._driven(call, Control(pinned=torch.empty(0)), [])

    def visited(self, call: PipelineCall, draws: RecordedNoise) -> list[Received]:
        """Arguments of all steps of the loop, in order, which sets the scheduler's own lists.

        Denoisers are stubbed, states do not change, and noise comes from `draws`.
        """
        return self._assembled(self._visit(call, draws.patches(self.pipe)), call.arguments)

    def _visit(self, call: PipelineCall, patches: Sequence[Patch]) -> list[Received]:
        control = Control("visit")
        with torch.no_grad():
            self._driven(call, control, patches, until=NEVER_STOP)
        self.counts = control.calls
        return control.records

    def step_calls(self, call: PipelineCall) -> list[Received]:
        """Arguments of each call of `step` in a visit, also where steps move parts of a state."""
        before, self.clockwork = self.clockwork, None
        try:
            return self._visit(call, RecordedNoise(1.0).patches(self.pipe))
        finally:
            self.clockwork = before

    def _assembled(self, records: list[Received], arguments: Mapping[str, Any]) -> list[Received]:
        """Whole steps of a loop whose steps move some parts of its state."""
        if self.clockwork is None or self.clockwork.of(arguments) is None:
            return records
        return self.clockwork.assembled(records, arguments, _samples(arguments))

    def forget_clockwork(self) -> None:
        """Find the parts of the state again, which are as many as given images lead to."""
        self.clockwork = None

    def find_clockwork(self, call: PipelineCall) -> ClockedEntry:
        """Find the parts of a state that steps move one after the other. UserError without such."""
        outputs, patch = self._kept_of(PREPARE)
        self._visit(replace(call, x=None), [patch])
        entry = entry_of(partial(self._visit, replace(call, x=None)), outputs, self.pipe)
        self.clockwork = Clockwork(entry.layout, self._reads_decoded(call))
        return entry

    def _reads_decoded(self, call: PipelineCall) -> bool:
        """Whether the inputs of the denoisers depend on what decoders make inside the loop."""
        sums = []
        for silent in ((), self.stubs.of_decoders(self.pipe.components)):
            with self.stubs.summing() as inputs:
                self._visit(replace(call, x=None), silent)
            sums.append(inputs)
        return sums[0] != sums[1]

    def find_order(self, call: PipelineCall) -> PartOrder:
        """Find the parts that each step of a call moves, which are those of all calls with as many
        steps. Its entry is that of a state with such parts."""
        assert self.clockwork is not None, "the parts are found before their order"
        x = marked(self.clockwork.layout).expand(_samples(call.arguments), -1)
        seen = self._visit(replace(call, x=x), [])
        parts = [int(step.sample.flatten()[0]) for step in seen]
        order = PartOrder.of(parts, self.counts)
        self.clockwork.orders[call.arguments["num_inference_steps"]] = order
        return order

    def recorded(self, arguments: Mapping[str, Any]) -> tuple[list[Received], Any, bool]:
        """Run the pipeline's own call with its own scheduler.

        Return all arguments of `step`, the result, and whether a repeated step had equal results.
        """
        control = Control("own")
        result = self._run(type(self.pipe).__call__, self._seeded(arguments), control, [])
        return self._assembled(control.records, arguments), result, control.repeatable

    def parts(self, call: PipelineCall) -> Layout | None:
        """The layout of a state of several parts; None for a single one.

        A loop has p of them if it calls `step` p times after each evaluation of its denoiser. Their
        names are known with their entries, the schedulers that step them at once.
        """
        before, self.layout, control = self.layout, None, Control("visit")
        doors = Doors.of(type(self.pipe), parts=True)
        if len(doors.arguments) < 2 and len(doors.methods) < 2:
            return None
        try:
            self._driven(call, control, [], until=NEVER_STOP)
        except FAILURES as error:  # a loop that looks into its denoisers
            raise_memory(error)
            return None
        counts = {count for count in control.calls if count}
        if len(counts) != 1 or counts == {1}:
            return None
        many = counts.pop()
        seen = [record.folded(_samples(call.arguments)) for record in control.records[:many]]
        shapes = tuple(tuple(record.sample.shape[1:]) for record in seen)
        self.steppers = tuple(record.scheduler for record in seen)
        unchanged = before is not None and before.shapes == shapes  # with its names
        self.layout = before if unchanged else Layout(tuple(map(str, range(many))), shapes)
        return self.layout

    def find_entry(self, call: PipelineCall, shape: tuple[int, ...]) -> Entry | PartEntries:
        """Find a way to pass a given state [1 *shape] to a step."""

        def seen(x: Tensor, entry: Entry | PartEntries) -> Tensor:
            return self.received(replace(call, x=x, entry=entry), None).folded(1).sample

        kind, size = type(self.pipe), data_size(self.real)
        prepared = partial(self.prepared, call)
        if self.layout is not None:
            entries = entered(seen, prepared, self.layout, kind, size)
            self.layout = entries.layout
            return entries
        doors = Doors.of(kind, parts=False)
        return injected(seen, prepared, shape, doors, size=size, owner=kind.__name__)

    def takes_stubs(self, call: PipelineCall) -> bool:
        """Whether the loop reaches a step if denoisers return zeros."""
        try:
            self.received(call, None)
            return True
        except FAILURES as error:
            raise_memory(error)
            return False

    def prepared(self, call: PipelineCall, method: str = PREPARE) -> list[Any]:
        """Outputs of the calls of a method that prepares states, if any, without a given state."""
        if method not in dir(self.pipe):
            return []
        outputs, patch = self._kept_of(method)
        self._driven(replace(call, x=None), Control(), [patch], until=NEVER_STOP)
        return outputs

    def _kept_of(self, method: str) -> tuple[list[Any], Patch]:
        """A list of a method's outputs, and the patch of the pipeline that records them."""
        outputs: list[Any] = []
        real = getattr(self.pipe, method)

        def keep(*args: Any, **named: Any) -> Any:
            outputs.append(real(*args, **named))
            return outputs[-1]

        return outputs, Patch(self.pipe, method, keep)

    def _driven(
        self, call: PipelineCall, control: Control, patches: Sequence[Patch], *, until: int = 0
    ) -> Any:
        """One call, with denoisers stubbed until the step `until` if the call allows stubs."""
        arguments = self._seeded(call.arguments)
        stubs = self.stubs.patches(self.control, until) if until and call.stubs else []
        patches = [*patches, *stubs, self._hand_back(call.encoded)]
        if call.x is not None:
            arguments |= call.entry.arguments(call.x)
            patches += call.entry.patches(self.pipe, call.x, call.held)
        return self._run(self.raw, arguments, control, patches)

    def _seeded(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Add a generator, so that a pipeline draws the same noise in every call."""
        seeded = dict(arguments)
        if "generator" in self.parameters:
            seeded["generator"] = torch.Generator().manual_seed(self.seed)
        return seeded

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Calls draw other noise, for a trial."""
        before, self.seed = self.seed, seed
        try:
            yield
        finally:
            self.seed = before

    def _run(
        self,
        call: Callable[..., Any],
        arguments: Mapping[str, Any],
        control: Control,
        patches: Sequence[Patch],
    ) -> Any:
        """Return the call's result, or the Stop that ended it (without its frames)."""
        self._refuse_caches()
        if self.guider is not None and GUIDER in arguments:
            arguments = {name: value for name, value in arguments.items() if name != GUIDER}
            patches = [*patches, Patch(self.pipe, GUIDER, self.guider.new(enabled=False))]
        clockwork = self.clockwork
        of_call = replace(
            control,
            layout=self.layout,
            clockwork=clockwork,
            order=None if clockwork is None else clockwork.of(arguments),
            rows=_samples(arguments),
        )
        vars(self.control).update(vars(of_call))
        finished = False
        try:
            stands = [Patch(self.pipe, MAIN_SCHEDULER, self.scheduler)]
            stands += [Patch(self.pipe, name, other) for name, other in self.beside.items()]
            # its own call warns once; each driven one would warn again
            silent = Patch(self.logger, "disabled", call is self.raw)
            place = placed(self.pipe, self._device()) if call is self.raw else nullcontext()
            memo = () if self.memo is None else self.memo.patches()
            with place, patched((*stands, silent, *memo, *patches)):
                result = call(self.pipe, **arguments)
            finished = True
            return result
        except Stop as stop:
            return stop.with_traceback(None)
        finally:
            if self.memo is not None:
                self.memo.begin(None)
            control.repeatable = self.control.repeatable
            vars(self.control).update(vars(Control()))
            # the pipeline's own last line, which the exception skipped; without hooks it goes
            # through all modules for the caches that are refused above
            if not finished and vars(self.pipe).get("_all_hooks"):
                self.pipe.maybe_free_model_hooks()

    def _device(self) -> torch.device:
        """The pipeline's `_execution_device`, read again if the denoiser has moved."""
        at = next(next(iter(self.denoisers.values())).parameters()).device
        if self._place is None or self._place[0] != at:
            self._place = at, self.pipe._execution_device
        return self._place[1]

    def _hand_back(self, calls: Calls) -> Patch:
        queue = list(calls)

        def stub(*_: Any, **__: Any) -> Any:
            if not queue:
                raise UserError(
                    f"{type(self.pipe).__name__} encodes prompts more often than at load"
                )
            return queue.pop(0)

        return Patch(self.pipe, self.encoder, stub)

    def _whole_list(self, real: Callable[..., Any]) -> Patch:
        """Let a `strength` cut the real list of timesteps instead of the pinned one."""

        def cut(*args: Any, **named: Any) -> Any:
            pinned, self.control.pinned = self.control.pinned, None
            try:
                result = real(*args, **named)
            finally:
                self.control.pinned = pinned
            return (pinned, *result[1:])

        return Patch(self.pipe, "get_timesteps", cut)

    def _refuse_caches(self) -> None:
        for name, denoiser in self.denoisers.items():
            if isinstance(denoiser, CacheMixin) and denoiser.is_cache_enabled:
                raise UserError(
                    f"{type(self.pipe).__name__}.{name} keeps a cache between calls, so "
                    f"velocities would depend on earlier calls: call pipe.{name}.disable_cache()"
                )


def _samples(arguments: Mapping[str, Any]) -> int:
    """The samples that a call makes: one per prompt."""
    prompt = arguments["prompt"]
    return len(prompt) if isinstance(prompt, list) else 1
