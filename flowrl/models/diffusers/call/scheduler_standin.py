"""The stand-in for a pipeline's scheduler during a driven call, and the arguments of its `step`."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# errors of a pipeline's own code when it cannot be called in some way
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    NotImplementedError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class Received(NamedTuple):
    """Arguments of one `scheduler.step`, and its result in the pipeline's own call."""

    output: Tensor
    timestep: Any
    sample: Tensor
    following: Tensor | None = None
    # `sample` as the denoiser sees it: some schedulers scale it (Euler-discrete), most do not
    state: Tensor | None = None
    # the scheduler's own prediction of the clean sample, in its first step, where it returns one
    clean: Tensor | None = None
    more: Mapping[str, Any] = {}  # the other arguments of the step (eta)

    @classmethod
    def joined(cls, parts: Sequence["Received"]) -> "Received":
        """Join rows that were called one at a time."""
        first = parts[0]
        return first._replace(
            output=torch.cat([part.output for part in parts]),
            sample=torch.cat([part.sample for part in parts]),
            following=_joined([part.following for part in parts]),
            state=_joined([part.state for part in parts]),
            clean=_joined([part.clean for part in parts]),
        )

    def folded(self, rows: int) -> "Received":
        """One row per sample: some loops step the frames of all videos as rows."""
        if len(self.output) == len(self.sample) == rows:
            return self
        return self._replace(
            output=_folded(self.output, rows),
            sample=_folded(self.sample, rows),
            following=None if self.following is None else _folded(self.following, rows),
            state=None if self.state is None else _folded(self.state, rows),
            clean=None if self.clean is None else _folded(self.clean, rows),
        )


OURS_OF_STEP = ("model_output", "timestep", "sample", "generator", "return_dict")


def data_size(scheduler: Any) -> float:
    """The size of the data in the scheduler's states and predictions: sigma_data of TrigFlow
    (arXiv:2410.11081), otherwise 1. Outside the stand-in, data has size 1 everywhere."""
    trig = scheduler.config.get("prediction_type") == "trigflow"
    return float(scheduler.config["sigma_data"]) if trig else 1.0


def _joined(values: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [value for value in values if value is not None]
    return torch.cat(tensors) if tensors else None


def _folded(value: Tensor, rows: int) -> Tensor:
    if len(value) == rows or len(value) % rows:
        return value
    return value.reshape(rows, len(value) // rows, *value.shape[1:])


class Stop(BaseException):
    """Ends a pipeline call. Not an Exception, so that pipelines that catch errors do not catch
    it."""

    def __init__(self, received: Received | None = None):
        self.received = received


class PerRow(Tensor):
    """A vector of timesteps in place of the loop's scalar `t`.

    Most loops broadcast `t` by `expand` to the rows that the denoiser sees. Here `expand` repeats
    the vector instead, so that in guidance's doubled batch both copies of a row get its time.
    """

    @staticmethod
    def __new__(cls, times: Tensor) -> "PerRow":
        return Tensor._make_subclass(cls, times)

    def expand(self, *shape: Any) -> Tensor:  # type: ignore[override]
        sizes = shape[0] if isinstance(shape[0], tuple | list) else shape
        plain = self.as_subclass(Tensor)
        if len(sizes) != 1 or sizes[0] % len(plain):
            raise ValueError(f"one timestep per row cannot be expanded to {tuple(sizes)}")
        return plain.repeat(sizes[0] // len(plain))


class OneStep(list):
    """A one-step loop with a vector as its timestep, in place of a tensor of shape [1]."""

    shape = (1,)


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
    """

    mode: Literal["own", "stop", "visit"] = "stop"
    pinned: Any = None  # stands for `timesteps`; None: the real list
    stop_at: int = 0
    moved: float | None = None
    count: int = 0
    records: list[Received] = field(default_factory=list)
    repeatable: bool = True  # whether the first own step, made twice, had equal results
    native_scale: bool = False  # "stop" with the real scheduler's scaling of noise and inputs

    @property
    def scales(self) -> bool:
        return self.mode == "own" or self.native_scale


def stand_in(real: Any, control: Control) -> Any:
    """A deep copy of the scheduler, with its class replaced by a subclass that `control` steers.

    `isinstance`, the config, the signatures and settings made after construction (a shift) all
    still work. Outside mode `own`, latents are passed through as the denoiser receives them, never
    scaled.
    """
    kind, size = type(real), data_size(real)
    first_sigma = inspect.getattr_static(kind, "init_noise_sigma", None)

    def timesteps(self: Any) -> Any:
        return vars(self)["timesteps"] if control.pinned is None else control.pinned

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
        "step": _step(kind, control, size),
    }
    # also where the real one does not scale: some loops ask the class, which is another one now
    members["scale_model_input"] = scale
    if "set_timesteps" in dir(kind):
        members["set_timesteps"] = _set_timesteps(kind, control)
    if "init_noise_sigma" in {*dir(kind), *vars(real)}:
        members["init_noise_sigma"] = property(init_noise_sigma, _setter("init_noise_sigma"))
    copied = copy.deepcopy(real)
    copied.__class__ = type(kind.__name__, (kind,), members)
    return copied


def _step(kind: Any, control: Control, size: float) -> Any:
    """The stand-in's `step`, with the signature of the real one, which pipelines inspect."""
    signature = inspect.signature(kind.step)
    names = tuple(signature.parameters)[1:]

    def step(self: Any, *args: Any, **named: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | named
        more = {name: value for name, value in given.items() if name not in OURS_OF_STEP}
        output, sample = _over(given["model_output"], size), _over(given["sample"], size)
        seen = Received(output, given["timestep"], sample, more=more)
        index, control.count = control.count, control.count + 1
        if control.mode == "stop" and index == control.stop_at:
            if control.native_scale:
                seen = seen._replace(state=_as_seen(self, kind, seen.sample, seen.timestep))
            raise Stop(seen)
        if control.mode == "stop" and control.moved is not None:
            kind.step(self, *args, **named)  # it counts its steps
            return Unmoved(torch.full_like(given["sample"], control.moved))
        if control.mode == "stop":
            return Unmoved(given["sample"])
        # some loops write the next state into this one
        kept = seen._replace(output=seen.output.clone(), sample=seen.sample.clone())
        if control.mode == "own":
            return _own_step(control, self, kind, kept, (args, named), size)
        control.records.append(kept)
        return Unmoved(given["sample"])

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
    control: Control, scheduler: Any, kind: Any, seen: Received, given: Any, size: float
) -> Any:
    args, named = given
    state = _as_seen(scheduler, kind, seen.sample, seen.timestep)
    twin = copy.deepcopy(scheduler) if not control.records else None
    result = kind.step(scheduler, *args, **named)
    following, clean = _over(_moved(result), size), None
    if twin is not None:
        given = inspect.signature(kind.step).bind(twin, *args, **named).arguments
        again = kind.step(**given | {"return_dict": True})
        control.repeatable = torch.equal(following, _over(_moved(again), size))
        clean = _clean(twin, seen, again)
        clean = None if clean is None else _over(clean, size)
    control.records.append(seen._replace(following=following, state=state, clean=clean))
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
    if clean is None and solver.endswith("dpmsolver++"):
        vars(scheduler)["_step_index"] -= 1  # back to the step that was made
        clean = scheduler.convert_model_output(seen.output, sample=seen.sample)
    return clean if isinstance(clean, Tensor) and clean.shape == seen.sample.shape else None


def _moved(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result.prev_sample
