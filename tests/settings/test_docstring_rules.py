"""Each rule that a docstring of the settings or of a recipe states as a need is checked: a run that
breaks it is refused before weights load, with the words of the rule's way out."""

import re
from typing import Any

import pytest

from flowrl.errors import UserError
from flowrl.run.watch.guidance_check import check_guidance
from flowrl.settings.read import check_plan, check_rewards, run_from

IMAGE: dict[str, Any] = {"pipeline": "stabilityai/stable-diffusion-3.5-medium"}
TEXT: dict[str, Any] = {"language": "some/model"}

# where the rule stands, a run that breaks it, what is said
RULES: dict[str, tuple[dict[str, Any], str]] = {
    "Guidance: matching losses are unguided": (
        {"recipe": "nft", "model": {**IMAGE, "guidance": {"train": 4.0}}}, "set it to none",
    ),
    "Guidance: ratios have one scale": (
        {"recipe": "flow_grpo", "model": {**IMAGE, "guidance": {"sample": 4.0, "train": 1.0}}},
        r"leave guidance\.train out",
    ),
    "Quantization: gguf needs a file": (
        {"recipe": "nft", "model": {**IMAGE, "quantization": {"backend": "gguf"}}}, r"\.gguf file",
    ),
    "Steer: only for losses on clean samples": (
        {"recipe": "flow_grpo", "model": IMAGE, "steer": {"iterations": [0, 5]}}, "particles",
    ),
    "Lora.dtype: bfloat16 only below bfloat16": (
        {"recipe": "nft", "model": {**IMAGE, "lora": {"dtype": "bfloat16"}}},
        r"leave lora\.dtype out",
    ),
    "joint: a rewriter and the recipe need each other": (
        {"recipe": "nft", "model": {**IMAGE, "rewriter": {"language": "x/y"}}}, "recipe joint",
    ),
    "flow_dppo: an own kernel needs its own most": (
        {"recipe": {"name": "flow_dppo", "kernel": {"name": "churn", "gamma": 0.1}},
         "model": IMAGE}, "set most",
    ),
    "vgpo: bounds are at least 0": (
        {"recipe": {"name": "vgpo", "bounds": [-1.0, 2.0]}, "model": IMAGE}, "at least 0",
    ),
    "reward gradients: rewards need `differentiable`": (
        {"recipe": "draft", "model": IMAGE, "rewards": ["ocr"]}, "gradient",
    ),
    "opd: needs teachers": ({"recipe": "opd", "model": IMAGE}, "teachers"),
    "text_opo: one update per iteration": (
        {"recipe": "text_opo", "model": TEXT, "train": {"updates": 2}}, r"set train\.updates: 1",
    ),
    "text_opo: one pass per iteration": (
        {"recipe": "text_opo", "model": TEXT, "train": {"epochs": 2}}, r"set train\.epochs: 1",
    ),
    "text_riskpo: a multiple of bundle": (
        {"recipe": {"name": "text_riskpo", "bundle": 5}, "model": TEXT}, "bundle",
    ),
    "text_gigpo: needs an environment": ({"recipe": "text_gigpo", "model": TEXT}, "environment"),
    "text_turns: needs an environment": ({"recipe": "text_turns", "model": TEXT}, "environment"),
    "text_rebn: needs an environment": ({"recipe": "text_rebn", "model": TEXT}, "environment"),
    "text_process: needs steps or an environment": (
        {"recipe": "text_process", "model": TEXT}, "steps",
    ),
    "text_igpo: needs an environment or steps": (
        {"recipe": "text_igpo", "model": TEXT}, "environment",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_a_docstring_is_checked(rule: str) -> None:
    changes, words = RULES[rule]
    reward = {"name": "format", "kind": "number"} if changes["model"] is TEXT else "brightness"
    tree = {
        "prompts": {"train": "x.txt", "per_iteration": 8},
        "rewards": [reward],
        **changes,
    }
    if isinstance(tree["recipe"], str):
        tree["recipe"] = {"name": tree["recipe"]}
    with pytest.raises(UserError) as told:
        run = run_from(tree, "test")
        check_plan(run)
        check_guidance(run)
        check_rewards(run)
    assert re.search(words, str(told.value)), str(told.value)
