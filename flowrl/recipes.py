"""The algorithms, one row each. YAML picks the numbers; a function, the structure.

| recipe          | plan         | advantage                    | likelihood        | loss       |
| --------------- | ------------ | ---------------------------- | ----------------- | ---------- |
| flow_grpo       | Chain        | group mean, batch std        | Transition        | Surrogate  |
| flow_grpo_fast  | Window       | group mean, batch std        | Transition, cps   | Surrogate  |
| dance_grpo      | Chain        | group std a reward, then sum | Transition        | Surrogate  |
| mix_grpo        | Window       | group std a reward, then sum | Transition        | Surrogate  |
| mix_grpo_flash  | Window, fast | as mix_grpo                  | Transition        | Surrogate  |
| temp_flow       | Fork         | group std, by the step's std | Transition        | Surrogate  |
| branch_grpo     | Tree         | depth by depth               | Transition        | Surrogate  |
| branch_grpo_mix | Tree, ODE    | depth by depth               | Transition        | Surrogate  |
| grpo_guard      | Chain        | group std, by 1/h            | Transition, guard | Surrogate  |
| ddpo            | Chain, DDIM  | group std                    | Transition        | Surrogate  |
| loop            | Chain, DDIM  | leave one out                | Transition        | Surrogate  |
| awm             | Ode, SA      | group mean, batch std        | Matching          | Surrogate  |
| nft             | Ode, DPM     | group mean, batch std        | Matching          | NFT        |
| dpo             | Ode          | best, worst                  | Matching, paired  | Preference |
| rwr             | Ode          | exponential weights          | Matching          | Weighted   |

nft samples with a slow average, the others with the policy that is trained. Pref-GRPO
(arXiv:2508.20751) is flow_grpo with the reward `rewards.WinRate(judge)`: it needs no line here.
The transition recipes are in `flowrl/grpo_recipes.py`, the others in `flowrl/matching_recipes.py`.
"""

from collections.abc import Callable

from flowrl.algorithm import Algorithm
from flowrl.grpo_recipes import (
    branch_grpo,
    branch_grpo_mix,
    dance_grpo,
    ddpo,
    flow_grpo,
    flow_grpo_fast,
    grpo_guard,
    loop,
    mix_grpo,
    mix_grpo_flash,
    temp_flow,
)
from flowrl.matching_recipes import awm, dpo, nft, rwr

ALL = (
    flow_grpo, flow_grpo_fast, dance_grpo, mix_grpo, mix_grpo_flash, temp_flow, branch_grpo,
    branch_grpo_mix, grpo_guard, ddpo, loop, awm, nft, dpo, rwr,
)  # fmt: skip

RECIPES: dict[str, Callable[..., Algorithm]] = {recipe.__name__: recipe for recipe in ALL}
