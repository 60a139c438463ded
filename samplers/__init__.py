"""Draw samples from a velocity model under a plan. Imports torch only."""

from samplers.grid import DiffusersGrid, Grid
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
from samplers.particles import FeynmanKac
from samplers.plan import Columns, Plan, Step, evaluations, steps_of
from samplers.planners import (
    Chain,
    Flash,
    Fork,
    Ode,
    Particled,
    Planner,
    Prune,
    Stripes,
    Tree,
    Window,
)  # fmt: skip
from samplers.roll import Edges, Rollout, Velocity, chunked, roll
from samplers.solvers import DPM2M, DPM3M, SA, Euler, Heun, Solver
from samplers.windows import (
    Decaying,
    ExponentiallyDecaying,
    Frozen,
    Position,
    Progressive,
    Random,
)  # fmt: skip

__all__ = [
    "CPS", "DDIM", "DDPM", "DPM2M", "DPM3M", "SA", "Chain", "Columns", "ConstantSDE",
    "Decaying", "DiffusersGrid", "Edges", "Euler", "ExponentiallyDecaying", "FeynmanKac",
    "Flash", "FlowSDE", "Fork", "Frozen", "Gaussian", "Grid", "Heun", "Kernel", "Ode",
    "Particled", "Plan", "Planner", "Position", "Progressive", "Prune", "Random", "Rollout",
    "Solver", "Step", "Stripes", "Tree", "Velocity", "WanSDE", "Window", "chunked", "euler",
    "evaluations", "mean_log_prob", "roll", "steps_of",
]  # fmt: skip
