"""Units of sampling, and the processes that sample and score them during training."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.likelihoods.token import Token
from flowrl.losses.base import ClipsRatio, RatioLoss
from flowrl.losses.weights import BehindClip, Decoupled
from flowrl.settings.base import OnResume, Settings
from flowrl.settings.model.server import CorrectionSettings, corrected
from rewards.rights import Address


class ReplicaSettings(Settings):
    """Processes that score samples with one reward."""

    replicas: int = Field(default=1, ge=1)
    gpus: float = Field(default=0.0, ge=0)
    """GPUs per replica."""


class WorkerSettings(Settings):
    """Sampling in units of calls, and scoring, in separate processes: see docs/many_machines.md."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "sampling": OnResume.FREE,
        "gpus": OnResume.FREE,
        "rewards": OnResume.FREE,
        "address": OnResume.FREE,
        "limit": OnResume.FREE,
        "differing": OnResume.FREE,
        "unit": OnResume.SAID,
        "evaluate": OnResume.SAID,
        "lag": OnResume.NEVER,
    }
    sampling: int = Field(default=0, ge=0)
    """Number of sampling processes, started by Ray (`pip install 'flowrl[ray]'`). 0: the training
    processes sample."""
    unit: int | None = Field(default=None, ge=1)
    """Number of draws that are encoded, sampled, decoded and scored in their own calls; one worker
    samples a unit. null: all draws of a process share calls. Like other call sizes it changes
    numbers by rounding; the number of workers changes nothing."""
    lag: int = Field(default=0, ge=0)
    """Iteration i learns from samples of the weights at the start of iteration i - lag. 0: nothing
    is sampled while weights are updated. Without `sampling` one process does both in turn, with the
    same bits, which shows the cost of a lag in learning."""
    evaluate: bool = False
    """Evaluate in slices of `unit` held-out prompts, by the sampling processes beside the next
    iteration, whose line in metrics.jsonl waits for the evaluation's. Without `sampling` the
    training processes evaluate in these slices, with the same bits."""
    rewards: dict[str, ReplicaSettings] = Field(default_factory=dict)
    """Rewards, by label, that are scored in separate processes: `{hpsv3: {replicas: 2, gpus: 1}}`.
    Every sampling process loads the other rewards itself."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs per sampling worker; null: one if the run uses CUDA, otherwise none."""
    address: Address | None = None
    """A Ray cluster: `auto` for the cluster of this machine. null: a new one on this machine, which
    ends with the run."""
    limit: float = Field(default=900, gt=0)
    """Seconds until a worker that does not answer is ended and another one is asked."""
    differing: Literal["raise", "warn"] = "raise"
    """Action if a worker's packages or its first draw differ from the training process's."""
    correction: CorrectionSettings = CorrectionSettings()
    """With a lag and `train.recompute_old`: bounds of the ratio of the probability at the start of
    an update to the sampling probability, which then weights the loss."""
    clip: bool = True
    """With a lag and `train.recompute_old`: leave out rows that the weights have moved past the
    loss's clip range since they were sampled, in the direction of their advantage."""

    @property
    def any(self) -> bool:
        """Whether a run has workers, and needs Ray."""
        return self.sampling > 0 or bool(self.rewards)

    @property
    def evaluation_slice(self) -> int | None:
        """Prompts of a slice of an evaluation; None: evaluations are not cut."""
        return self.unit if self.evaluate else None

    def around(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm with the decoupled objective, where log-densities of an older policy are
        stored and recomputed. UserError for a loss without ratios."""
        if not isinstance(algorithm.loss, RatioLoss):
            raise UserError(
                "workers.lag: train.recompute_old replaces the log-densities of the sampling "
                "weights, and this loss has no ratio to weight its rows with: set "
                "train.recompute_old: false, or lag: 0"
            )
        algorithm, how = self.within_clip(algorithm), self.correction
        likelihood, loss = algorithm.likelihood, algorithm.loss
        assert isinstance(loss, RatioLoss), "`within_clip` changes only its weights"
        if isinstance(likelihood, Token):
            return corrected(algorithm, how.weight())
        weight = Decoupled(likelihood, how.mode, how.high, how.low)
        return replace(algorithm, loss=replace(loss, weights=(*loss.weights, weight)))

    def within_clip(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm that leaves out rows past the clip range of the policy that sampled, if its
        loss has one."""
        loss = algorithm.loss
        if not (self.clip and isinstance(loss, RatioLoss) and isinstance(loss, ClipsRatio)):
            return algorithm
        past = BehindClip(algorithm.likelihood, *loss.clip)
        return replace(algorithm, loss=replace(loss, weights=(*loss.weights, past)))
