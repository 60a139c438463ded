"""The tree of steps of a plan as data: every step, its noise, its branching.

The tree is level-uniform. Nodes of one level are contiguous rows, so "the ancestor of leaf i
after step k" is integer division and "the mean over a node's leaves" is a reshape: there is no
linked list of nodes anywhere. A *draw* is one use of a prompt; its leaves are its group.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from samplers.kernels import Kernel
from samplers.number_ranges import AT_LEAST_0
from samplers.solvers import Euler, Solver

# noise for unit velocity below this is rounded away by any state, and its square is 0 in float32
LEAST_STEP_NOISE = torch.finfo(torch.float64).eps
LAST_LEVEL = 0.1  # the highest level that a plan may end on; SD1.5's alpha_0 is 0.028


@dataclass(frozen=True)
class Step:
    sigma: float
    sigma_next: float
    noisy: bool = False  # a step with the plan's kernel; otherwise one of its solver
    branch: int = 1  # children drawn from each node
    train: bool = False  # keep the transition, so that a policy can be scored on it


@dataclass(frozen=True)
class StepTree:
    """Sampling steps from the first noise level (at most 1) down to 0. The kernel is bound to
    their levels.

    The last level may be a scheduler's own, just above 0 (DDIM with set_alpha_to_one false).

    `split` correlates the noise of siblings: xi = (xi_parent + split eta) / sqrt(1 + split^2), so
    each child is still N(mean, std^2) given its parent (BranchGRPO, arXiv:2509.06040, uses 4); None
    draws them independently. `noise_of` is the index of another plan of the iteration whose step
    noise this one uses: both then have the same children where they are in the same state. Raises
    ValueError, with the step's index, for steps that do not connect or are impossible.
    """

    steps: tuple[Step, ...]
    kernel: Kernel | None = None
    roots: int = 1  # initial noises a draw
    shared_noise: bool = False  # one initial noise for all of a draw's roots
    solver: Solver = Euler()  # of the steps that are not noisy
    solve_from: int = 0  # steps without noise before this index are Euler's
    split: float | None = None
    noise_of: int | None = None

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("a plan needs at least one step: give two or more noise levels")
        if not 0 < self.steps[0].sigma <= 1 or not 0 <= self.steps[-1].sigma_next <= LAST_LEVEL:
            first, last = self.steps[0].sigma, self.steps[-1].sigma_next
            raise ValueError(
                f"noise levels must run from at most 1 down to 0, but run from {first} to {last}"
            )
        if self.roots < 1:
            raise ValueError(f"a group needs at least one sample, not {self.roots}")
        if self.split is not None and not 0 < self.split < math.inf:
            raise ValueError(
                f"split must be above 0, not {self.split}: siblings would be identical"
            )
        AT_LEAST_0.check("a plan's noise_of", self.noise_of)
        if not 0 <= self.solve_from <= len(self.steps):
            raise ValueError(
                f"solve_from is {self.solve_from}, but the plan has only {len(self.steps)} steps"
            )
        for a, b in pairwise(self.steps):
            if a.sigma_next != b.sigma:
                raise ValueError(
                    f"one step ends at noise level {a.sigma_next}, but the next starts at {b.sigma}"
                )
        if self.kernel is not None:
            object.__setattr__(self, "kernel", self.kernel.bound(self.sigmas))
        for k, s in enumerate(self.steps):
            _check(k, s, self.kernel)

    @cached_property
    def sigmas(self) -> tuple[float, ...]:
        return (*(s.sigma for s in self.steps), self.steps[-1].sigma_next)

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Nodes per draw after each step; the last entry is the group size."""
        nodes, counts = self.roots, list[int]()
        for step in self.steps:
            nodes *= step.branch
            counts.append(nodes)
        return tuple(counts)

    @property
    def group(self) -> int:
        return self.nodes[-1]

    @cached_property  # of every sample's credit
    def columns(self) -> "Columns":
        moments = [_of_unit_velocity(self.kernel, s) for s in self.steps]
        return Columns(
            nodes=self.nodes,
            noisy=tuple(s.noisy for s in self.steps),
            std=tuple(std for _, std in moments),
            h=tuple(s.sigma - s.sigma_next for s in self.steps),
            slope=tuple(slope for slope, _ in moments),
            parents=self.states[:-1],
        )

    def stochastic(self, k: int) -> bool:
        """Whether step k draws noise, in the kernel or in the solver."""
        return self.steps[k].noisy or (self.solver.random and k >= self.solve_from)

    @cached_property
    def states(self) -> tuple[int, ...]:
        """Distinct states per draw before each step, and at the end.

        Fewer than nodes where roots share their noise and no step has drawn noise yet.
        """
        states = [1 if self.shared_noise else self.roots]
        for k, nodes in enumerate(self.nodes):
            states.append(nodes if self.stochastic(k) else states[-1])
        return tuple(states)

    @property
    def trained_nodes(self) -> int:
        """Number of trained transitions per draw."""
        return sum(n for n, step in zip(self.nodes, self.steps, strict=True) if step.train)

    @property
    def trained_states(self) -> int:
        """Distinct states per draw at which trained transitions start, which is the number of
        network evaluations needed to score them all."""
        return sum(n for n, step in zip(self.states, self.steps, strict=False) if step.train)

    @property
    def shares_states(self) -> bool:
        """Whether several transitions of a noisy step start at the same state."""
        before = zip(self.states, self.nodes, self.steps, strict=False)
        return any(step.noisy and states < nodes for states, nodes, step in before)

    def solver_at(self, k: int) -> Solver:
        return self.solver if k >= self.solve_from else Euler()


@dataclass(frozen=True)
class Columns:
    """A rollout's k decision points, as credit assignment reads them.

    A plan of images has one column per step, a completion one per turn, and one per fork in a
    token tree. The number of parents is data,
    since it does not follow from the numbers of nodes: the first step of two roots that branch in
    two has 4 nodes, as that of four roots has. Without it the first nodes are drawn from the
    prompt, and all others from the nodes of the column before. ValueError for numbers that form no
    tree.
    """

    nodes: tuple[int, ...]  # distinct nodes a draw at each column
    noisy: tuple[bool, ...]  # whether noise was drawn there
    std: tuple[float, ...]  # of the kernel there, used or not; 0 without a kernel
    h: tuple[float, ...]  # sigma covered there
    slope: tuple[float, ...] = ()  # d mean / d v of the kernel there, at most 0; 0 without a kernel
    parents: tuple[int, ...] = ()  # distinct states a draw that its nodes are drawn from; 0: prompt

    def __post_init__(self) -> None:
        if len(self.origins) != len(self.nodes):
            raise ValueError(
                f"{len(self.nodes)} columns of nodes need as many numbers of parents, not "
                f"{self.parents}"
            )
        for k, (nodes, parents) in enumerate(zip(self.nodes, self.origins, strict=True)):
            before = self.nodes[k - 1] if k else 1
            if nodes < 1 or nodes % before or nodes % max(parents, 1):
                raise ValueError(
                    f"column {k} has {nodes} nodes: it needs a multiple of its {max(parents, 1)} "
                    f"parents and of the {before} nodes before it"
                )

    @property
    def group(self) -> int:
        return self.nodes[-1]

    @property
    def origins(self) -> tuple[int, ...]:
        """`parents`, or what they are by default."""
        return self.parents or (0, *self.nodes[:-1])

    @cached_property
    def families(self) -> tuple[int, ...]:
        """Number of families a draw at each column: the nodes of a family were drawn from one state
        at the last split. Where nothing split yet, the draw is one family."""
        families, now = list[int](), 1
        for nodes, parents in zip(self.nodes, self.origins, strict=True):
            now = max(parents, 1) if parents < nodes else now
            families.append(now)
        return tuple(families)


def _check(k: int, s: Step, kernel: Kernel | None) -> None:
    if not s.sigma > s.sigma_next:
        raise ValueError(
            f"step {k}: sigma must decrease, but goes from {s.sigma} to {s.sigma_next}"
        )
    if s.branch < 1:
        raise ValueError(f"step {k}: branch must be at least 1, not {s.branch}")
    if (s.branch > 1 or s.train) and not s.noisy:
        raise ValueError(f"step {k}: only a noisy step can branch or be trained on")
    if s.noisy and kernel is None:
        raise ValueError(f"step {k} is noisy, but the plan has no kernel")
    if (s.branch > 1 or s.train) and not _of_unit_velocity(kernel, s)[1] > LEAST_STEP_NOISE:
        raise ValueError(
            f"step {k}: {kernel} adds no noise between {s.sigma} and {s.sigma_next}, so this "
            "step cannot branch or be trained on"
        )


def _of_unit_velocity(kernel: Kernel | None, step: Step) -> tuple[float, float]:
    """Mean and std of the step from 0 under the velocity 1: every kernel's mean is affine in state
    and velocity. 0 without a kernel."""
    if kernel is None:
        return 0.0, 0.0
    zero = torch.zeros(1, 1, dtype=torch.float64)
    at, to = torch.tensor([[step.sigma], [step.sigma_next]], dtype=torch.float64)
    mean, std = kernel(zero, zero + 1, at, to)
    return float(mean), float(std)


def steps_of(
    sigmas: Sequence[float],
    *,
    noisy: Set[int] = frozenset(),
    train: Set[int] = frozenset(),
    branch: Mapping[int, int] = {},
) -> tuple[Step, ...]:
    """Build the steps over a list of noise levels, with flags set by index. Raises for an index
    out of range."""
    last = len(sigmas) - 2
    for name, marks in (("noisy", noisy), ("train", train), ("branch", branch.keys())):
        if wrong := sorted(k for k in marks if not 0 <= k <= last):
            raise ValueError(f"{name} steps {wrong} are out of range: the steps are 0 to {last}")
    return tuple(
        Step(a, b, noisy=k in noisy, branch=branch.get(k, 1), train=k in train)
        for k, (a, b) in enumerate(pairwise(sigmas))
    )
