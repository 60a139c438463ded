"""Whether a row's prediction depends on the other rows of its batch.

A different batch is a different computation, so two predictions for one row differ by rounding,
which guidance and deep half-precision networks amplify. The bound is measured: the effect of one
rounding unit in the state, and of another position in a batch of equal rows. A clearly larger
difference means dependence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.inputs.columns import Extra
from flowrl.models.diffusers.call.inputs.conditioning import LONG_PROMPT, SHORT_PROMPT, Conditioning
from flowrl.models.diffusers.call.levels.schedule import Way
from flowrl.models.diffusers.call.loop.loop import Loop
from samplers.host import wide

LONG_NEIGHBOUR = " and ".join([LONG_PROMPT] * 3)
ROUNDING_MARGIN = 4.0  # times what one unit of rounding does: other kernels for other batch sizes
PLACES = 4.0  # times what another place does
ROUNDING_FLOOR = 1e-4  # of the prediction: in no dtype more than rounding
SAME_FLOOR = 1e-5  # likewise, where shapes are the same
SAME_SHAPES = 1 / 8  # times one unit of rounding, where shapes, and so kernels, are the same


@dataclass(frozen=True)
class Neighbours:
    """Three rows in one call. `states` are states [3 *d] of the loop, with their levels; `extras`
    come from the prompt's row."""

    loop: Loop
    prompt: str
    extras: Sequence[Extra]
    states: Sequence[tuple[Tensor, float]]
    way: Way

    def check(self) -> float | None:
        """Share of a prediction that depends on the other prompts encoded with it.

        Such a share comes from diffusers' own padding to the longest prompt without a mask
        (CogView4); None if the difference is only rounding. Raises UserError if the network mixes
        rows.
        """
        joint, alone = self.joint(), self.loop.encode([self.prompt], self.extras[:1])
        x, sigma = self.states[0]
        single = self.predict(x[1:2], sigma, alone)
        size = rms(single)
        unit = rounding_unit(self.loop)
        rounding = rms(self.predict(nudged(x[1:2], unit), sigma, alone) - single)
        limit = ROUNDING_MARGIN * rounding + ROUNDING_FLOOR * size
        changed, beside = self.changed(joint)
        if not changed <= SAME_SHAPES * rounding + SAME_FLOOR * size:
            self.refuse("the other rows of its batch", changed, size)
        self.check_place(rms(beside[0] - beside[1]), limit, size)
        if rms(beside[1] - single[0]) <= limit:
            return None
        copies = self.predict(x[[1, 1, 1]], sigma, alone.take([0, 0, 0]))
        away = max(rms(copies[1] - single[0]), *(rms(copies[i] - copies[1]) for i in (0, 2)))
        self.check_place(away, limit, size)
        padding = rms(beside[1] - copies[1])
        shown = padding > rounding + PLACES * away + ROUNDING_FLOOR * size
        return padding / size if shown else None

    def check_place(self, away: float, limit: float, size: float) -> None:
        if not away <= limit:
            self.refuse("its position in the batch and the batch size", away, size)

    def joint(self) -> Conditioning:
        """A short prompt, the given one and a long one, encoded together."""
        try:
            return self.loop.encode(*three_rows(self.prompt, self.extras, LONG_NEIGHBOUR))
        except UserError:  # some refuse prompts above their max_sequence_length
            return self.loop.encode(*three_rows(self.prompt, self.extras, LONG_PROMPT))

    def changed(self, joint: Conditioning) -> tuple[float, Tensor]:
        """(change of the other rows if the first row changes, prediction for the first state).

        The longest row stays, so that shapes, and therefore kernels, are unchanged.
        """
        same, away, beside = [1, 1, 2], [], []
        for x, sigma in self.states:
            among = self.predict(x, sigma, joint)
            beside.append(self.predict(x[same], sigma, joint.take(same)))
            away += [rms(among[row] - beside[-1][row]) for row in (1, 2)]
        return max(away), beside[0]

    def refuse(self, reason: str, away: float, size: float) -> None:
        raise UserError(
            f"{self.loop.name}: the prediction for a prompt depends on {reason} (by {away:.3g}, "
            f"for predictions of size {size:.3g}): density ratios would be wrong"
        )

    def predict(self, x: Tensor, sigma: float, conditioning: Conditioning) -> Tensor:
        with torch.no_grad():
            level = torch.full((len(x),), sigma)
            return self.loop.received(x, level, conditioning, self.way).output.float()


def nudged(x: Tensor, unit: float) -> Tensor:
    """States with every number moved up or down by one rounding unit, in at least float32."""
    draws = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, x.shape, generator=draws).to(x.device) * 2 - 1
    return (wide(x) * (1 + unit * signs)).to(torch.promote_types(x.dtype, torch.float32))


def rounding_unit(loop: Loop) -> float:
    """Rounding unit of the network's dtype, the coarsest among its weights."""
    networks = loop.driver.denoisers.values()
    kinds = {p.dtype for network in networks for p in network.parameters()}
    return max(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point)


def rms(values: Tensor) -> float:
    """Root mean square; infinite if any value is NaN."""
    size = float(values.float().square().mean().sqrt())
    return size if size == size else float("inf")


def three_rows(
    prompt: str, extras: Sequence[Extra], long: str
) -> tuple[list[str], tuple[Extra, ...]]:
    """(prompts, extras) of three rows. Other texts, such as negative prompts, also get other
    lengths."""
    prompts = [SHORT_PROMPT, prompt, long]
    if not extras:
        return prompts, ()
    texts = [name for name in extras[0] if columns.TEXT_COLUMNS.fullmatch(name)]
    above, below = ({**extras[0], **dict.fromkeys(texts, text)} for text in (long, SHORT_PROMPT))
    return prompts, (above, extras[0], below)
