"""What stands in for a pipeline's scheduler while it is driven, and what its `step` saw."""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

_ABSENT = object()


class Received(NamedTuple):
    """What one `scheduler.step` got, and in the pipeline's own call what it gave."""

    output: Tensor
    timestep: Any
    sample: Tensor
    following: Tensor | None = None
    # `sample` as the denoiser sees it: some schedulers scale it (Euler-discrete), most do not
    state: Tensor | None = None


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


class Unmoved(tuple):
    """A step that was not made, in every form in which pipelines take a step's result.

    CogVideoX's takes two values: the state, and the last prediction of the clean sample.
    """

    def __new__(cls, sample: Tensor) -> "Unmoved":
        return super().__new__(cls, (sample, sample))

    @property
    def prev_sample(self) -> Tensor:
        return self[0]

    pred_original_sample = prev_sample


@dataclass
class Control:
    """What the stand-in does. Shared with copies that a pipeline makes of its scheduler.

    own    the real scheduler steps, and what each step got and gave is recorded
    stop   the call ends at step number `stop_at`; states do not move before it
    visit  the loop runs to its end, its timesteps are recorded, states do not move
    """

    mode: Literal["own", "stop", "visit"] = "stop"
    pinned: Any = None  # stands for `timesteps`; None: the real list
    stop_at: int = 0
    count: int = 0
    records: list[Received] = field(default_factory=list)
    repeatable: bool = True  # whether the first own step, made twice, gave the same


def stand_in(real: Any, control: Control) -> Any:
    """A copy of the scheduler, of a subclass of its own class, that `control` steers.

    `isinstance`, the config, the signatures and settings made after construction (a shift) all
    hold. Outside its own call latents are handed through as the denoiser sees them, never scaled.
    """
    kind = type(real)
    signature = inspect.signature(kind.step)
    first_sigma = inspect.getattr_static(kind, "init_noise_sigma", None)

    def timesteps(self: Any) -> Any:
        return vars(self)["timesteps"] if control.pinned is None else control.pinned

    def init_noise_sigma(self: Any) -> Any:
        if control.mode != "own":
            return 1.0
        if isinstance(first_sigma, property) and first_sigma.fget is not None:
            return first_sigma.fget(self)
        return vars(self)["init_noise_sigma"]

    def scale(self: Any, sample: Tensor, timestep: Any = None) -> Tensor:
        return sample if control.mode != "own" else kind.scale_model_input(self, sample, timestep)

    def step(self: Any, *args: Any, **named: Any) -> Any:
        given = signature.bind(self, *args, **named).arguments
        seen = Received(given["model_output"], given["timestep"], given["sample"])
        index, control.count = control.count, control.count + 1
        if control.mode == "own":
            return _own_step(control, self, kind, seen, (args, named))
        if control.mode == "visit":
            control.records.append(seen)
        elif index == control.stop_at:
            raise Stop(seen)
        return Unmoved(seen.sample)

    step.__signature__ = signature  # type: ignore[attr-defined]  # pipelines ask what it takes
    members = {
        "timesteps": property(timesteps, _setter("timesteps")),
        "step": step,
        "init_noise_sigma": property(init_noise_sigma, _setter("init_noise_sigma")),
    }
    if "scale_model_input" in dir(kind):
        members["scale_model_input"] = scale
    copied = copy.deepcopy(real)
    copied.__class__ = type(kind.__name__, (kind,), members)
    return copied


def _setter(name: str) -> Any:
    def put(self: Any, value: Any) -> None:
        vars(self)[name] = value

    return put


def _own_step(control: Control, scheduler: Any, kind: Any, seen: Received, given: Any) -> Any:
    args, named = given
    state = seen.sample
    if "scale_model_input" in dir(kind):
        state = kind.scale_model_input(scheduler, seen.sample, seen.timestep)
    twin = copy.deepcopy(scheduler) if not control.records else None
    result = kind.step(scheduler, *args, **named)
    following = _moved(result)
    if twin is not None:
        control.repeatable = torch.equal(following, _moved(kind.step(twin, *args, **named)))
    control.records.append(seen._replace(following=following, state=state))
    return result


def _moved(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result.prev_sample


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
