"""The algorithms. Each has a row here and a function with its choices; YAML sets the numbers.

| recipe          | plan         | advantage                    | likelihood        | loss                |
| --------------- | ------------ | ---------------------------- | ----------------- | ------------------- |
| flow_grpo       | Chain        | group mean, batch std        | Transition        | Surrogate           |
| flow_grpo_fast  | Window       | group mean, batch std        | Transition, cps   | Surrogate           |
| dance_grpo      | Chain        | std per reward, then the sum | Transition        | Surrogate           |
| mix_grpo        | Window       | std per reward, then the sum | Transition        | Surrogate           |
| mix_grpo_flash  | Window, fast | as mix_grpo                  | Transition        | Surrogate           |
| temp_flow       | Fork         | group std, by the step's std | Transition        | Surrogate           |
| branch_grpo     | Tree         | group std, by depth          | Transition        | Surrogate           |
| branch_grpo_mix | Tree, ODE    | group std, by depth          | Transition        | Surrogate           |
| grpo_guard      | Chain        | group std, by 1/h            | Transition, guard | Surrogate           |
| gardo           | Chain        | group mean, by distance      | Transition        | Surrogate           |
| ddpo            | Chain, DDIM  | group std                    | Transition        | Surrogate           |
| loop            | Chain, DDIM  | leave one out                | Transition        | Surrogate           |
| awm             | Ode, SA      | group mean, batch std        | Matching          | Surrogate           |
| nft             | Ode, DPM     | group mean, batch std        | Matching          | NFT                 |
| dpo             | Ode          | best, worst                  | Matching, paired  | Preference          |
| rwr             | Ode          | exponential weights          | Matching          | Weighted            |
| flow_dppo       | Scattered    | group mean, batch std        | Transition        | TrustRegion         |
| dgpo            | Ode, DPM     | group mean, batch std        | Matching, group   | GroupPreference     |
| crd             | Ode, DPM     | group mean, batch std        | Matching, group   | CentredReward       |
| fdfo            | Chain, churn | minus the pair's mean        | Directional       | Quadratic           |
| flash_grpo      | Window, one  | batch std, even gradients    | Transition        | Surrogate           |
| e_grpo          | Merged       | std per reward, then the sum | Transition        | Surrogate           |
| g2rpo           | Granular     | std per reward, then the sum | Transition        | Surrogate           |
| euphonium       | Chain, drift | std per reward, then the sum | Transition        | Surrogate           |
| dense_grpo      | Chain, looks | gains, std by step           | Transition        | Surrogate           |
| turning_point   | Chain, looks | turning points, std by step  | Transition, cps   | Surrogate           |
| vgpo            | Chain, looks | discounted, with a level     | Transition        | Surrogate           |
| pro_grpo        | Chain, thin  | group std, remaining samples | Transition        | Surrogate           |
| potential_tree  | Tree, looks  | group std, and a potential   | Transition        | Surrogate           |
| refl            | OneOfSteps   | none                         | Pathwise, late    | RewardGradient      |
| draft           | LastSteps    | none                         | Pathwise, K steps | RewardGradient      |
| draft_lv        | Ode          | none                         | Pathwise, renoise | RewardGradient      |
| srpo            | Ode          | none                         | Pathwise, noise   | RewardGradient      |
| leap_align      | TwoLeaps     | none                         | Pathwise, leaps   | RewardGradient      |
| flow_bp         | SomeSteps    | none                         | Pathwise, active  | RewardGradient      |
| flow_bp_lagrange | TwoLeaps    | none                         | Pathwise, leaps   | RewardGradient      |
| opd             | Window       | none                         | Transition        | Distillation        |

| text            | any          | any                          | Token             | any                 |
| text_grpo       | Completions  | group mean, group std        | Token             | Surrogate           |
| text_rloo       | Completions  | leave one out                | Token, product    | Surrogate           |
| text_dr_grpo    | Completions  | group mean                   | Token             | Surrogate           |
| text_dapo       | Completions  | group mean, group std        | Token             | Surrogate           |
| text_gspo       | Completions  | group mean, group std        | Token, sequence   | Surrogate           |
| text_tree       | Segments     | by depth, or to the parent   | Token             | Surrogate           |
| text_cispo      | Completions  | group mean, group std        | Token             | CISPO               |
| text_forking    | Completions  | group mean, group std        | Token             | Surrogate           |
| text_sapo       | Completions  | group mean, group std        | Token             | SAPO                |
| text_vespo      | Completions  | group mean, group std        | Token             | VESPO               |
| text_gmpo       | Completions  | group mean, group std        | Token             | GMPO                |
| text_gppo       | Completions  | group mean, group std        | Token             | GPPO                |
| text_rec        | Completions  | group mean, shifted          | Token             | REC                 |
| text_luspo      | Completions  | group mean, group std        | Token, sequence   | Surrogate           |
| text_reinforce  | Completions  | group mean, tokens' std      | Token             | Surrogate           |
| text_remax      | Completions  | the greedy completion's      | Token, product    | Surrogate           |
| text_opo        | Completions  | mean weighed by length       | Token             | Reinforce           |
| text_maxrl      | Completions  | group mean, by the mean      | Token             | Surrogate           |
| text_pass_at_k  | Completions  | pass@k                       | Token             | Surrogate           |
| text_bnpo       | Completions  | by a Beta density            | Token             | Surrogate           |
| text_riskpo     | Completions  | quantiles of bundles         | Token             | Surrogate           |
| text_stream     | Completions  | a tracker's, batch std       | Token             | Surrogate           |
| text_a_star_po  | Completions  | minus the start's soft value | Token, product    | AdvantageRegression |
| text_dpo        | Completions  | best, worst                  | Token, paired     | Preference          |
| text_spo_tree   | Segments     | to the parent                | Token             | Surrogate           |
| text_tempo      | Segments     | group, and to the parent     | Token             | Surrogate           |
| text_treerl     | Forks        | to the draw and the parent   | Token             | Surrogate           |
| text_gigpo      | Completions  | group, and equal states      | Token             | Surrogate           |
| text_turns      | Completions  | group std, turn by turn      | Token             | Surrogate           |
| text_rebn       | Completions  | discounted, batch std        | Token             | Surrogate           |
| text_process    | Completions  | sums of steps, group std     | Token             | Surrogate           |
| text_igpo       | Completions  | sums of gains, group std     | Token             | Surrogate           |

nft, dgpo and crd sample with a slow average, the others with the trained policy. Pref-GRPO
(arXiv:2508.20751) is flow_grpo with the reward `win_rate`, so it has no row. The transition recipes
are in `flowrl/recipes/grpo.py` and `flowrl/recipes/grpo_trees.py`, the matching recipes in
`flowrl/recipes/matching.py`, recipes with other feedback in `flowrl/recipes/feedback.py`, recipes
with intermediate rewards (`looks`, `thin`) in `flowrl/recipes/intermediate.py`, recipes that use a
reward's gradient in `flowrl/recipes/reward_gradient.py`, and opd, which has teachers and needs no
rewards, in `flowrl/recipes/distillation.py`. vgpo, pro_grpo, potential_tree and gardo are based on
reviews, an abstract or code, as their docstrings say. Recipes of language models are in
`flowrl/recipes/text.py` and, where they differ in credit, in `flowrl/recipes/text_credit.py` and,
with credit of turns or steps, in `flowrl/recipes/text_turns.py`.
"""

from collections.abc import Callable

from flowrl.algorithm import Algorithm
from flowrl.recipes import (
    distillation,
    feedback,
    grpo,
    grpo_trees,
    intermediate,
    matching,
    reward_gradient,
    text,
    text_credit,
    text_turns,
)

IMAGE_FUNCTIONS = (
    grpo.flow_grpo, grpo.flow_grpo_fast, grpo.dance_grpo, grpo.mix_grpo, grpo.mix_grpo_flash,
    grpo_trees.temp_flow, grpo_trees.branch_grpo, grpo_trees.branch_grpo_mix, grpo.grpo_guard,
    grpo.gardo, grpo.ddpo, grpo.loop, matching.awm, matching.nft, matching.dpo, matching.rwr,
    feedback.flow_dppo, feedback.dgpo, feedback.crd, feedback.fdfo, feedback.flash_grpo,
    feedback.e_grpo, feedback.g2rpo, feedback.euphonium, intermediate.dense_grpo,
    intermediate.turning_point, intermediate.vgpo, intermediate.pro_grpo,
    intermediate.potential_tree, reward_gradient.refl, reward_gradient.draft,
    reward_gradient.draft_lv, reward_gradient.srpo, reward_gradient.leap_align,
    reward_gradient.flow_bp, reward_gradient.flow_bp_lagrange, distillation.opd,
)  # fmt: skip
TEXT_FUNCTIONS = (
    text.text_mixture, text.text_grpo, text.text_rloo, text.text_dr_grpo, text.text_dapo,
    text.text_gspo, text_credit.text_tree, text.text_cispo, text.text_forking, text.text_sapo,
    text.text_vespo, text.text_gmpo, text.text_gppo, text.text_rec, text.text_luspo,
    text_credit.text_reinforce, text_credit.text_opo, text_credit.text_maxrl,
    text_credit.text_pass_at_k, text_credit.text_bnpo,
    text_credit.text_riskpo, text_credit.text_stream, text_credit.text_a_star_po,
    text_credit.text_dpo,
    text_credit.text_spo_tree, text_credit.text_tempo, text_credit.text_remax,
    text_credit.text_treerl, text_turns.text_gigpo, text_turns.text_turns, text_turns.text_rebn,
    text_turns.text_process, text_turns.text_igpo,
)  # fmt: skip
RecipeTable = dict[str, Callable[..., Algorithm]]
IMAGE_RECIPES: RecipeTable = {recipe.__name__: recipe for recipe in IMAGE_FUNCTIONS}
TEXT_RECIPES: RecipeTable = {recipe.__name__: recipe for recipe in TEXT_FUNCTIONS}
RECIPES: RecipeTable = IMAGE_RECIPES | TEXT_RECIPES
