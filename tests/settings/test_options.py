"""Every setting of a file is an option."""

import pytest

from flowrl.errors import UserError
from flowrl.evaluation.measure import parse_specs
from flowrl.evaluation.reward_evaluation import EvaluateRewards
from flowrl.evaluation.scoring import ScoreArguments
from flowrl.settings import RECIPE_SETTINGS
from flowrl.settings.command_line.arguments import (
    EvaluateArguments,
    ExportArguments,
    SampleArguments,
    parse_arguments,
)
from flowrl.settings.command_line.options import option_names
from flowrl.settings.read import dump, override, run_from
from tests.settings.test_words import TREE

RUN = run_from({**TREE, "model": {"pipeline": "p/q", "lora": None}}, "x")


@pytest.mark.parametrize(
    ("words", "where", "value"),
    [
        (["--track.with", "tensorboard", "wandb"], "track.with", ["tensorboard", "wandb"]),
        (["--track.with", "tensorboard"], "track.with", ["tensorboard"]),
        (["--track.with", "tensorboard,wandb"], "track.with", ["tensorboard", "wandb"]),
        (["--model.lora.targets", "to_q,to_k"], "model.lora.targets", ["to_q", "to_k"]),
        (["--track.with", "[]"], "track.with", []),
        (["--model.lora.rank", "8"], "model.lora.rank", 8),
        (["--model.lora.targets", "to_q", "to_k"], "model.lora.targets", ["to_q", "to_k"]),
        (["--model.call.max_sequence_length", "12"], "model.call", {"max_sequence_length": 12}),
        (["--model.guidance", "null"], "model.guidance.sample", None),
        (["--train.betas", "0.8", "0.9"], "train.betas", [0.8, 0.9]),
        (["--train.betas=[0.8, 0.9]"], "train.betas", [0.8, 0.9]),
        (["--train.rows-per-call", "4"], "train.rows_per_call", 4),
        (["--train.gradient-checkpointing"], "train.gradient_checkpointing", True),
        (["--train.no-gradient-checkpointing"], "train.gradient_checkpointing", False),
        (["--train.gradient_checkpointing=false"], "train.gradient_checkpointing", False),
        (["--evaluate.average", "null"], "evaluate.average", None),
        (["--steer.iterations", "0", "5"], "steer.iterations", [0, 5]),
        (["--budget.rates", "0.1", "0.9"], "budget.rates", [0.1, 0.9]),
        (["--rewards", "jpeg"], "rewards.0.name", "jpeg"),
        (["--rewards", "{name: shapes, kind: strict}", "jpeg"], "rewards.0.label", "shapes.strict"),
        (["--prompts.column", "null"], "prompts.column", "null"),
        (["--train.lr=1e-5"], "train.lr", 1e-5),
    ],
)
def test_an_option_sets_its_value(words, where, value):
    node = dump(override(RUN, words))
    for part in where.split("."):
        node = node[int(part)] if isinstance(node, list) else node[part]
    assert node == value


@pytest.mark.long
def test_every_setting_of_every_recipe_can_be_set_to_its_own_value():
    for name, kind in RECIPE_SETTINGS.items():
        model = {"language": "p/q"} if name.startswith("text_") else {"pipeline": "p/q"}
        run = run_from({**TREE, "model": model, "recipe": {"name": name}}, "x")
        tree = dump(run)
        words = []
        for option in option_names(kind):
            node = tree
            for part in option.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            if option != "recipe.name" and isinstance(node, int | float | str | bool):
                words += [f"--{option}", str(node)]
        assert len(words) > 40 and override(run, words) == run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train.lr", "abc"], "command line: train.lr: input should be a valid number, .*'abc'$"),
        (["--train.lr"], "--train.lr needs a value"),
        (["--train.lr", "1", "2"], "--train.lr takes one value, not 1 2"),
        (["train.lr", "1"], "'train.lr' is not an option; write --SECTION.SETTING VALUE"),
        (["--rewards", "[shapes"], "--rewards: not valid YAML: line 1"),
        (["--"], "-- is not known"),
        (["--train..lr", "1"], "--train..lr is not known; did you mean --train.lr"),
        (["--rewards.x.y", "1"], "--rewards.x.y is not known"),
        (["--train.iter", "1"], r"--train.iter is not known; did you mean --train.iterations\?$"),
        (["--recipe.beta_x", "1"], "--recipe.beta_x is not known; did you mean"),
        (
            ["--recipe.levels_per_sample", "1"],
            "not known; flow_grpo has no such setting, awm, nft, dpo, rwr and [0-9]+ more do$",
        ),
        (["--recipe", "{name: nft, eta: 0.5}"], "'eta' is not known; nft has no such setting, fl"),
        (
            ["--model.guidance.sample", "-1"],
            "^command line: model.guidance.sample: input should be greater than .*; "
            "model.guidance.sample: input should be 'none', not '-1'$",
        ),
        (["--rewards", ""], "rewards: expected at least 1 value, not "),
        (["--train.betas", "-.9", ".9"], "train.betas.0: .*greater than or equal to 0, not '-.9'"),
        (["--train.betas", ".9", "1"], "train.betas.1: .*less than 1, not '1'"),
        (["--train.betas", ".9", ".9", ".9"], "train.betas: expected at most 2 values, not "),
    ],
)
def test_a_wrong_option_is_one_sentence(words, message):
    with pytest.raises(UserError, match=message) as caught:
        override(RUN, words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", [["shapes,jpeg"], ["shapes", "jpeg"], ["[shapes, jpeg]"]])
def test_every_command_takes_rewards_with_commas_and_with_spaces(words):
    run = override(run_from(TREE, "x"), ["--rewards", *words, "--held-out-rewards", *words])
    assert [spec.name for spec in run.rewards] == ["shapes", "jpeg"] == [s.name for s in run.judges]
    for kind in (SampleArguments, EvaluateArguments, ScoreArguments, EvaluateRewards):
        line = ["here", "--rewards", *words]
        given = parse_arguments(kind, line, "x").rewards
        assert list(parse_specs(given, "--rewards")) == ["shapes", "jpeg"], kind


def test_a_reward_with_settings_may_stand_in_a_list():
    words = ["shapes,{name: shapes, kind: strict}", "{name: jpeg, weight: 0.5}"]
    run = override(run_from(TREE, "x"), ["--rewards", *words])
    assert [spec.label for spec in run.rewards] == ["shapes", "shapes.strict", "jpeg"]
    assert list(parse_specs(words, "x")) == ["shapes", "shapes.strict", "jpeg"]


@pytest.mark.parametrize(
    ("words", "both"),
    [
        (
            ["--train.lr", "1e-3", "--train.lr=1e-4"],
            "--train.lr is given twice, with 1e-3 and 1e-4",
        ),
        (["--train.max-grad-norm", "1", "--train.max_grad_norm", "2"], "with 1 and 2: keep one"),
        (["--track.no-panel", "--track.panel"], "with no value and no value"),
        (["--model", "a/b", "--model", "c/d"], "with a/b and c/d"),
        (["--recipe.name", "nft", "--recipe.name", "awm"], "with nft and awm"),
    ],
)
def test_an_option_that_is_given_twice_is_refused_with_both_values(words, both):
    with pytest.raises(UserError, match=both):
        override(run_from(TREE, "x"), words)


def test_a_list_that_is_given_twice_has_the_words_of_both():
    words = [
        "--rewards",
        "shapes",
        "--rewards=jpeg",
        "--train.betas",
        "0.5",
        "--train.betas",
        "0.6",
    ]
    run = override(run_from(TREE, "x"), words)
    assert [spec.name for spec in run.rewards] == ["shapes", "jpeg"]
    assert run.train.betas == (0.5, 0.6)


def test_commas_separate_numbers_and_fixed_names_and_no_texts():
    tree = TREE | {"recipe": {"name": "branch_grpo"}}
    words = ["--recipe.at", "0,3", "--track.tags", "a,b", "--evaluate.pass-at", "1,2", "4"]
    run = override(run_from(tree, "x"), words)
    assert run.recipe.at == (0, 3) and run.track.tags == ("a,b",)
    assert run.evaluate.pass_at == (1, 2, 4)
    given = parse_arguments(
        EvaluateArguments, ["r", "--pass-at", "1,4", "--prompts", "a,b.txt"], "x"
    )
    assert given.pass_at == (1, 4) and given.prompts == ("a,b.txt",)
    kept = parse_arguments(ExportArguments, ["r", "--formats", "diffusers,kohya"], "x").formats
    assert kept == ("diffusers", "kohya")
