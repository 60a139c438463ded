"""The user's noise levels (`model.sigmas`) in a pipeline's own call, where they are the argument
`sigmas`.

The scheduler would shift them once more, so calls use a copy of it without a shift: the model is
called at exactly these levels. The pipeline's own scheduler stays unchanged, also in exports.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flowrl.errors import UserError
from flowrl.models.diffusers.call.levels.schedule import ModelOutput, PipelineSchedule

# settings of schedulers that would change a list of levels, and their values that do not
_AS_GIVEN = {
    "shift": 1.0,
    "use_dynamic_shifting": False,
    "shift_terminal": None,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
}
_NEAR = 1e-6  # rounding to float32


@dataclass(frozen=True)
class UserLevels:
    """The user's noise levels. `at` maps a number of steps to levels without the final 0; `trial`
    is a number of steps that `at` accepts, for trial calls."""

    at: Callable[[int], tuple[float, ...]]
    trial: int

    def scheduler(self, real: Any, kind: ModelOutput, owner: str) -> Any:
        """A copy of the scheduler that visits exactly these levels.

        UserError for a scheduler that takes no levels, and for models that are not flows.
        """
        name = type(real).__name__
        if kind != "flow":
            raise UserError(
                f"model.sigmas: {owner} predicts {kind}, so its levels come from its {name}: "
                "leave sigmas out"
            )
        if "sigmas" not in inspect.signature(type(real).set_timesteps).parameters:
            raise UserError(f"model.sigmas: the {name} of {owner} takes no levels: leave it out")
        settings = {key: value for key, value in _AS_GIVEN.items() if key in real.config}
        return type(real).from_config(real.config, **settings)

    def check(self, schedule: PipelineSchedule, steps: int, owner: str) -> None:
        """UserError if the call visits other levels. A `strength` skips the first ones."""
        wanted = torch.tensor(self.at(steps), dtype=torch.float64)
        visited = torch.tensor(schedule.sigmas[:-1], dtype=torch.float64)
        last = wanted[-len(visited) :]
        if len(last) < len(visited) or not torch.allclose(last, visited, rtol=0, atol=_NEAR):
            raise UserError(
                f"model.sigmas: {owner} visits the levels {_shown(visited)} instead of "
                f"{_shown(wanted)}: leave sigmas out"
            )


def refuse_levels(owner: str, parameters: Mapping[str, Any]) -> None:
    """UserError for a pipeline whose call takes no `sigmas`."""
    if "sigmas" not in parameters:
        raise UserError(
            f"model.sigmas: the call of {owner} takes no `sigmas`, so its levels come from its "
            "scheduler: leave sigmas out"
        )


def _shown(levels: torch.Tensor) -> str:
    return ", ".join(f"{level:.4g}" for level in levels.tolist())
