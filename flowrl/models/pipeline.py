"""A diffusers pipeline as a policy: its own `__call__` is the velocity field.

There is no code of a model family here. The pipeline is driven through a stand-in for its
scheduler (`flowrl.models.drive`), and what that gives is compared with the pipeline's own call for
the user's own arguments before it is used (`flowrl.models.replay`).
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models import checks, lora, replay
from flowrl.models.conditioning import LONG, SHORT, Calls, Conditioning, flatten, learn
from flowrl.models.drive import Driver, Received, Target
from flowrl.models.schedule import Schedule, Start, Way
from samplers import Velocity


class PipelinePolicy:
    """Velocities, decoded samples and trainable weights of one diffusers pipeline.

    `call` holds arguments of the pipeline's own `__call__` (height, width, negative_prompt, ...).
    `rows_per_call` bounds the samples that one call of the denoiser, encoders or decoder sees.
    Raises UserError, with the reason, for a pipeline that cannot be driven.
    """

    def __init__(
        self, pipe: Any, *, call: Mapping[str, Any], rows_per_call: int | None = None
    ) -> None:
        self.pipe = pipe
        self.name = type(pipe).__name__
        self.rows_per_call = rows_per_call
        self._parameters = inspect.signature(type(pipe).__call__).parameters
        checks.refuse(pipe, self._parameters)
        self._driver = Driver(pipe)
        self.denoisers: tuple[nn.Module, ...] = tuple(self._driver.denoisers.values())
        self._guidance = checks.guidance_argument(self._parameters, self.denoisers)
        self.call = checks.arguments(self.name, call, self._parameters, self._guidance)
        pipe.set_progress_bar_config(disable=True)
        for module in pipe.components.values():
            if isinstance(module, nn.Module):
                module.eval()
        self._starts: dict[int, Start] = {}
        self._replays: dict[tuple[int, float | None], replay.Replay] = {}
        try:
            self._layout = learn(self._encoded, self.name)
        except UserError:
            raise
        except ValueError as error:  # the pipeline's own check of its arguments
            raise UserError(f"{self.name} refuses its arguments {self.call}: {error}") from error
        self._blank = self.encode([SHORT])

    @classmethod
    def load(
        cls,
        source: str,
        *,
        dtype: torch.dtype,
        device: str | torch.device,
        call: Mapping[str, Any],
        rows_per_call: int | None = None,
    ) -> "PipelinePolicy":
        """From a folder or a hub name. Components that its index does not list are left out."""
        pipe = checks.from_pretrained(source, dtype).to(device)
        for module in pipe.components.values():
            if isinstance(module, nn.Module):
                module.requires_grad_(False)
        return cls(pipe, call=call, rows_per_call=rows_per_call)

    def schedule(self, steps: int) -> Schedule:
        return self._start(steps).schedule

    def shape(self, steps: int) -> tuple[int, ...]:
        """Of one row's latents as the loop sees them (packed, where the family packs)."""
        return self._start(steps).shape

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """What the pipeline's own call would make of the prompts, negative rows included."""
        size = self.rows_per_call or len(prompts)
        parts = []
        for start in range(0, len(prompts), size):
            some = list(prompts[start : start + size])
            counts, values = flatten(self._encoded(some))
            assert counts == self._layout.counts
            parts.append(Conditioning(self._layout, values, len(some)))
        return Conditioning.cat(parts)

    def bind(self, conditioning: Conditioning, *, steps: int, guidance: float | None) -> Velocity:
        """(x [n *d], sigma [n], prompt [n]) -> v [n *d] float32, with gradients.

        `prompt` are rows of the conditioning. Proves the way in first where that was not done.
        """
        proof = self._replays.get((steps, guidance))
        if proof is None:
            proof = self.prove([SHORT, LONG], steps=steps, guidance=guidance)
        for denoiser in self.denoisers:
            denoiser.eval()  # dropout would make the ratio of new to old differ from 1
        way = Way(steps, guidance, forward=proof.way == "forward", mixed=proof.mixed)

        def velocity(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
            groups = self._groups(sigma, mixed=way.mixed)
            parts = [
                self.received(x[rows], sigma[rows], conditioning.take(prompt[rows]), way).output
                for rows in groups
            ]
            order = torch.argsort(torch.cat(groups)).to(x.device)
            return torch.cat([v.to(x.device, torch.float32) for v in parts])[order]

        return velocity

    def received(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, way: Way) -> Received:
        """What `scheduler.step` receives at these rows, in one call of the pipeline."""
        start = self._start(way.steps)
        if way.forward:
            index = set(start.schedule.index(sigma).tolist())
            if len(index) != 1 or -1 in index:
                raise UserError(
                    f"{self.name} with {self.call} depends on the step's index: it has velocities "
                    f"at one of its own {way.steps} sigmas at a time, not at {sigma.tolist()}"
                )
            target = Target(torch.empty(0), index.pop())
        else:
            times = start.schedule.times(sigma).to(start.device)
            target = Target(times[0] if bool((times == times[0]).all()) else times)
        arguments = self.arguments(len(x), way.steps, way.guidance)
        arguments["latents"] = x.to(start.device, start.dtype)
        return self._driver.received(arguments, conditioning.calls(), target)

    def decode(
        self, x0: Tensor, conditioning: Conditioning, *, steps: int, guidance: float | None
    ) -> Tensor:
        """x0 [n *d] -> images [n 3 h w] or videos [n f 3 h w], float32 in 0..1, no gradients.

        Row i of the conditioning belongs to row i of x0.
        """
        assert len(x0) == len(conditioning), "decode takes one row of conditioning a sample"
        start, media = self._start(steps), []
        for rows in torch.arange(len(x0)).split(self.rows_per_call or max(len(x0), 1)):
            arguments = self.arguments(len(rows), steps, guidance)
            arguments["latents"] = x0[rows].detach().to(start.device, start.dtype)
            result = self._driver.finished(arguments, conditioning.take(rows).calls())
            media.append(result[0].float())
        return torch.cat(media)

    def prove(self, prompts: Sequence[str], *, steps: int, guidance: float | None) -> replay.Replay:
        """Compare with the pipeline's own call, step by step. Raises UserError if not equal."""
        proof = replay.prove(self, prompts, steps, guidance)
        self._replays[steps, guidance] = proof
        return proof

    def add_lora(
        self, *, rank: int, alpha: int | float, targets: Sequence[str] | None, seed: int
    ) -> None:
        """Adapters on every denoiser. None: the attention and feed-forward linears."""
        lora.add(self.pipe, self._driver.denoisers, lora.Spec(rank, alpha, targets, seed))

    def trainable(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters if there are any, else all of the denoisers'."""
        named = {
            f"{component}.{name}": parameter
            for component, denoiser in self._driver.denoisers.items()
            for name, parameter in denoiser.named_parameters()
        }
        return {name: p for name, p in named.items() if ".lora_" in name} or named

    def train_all(self) -> None:
        """Full fine-tuning: every parameter of every denoiser takes a gradient."""
        for denoiser in self.denoisers:
            denoiser.requires_grad_(True)

    def save(self, folder: Path) -> None:
        """Files that plain diffusers loads: `load_lora_weights`, or `from_pretrained`."""
        if lora.present(self._driver.denoisers):
            lora.save(self.pipe, self._driver.denoisers, folder)
        else:
            self.pipe.save_pretrained(folder)

    def load_weights(self, folder: Path) -> None:
        """The reverse of `save`, into a policy that was loaded from the same base."""
        lora.load(self.pipe, self._driver.denoisers, folder)

    def arguments(self, rows: int, steps: int, guidance: float | None) -> dict[str, Any]:
        """Of the pipeline's own call for `rows` samples; prompts are still blank."""
        given = dict(self.call)
        for name, value in given.items():
            if checks.TEXTS.fullmatch(name) and isinstance(value, str):
                given[name] = [value] * rows
        given |= {"prompt": [""] * rows, "num_inference_steps": steps}
        given |= {"output_type": "pt", "return_dict": False}
        if guidance is not None:
            if self._guidance is None:
                raise UserError(f"{self.name} takes no guidance: leave guidance out (null)")
            given[self._guidance] = float(guidance)
        return given

    def record(
        self, prompts: Sequence[str], steps: int, guidance: float | None
    ) -> tuple[list[Received], Tensor]:
        """The pipeline's own call as a user would make it, its steps recorded: (steps, media)."""
        arguments = self.arguments(len(prompts), steps, guidance) | {"prompt": list(prompts)}
        if "generator" in self._parameters:
            arguments["generator"] = torch.Generator().manual_seed(0)
        records, result = self._driver.recorded(arguments)
        return records, result[0].float()

    def _encoded(self, prompts: Sequence[str]) -> Calls:
        guidance = None if self._guidance is None else 2.0  # above 1, so that negatives are made
        arguments = self.arguments(len(prompts), 2, guidance) | {"prompt": list(prompts)}
        return self._driver.encoded(arguments)

    def _start(self, steps: int) -> Start:
        if steps not in self._starts:
            with torch.no_grad():
                arguments = self.arguments(1, steps, None)
                if "generator" in self._parameters:
                    arguments["generator"] = torch.Generator().manual_seed(0)
                first = self._driver.received(arguments, self._blank.calls(), None)
            self._starts[steps] = Start(
                Schedule.of(self._driver.scheduler, steps, self.name),
                tuple(first.sample.shape[1:]),
                first.sample.dtype,
                first.sample.device,
            )
        return self._starts[steps]

    def _groups(self, sigma: Tensor, *, mixed: bool) -> list[Tensor]:
        """Rows that go into one call each."""
        rows = torch.arange(len(sigma))
        if mixed or not len(sigma):
            groups = [rows]
        else:
            found, place = torch.unique(sigma.detach().cpu(), return_inverse=True)
            groups = [rows[place == i] for i in range(len(found) - 1, -1, -1)]  # falling, as a loop
        size = self.rows_per_call or max(len(sigma), 1)
        return [part for group in groups for part in group.split(size)]
