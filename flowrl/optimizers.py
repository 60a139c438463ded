"""The optimizers that a run may name."""

from collections.abc import Iterable
from importlib.util import find_spec

import torch
from torch import nn

from flowrl.errors import UserError
from flowrl.processes.sharding import groups
from flowrl.settings import Train


def check(name: str) -> None:
    """UserError where a library is missing."""
    if name == "adamw8bit" and find_spec("bitsandbytes") is None:
        raise UserError(
            "train.optimizer: adamw8bit is bitsandbytes', which is not installed; pip install "
            "bitsandbytes, or set train.optimizer: adamw"
        )


def build(t: Train, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    check(t.optimizer)
    if t.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit as kind  # type: ignore[import-not-found]
    else:
        kind = torch.optim.AdamW
    given = [{"params": group} for group in groups(parameters)]
    return kind(given, lr=t.lr, betas=t.betas, weight_decay=t.weight_decay)
