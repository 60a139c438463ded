"""Settings that would learn backwards, do nothing or never end are refused by name."""

from typing import Any

import pytest

from flowrl.errors import UserError
from flowrl.settings.read import check_plan, run_from

RUN = {
    "model": {"pipeline": "flowrl/demo/shapes-sd3", "sigmas": {"shift": 1.0}},
    "prompts": {"train": "prompts.txt"},
    "rewards": ["brightness"],
}


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"name": "opd", "task": -1.0}, "task must be at least 0 (0 is off), not -1.0"),
        ({"name": "branch_grpo", "at": [0, 1], "siblings": 3.0}, "must be in [0, 1], not 3.0"),
        (
            {"name": "potential_tree", "at": [0], "weight": -1.0},
            "rewards must be at least 0, not -1.0",
        ),
        ({"name": "potential_tree", "at": []}, "a group of at least 2, or split a tree"),
        ({"name": "crd", "decay": [0, 0.1, 7.0]}, "to 7.0: start and most must be in"),
        ({"name": "crd", "decay": [-5, 0.1, 0.9]}, "average.flat must be at least 0, not -5"),
        ({"name": "dgpo", "switch": -5}, "average.flat must be at least 0, not -5"),
        (
            {"name": "vgpo", "bounds": [2.0, 0.5]},
            "bounds (2.0, 0.5) must be at least 0, the lower one first",
        ),
        ({"name": "vgpo", "share": -1.0}, "the share of the steps must be in [0, 1], not -1.0"),
        ({"name": "vgpo", "kappa": -0.1}, "kappa must be at least 0, not -0.1"),
        ({"name": "draft", "last": 9}, "last must be between 1 and 6, the number of steps, not 9"),
        ({"name": "draft", "last": 0}, "last must be between 1 and 6"),
        ({"name": "draft", "spread": -1.0}, "must be at least 0, not -1.0"),
        ({"name": "draft", "group": 0}, "a group needs at least one sample, not 0"),
        ({"name": "refl", "first": -0.5}, "first -0.5 and stop 1.0 select no step: as shares"),
        ({"name": "flow_grpo", "eta": -0.1}, "FlowSDE's eta must be at least 0, not -0.1"),
        (
            {"name": "flow_grpo", "kernel": {"name": "cps", "eta": 2.5}},
            "CPS's eta must be in [0, 2], not 2.5",
        ),
        ({"name": "dgpo", "kl": -1.0}, "GroupPreference's kl must be at least 0, not -1.0"),
        ({"name": "fdfo", "gamma": -0.1}, "must be at least 0, not -0.1"),
        ({"name": "euphonium", "outcome": 0.0}, "has no effect without process: set process"),
        ({"name": "branch_grpo", "at": [0, 4], "prune": "deeper"}, "the splits come too late"),
    ],
    ids=lambda given: given["name"] if isinstance(given, dict) else "",
)
def test_a_setting_out_of_range_is_named(recipe: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        check_plan(run_from({**RUN, "recipe": {"steps": 6, **recipe}}, "test"))
    assert words in str(refused.value)
