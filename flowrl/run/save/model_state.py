"""A model's part of a checkpoint: weights, averages, optimizer, loss scale, call sizes."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flowrl.processes.sharding import load_state, whole_state
from flowrl.session.learner import Learner
from flowrl.session.optimizers import update_settings
from flowrl.session.smaller_calls import saved_sizes, take_sizes


def optimizer_file(model: str) -> str:
    return f"optimizer_{model}.pt" if model else "optimizer.pt"


def model_weights(learner: Learner) -> dict[str, torch.Tensor]:
    """CPU copies of a model's weights as `policy/parameter`; parameters of a named model begin with
    its name and a dot."""
    state = learner.policies.state()
    if not learner.name:
        return state
    parts = ((*key.split("/", 1), value) for key, value in state.items())
    return {f"{policy}/{learner.name}.{key}": value for policy, key, value in parts}


def model_moments(learner: Learner) -> dict[str, Any]:
    """The optimizer's state. Collective: all processes call it."""
    return whole_state(learner.optimizer, learner.policies.parameters.values())


def model_numbers(learner: Learner) -> dict[str, Any]:
    """The loss scale and the call sizes, for JSON."""
    return {"scaler": learner.scaler.state_dict(), "call_sizes": saved_sizes(learner)}


def restore_model(
    learner: Learner,
    state: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any],
) -> None:
    """Restore one model's weights, optimizer, loss scale and call sizes."""
    if before := learner.name and f"/{learner.name}.":
        weights = {k.replace(before, "/", 1): v for k, v in weights.items() if before in k}
    learner.policies.restore(weights)
    load_state(learner.optimizer, learner.policies.parameters.values(), optimizer)
    update_settings(learner.optimizer, learner.run.train)
    learner.scaler.load_state_dict(state["scaler"])
    take_sizes(learner, state["call_sizes"])


def named_moments(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an optimizer's state, with names for messages."""
    for place, of_weight in state["state"].items():
        for name, value in of_weight.items():
            if isinstance(value, torch.Tensor):
                yield f"the optimizer's {name} of weight {place}", value
