"""Draw samples from a velocity model under a plan. Imports torch only.

Routes around the plain one (`samplers.routes`), and their planners, are imported when first used.
Kernels and planners of contributed recipes stand in flowrl/contrib, and are imported from here by
name: see `CONTRIBUTED`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samplers.kernels import (
    CPS,
    DDIM,
    DDPM,
    ConstantSDE,
    FlowSDE,
    Gaussian,
    Kernel,
    WanSDE,
    euler,
    mean_log_prob,
    reverse_sde,
)  # fmt: skip
from samplers.placements import Scattered
from samplers.plan import Columns, Plan, Step, evaluations, steps_of
from samplers.planners import (
    Chain,
    Flash,
    Fork,
    Ode,
    Planner,
    Tree,
    Window,
)  # fmt: skip
from samplers.roll import Begin, Edges, Latents, Rollout, Sampling, Velocity, roll
from samplers.route import Descent, Passage, PlainRoute, Route
from samplers.scheduler import KernelSteps, Scheduler
from samplers.solvers import DPM2M, DPM3M, SA, Euler, Heun, Solver
from samplers.table_sde import TableSDE
from samplers.tree_steps import Moving, Prune, Stripes
from samplers.walk import State
from samplers.windows import (
    Decaying,
    ExponentiallyDecaying,
    Frozen,
    Progressive,
    Random,
    WindowPosition,
)  # fmt: skip

if TYPE_CHECKING:
    from samplers.routes.around import DescentAround, RouteAround
    from samplers.routes.drift import RewardDrift
    from samplers.routes.guiding import Guided, RewardGuide
    from samplers.routes.looks import Looking, Looks
    from samplers.routes.particles import FeynmanKac
    from samplers.routes.steering import Particled
    from samplers.routes.thinning import Thinned, Thinning

__all__ = [
    "CPS",
    "DDIM",
    "DDPM",
    "DPM2M",
    "DPM3M",
    "SA",
    "Begin",
    "Chain",
    "Columns",
    "ConstantSDE",
    "Decaying",
    "Descent",
    "DescentAround",
    "Edges",
    "Euler",
    "ExponentiallyDecaying",
    "FeynmanKac",
    "Flash",
    "FlowSDE",
    "Fork",
    "Frozen",
    "Gaussian",
    "Guided",
    "Heun",
    "Kernel",
    "KernelSteps",
    "Latents",
    "Looking",
    "Looks",
    "Moving",
    "Ode",
    "Particled",
    "Passage",
    "PlainRoute",
    "Plan",
    "Planner",
    "Progressive",
    "Prune",
    "Random",
    "RewardDrift",
    "RewardGuide",
    "Rollout",
    "Route",
    "RouteAround",
    "Sampling",
    "Scattered",
    "Scheduler",
    "Solver",
    "State",
    "Step",
    "Stripes",
    "TableSDE",
    "Thinned",
    "Thinning",
    "Tree",
    "Velocity",
    "WanSDE",
    "Window",
    "WindowPosition",
    "euler",
    "evaluations",
    "mean_log_prob",
    "reverse_sde",
    "roll",
    "steps_of",
]  # fmt: skip

CONTRIBUTED = ("Churn", "Granular", "Merged")
"""Names of this package that stand in a file of flowrl/contrib."""
_OF_ROUTES = {
    "DescentAround": "around",
    "FeynmanKac": "particles",
    "Guided": "guiding",
    "Looking": "looks",
    "Looks": "looks",
    "Particled": "steering",
    "RewardDrift": "drift",
    "RewardGuide": "guiding",
    "RouteAround": "around",
    "Thinned": "thinning",
    "Thinning": "thinning",
}


def __getattr__(name: str) -> Any:
    """A name of a route, or a kernel or planner of a contributed recipe."""
    if name in CONTRIBUTED:
        return import_module("flowrl.contributed").contributed_part(name)
    if name not in _OF_ROUTES:
        raise AttributeError(f"module 'samplers' has no attribute {name!r}")
    return getattr(import_module(f"samplers.routes.{_OF_ROUTES[name]}"), name)
