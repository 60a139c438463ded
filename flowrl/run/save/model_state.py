"""A model's part of a checkpoint: weights, averages, optimizer, loss scale, call sizes."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flowrl.processes.sharding import load_state, whole_state
from flowrl.session.learner import Learner
from flowrl.session.optimizers import update_settings
from flowrl.session.smaller_calls import saved_sizes, take_sizes

_LIKE_THE_WEIGHT = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}


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


def own_weights(
    learner: Learner, weights: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """A model's weights among those of a checkpoint, without its name."""
    if before := learner.name and f"/{learner.name}.":
        return {k.replace(before, "/", 1): v for k, v in weights.items() if before in k}
    return weights


def check_saved_model(
    learner: Learner, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]
) -> None:
    """ValueError for a model's weights or optimizer state that do not fit it. Changes nothing."""
    learner.policies.check(own_weights(learner, weights))
    parameters = list(learner.policies.parameters.values())
    states = optimizer["state"] if isinstance(optimizer, Mapping) else None
    if not isinstance(states, Mapping) or not isinstance(optimizer.get("param_groups"), list):
        raise ValueError("the optimizer's state has no state or no param_groups")
    for place, values in states.items():
        if type(place) is not int or not 0 <= place < len(parameters):
            raise ValueError(f"the optimizer has a state of weight {place!r:.50}, which is none")
        for name in _LIKE_THE_WEIGHT & values.keys():
            if values[name].shape != parameters[place].shape:
                raise ValueError(
                    f"the optimizer's {name} of weight {place} has the shape "
                    f"{list(values[name].shape)}, but the weight's is "
                    f"{list(parameters[place].shape)}"
                )


def restore_model(
    learner: Learner,
    state: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any],
) -> None:
    """Restore one model's weights, optimizer, loss scale and call sizes."""
    learner.policies.restore(own_weights(learner, weights))
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
