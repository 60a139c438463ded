"""The optimizers that a run may name."""

from collections.abc import Iterable

import torch
from torch import nn

from flowrl.processes.sharding import groups
from flowrl.settings import Train


def build(t: Train, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if t.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit as kind  # type: ignore[import-not-found]
    else:
        kind = torch.optim.AdamW
    given = [{"params": group} for group in groups(parameters)]
    return kind(given, lr=t.lr, betas=t.betas, weight_decay=t.weight_decay)
