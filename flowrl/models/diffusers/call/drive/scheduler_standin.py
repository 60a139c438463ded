"""The stand-in for a pipeline's scheduler during a driven call, and errors of a pipeline's code."""

import copy
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.clocked import Clockwork, PartOrder
from flowrl.models.diffusers.call.drive.received import MAIN_SCHEDULER, Received
from flowrl.models.out_of_memory import out_of_memory
from samplers.layout import Layout

# errors of a pipeline's own code when it cannot be called in some way
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    NotImplementedError, RuntimeError, TypeError, ValueError,
)  # fmt: skip

OURS_OF_STEP = ("model_output", "timestep", "sample", "generator", "return_dict")


def refused(owner: str, call: Mapping[str, Any], error: BaseException) -> UserError:
    said = f"{type(error).__name__}: {error}"
    return UserError(f"{owner} rejects its arguments {shown_call(call)}: {said}")


def shown_call(call: Mapping[str, Any]) -> str:
    """A call's arguments for a sentence, with the shapes of tensors in place of their numbers."""
    shapes = {k: list(v.shape) for k, v in call.items() if isinstance(v, Tensor)}
    shown = {k: f"a tensor of shape {shape}" for k, shape in shapes.items()}
    return ", ".join(f"{k}: {shown.get(k) or repr(v)}" for k, v in call.items()).join("{}")


@dataclass(frozen=True)
class its_own(AbstractContextManager[None]):  # noqa: N801 it reads as a word
    """Turns errors in a pipeline's own code into UserErrors that name its arguments.

    Some pipelines raise a plain Exception: it is turned as well, but its subclasses are not.
    """

    owner: str
    call: Mapping[str, Any]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, UserError) or out_of_memory(error):
            return
        if isinstance(error, FAILURES) or type(error) is Exception:
            raise refused(self.owner, self.call, error) from error


def data_size(scheduler: Any) -> float:
    """The size of the data in the scheduler's states and predictions: sigma_data of TrigFlow
    (arXiv:2410.11081), otherwise 1. Outside the stand-in, data has size 1 everywhere."""
    trig = scheduler.config.get("prediction_type") == "trigflow"
    return float(scheduler.config["sigma_data"]) if trig else 1.0


class Stop(BaseException):
    """Ends a pipeline call. Not an Exception, so that pipelines that catch errors do not catch
    it."""

    def __init__(self, received: Received | None = None):
        self.received = received


class Unmoved(tuple):
    """Result of a step that leaves the state unchanged, in every form that pipelines read.

    CogVideoX reads two values: the state, and the last prediction of the clean sample.
    """

    def __new__(cls, sample: Tensor) -> "Unmoved":
        return super().__new__(cls, (sample, sample))

    @property
    def prev_sample(self) -> Tensor:
        return self[0]

    pred_original_sample = prev_sample


@dataclass
class Control:
    """Mode of the stand-in, shared with copies that a pipeline makes of its scheduler.

    own    the real scheduler steps, and each step's arguments and result are recorded
    stop   the call ends at step number `stop_at`; states do not change before it, or are `moved`
           everywhere
    visit  the loop runs to its end, its steps are recorded, states do not change

    With a `layout` each step of the loop is as many calls of `step`, one per part, and what they
    receive is joined. With an `order` a step moves only some parts: its calls are joined where the
    call stops, and recorded one by one elsewhere. `calls` counts those since each evaluation of a
    stubbed denoiser. A pipeline may have several schedulers, which share one control.
    """

    mode: Literal["own", "stop", "visit"] = "stop"
    pinned: Any = None  # stands for `timesteps`; None: the real list
    beside: Mapping[str, Any] = field(default_factory=dict)  # the same of other schedulers, by name
    levels: Any = None  # stands for `sigmas`; None: the real list
    layout: Layout | None = None
    clockwork: Clockwork | None = None  # of a loop whose steps move some parts of its state
    order: PartOrder | None = None  # of this call; None: calls of `step` are recorded one by one
    rows: int = 1  # samples of the call
    part: int = 0  # of the loop's step that comes next
    waiting: list[Received] = field(default_factory=list)  # parts of a step that is not whole
    calls: list[int] = field(default_factory=list)
    stop_at: int = 0
    moved: float | None = None
    count: int = 0
    records: list[Received] = field(default_factory=list)
    repeatable: bool = True  # whether the first own step, made twice, had equal results
    native_scale: bool = False  # "stop" with the real scheduler's scaling of noise and inputs

    @property
    def scales(self) -> bool:
        return self.mode == "own" or self.native_scale

    def arrived(self) -> int:
        """Count a call of `step`, and return the number of the loop's step."""
        if not self.calls:
            self.calls.append(0)
        self.calls[-1] += 1
        index, self.part = self.count, self.part + 1
        if self.part == self._parts(index):
            self.part, self.count = 0, self.count + 1
        return index

    def _parts(self, step: int) -> int:
        """The number of calls that make one of the loop's steps."""
        if self.order is not None:
            return len(self.order.parts[step]) if step < len(self.order.parts) else 1
        return 1 if self.layout is None else len(self.layout.names)

    def fills(self) -> bool:
        """Whether the evaluation that was counted last fills a cache."""
        if self.order is None or self.count >= len(self.order.filling):
            return False
        since = next((k for k, count in enumerate(reversed(self.calls)) if count), len(self.calls))
        return since <= self.order.filling[self.count]

    def whole(self, seen: Received, owner: str) -> Received | None:
        """The whole step that this part completes; None while others are missing."""
        if self.order is not None:
            assert self.clockwork is not None, "the order is its"
            parts = self.order.parts[self.stop_at]
            self.waiting.append(seen)
            if len(self.waiting) < len(parts):
                return None
            calls, self.waiting = self.waiting, []
            return self.clockwork.joined(calls, parts, self.rows)
        if self.layout is None:
            return seen
        self.waiting.append(seen)
        if len(self.waiting) < len(self.layout.names):
            return None
        parts, self.waiting = self.waiting, []
        return Received.packed(parts, owner, self.rows)

    def record(self, seen: Received, owner: str) -> None:
        step = seen if self.order is not None else self.whole(seen, owner)
        self.records += [] if step is None else [step]


def stand_in(real: Any, control: Control, name: str = MAIN_SCHEDULER) -> Any:
    """A deep copy of the scheduler, with its class replaced by a subclass that `control` steers;
    `name` is that of the component.

    `isinstance`, the config, the signatures and settings made after construction (a shift) all
    still work. Outside mode `own`, latents are passed through as the denoiser receives them, never
    scaled.
    """
    kind, size = type(real), data_size(real)
    first_sigma = inspect.getattr_static(kind, "init_noise_sigma", None)

    def timesteps(self: Any) -> Any:
        if control.pinned is None:
            return vars(self)["timesteps"]
        return control.beside.get(name, control.pinned)

    def sigmas(self: Any) -> Any:
        real_list = control.levels is None or name != MAIN_SCHEDULER
        return vars(self)["sigmas"] if real_list else control.levels

    def init_noise_sigma(self: Any) -> Any:
        if not control.scales:
            return 1.0
        if isinstance(first_sigma, property) and first_sigma.fget is not None:
            return first_sigma.fget(self)
        return vars(self)["init_noise_sigma"]

    def scale(self: Any, sample: Tensor, timestep: Any = None) -> Tensor:
        return _as_seen(self, kind, sample, timestep) if control.scales else sample

    members = {
        "timesteps": property(timesteps, _setter("timesteps")),
        "step": _step(kind, control, size, name),
    }
    # also where the real one does not scale: some loops ask the class, which is another one now
    members["scale_model_input"] = scale
    if "sigmas" in vars(real):
        members["sigmas"] = property(sigmas, _setter("sigmas"))
    if "set_timesteps" in dir(kind):
        members["set_timesteps"] = _set_timesteps(kind, control)
    if "init_noise_sigma" in {*dir(kind), *vars(real)}:
        members["init_noise_sigma"] = property(init_noise_sigma, _setter("init_noise_sigma"))
    copied = copy.deepcopy(real)
    copied.__class__ = type(kind.__name__, (kind,), members)
    return copied


def _step(kind: Any, control: Control, size: float, name: str) -> Any:
    """The stand-in's `step`, with the signature of the real one, which pipelines inspect."""
    signature = inspect.signature(kind.step)
    names = tuple(signature.parameters)[1:]

    def step(self: Any, *args: Any, **named: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | named
        more = {key: value for key, value in arguments.items() if key not in OURS_OF_STEP}
        output, sample = arguments["model_output"], arguments["sample"]
        if size != 1.0:
            output, sample = output / size, sample / size
        seen = Received(output, arguments["timestep"], sample, more=more, scheduler=name)
        index = control.arrived()
        if control.mode == "stop" and index == control.stop_at:
            if control.native_scale:
                seen = seen._replace(state=_as_seen(self, kind, seen.sample, seen.timestep))
            whole = control.whole(seen, kind.__name__)
            if whole is not None:
                raise Stop(whole)
            return Unmoved(arguments["sample"])
        if control.mode == "stop" and control.moved is not None:
            kind.step(self, *args, **named)  # it counts its steps
            return Unmoved(torch.full_like(arguments["sample"], control.moved))
        if control.mode == "stop":
            return Unmoved(arguments["sample"])
        # some loops write the next state into this one
        copied = seen._replace(output=seen.output.clone(), sample=seen.sample.clone())
        if control.mode == "own":
            return _own_step(control, self, kind, copied, (args, named), size)
        control.record(copied, kind.__name__)
        return Unmoved(arguments["sample"])

    step.__signature__ = signature  # type: ignore[attr-defined]
    return step


def _set_timesteps(kind: Any, control: Control) -> Any:
    """Call the real one. With a pinned time, its lists stay on the CPU: the loop's step never reads
    them, and copying them would make a GPU wait in every call."""
    real = kind.set_timesteps

    @wraps(real)
    def set_timesteps(self: Any, *args: Any, **named: Any) -> Any:
        if control.pinned is not None and named.get("device") is not None:
            named["device"] = torch.device("cpu")
        return real(self, *args, **named)

    return set_timesteps


def _setter(name: str) -> Any:
    def put(self: Any, value: Any) -> None:
        vars(self)[name] = value

    return put


def _over(value: Tensor, size: float) -> Tensor:
    return value if size == 1.0 else value / size


def _own_step(
    control: Control, scheduler: Any, kind: Any, seen: Received, arguments: Any, size: float
) -> Any:
    args, named = arguments
    state = _as_seen(scheduler, kind, seen.sample, seen.timestep)
    twin = copy.deepcopy(scheduler) if not control.records else None
    result = kind.step(scheduler, *args, **named)
    following, clean = _over(_moved(result), size), None
    if twin is not None:
        arguments = inspect.signature(kind.step).bind(twin, *args, **named).arguments
        generator = arguments.get("generator")
        if isinstance(generator, torch.Generator):  # a Brownian tree draws by its first seed alone
            seed = generator.initial_seed() + 1
            arguments["generator"] = torch.Generator(generator.device).manual_seed(seed)
        again = kind.step(**arguments | {"return_dict": True})
        control.repeatable &= torch.equal(following, _over(_moved(again), size))
        clean = _clean(twin, seen, again)
        clean = None if clean is None else _over(clean, size)
    whole = seen._replace(following=following, state=state, clean=clean)
    control.record(whole, kind.__name__)
    return result


def _as_seen(scheduler: Any, kind: Any, sample: Tensor, timestep: Any) -> Tensor:
    """Return the sample as the real scheduler passes it to the denoiser."""
    if "scale_model_input" not in dir(kind):
        return sample
    return kind.scale_model_input(scheduler, sample, timestep)


def _clean(scheduler: Any, seen: Received, result: Any) -> Tensor | None:
    """Return the clean sample that the scheduler itself computes from the prediction, or None.

    LCM blends it with the state near the data (the boundary scalings); the blend is undone.
    """
    outputs = dict(result) if isinstance(result, Mapping) else {}
    clean = outputs.get("pred_original_sample")
    if clean is None and outputs.get("denoised") is not None:
        boundary = getattr(scheduler, "get_scalings_for_boundary_condition_discrete", None)
        skip, out = (0.0, 1.0) if boundary is None else boundary(seen.timestep)
        clean = (outputs["denoised"] - skip * seen.sample) / out
    solver = str(scheduler.config.get("algorithm_type") or "")
    formulated = getattr(scheduler, "precondition_outputs", None)  # as EDM's are
    if clean is None and (solver.endswith("dpmsolver++") or formulated):
        vars(scheduler)["_step_index"] -= 1  # back to the step that was made
        clean = scheduler.convert_model_output(seen.output, sample=seen.sample)
    return clean if isinstance(clean, Tensor) and clean.shape == seen.sample.shape else None


def _moved(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result.prev_sample
