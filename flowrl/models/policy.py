"""The interface of a model to the loop, whatever it makes.

A policy opens a batch of prompts, which are encoded once; the batch draws rollouts under a plan,
makes them into media, and holds what a likelihood evaluates. `flowrl.models.diffusers.policy` is
the policy of images and videos, `flowrl.models.language.policy` that of text. n samples, g draws,
k points.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from flowrl.models.evaluation_counter import Meter
from samplers import Columns, Sampling

ADAPTER = "default"  # the name of the trained adapter in peft


@runtime_checkable
class Edge(Protocol):
    """The transitions into one decision point's nodes."""

    @property
    def step(self) -> int: ...  # the decision point

    @property
    def logp(self) -> Float[Tensor, " nodes"]: ...  # mean log-density of each


@runtime_checkable
class RolloutLike(Protocol):
    """The view of samples that the loop and credit read. A draw's are contiguous."""

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
    def exists(self) -> Bool[Tensor, "n k"] | None: ...  # decision points of each; None: all

    @property
    def states(self) -> Int[Tensor, "n k"] | None: ...  # ids of what each decided in, if known

    @property
    def iteration(self) -> int: ...  # of the run, which weights of rewards may depend on


@runtime_checkable
class Batch(Protocol):
    """Prompts that were encoded once; a row of theirs is a rollout's `prompt`."""

    @property
    def policy(self) -> Any: ...  # what `Likelihood.evaluate` is handed, with gradients

    @property
    def meter(self) -> Meter: ...  # counts what sampling asked the model for

    def rollouts(
        self,
        plan: Any,
        draws: Sequence[int],
        *,
        seed: int,
        iteration: int,
        sampling: Sampling[Any] = Sampling(),
    ) -> Sequence[Any]:
        """One `RolloutLike` for each of the planner's plans, under the weights in force."""
        ...

    def media(self, rollout: Any) -> Any:
        """Decode a rollout: images, videos or strings, as `rewards.Samples` holds them."""
        ...

    def statistics(self, rollout: Any, media: Any) -> dict[str, float]:
        """Statistics that no reward sees: `image/brightness`, `text/length`, ..."""
        ...


@runtime_checkable
class Policy(Protocol):
    """A model with trainable weights. `rows_per_call` bounds what one call of it sees."""

    rows_per_call: int | None

    def open(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]], steps: int) -> Batch:
        """Encode prompts; `meta` are their rows of the prompt file, or nothing. `steps` are
        denoising steps, or the most tokens of a completion."""
        ...

    def plain(self, group: int) -> Any:
        """The planner of evaluations: `group` samples a draw that nothing is trained on."""
        ...

    def automatic(self, steps: int) -> int:
        """Rows a call that fit most machines."""
        ...

    def proofs(
        self, prompts: Sequence[str], steps: int, meta: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        """Check that what we drive is what the model does, for these prompts. A sentence for each
        thing that was found; UserError where it cannot be used."""
        ...

    def roots(self) -> dict[str, nn.Module]: ...  # what is called, and trained, as a whole

    def trainable(self) -> dict[str, nn.Parameter]: ...

    def train_all(self) -> None: ...

    def add_lora(
        self, *, rank: int, alpha: int | float, targets: Sequence[str] | None, seed: int
    ) -> None: ...

    def checkpoint_gradients(self) -> None: ...  # UserError where the model does not have it

    def save(self, folder: Path) -> None: ...

    def load_weights(self, folder: Path) -> None: ...

    def close(self) -> None: ...  # gives back what it holds elsewhere, at the end of a run
