"""Bring a diffusers pipeline's own loop to a state and a timestep, and see what it would integrate.

The pipeline's `__call__` runs as it is, on a stand-in for its scheduler. Two ways lead to a
timestep: *pinned*, the loop's `timesteps` is that one value; *forward*, the full list stays, a
stubbed denoiser returns zeros until the wanted index. `step()` ends the call by an exception.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from diffusers.models.cache_utils import CacheMixin
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models.conditioning import Calls

DENOISERS = ("transformer", "transformer_2", "unet")
_ABSENT = object()


class Received(NamedTuple):
    """What one `scheduler.step` got, and what it gave (None where it ended the call)."""

    output: Tensor
    timestep: Tensor
    sample: Tensor
    following: Tensor | None = None


class Stop(BaseException):
    """Ends a pipeline call. Not an Exception: a pipeline that catches errors must not catch it."""

    def __init__(self, received: Received | None = None):
        self.received = received


class PerRow(Tensor):
    """A vector of timesteps that stands for the loop's scalar `t`.

    Most loops broadcast `t` by `expand` to the rows that the denoiser sees. Here `expand` repeats
    the vector instead, so that guidance's doubled batch gets each row's own time twice.
    """

    @staticmethod
    def __new__(cls, times: Tensor) -> "PerRow":
        return Tensor._make_subclass(cls, times)

    def expand(self, *shape: Any) -> Tensor:  # type: ignore[override]
        sizes = shape[0] if isinstance(shape[0], tuple | list) else shape
        plain = self.as_subclass(Tensor)
        if len(sizes) != 1 or sizes[0] % len(plain):
            raise ValueError(f"one timestep a row cannot be expanded to {tuple(sizes)}")
        return plain.repeat(sizes[0] // len(plain))


class OneStep(list):
    """A loop of one step whose timestep is a vector: for a tensor of shape [1]."""

    shape = (1,)


@dataclass
class Control:
    """What the stand-in does. Shared with copies that a pipeline makes of its scheduler."""

    pinned: Any = None  # stands for `timesteps`; None: the real list
    stop_at: int | None = 0  # index of the `step` that ends the call; None: record them all
    count: int = 0
    records: list[Received] = field(default_factory=list)


def stand_in(real: Any, control: Control) -> Any:
    """A copy of the scheduler, of a subclass of its own class, that `control` steers.

    `isinstance`, the config, the signature of `set_timesteps` and settings made after construction
    (a shift) all hold. Latents that are passed in are never rescaled.
    """
    kind = type(real)

    def timesteps(self: Any) -> Any:
        return vars(self)["timesteps"] if control.pinned is None else control.pinned

    def set_timesteps(self: Any, value: Any) -> None:
        vars(self)["timesteps"] = value

    def step(
        self: Any, model_output: Tensor, timestep: Any, sample: Tensor, *a: Any, **k: Any
    ) -> Any:
        index, control.count = control.count, control.count + 1
        if control.stop_at is None:
            result = kind.step(self, model_output, timestep, sample, *a, **k)
            following = result[0] if isinstance(result, tuple) else result.prev_sample
            control.records.append(Received(model_output, timestep, sample, following))
            return result
        if index == control.stop_at:
            raise Stop(Received(model_output, timestep, sample))
        return (sample,)

    members = {
        "timesteps": property(timesteps, set_timesteps),
        "step": step,
        "init_noise_sigma": property(lambda self: 1.0, lambda self, value: None),
    }
    if "scale_model_input" in dir(kind):
        members["scale_model_input"] = lambda self, sample, timestep=None: sample
    copied = copy.deepcopy(real)
    copied.__class__ = type(kind.__name__, (kind,), members)
    return copied


@dataclass(frozen=True)
class Patch:
    """An instance attribute for the time of one call."""

    owner: Any
    name: str
    value: Any

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set it, then put back what was there, which may be nothing.

        Through `vars`: a pipeline's own setattr would also rewrite its config.
        """
        held = vars(self.owner)
        before = held.get(self.name, _ABSENT)
        held[self.name] = self.value
        try:
            yield
        finally:
            if before is _ABSENT:
                del held[self.name]
            else:
                held[self.name] = before


@dataclass(frozen=True)
class Target:
    """Where a driven call is to stop."""

    times: Tensor  # [] or [n]
    index: int | None = None  # of the schedule: fast-forward to it


class Driver:
    """Runs one pipeline's `__call__` on a stand-in scheduler, and always cleans up after it."""

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.denoisers: dict[str, nn.Module] = {
            name: module
            for name in DENOISERS
            if isinstance(module := vars(pipe).get(name), nn.Module)
        }
        self.raw: Callable[..., Any] = inspect.unwrap(type(pipe).__call__)  # without torch.no_grad
        self.logger = logging.getLogger(type(pipe).__module__)
        self.control = Control()
        self.scheduler = stand_in(pipe.scheduler, self.control)

    def encoded(self, arguments: Mapping[str, Any]) -> Calls:
        """The outputs of the real `encode_prompt`; the call ends at the denoiser's door."""
        outputs: list[Any] = []
        real = self.pipe.encode_prompt

        def keep(*args: Any, **named: Any) -> Any:
            outputs.append(real(*args, **named))
            return outputs[-1]

        def door(*args: Any, **named: Any) -> Any:
            raise Stop

        doors = [Patch(denoiser, "forward", door) for denoiser in self.denoisers.values()]
        with torch.no_grad():
            patches = [Patch(self.pipe, "encode_prompt", keep), *doors]
            self._run(self.raw, arguments, Control(), patches)
        return tuple(outputs)

    def received(
        self, arguments: Mapping[str, Any], calls: Calls, target: Target | None
    ) -> Received:
        """What `step` gets at the target; at the loop's first step where the target is None."""
        control = Control()
        patches = [self._hand_back(calls)]
        if target is not None and target.index is not None:
            control = Control(stop_at=target.index)
            for denoiser in self.denoisers.values():
                until = self._until(denoiser.forward, target.index)
                patches.append(Patch(denoiser, "forward", until))
        elif target is not None:
            times = target.times
            control.pinned = OneStep([PerRow(times)]) if times.ndim else times.reshape(1)
        stop = self._run(self.raw, arguments, control, patches)
        if not isinstance(stop, Stop) or stop.received is None:
            raise UserError(
                f"{type(self.pipe).__name__} came to its end without the expected call of "
                "scheduler.step: it cannot be driven"
            )
        return stop.received

    def finished(self, arguments: Mapping[str, Any], calls: Calls) -> Any:
        """The result of a call whose loop is skipped: `latents` decoded."""
        with torch.no_grad():
            control = Control(pinned=torch.empty(0))
            return self._run(self.raw, arguments, control, [self._hand_back(calls)])

    def recorded(self, arguments: Mapping[str, Any]) -> tuple[list[Received], Any]:
        """The pipeline's own call, its own scheduler stepping: all that `step` saw, the result."""
        control = Control(stop_at=None)
        result = self._run(type(self.pipe).__call__, arguments, control, [])
        return control.records, result

    def _run(
        self,
        call: Callable[..., Any],
        arguments: Mapping[str, Any],
        control: Control,
        patches: Sequence[Patch],
    ) -> Any:
        """What the call returned, or the Stop that ended it (without its frames)."""
        self._refuse_caches()
        vars(self.control).update(vars(control))
        finished = False
        try:
            with ExitStack() as stack:
                stands = Patch(self.pipe, "scheduler", self.scheduler)
                # warnings that its own call gives once would come with each driven one
                silent = Patch(self.logger, "disabled", call is self.raw)
                for patch in (stands, silent, *patches):
                    stack.enter_context(patch.applied())
                result = call(self.pipe, **arguments)
            finished = True
            return result
        except Stop as stop:
            return stop.with_traceback(None)
        finally:
            self.control.pinned = None
            if not finished:  # the pipeline's own last line, which the exception skipped
                self.pipe.maybe_free_model_hooks()

    def _hand_back(self, calls: Calls) -> Patch:
        queue = list(calls)

        def stub(*args: Any, **named: Any) -> Any:
            if not queue:
                raise UserError(f"{type(self.pipe).__name__} encodes more prompts than at load")
            return queue.pop(0)

        return Patch(self.pipe, "encode_prompt", stub)

    def _until(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        """The denoiser's forward from the loop's `index` on, zeros before it."""

        def stub(*args: Any, **named: Any) -> Any:
            if self.control.count >= index:
                return forward(*args, **named)
            hidden = named["hidden_states"] if "hidden_states" in named else args[0]
            if isinstance(hidden, Tensor):
                return (torch.zeros_like(hidden),)
            return ([torch.zeros_like(row) for row in hidden],)

        return stub

    def _refuse_caches(self) -> None:
        for name, denoiser in self.denoisers.items():
            if isinstance(denoiser, CacheMixin) and denoiser.is_cache_enabled:
                raise UserError(
                    f"{type(self.pipe).__name__}.{name} keeps a cache between calls, so a velocity "
                    f"would depend on earlier ones: call pipe.{name}.disable_cache()"
                )
