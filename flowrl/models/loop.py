"""A pipeline's denoising loop from outside: what goes in, and what a step would integrate.

Nothing here knows a family. What a pipeline needs (an image, a packed state, a scaled input) is
found by trying it out once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models import checks, columns
from flowrl.models.columns import Extra
from flowrl.models.conditioning import SHORT, Calls, Conditioning, Layout, flatten, learn
from flowrl.models.drive import Call, Driver, Target
from flowrl.models.entry import Entry
from flowrl.models.schedule import Kind, Schedule, Start, Way
from flowrl.models.standin import Received
from samplers.adapt import flow_velocity, to_vp

SIDE = 64  # pixels of a picture for trying out, where the call gives no size


class Loop:
    """Raises UserError, with the reason, for a pipeline that cannot be driven."""

    def __init__(self, pipe: Any, call: Mapping[str, Any]) -> None:
        self.pipe = pipe
        self.name = type(pipe).__name__
        checks.refuse(pipe)
        self.driver = Driver(pipe)
        self.kind: Kind = checks.prediction(pipe.scheduler, self.name)
        denoisers = tuple(self.driver.denoisers.values())
        self.guidance = checks.guidance_argument(self.driver.parameters, denoisers)
        self.call = checks.arguments(self.name, call, self.driver.parameters, self.guidance)
        self._layouts: dict[tuple[str, ...], tuple[Layout, bool]] = {}
        self._starts: dict[int, Start] = {}
        self._entry: Entry | None = None
        self._sample = self._needed()
        self._blank = self.encode([SHORT], (self._sample,) if self._sample else ())

    def arguments(
        self, rows: int, steps: int, guidance: float | None, extras: Sequence[Extra] = ()
    ) -> dict[str, Any]:
        """Of the pipeline's own call for `rows` samples; prompts are still blank."""
        given = dict(self.call)
        for name, value in given.items():
            if columns.TEXTS.fullmatch(name) and isinstance(value, str):
                given[name] = [value] * rows
        if extras:
            assert len(extras) == rows
            given |= columns.merged(extras, each=self._layout(extras[0])[1])
        given |= {"prompt": [""] * rows, "num_inference_steps": steps}
        given |= {"output_type": "pt", "return_dict": False}
        if guidance is not None:
            if self.guidance is None:
                raise UserError(f"{self.name} takes no guidance: leave guidance out (null)")
            given[self.guidance] = float(guidance)
        return given

    def encode(self, prompts: Sequence[str], extras: Sequence[Extra]) -> Conditioning:
        """In one call. Rows of `extras`, if there are any, have the same images."""
        layout, _ = self._layout(extras[0] if extras else {})
        counts, values = flatten(self._encoded(prompts, extras))
        assert counts == layout.counts
        return Conditioning(layout, values, len(prompts), tuple(extras))

    def tried(self, extras: Sequence[Extra]) -> tuple[Extra, ...]:
        """Two rows: the first one's images, own texts. Without any, those for trying out."""
        if not extras:
            return (self._sample, self._sample) if self._sample else ()
        pictures = {name: extras[0][name] for name in columns.images(extras[0])}
        return tuple({**extra, **pictures} for extra in extras)

    def start(self, steps: int) -> Start:
        if steps not in self._starts:
            blank = self._blank
            call = Call(self.arguments(1, steps, None, blank.extras), blank.calls())
            with torch.no_grad():
                first = self.driver.received(call, None).sample
                shape = tuple(first.shape[1:])
                if self._entry is None:
                    self._entry = self.driver.learned(call, shape)
                visited = self.driver.visited(call)
            schedule = Schedule.of(self.driver.scheduler, visited, self.kind, self.name)
            if len(schedule.sigmas) != steps + 1 and "strength" not in self.driver.parameters:
                raise UserError(
                    f"{self.name} visits the levels {schedule.sigmas} in {steps} steps: use "
                    "another scheduler, such as FlowMatchEulerDiscreteScheduler or DDIMScheduler"
                )
            self._starts[steps] = Start(schedule, shape, first.dtype, first.device)
        return self._starts[steps]

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, way: Way) -> Tensor:
        """Of flow states x [n *d] at sigma [n]; rows have the same images."""
        if self.kind == "flow":
            return self.received(x, sigma, conditioning, way).output
        if self.kind == "inverted":
            return -self.received(x, sigma, conditioning, way).output
        state = to_vp(x, sigma.to(x.device))
        return self.read(state, self.received(state, sigma, conditioning, way).output, sigma)

    def read(self, state: Tensor, output: Tensor, sigma: Tensor) -> Tensor:
        """The flow's velocity in what a step receives at a state of the loop."""
        if self.kind in ("flow", "inverted"):
            return output if self.kind == "flow" else -output
        if output.shape[1] == 2 * state.shape[1]:  # a learned variance comes behind
            output = output[:, : state.shape[1]]
        return flow_velocity(self.kind, state.to(output.device), output, sigma.to(output.device))

    def received(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, way: Way) -> Received:
        """What `scheduler.step` receives at these states of the loop, in one call."""
        start = self.start(way.steps)
        if way.forward:
            index = set(start.schedule.index(sigma).tolist())
            if len(index) != 1 or -1 in index:
                raise UserError(
                    f"{self.name} with {self.call} depends on the step's index: it has velocities "
                    f"at one of its own {way.steps} sigmas at a time, not at {sigma.tolist()}"
                )
            target = Target(torch.empty(0), start.schedule.place(index.pop()))
        else:
            times = start.schedule.times(sigma).to(start.device)
            target = Target(times[0] if bool((times == times[0]).all()) else times)
        return self.driver.received(self._at(x, conditioning, way.steps, way.guidance), target)

    def decode(self, x0: Tensor, conditioning: Conditioning, way: Way) -> Tensor:
        """x0 [n *d] -> [n 3 h w] or [n f 3 h w], float32; rows have the same images."""
        call = self._at(x0.detach(), conditioning, way.steps, way.guidance)
        return self.driver.finished(call, through=way.through)[0].float()

    def record(
        self, prompts: Sequence[str], extras: Sequence[Extra], steps: int, guidance: float | None
    ) -> tuple[list[Received], Tensor, bool]:
        """The pipeline's own call as a user would make it.

        Its steps, its media, and whether its scheduler's step draws no noise.
        """
        given = self.arguments(len(prompts), steps, guidance, extras) | {"prompt": list(prompts)}
        records, result, repeatable = self.driver.recorded(given)
        return records, result[0].float(), repeatable

    def _at(
        self, x: Tensor, conditioning: Conditioning, steps: int, guidance: float | None
    ) -> Call:
        start = self.start(steps)
        assert self._entry is not None
        given = self.arguments(len(x), steps, guidance, conditioning.extras)
        x = x.to(start.device, start.dtype)
        return Call(given, conditioning.calls(), x, self._entry)

    def _encoded(self, prompts: Sequence[str], extras: Sequence[Extra]) -> Calls:
        guidance = None if self.guidance is None else 2.0  # above 1, so that negatives are made
        given = self.arguments(len(prompts), 2, guidance, extras) | {"prompt": list(prompts)}
        return self.driver.encoded(given)

    def _layout(self, extra: Extra) -> tuple[Layout, bool]:
        """How encodings are cut, and whether a pipeline wants its image once a row."""
        names = tuple(extra)
        if names not in self._layouts:
            reasons: list[Exception] = []
            for each in (False, True) if columns.images(names) else (False,):
                layout = Layout((), ())
                self._layouts[names] = layout, each  # for the arguments of the probes
                try:
                    layout = learn(
                        lambda some: self._encoded(some, [extra] * len(some) if extra else ()),
                        self.name,
                    )
                    self._layouts[names] = layout, each
                    return layout, each
                except torch.OutOfMemoryError:
                    raise
                except checks.FAILURES as error:
                    reasons.append(error)
            del self._layouts[names]
            raise reasons[0]
        return self._layouts[names]

    def _needed(self) -> Extra:
        """A picture for each image that the pipeline cannot go without."""
        try:
            self._layout({})
            return {}
        except torch.OutOfMemoryError:
            raise
        except checks.FAILURES as error:
            reason = error
        width, height = self.call.get("width", SIDE), self.call.get("height", SIDE)
        for names in checks.needed_images(self.driver.parameters):
            sample = columns.sample(names, width, height)
            try:
                self._layout(sample)
                return sample
            except torch.OutOfMemoryError:
                raise
            except checks.FAILURES as error:
                reason = error
        if isinstance(reason, UserError):
            raise reason
        raise UserError(
            f"{self.name} refuses its arguments {self.call}: {type(reason).__name__}: {reason}"
        ) from reason
