"""A guided velocity whose gradient flows through the prompt's prediction alone."""

import torch
from torch import Tensor

from samplers import Velocity


def through_prompt(guided: Velocity, alone: Velocity, weight: float) -> Velocity:
    """The values of `guided`, with `weight` times the gradient of `alone`, the prompt's prediction.

    Guidance is linear in its two predictions, so detaching the other one leaves this gradient. The
    guided velocity is evaluated without activations.
    """

    def velocity(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        with torch.no_grad():
            value = guided(x, sigma, prompt)
        if not torch.is_grad_enabled():
            return value
        prediction = alone(x, sigma, prompt)
        return value + weight * (prediction - prediction.detach())

    return velocity
