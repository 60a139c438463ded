"""Units of sampling, and the processes that sample them beside training."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import ClassVar

from pydantic import Field

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Transition
from flowrl.settings.base import OnResume, Settings


class WorkerSettings(Settings):
    """Sampling in separate processes, in units of calls: see docs/processes.md."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "sampling": OnResume.FREE,
        "gpus": OnResume.FREE,
        "address": OnResume.FREE,
        "limit": OnResume.FREE,
        "unit": OnResume.SAID,
        "lag": OnResume.NEVER,
    }
    sampling: int = Field(default=0, ge=0)
    """Processes that sample and score, started by Ray (`pip install 'flowrl[ray]'`). 0: the
    training process samples."""
    unit: int | None = Field(default=None, ge=1)
    """Draws that are encoded, sampled, decoded and scored in calls of their own; one worker samples
    a unit. null: all draws of a process share calls. It moves numbers by rounding, as other calls
    do; the number of workers moves none."""
    lag: int = Field(default=0, ge=0)
    """Iteration i learns from samples of the weights with which iteration i - lag began. 0: nothing
    is sampled while weights are updated."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs of a worker; null: one if the run uses CUDA, else none."""
    address: str | None = None
    """A Ray cluster: `auto` for the one that this machine belongs to. null: one on this machine,
    which ends with the run."""
    limit: float = Field(default=900, gt=0)
    """Seconds until a unit that has no result is given to another worker."""

    def check(self, algorithm: Algorithm, budget: bool, recomputes_old: bool) -> None:
        """UserError for choices that cannot be combined."""
        if self.sampling == 0:
            for name in ("lag", "gpus", "address"):
                if getattr(self, name):
                    raise UserError(f"workers.{name}: no workers; set workers.sampling too")
        elif find_spec("ray") is None:
            raise UserError("workers.sampling needs Ray: pip install 'flowrl[ray]'")
        if not self.lag:
            return
        averages = {each.name for each in algorithm.averages} & {*algorithm.roles}
        computes_old = "old" in algorithm.roles and not isinstance(
            algorithm.likelihood, Transition | Token
        )
        if averages or computes_old or algorithm.behaviour != "current":
            raise UserError(
                "workers.lag: this loss evaluates the weights that sampled, and after a lag they "
                "are gone: log-probabilities alone are kept; set lag: 0"
            )
        if algorithm.reward_gradient:
            raise UserError(
                "workers.lag: reward gradients are those of the weights that sampled; set lag: 0"
            )
        if budget:
            raise UserError(
                "workers.lag: a budget chooses prompts by the scores of the iteration before; "
                "set lag: 0, or leave the budget out"
            )
        if recomputes_old:
            raise UserError(
                "workers.lag: train.recompute_old replaces the log-probabilities of the weights "
                "that sampled by those of the current ones; set train.recompute_old: false, or "
                "lag: 0"
            )
