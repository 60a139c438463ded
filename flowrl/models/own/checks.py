"""Check a user's own model before a run: shapes, finite numbers, determinism, independent rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models.diffusers.batch import Driven
from flowrl.models.own.calls import OwnConditioning
from flowrl.models.own.schedule import Scheduled
from flowrl.models.precision import HALF
from rewards.types import MediaForm
from samplers.noise import normal

ROWS = 3  # of the batch whose rows are compared with the same alone
TURNED = 64  # noise states that the sign of the velocity is read from
# allowed differences of a row alone and in a batch, relative to the largest number: rounding
ROUNDING, HALF_ROUNDING = 1e-4, 0.05


class CheckedModel(Driven, Protocol):
    """A user's own model as these checks call it."""

    model: Any
    scheduled: Scheduled
    row_shape: tuple[int, ...]
    form: MediaForm | None

    @property
    def dtype(self) -> torch.dtype: ...

    def encode(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]] = ()
    ) -> OwnConditioning: ...

    def trainable(self) -> dict[str, nn.Parameter]: ...


def checked(
    policy: CheckedModel, prompts: Sequence[str], steps: int, meta: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Call the model on some of these prompts, and return a sentence per finding.

    UserError for a prediction or sample of a wrong shape or with numbers that are not finite, for
    one that changes between calls or with the rest of the batch, for a velocity of the wrong sign,
    and for trained weights that get no gradient.
    """
    chosen = [prompts[i % len(prompts)] for i in (0, -1, 0)][:ROWS]
    rows = [meta[i % len(meta)] for i in (0, -1, 0)] if meta else []
    encoded = policy.encode(chosen, rows)
    alone = [policy.encode([p], rows[i : i + 1]) for i, p in enumerate(chosen)]
    _check_encoded(policy, encoded, alone)
    sigmas = policy.schedule(steps).sigmas
    levels = [sigmas[0], sigmas[len(sigmas) // 2 - 1], sigmas[-2]]
    keys = [(0, "own", i) for i in range(ROWS)]
    x = normal(keys, policy.row_shape).to(policy.device, policy.arithmetic)
    sigma = torch.tensor(levels, dtype=policy.arithmetic, device=policy.device)
    velocity = policy.bind(encoded, steps=steps, guidance=None)
    with torch.no_grad():
        moved = _compare(
            f"{policy.name}.forward",
            lambda at: velocity(x[at], sigma[at], at),
            x.device,
            _room(policy),
        )
        _check_sign(policy, encoded, sigmas[0], steps)
        policy.decode(x, encoded, steps=steps, guidance=None)
        _compare(
            f"{policy.name}.decode",
            lambda at: policy.decode(x[at], encoded.take(at), steps=steps, guidance=None),
            x.device,
            _room(policy),
        )
    _check_gradient(policy, velocity(x, sigma, torch.arange(ROWS)))
    size = sum(p.numel() for p in policy.model.parameters()) / 1e6
    states = ", ".join(map(str, policy.row_shape))
    return [
        f"{policy.name}: {size:.3g} million weights, predicts {policy.scheduled.prediction} at "
        f"states [{states}]; samples are {policy.form}s; alone and in a batch, rows differ by "
        f"{moved:.1e}"
    ]


def _room(policy: CheckedModel) -> float:
    return HALF_ROUNDING if policy.dtype in HALF else ROUNDING


def _check_encoded(
    policy: CheckedModel, encoded: OwnConditioning, alone: Sequence[OwnConditioning]
) -> None:
    """UserError for encodings that are not finite, or that depend on the other prompts."""
    for name, whole in encoded.parts.items():
        parts = [encoded_prompt.parts[name] for encoded_prompt in alone]
        if any(part.shape[1:] != whole.shape[1:] for part in parts):
            raise UserError(
                f"{policy.name}.encode: {list(whole.shape)} for {len(whole)} prompts, but "
                f"{list(parts[0].shape)} for one: pad prompts to one length"
            )
        _same(f"{policy.name}.encode", whole, torch.cat(parts), _room(policy))


def _compare(
    place: str, call: Callable[[Tensor], Tensor], device: torch.device, room: float
) -> float:
    """Call twice with all rows, and with each row alone; returns the largest relative difference of
    the latter."""
    rows = torch.arange(ROWS, device=device)
    whole = call(rows)
    if not bool(whole.isfinite().all()):
        raise UserError(f"{place}: it returns numbers that are not finite for pure-noise states")
    if not torch.equal(whole, call(rows)) and whole.device.type == "cpu":
        raise UserError(
            f"{place}: two identical calls differ; it must not draw random numbers or keep state "
            "between calls"
        )
    return _same(place, whole, torch.cat([call(rows[i : i + 1]) for i in range(ROWS)]), room)


def _same(place: str, whole: Tensor, alone: Tensor, room: float) -> float:
    if not bool(whole.double().isfinite().all()):
        raise UserError(f"{place}: it returns numbers that are not finite")
    largest = float(whole.double().abs().max()) if whole.numel() else 0.0
    moved = float((whole.double() - alone.double()).abs().max()) if whole.numel() else 0.0
    if moved > room * max(largest, 1e-12):
        raise UserError(
            f"{place}: a row alone and in a batch of three differs by {moved:.2g} (numbers up to "
            f"{largest:.2g}): rows must not depend on one another (no batch norm, no mean over "
            "rows)"
        )
    return moved / max(largest, 1e-12)


def _check_sign(policy: CheckedModel, encoded: OwnConditioning, sigma: float, steps: int) -> None:
    """UserError for velocities of the wrong sign, tested at the first level: there noise - x0 grows
    with the noise (slope 1), while x0 - noise falls."""
    noise = normal([(1, "own", i) for i in range(TURNED)], policy.row_shape).to(policy.device)
    begin, first = policy.begin(encoded, steps), torch.zeros(TURNED, dtype=torch.long)
    x = noise.to(policy.arithmetic)
    x = x if begin is None else begin(x, first)
    at = torch.full((TURNED,), sigma, dtype=policy.arithmetic, device=policy.device)
    v = policy.bind(encoded, steps=steps, guidance=None)(x, at, first.to(policy.device))
    centred, grown = (a.double() - a.double().mean(0) for a in (x, v))
    slope = float((centred * grown).sum() / centred.square().sum())
    if slope < -0.5:
        raise UserError(
            f"{policy.name}.forward: its velocity falls as the noise grows (slope {slope:.2g}), "
            "while noise - x0 grows with it (slope 1): for a flow from noise to samples, return "
            "minus its velocity at t = 1 - sigma"
        )


def _check_gradient(policy: CheckedModel, prediction: Tensor) -> None:
    """UserError if no trained weight has a gradient."""
    trained = [p for p in policy.trainable().values() if p.requires_grad]
    if not trained:
        return  # a model that is only sampled from
    gradients: Sequence[Tensor | None] = (None,)
    if prediction.requires_grad:
        gradients = torch.autograd.grad(prediction.square().sum(), trained, allow_unused=True)
    if all(gradient is None for gradient in gradients):
        raise UserError(
            f"{policy.name}.forward: its prediction has no gradient with respect to the trained "
            "weights: "
            "remove torch.no_grad or detach, or name other modules in `trained`"
        )
