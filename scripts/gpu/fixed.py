"""A reward that does not look: samples of a prompt score 0 to 3 in turn, so that runs in two
precisions have the same advantages, and scoring takes no time."""

from rewards import Samples


def fixed(samples: Samples) -> list[float]:
    return [float(place % 4) for place in range(len(samples.prompts))]
