"""The laws of all parts of an algorithm that are not flowrl's own."""

from collections.abc import Sequence
from types import FunctionType

from flowrl.algorithm import Algorithm
from flowrl.laws.kernels import check_kernel
from flowrl.laws.losses import check_loss
from flowrl.laws.planners import check_planner
from flowrl.laws.transforms import check_transform
from samplers import Plan

_PACKAGES = ("flowrl", "samplers", "rewards")


def is_included(part: object) -> bool:
    """Whether a part is flowrl's own, whose laws are tests of flowrl."""
    kind = part if isinstance(part, FunctionType) else type(part)
    return kind.__module__.partition(".")[0] in _PACKAGES


def check_laws(
    algorithm: Algorithm, levels: Sequence[float], seed: int, rewards: Sequence[str]
) -> None:
    """Check the laws of all parts of an algorithm that are not flowrl's own, on its noise levels:
    the planner, kernels, transforms of scores by the labelled rewards, and the loss. UserError for
    a part that breaks one."""
    plan = algorithm.plan
    if not is_included(plan):
        check_planner(plan, levels, seed)
    plans = algorithm.planned(levels, 0, seed)
    for planned in plans:
        kernel = planned.kernel if isinstance(planned, Plan) else None
        if isinstance(planned, Plan) and kernel is not None and not is_included(kernel):
            check_kernel(kernel, planned.sigmas)
    chain = algorithm.advantage.chain
    for index, transform in enumerate(chain):
        if not is_included(transform):
            check_transform(transform, plans[0].columns, chain[:index], rewards)
    if not is_included(algorithm.loss):
        check_loss(algorithm.loss, algorithm.likelihood)
