"""A reward to be hacked: it pays for samples that resemble the others of their group."""

import torch

from rewards.types import Samples


def alike(samples: Samples) -> torch.Tensor:
    """1 minus the root mean square distance per pixel to the mean of the group, [n] in 0..1."""
    flat = samples.media.float().flatten(1)
    scores = torch.empty(len(flat))
    for group in samples.group.unique():
        rows = samples.group == group
        scores[rows] = 1 - (flat[rows] - flat[rows].mean(0)).square().mean(1).sqrt()
    return scores


def warm(samples: Samples) -> torch.Tensor:
    """Red minus blue, averaged over the image: a healthy wish of a user, [n] in -1..1."""
    red, _, blue = samples.media.float().mean((2, 3)).unbind(1)
    return red - blue
