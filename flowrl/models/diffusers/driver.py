"""Bring a diffusers pipeline's own loop to a state and a timestep, and see what it would integrate.

The pipeline's `__call__` runs as it is, on a stand-in for its scheduler. Two ways lead to a
timestep: *pinned*, the loop's `timesteps` is that one value; *forward*, the full list stays, a
stubbed denoiser returns zeros until the wanted index. `step()` ends the call by an exception.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.models.cache_utils import CacheMixin
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flowrl.errors import UserError
from flowrl.models.diffusers.conditioning import Calls
from flowrl.models.diffusers.image_cache import Memo
from flowrl.models.diffusers.image_to_image import RecordedNoise
from flowrl.models.diffusers.latents import Entry, injected
from flowrl.models.diffusers.scheduler_standin import (
    FAILURES,
    Control,
    OneStep,
    Patch,
    PerRow,
    Received,
    Stop,
    placed,
    stand_in,
)

DENOISERS = ("transformer", "transformer_2", "unet")
ENCODERS = ("encode_prompt", "_encode_prompt")  # methods that encode prompts, the newer name first
NEVER_STOP = 2**31  # of a denoiser that stays stubbed


@dataclass(frozen=True)
class Target:
    """The point where a driven call stops."""

    times: Tensor  # [] or [n]
    index: int | None = None  # of the loop's steps: fast-forward to it


@dataclass(frozen=True)
class PipelineCall:
    """One call of the pipeline: its arguments, what stands for its encoders, its first state."""

    arguments: Mapping[str, Any]
    encoded: Calls = ()
    x: Tensor | None = None  # None: the pipeline's own initial noise
    entry: Entry = Entry()


class Driver:
    """Runs one pipeline's `__call__` on a stand-in scheduler, and always cleans up after it."""

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.denoisers: dict[str, nn.Module] = {
            name: module
            for name in DENOISERS
            if isinstance(module := vars(pipe).get(name), nn.Module)
        }
        self.parameters = inspect.signature(type(pipe).__call__).parameters
        self.raw: Callable[..., Any] = inspect.unwrap(type(pipe).__call__)  # without torch.no_grad
        self.logger = logging.getLogger(type(pipe).__module__)
        self.control = Control()
        self.scheduler = stand_in(pipe.scheduler, self.control)
        self.memo = Memo(pipe)
        self.encoder = next(name for name in ENCODERS if name in dir(pipe))
        self._shapes: dict[Any, Any] = {}  # of denoisers' outputs, by their inputs' shapes
        self.stubbed = True  # whether its loop takes denoisers that give zeros
        self._place: tuple[torch.device, torch.device] | None = None

    def encoded(self, arguments: Mapping[str, Any]) -> Calls:
        """The outputs of the real `encode_prompt`; the call ends at the denoiser's door."""
        outputs: list[Any] = []
        real = getattr(self.pipe, self.encoder)

        def keep(*args: Any, **named: Any) -> Any:
            outputs.append(real(*args, **named))
            return outputs[-1]

        def door(*args: Any, **named: Any) -> Any:
            raise Stop

        doors = [Patch(denoiser, "forward", door) for denoiser in self.denoisers.values()]
        with torch.no_grad():
            patches = [Patch(self.pipe, self.encoder, keep), *doors]
            self._run(self.raw, self._seeded(arguments), Control(), patches)
        return tuple(outputs)

    def first(self, call: PipelineCall, draws: RecordedNoise, *, own_scale: bool) -> Received:
        """Return what the loop's first `step` receives; the denoiser is stubbed.

        Noise comes from `draws`. With `own_scale` the real scheduler scales the noise and the
        denoiser's input, as in the pipeline's own call, and `state` is that input.
        """
        control = Control(own_scale=own_scale)
        stop = self._driven(call, control, draws.patches(self.pipe), until=NEVER_STOP)
        assert isinstance(stop, Stop) and stop.received is not None
        return stop.received

    def received(self, call: PipelineCall, target: Target | None) -> Received:
        """Return what `step` receives at the target, or at the first step if there is none.

        Where the target is None the denoiser is a stub: only the state is of interest.
        """
        if target is None:
            stop = self._driven(call, Control(), [], until=NEVER_STOP)
        elif target.index is not None:
            stop = self._driven(call, Control(stop_at=target.index), [], until=target.index)
        else:
            times = target.times
            pinned = OneStep([PerRow(times)]) if times.ndim else times.reshape(1)
            stop = self._driven(call, Control(pinned=pinned), self._whole_list())
        if not isinstance(stop, Stop) or stop.received is None:
            raise UserError(
                f"{type(self.pipe).__name__} came to its end without the expected call of "
                "scheduler.step: it cannot be driven"
            )
        return stop.received

    def finished(self, call: PipelineCall, *, through: bool) -> Any:
        """The result of a call whose state never moves: it is decoded.

        The loop is skipped, or gone through with a stubbed denoiser where a pipeline needs that.
        """
        with torch.no_grad():
            if through:
                return self._driven(call, Control("visit"), [], until=NEVER_STOP)
            return self._driven(call, Control(pinned=torch.empty(0)), [])

    def visited(self, call: PipelineCall) -> list[Any]:
        """The timesteps of the loop's steps, in order; the real scheduler's lists are then set."""
        with torch.no_grad():
            control = Control("visit")
            self._driven(call, control, [], until=NEVER_STOP)
            return [record.timestep for record in control.records]

    def recorded(self, arguments: Mapping[str, Any]) -> tuple[list[Received], Any, bool]:
        """The pipeline's own call, its own scheduler stepping.

        All that `step` saw, the result, and whether a step made twice gives the same.
        """
        control = Control("own")
        result = self._run(type(self.pipe).__call__, self._seeded(arguments), control, [])
        return control.records, result, control.repeatable

    def learned(self, call: PipelineCall, shape: tuple[int, ...]) -> Entry:
        """Find the entry by which a step sees a given state [1 *shape]."""
        return injected(
            lambda x, entry: self.received(replace(call, x=x, entry=entry), None).folded(1).sample,
            lambda seen: self._prepared(call, seen),
            shape,
            takes_latents="latents" in self.parameters,
            owner=type(self.pipe).__name__,
        )

    def _prepared(self, call: PipelineCall, seen: list[Any]) -> None:
        """Keep what prepare_latents gives, where there is one."""
        if "prepare_latents" not in dir(self.pipe):
            return
        real = self.pipe.prepare_latents

        def keep(*args: Any, **named: Any) -> Any:
            seen.append(real(*args, **named))
            return seen[-1]

        patches = [Patch(self.pipe, "prepare_latents", keep)]
        self._driven(replace(call, x=None), Control(), patches, until=NEVER_STOP)

    def _driven(
        self, call: PipelineCall, control: Control, patches: Sequence[Patch], *, until: int = 0
    ) -> Any:
        """One call, its denoisers stubbed until a step.

        A loop that looks into its denoisers (for attention maps, for keys and values) does not
        take stubs: there they run.
        """
        if not (until and self.stubbed):
            return self._once(call, control, patches)
        try:
            return self._once(call, control, [*patches, *self._stubs(until)])
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            control.records.clear()
            result = self._once(call, control, patches)
            self.stubbed = False
            return result

    def _once(self, call: PipelineCall, control: Control, patches: Sequence[Patch]) -> Any:
        arguments = self._seeded(call.arguments)
        patches = [*patches, self._hand_back(call.encoded)]
        if call.x is not None and call.entry.place is None:
            arguments["latents"] = call.x
        elif call.x is not None:
            put = call.entry.around(self.pipe.prepare_latents, call.x)
            patches.append(Patch(self.pipe, "prepare_latents", put))
        return self._run(self.raw, arguments, control, patches)

    def _seeded(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """With a generator, so that what a pipeline draws is the same in every call."""
        given = dict(arguments)
        if "generator" in self.parameters:
            given["generator"] = torch.Generator().manual_seed(0)
        return given

    def _run(
        self,
        call: Callable[..., Any],
        arguments: Mapping[str, Any],
        control: Control,
        patches: Sequence[Patch],
    ) -> Any:
        """Return the call's result, or the Stop that ended it (without its frames)."""
        self._refuse_caches()
        vars(self.control).update(vars(control))
        finished = False
        try:
            with ExitStack() as stack:
                stands = Patch(self.pipe, "scheduler", self.scheduler)
                # warnings that its own call gives once would come with each driven one
                silent = Patch(self.logger, "disabled", call is self.raw)
                if call is self.raw:
                    stack.enter_context(placed(self.pipe, self._device()))
                for patch in (stands, silent, *self.memo.patches(), *patches):
                    stack.enter_context(patch.applied())
                result = call(self.pipe, **arguments)
            finished = True
            return result
        except Stop as stop:
            return stop.with_traceback(None)
        finally:
            control.repeatable = self.control.repeatable
            vars(self.control).update(vars(Control()))
            # the pipeline's own last line, which the exception skipped; without hooks it goes
            # through all modules for the caches that are refused above
            if not finished and vars(self.pipe).get("_all_hooks"):
                self.pipe.maybe_free_model_hooks()

    def _device(self) -> torch.device:
        """The pipeline's `_execution_device`; asked again if the denoiser has moved."""
        at = next(next(iter(self.denoisers.values())).parameters()).device
        if self._place is None or self._place[0] != at:
            self._place = at, self.pipe._execution_device
        return self._place[1]

    def _hand_back(self, calls: Calls) -> Patch:
        queue = list(calls)

        def stub(*args: Any, **named: Any) -> Any:
            if not queue:
                raise UserError(f"{type(self.pipe).__name__} encodes more prompts than at load")
            return queue.pop(0)

        return Patch(self.pipe, self.encoder, stub)

    def _whole_list(self) -> list[Patch]:
        """A `strength` cuts the list of timesteps: the real one, and not the one that is pinned."""
        real = getattr(self.pipe, "get_timesteps", None)
        if real is None:
            return []

        def cut(*args: Any, **named: Any) -> Any:
            pinned, self.control.pinned = self.control.pinned, None
            try:
                result = real(*args, **named)
            finally:
                self.control.pinned = pinned
            return (pinned, *result[1:])

        return [Patch(self.pipe, "get_timesteps", cut)]

    def _stubs(self, index: int) -> list[Patch]:
        """Denoisers that run from the loop's `index` on, and give zeros before it."""
        return [
            Patch(denoiser, "forward", self._until(name, denoiser.forward, index))
            for name, denoiser in self.denoisers.items()
        ]

    def _until(self, name: str, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def stub(*args: Any, **named: Any) -> Any:
            if self.control.count >= index:
                return forward(*args, **named)
            key = (name, str(tree_map(_form, (args, named))))
            if key not in self._shapes:
                with torch.no_grad():
                    self._shapes[key] = tree_map(_form, forward(*args, **named))
            return tree_map(_zeros, self._shapes[key])

        return stub

    def _refuse_caches(self) -> None:
        for name, denoiser in self.denoisers.items():
            if isinstance(denoiser, CacheMixin) and denoiser.is_cache_enabled:
                raise UserError(
                    f"{type(self.pipe).__name__}.{name} keeps a cache between calls, so a velocity "
                    f"would depend on earlier ones: call pipe.{name}.disable_cache()"
                )


@dataclass(frozen=True)
class _Form:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _form(value: Any) -> Any:
    """Return a tensor's shape, dtype and device, or another value's type."""
    if isinstance(value, Tensor):
        return _Form(tuple(value.shape), value.dtype, value.device)
    return type(value)


def _zeros(value: Any) -> Any:
    if isinstance(value, _Form):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return value
