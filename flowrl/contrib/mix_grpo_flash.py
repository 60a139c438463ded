"""MixGRPO-Flash: fewer steps, of a higher order, after MixGRPO's window."""

from flowrl.algorithm import Algorithm
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import Scale, each_reward
from samplers import DPM2M, Flash, FlowSDE, Frozen, Kernel, Progressive, Solver, Window


@rests_on("arrays", "mixgrpo_step", "mixgrpo_window_schedule", "mixgrpo_dpmpp")
def mix_grpo_flash(
    *, steps: int = 25, group: int = 12, eta: float = 0.7, clip: float = 1e-4, window: int = 4,
    every: int = 20, ratio: float = 0.4, frozen: bool = False, scale: Scale = "group",
    kernel: Kernel | None = None, solver: Solver | None = None,
) -> Algorithm:  # fmt: skip
    """MixGRPO-Flash (same paper): after the window, the steps are reduced to the share `ratio` and
    taken by second-order DPM-Solver++. Flash: ratio 0.4, the window moves every 20 iterations;
    Flash*: `frozen=True`, ratio 0.2. Your own `solver` replaces DPM-Solver++.

    Differences: as `mix_grpo`; at least one step follows the window, so that sigma 0 is reached.

    every   iterations after which the window moves by a step, at least 1; no effect if it is
            `frozen`
    ratio   share of the steps after the window that is taken, in (0, 1]; smaller is faster and less
            exact
    frozen  whether the window stays at the first steps (Flash*)
    """
    position = Frozen(0) if frozen else Progressive(every)
    flash = Flash(ratio, solver or DPM2M())
    return Algorithm(
        steps=steps,
        plan=Window(kernel or FlowSDE(eta), group, window, position, True, flash),
        advantage=each_reward(scale),
        likelihood=Transition(),
        loss=Surrogate(clip, clip),
    )
