"""Qwen-VLs in which a small network maps the state at one token to (mu, log sigma).

HPSv3 has one such head and EditReward two, each of three linear layers with ReLUs. They read images
of about 448 x 448 pixels and the token `<|Reward|>` at the end of the instruction.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from rewards.perception.embedding import Placement
from rewards.perception.qwen import (
    QwenBackbone,
    linear_layers,
    open_backbone,
    refuse_others,
    split_names,
)
from rewards.perception.weight_files import weights_of_file

TOKEN = "<|Reward|>"
INSTRUCTION_TAIL = f"\nPlease provide the overall ratings of this image: {TOKEN}\n\nEND\n"
PIXELS = 448 * 448
PLACES, OUTPUTS = (0, 3, 5), 2  # places of the linear layers; 2 is the dropout


def open_scalar_model(
    reward: str, file: Path, base: str, heads: Sequence[str], placement: Placement
) -> tuple[QwenBackbone, tuple[nn.Sequential, ...]]:
    """Load the network of a file, and its heads (by the prefixes of their names) in float32.

    ValueError, in one sentence, if the file has another layout.
    """
    network, entries = split_names(weights_of_file(reward, file))
    refuse_others(reward, entries, tuple(heads))
    layers = [
        linear_layers(reward, entries, head, PLACES, OUTPUTS).to(placement.device) for head in heads
    ]
    return open_backbone(reward, base, (TOKEN,), network, placement), tuple(layers)
