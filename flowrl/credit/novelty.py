"""Advantages that grow with how far a sample lies from the others of its group."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.credit.choices import Choices, text_plans
from flowrl.credit.values import Context, Credit
from flowrl.errors import UserError
from flowrl.table import Column

LATENT_DISTANCE: Column[Float[Tensor, " n"]] = Column(
    "distances of clean latents from their group's mean", "latents"
)


@dataclass(frozen=True)
class Novelty:
    """Good samples count more the farther they lie from their group; ours.

        A <- A (1 + weight (d / mean of the group's d - 1)) where A > 0

    d is the root mean square difference of a sample's clean latent from its group's mean. Other
    samples stay as they are, so nothing is gained by being far and bad. It comes after the
    transforms that standardise.

    weight  share of an advantage that follows the distance, in [0, 1]; 0 leaves advantages as they
            are
    """

    weight: float = 0.5

    reads: ClassVar[tuple[Column[Any], ...]] = (LATENT_DISTANCE,)

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise UserError(f"Novelty's weight must be from 0 to 1, not {self.weight}")

    def __call__(self, credit: Credit, context: Context) -> Credit:
        distance = context.needed(LATENT_DISTANCE, "Novelty").double().cpu()
        grouped = distance.view(-1, context.columns.group)
        mean = grouped.mean(1, keepdim=True)
        relative = torch.where(mean > 0, grouped / mean, 1.0).reshape(-1, 1, 1)
        factor = torch.where(credit.value > 0, 1 + self.weight * (relative - 1), 1.0)
        return credit._replace(value=credit.value * factor)

    def refuses(self, choices: Choices) -> str | None:
        """Refuses texts, which have no latents."""
        if text_plans(choices):
            return "Novelty compares the latents of images and videos; leave it out for texts"
        return None
