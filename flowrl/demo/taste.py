"""The hidden taste of the demo's simulated person: large objects. It is a program on pixels.

A fit never sees it: it sees votes, and features of a model that was not made for it. As a reward,
`flowrl/demo/taste.py:large`, it measures what training on the votes has reached.
"""

import torch
from torch import Tensor

from rewards.catalogue.shapes import BACKGROUND
from rewards.types import Samples

FAR = 0.25  # distance of a colour from the background's above which a pixel is part of an object
TEMPERATURE = 0.015  # of the person, in shares of the image


def covered(image: Tensor) -> float:
    """Share of an image [3 h w] in 0..1 that objects cover."""
    background = torch.tensor(BACKGROUND, dtype=image.dtype)[:, None, None] / 255
    return float(((image.cpu() - background).norm(dim=0) > FAR).float().mean())


def large(samples: Samples) -> list[float]:
    """The hidden taste as a reward: the share of each image that objects cover."""
    return [covered(image) for image in samples.media]
