"""A resumed run names each rule of its rewards that has changed since it was begun."""

from typing import Any

import pytest

from rewards.rules import RULE_CHANGES, RULES_VERSION, changed_rules
from tests.support import runs, text_runs
from tests.support.runs import flowrl

# settings under which a reward follows each changed rule, in the order of RULE_CHANGES
CONCERNED: list[dict[str, Any]] = [
    {},
    {"find": "boxed"},
    {},
    {"find": "boxed"},
    {},
    {},
    {"find": "boxed"},
    {"find": "tag"},
    {"find": "last_number"},
    {"kind": "boxed"},
    {},
]
NESTED = {
    "in by_row": lambda spec: ("by_row", {"rewards": {"a": "brightness", "b": spec}}),
    "in a pair": lambda spec: ("win_rate", {"judge": spec}),
    "in one's own": lambda spec: ("own.py:mine", {"parts": [{"of": spec}]}),
}


@pytest.mark.parametrize(("change", "settings"), list(zip(RULE_CHANGES, CONCERNED, strict=True)))
def test_every_changed_rule_is_said_wherever_the_reward_stands(change, settings):
    spec = {"name": change.reward, **settings}
    said = list(changed_rules(change.reward, settings, change.since - 1))
    assert f"{change.reward}: {change.what}" in said
    for nested in NESTED.values():
        assert list(changed_rules(*nested(spec), change.since - 1)) == said
    assert not [*changed_rules(change.reward, settings, RULES_VERSION)]


@pytest.mark.parametrize(
    ("name", "settings"),
    [("exact_answer", {}), ("exact_answer", {"find": "hash"}), ("format", {"kind": "json"}),
     ("brightness", {}), ("own.py:code_tests", {})],
)  # fmt: skip
def test_rewards_whose_rule_is_as_before_are_not_accused(name, settings):
    assert not [*changed_rules(name, settings, 1)]


@pytest.mark.slow
def test_a_resume_says_so_once_and_drops_scores_of_the_older_rule(model, tmp_path, capsys):
    tree = text_runs.tree(model, tmp_path, text_runs.GRPO, iterations=2)
    tree["rewards"] = [{"name": "exact_answer", "kind": "text", "find": "last_number"}]
    tree["train"]["self_test"] = "off"
    tree["prompts"]["unwinnable"] = "keep"  # its answers are letters
    run = tmp_path / "run"
    assert flowrl("train", runs.write(tree, tmp_path), "--folder", run) == 0
    runs.as_older(run, "reward_rules")
    capsys.readouterr()
    assert flowrl("train", "--resume", run, "--train.iterations", "3") == 0
    out = capsys.readouterr().out
    assert out.count("whose rule of a reward was another: exact_answer: a sign behind") == 1
    assert "the held-out rewards exact_answer.text have changed" in out
    assert flowrl("train", "--resume", run, "--train.iterations", "4") == 0
    assert "rule of a reward" not in capsys.readouterr().out  # the new checkpoint has the new rule
