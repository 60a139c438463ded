"""Draw samples from a velocity model under a plan. Imports torch only.

Kernels and planners of contributed recipes stand in flowrl/contrib, and are imported from here by
name: see `CONTRIBUTED`.
"""

from importlib import import_module
from typing import Any

from samplers.drift import RewardDrift, RewardGuide
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
)  # fmt: skip
from samplers.looking import Looking, Thinned
from samplers.looks import Looks, Thinning
from samplers.particles import FeynmanKac
from samplers.placements import Guided, Scattered
from samplers.plan import Columns, Plan, Step, evaluations, steps_of
from samplers.planners import (
    Chain,
    Flash,
    Fork,
    Ode,
    Particled,
    Planner,
    Tree,
    Window,
)  # fmt: skip
from samplers.roll import Begin, Edges, Latents, Rollout, Sampling, Velocity, roll
from samplers.scheduler import KernelSteps, Scheduler
from samplers.solvers import DPM2M, DPM3M, SA, Euler, Heun, Solver
from samplers.table_sde import TableSDE
from samplers.tree_steps import Moving, Prune, Stripes
from samplers.windows import (
    Decaying,
    ExponentiallyDecaying,
    Frozen,
    Progressive,
    Random,
    WindowPosition,
)  # fmt: skip

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
    "Plan",
    "Planner",
    "Progressive",
    "Prune",
    "Random",
    "RewardDrift",
    "RewardGuide",
    "Rollout",
    "Sampling",
    "Scattered",
    "Scheduler",
    "Solver",
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
    "roll",
    "steps_of",
]  # fmt: skip

CONTRIBUTED = ("Churn", "Granular", "Merged")
"""Names of this package that stand in a file of flowrl/contrib."""


def __getattr__(name: str) -> Any:
    """A kernel or planner of a contributed recipe."""
    if name in CONTRIBUTED:
        return import_module("flowrl.contributed").contributed_part(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
