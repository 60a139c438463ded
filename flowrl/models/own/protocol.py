"""The protocol of a user's own model: a torch module that encodes prompts and predicts.

n rows; a state has the shape *d, an encoded prompt the shape *c. All other members are optional:
`Parametrized`, `Diffused`, `Decodes`, `Drawable`, `Trains`. docs/own_models.md has whole examples.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from flowrl.errors import UserError
from samplers.adapt import Prediction

EncodedPrompts = Tensor | Mapping[str, Tensor]
Parametrization = Literal["velocity"] | Prediction
PARAMETRIZATIONS: tuple[Parametrization, ...] = ("velocity", *get_args(Prediction))


@runtime_checkable
class OwnModel(Protocol):
    """A `torch.nn.Module` with these members. Its rows are independent of each other, and it is
    deterministic."""

    @property
    def state(self) -> tuple[int, ...]:
        """The shape *d of one state."""
        ...

    def encode(self, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> EncodedPrompts:
        """Encode n prompts: a tensor [n *c], or a dict of several. `rows` are the prompts' rows of
        their file, one mapping per prompt. Called without gradients."""
        ...

    def forward(
        self, x: Float[Tensor, "n *d"], sigma: Float[Tensor, " n"], encoded: Any
    ) -> Float[Tensor, "n *d"]:
        """The velocity noise - x0 at states x = (1 - sigma) x0 + sigma noise, sigma in (0, 1].

        x has the dtype of the weights, sigma float32 at least. See `Parametrized` and `Diffused`
        for other predictions and states."""
        ...


@runtime_checkable
class Parametrized(Protocol):
    """A model that predicts something other than the velocity."""

    @property
    def prediction(self) -> Parametrization:
        """velocity, epsilon (the noise), sample (x0), or v_prediction (alpha noise - s x0 of
        `Diffused`, arXiv:2202.00512)."""
        ...


@runtime_checkable
class Diffused(Protocol):
    """A model of a variance-preserving process: states are alpha x0 + s noise with alpha^2 + s^2 =
    1. Instead of sigma its `forward` receives times [n], floats from 0 to T - 1."""

    @property
    def alphas_cumprod(self) -> Sequence[float] | Float[Tensor, " T"]:
        """alpha^2 by time, decreasing."""
        ...


@runtime_checkable
class Decodes(Protocol):
    """A model whose states are not its samples."""

    def decode(self, x0: Float[Tensor, "n *d"], encoded: Any) -> Float[Tensor, "n ..."]:
        """Decode clean states: images [n 3 h w] or videos [n f 3 h w] in 0..1, or tensors [n k] or
        [n t k], or waveforms (see `Sounding`). With gradients for the recipes that train through a
        reward."""
        ...


@runtime_checkable
class Sounding(Protocol):
    """A model whose samples are sound."""

    @property
    def rate(self) -> int:
        """Numbers per second of its waveforms, which `decode` returns as [n t] or [n channels t],
        in -1..1."""
        ...


@runtime_checkable
class Drawable(Protocol):
    """A model that draws its samples for pages."""

    def image(self, sample: Float[Tensor, "..."]) -> Image:
        """An image of one decoded sample."""
        ...


@runtime_checkable
class Trains(Protocol):
    """A model that trains some of its modules and keeps the others frozen."""

    @property
    def trained(self) -> Sequence[str]:
        """Names of submodules, such as ("network",). `forward` must call each as a whole."""
        ...


def trained_parts(name: str, model: Any) -> tuple[str, ...]:
    """Names of the trained submodules; empty: the model itself is trained."""
    trained = model.trained if isinstance(model, Trains) else ()
    if isinstance(trained, str) or not all(isinstance(part, str) for part in trained):
        raise UserError(f'{name}: trained must be a tuple of names, such as ("network",)')
    return tuple(trained)


def sound_rate(name: str, model: Any) -> int | None:
    """The rate of a model that makes sound; None for another. UserError for anything but a whole
    number above 0."""
    if not isinstance(model, Sounding):
        return None
    if type(model.rate) is not int or model.rate < 1:
        raise UserError(
            f"{name}: rate must be a whole number of Hz above 0, such as 16000, not {model.rate!r}"
        )
    return model.rate


def state_shape(name: str, state: Any) -> tuple[int, ...]:
    """The shape of one state. UserError for anything else."""
    whole = isinstance(state, tuple | list) and bool(state)
    if not whole or not all(type(n) is int and n > 0 for n in state):
        raise UserError(
            f"{name}: state must be the shape of one state, such as (2,), not {state!r}"
        )
    return tuple(state)
