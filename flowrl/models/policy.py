"""The interface between the training loop and a model of any kind.

A policy opens a batch of prompts, which are encoded once; the batch samples rollouts under a plan,
decodes them, and holds the function that a likelihood evaluates. `flowrl.models.diffusers.policy`
generates images and videos, `flowrl.models.language.policy` text. n samples, g draws, k points.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from flowrl.media.statistics import Statistics
from flowrl.models.call_sizes import CallSizes
from flowrl.models.evaluation_counter import Meter
from samplers import Columns, Sampling


@runtime_checkable
class Edge(Protocol):
    """Transitions into the nodes of one decision point."""

    @property
    def step(self) -> int: ...  # the decision point

    @property
    def logp(self) -> Float[Tensor, " nodes"]: ...  # mean log-density of each


@runtime_checkable
class RolloutLike(Protocol):
    """Samples as the loop and credit read them. The samples of a draw are contiguous."""

    @property
    def by_size(self) -> Sequence[Any]: ...  # a rollout for each size; none of a text

    @property
    def columns(self) -> Columns: ...

    @property
    def prompt(self) -> Int[Tensor, " n"]: ...  # place in `draws`

    @property
    def draws(self) -> tuple[int, ...]: ...  # ids

    @property
    def edges(self) -> Sequence[Edge]: ...

    @property
    def lengths(self) -> Int[Tensor, " n"]: ...  # decisions of each: tokens, or noisy steps

    @property
    def nodes(self) -> Int[Tensor, "n k"] | None: ...  # passed by each, where trees are ragged

    @property
    def iteration(self) -> int: ...  # of the run, which weights of rewards may depend on


# planners of this kind of model, its rollouts, and their decoded samples
PlansIn = TypeVar("PlansIn", contravariant=True)
Plans = TypeVar("Plans")
Rolled = TypeVar("Rolled", bound=RolloutLike)
Media = TypeVar("Media")


@runtime_checkable
class Batch(Protocol[PlansIn, Rolled, Media]):
    """Encoded prompts. A rollout's `prompt` is an index into them."""

    @property
    def policy(self) -> Any: ...  # the first argument of `Likelihood.evaluate`, with gradients

    @property
    def meter(self) -> Meter: ...  # counts the evaluations of sampling

    def rollouts(
        self,
        plan: PlansIn,
        draws: Sequence[int],
        *,
        seed: int,
        iteration: int,
        sampling: Sampling[Rolled] = Sampling(),
    ) -> Sequence[Rolled]:
        """Sample one rollout for each of the planner's plans with the current weights."""
        ...

    def media(self, rollout: Rolled) -> Media:
        """Decode a rollout to images, videos or strings, as in `rewards.Samples`; to `Decoded` for
        videos with sound."""
        ...

    def statistics(self, rollout: Rolled, media: Media) -> Statistics:
        """Statistics of the samples, independent of rewards: `image/brightness`, `text/length`,
        ..."""
        ...


@runtime_checkable
class EvaluationSampler(Protocol[Plans, Rolled, Media]):
    """The part of a policy that evaluations need."""

    def open(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]], steps: int
    ) -> Batch[Plans, Rolled, Media]: ...

    def plain(self, group: int) -> Plans: ...


@runtime_checkable
class Policy(Protocol[Plans, Rolled, Media]):
    """A model with trainable weights. `sizes` limits the rows per call."""

    @property
    def sizes(self) -> CallSizes: ...

    def open(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]], steps: int
    ) -> Batch[Plans, Rolled, Media]:
        """Encode prompts. `meta` are their rows of the prompt file, or empty; `steps` are
        denoising steps, or the maximum tokens of a completion."""
        ...

    def plain(self, group: int) -> Plans:
        """Planner of evaluations with `group` samples per draw."""
        ...

    def automatic(self, steps: int) -> int:
        """A number of rows per call that fits most machines."""
        ...

    def proofs(
        self, prompts: Sequence[str], steps: int, meta: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        """Check, with these prompts, that the driven model equals its own call.

        Return a sentence per finding. Raises UserError for a model that cannot be used.
        """
        ...

    def roots(self) -> dict[str, nn.Module]: ...  # modules that are called and trained as a whole

    def trainable(self) -> dict[str, nn.Parameter]: ...

    def train_all(self) -> None: ...

    def add_lora(
        self,
        *,
        rank: int,
        alpha: int | float,
        targets: Sequence[str] | None,
        seed: int,
        dora: bool = False,
    ) -> None: ...

    def begin_from(self, source: str) -> None: ...  # adapters of a file, to train on

    def checkpoint_gradients(self) -> None: ...  # UserError if the model cannot

    def save(self, folder: Path) -> None: ...

    def load_weights(self, folder: Path) -> None: ...

    def close(self) -> None: ...  # frees what it holds on a server, at the end of a run
