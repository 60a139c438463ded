"""The algorithms by name. Each is a function with its choices; YAML sets the numbers.

nft, dgpo and crd sample with a slow average, the others with the trained policy. Pref-GRPO
(arXiv:2508.20751) is flow_grpo with the reward `win_rate`, so it is not here. Recipes of images are
in `grpo`, `grpo_trees`, `matching`, `feedback`, `reward_gradient` and, with teachers and without
rewards, `distillation`; recipes of texts in `text`, `text_credit` (which differ in credit) and
`text_turns` (credit of turns or steps). Contributed recipes are files of `flowrl/contrib`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from flowrl.algorithm import Algorithm
from flowrl.contributed import contributed_names, contributed_recipe
from flowrl.recipes import (
    distillation,
    feedback,
    grpo,
    grpo_trees,
    matching,
    reward_gradient,
    text,
    text_credit,
    text_turns,
)

IMAGE_FUNCTIONS = (
    grpo.flow_grpo, grpo.flow_grpo_fast, grpo.dance_grpo, grpo.mix_grpo, grpo_trees.temp_flow,
    grpo_trees.branch_grpo, grpo_trees.branch_grpo_mix, grpo.grpo_guard, grpo.gardo, grpo.ddpo,
    matching.awm, matching.nft, matching.dpo, matching.rwr, feedback.flow_dppo, feedback.dgpo,
    feedback.crd, feedback.flash_grpo, reward_gradient.refl, reward_gradient.draft,
    reward_gradient.srpo, reward_gradient.leap_align, distillation.opd,
)  # fmt: skip
TEXT_FUNCTIONS = (
    text.text_mixture, text.text_grpo, text.text_rloo, text.text_dr_grpo, text.text_dapo,
    text.text_gspo, text_credit.text_tree, text.text_cispo, text.text_forking, text.text_sapo,
    text.text_vespo, text.text_gmpo, text.text_rec, text.text_luspo, text_credit.text_reinforce,
    text_credit.text_opo, text_credit.text_maxrl, text_credit.text_pass_at_k,
    text_credit.text_bnpo, text_credit.text_a_star_po, text_credit.text_dpo,
    text_credit.text_remax, text_turns.text_gigpo, text_turns.text_turns, text_turns.text_process,
)  # fmt: skip
Recipe = Callable[..., Algorithm]


class RecipeTable(Mapping[str, Recipe]):
    """Recipes by name: flowrl's own, then contributed ones, whose file is imported when its recipe
    is asked for."""

    def __init__(self, included: Mapping[str, Recipe], contributed: Sequence[str]) -> None:
        self._own, self._contributed = included, tuple(contributed)

    def __getitem__(self, name: str) -> Recipe:
        if name in self._contributed:
            return contributed_recipe(name)
        return self._own[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._contributed

    def __iter__(self) -> Iterator[str]:
        return iter((*self._own, *self._contributed))

    def __len__(self) -> int:
        return len(self._own) + len(self._contributed)


def _of_texts(name: str) -> bool:
    return name.startswith("text")


OWN_RECIPES: Mapping[str, Recipe] = {
    recipe.__name__: recipe for recipe in (*IMAGE_FUNCTIONS, *TEXT_FUNCTIONS)
}
CONTRIBUTED_RECIPES = contributed_names()
IMAGE_RECIPES = RecipeTable(
    {recipe.__name__: recipe for recipe in IMAGE_FUNCTIONS},
    [name for name in CONTRIBUTED_RECIPES if not _of_texts(name)],
)
TEXT_RECIPES = RecipeTable(
    {recipe.__name__: recipe for recipe in TEXT_FUNCTIONS},
    [name for name in CONTRIBUTED_RECIPES if _of_texts(name)],
)
RECIPES = RecipeTable(OWN_RECIPES, CONTRIBUTED_RECIPES)
