"""flowrl's advantages as estimators of verl, for models that are too large to train here.

Import this file where verl's trainer starts, and set algorithm.adv_estimator=flowrl_maxrl, or
another name of ADVANTAGES. The formulas are those of docs/recipes.md.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.parts import (
    BetaNormalize,
    Context,
    Estimator,
    GroupBaseline,
    LeaveOneOut,
    MaxRL,
    PassAtK,
    Standardize,
    Transform,
)
from rewards.types import Scores
from samplers import Columns

ADVANTAGES: Mapping[str, Sequence[Transform]] = {
    "flowrl_grpo": [Standardize("group", correction=1, eps=1e-6)],
    "flowrl_rloo": [LeaveOneOut()],
    "flowrl_maxrl": [MaxRL()],
    "flowrl_pass_at_2": [PassAtK(2, "analytic")],
    "flowrl_bnpo": [BetaNormalize()],
    "flowrl_asymre": [GroupBaseline(shift=-0.1)],
}


def advantages(
    transforms: Sequence[Transform], reward: Tensor, mask: Tensor, index: np.ndarray
) -> Tensor:
    """Advantages [n t] of responses from token-level rewards [n t], whose sum is the score.

    Responses of one prompt have one `index`, and all prompts have equally many."""
    _, code, counts = np.unique(index, return_inverse=True, return_counts=True)
    if counts.min() != counts.max():
        raise ValueError(
            f"prompts have {counts.min()} to {counts.max()} responses: keep one number"
        )
    group = int(counts[0])
    order = torch.from_numpy(np.argsort(code, kind="stable"))
    value = reward.sum(-1).cpu()[order, None]
    scores = Scores(value, torch.ones_like(value, dtype=torch.bool), ("reward",))
    context = Context(Columns((group,), (True,), (1.0,), (1.0,)), torch.ones(1))
    found, known = Estimator(tuple(transforms))(scores, context)
    own = torch.empty(len(index), dtype=found.dtype)
    own[order] = found[:, 0] * known[:, 0]
    return own.to(reward)[:, None] * mask


def estimator(transforms: Sequence[Transform]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function with the arguments that verl passes to its estimators, by keyword."""

    def compute(
        token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **_: Any
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            own = advantages(transforms, token_level_rewards, response_mask, index)
        return own, own

    return compute


def register() -> None:
    """Add all to verl's registry."""
    from verl.trainer.ppo.core_algos import register_adv_est

    for name, transforms in ADVANTAGES.items():
        register_adv_est(name)(estimator(transforms))
