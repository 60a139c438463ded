"""Settings beside arguments mean the same as a mapping and as a command line's words, for every
argument that has a setting of its own; arguments take precedence over both."""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl.errors import UserError
from flowrl.settings.read import dump
from tests.run import test_own_runs as own_runs

BESIDE: dict[str, Any] = {
    "model": "a/b", "recipe": "nft", "prompts": ["a"], "rewards": ["brightness"],
}  # fmt: skip
GIVEN = {"model": "a/b", "recipe": "dpo", "rewards": ["brightness"]}
Case = tuple[dict[str, Any], dict[str, Any], list[str], Any]
# arguments; settings as a mapping, and as words; what the run then has at the last words' place
CASES: dict[str, Case] = {
    "prompts": (
        BESIDE | {"prompts": [{"x": "p"}]},
        {"prompts": {"column": "x"}}, ["--prompts.column", "x"], "x",
    ),
    "prompts, the same place": (
        BESIDE, {"prompts": {"train": "z.txt"}}, ["--prompts.train", "z.txt"], "train.jsonl",
    ),
    "held_out": (
        BESIDE | {"prompts": [{"x": "p"}], "held_out": [{"x": "q"}]},
        {"prompts": {"column": "x"}}, ["--prompts.column=x"], "x",
    ),
    "rewards": (BESIDE, {"rewards": ["shapes"]}, ["--rewards", "shapes"], ["brightness"]),
    "held_out_rewards": (
        BESIDE | {"held_out_rewards": ["shapes"]},
        {"held_out_rewards": ["brightness"]}, ["--held-out-rewards", "brightness"], ["shapes"],
    ),
    "recipe": (BESIDE, {"recipe": {"steps": 4}}, ["--recipe.steps", "4"], 4),
    "recipe, the same setting": (
        BESIDE | {"recipe": {"name": "nft", "steps": 6}},
        {"recipe": {"steps": 4}}, ["--recipe.steps", "4"], 6,
    ),
    "recipe, another one": (
        BESIDE, {"recipe": {"name": "flow_grpo"}}, ["--recipe.name", "flow_grpo"], "nft",
    ),
    "no recipe": (
        {k: v for k, v in BESIDE.items() if k != "recipe"},
        {"recipe": {"name": "nft", "steps": 4}},
        ["--recipe.name", "nft", "--recipe.steps", "4"], 4,
    ),
    "lora": (
        BESIDE | {"lora": 4}, {"model": {"lora": {"alpha": 8}}}, ["--model.lora.alpha", "8"], 8,
    ),
    "lora, the same setting": (
        BESIDE | {"lora": {"rank": 4}},
        {"model": {"lora": {"rank": 8}}}, ["--model.lora.rank", "8"], 4,
    ),
    "lora, none": (
        BESIDE | {"lora": False}, {"model": {"lora": {"rank": 8}}}, ["--model.lora.rank", "8"],
        None,
    ),
    "model": (
        BESIDE, {"model": {"dtype": "bfloat16"}}, ["--model.dtype", "bfloat16"], "bfloat16",
    ),
    "model, the same setting": (
        BESIDE, {"model": {"pipeline": "c/d"}}, ["--model.pipeline", "c/d"], "a/b",
    ),
    "iterations": (
        BESIDE | {"iterations": 3},
        {"train": {"iterations": 5}}, ["--train.iterations", "5"], 3,
    ),
    "lr": (BESIDE | {"lr": 1e-3}, {"train": {"lr": 5e-3}}, ["--train.lr", "5e-3"], 1e-3),
    "seed": (BESIDE | {"seed": 4}, {"train": {"seed": 1}}, ["--train.seed", "1"], 4),
    "given": (
        GIVEN | {"given": {"file": "x.jsonl", "kind": "pairs"}},
        {"given": {"share": 1.0}}, ["--given.share", "1.0"], 1.0,
    ),
    "given, the same setting": (
        GIVEN | {"given": {"file": "x.jsonl", "kind": "pairs"}},
        {"given": {"file": "y.jsonl"}}, ["--given.file", "y.jsonl"], "x.jsonl",
    ),
    "source": (
        {"source": "demo", "prompts": ["a"]},
        {"train": {"updates": 3}}, ["--train.updates", "3"], 3,
    ),
    "source, another recipe": (
        {"source": "demo", "prompts": ["a"]},
        {"recipe": {"name": "flow_grpo", "steps": 5}},
        ["--recipe.name", "flow_grpo", "--recipe.steps", "5"], 5,
    ),
    "source alone, another recipe": (
        {"source": "demo"},
        {"recipe": {"name": "flow_grpo", "steps": 5}},
        ["--recipe.name", "flow_grpo", "--recipe.steps", "5"], 5,
    ),
}  # fmt: skip
# what a live model or a resumed folder alone needs, and what is no setting
NO_SETTING = {"self", "live", "tokenizer", "settings", "trust"}


def read(arguments: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """Settings of the run, without the temporary folder of its lists."""
    tree = dump(flowrl.Run(**arguments, settings=settings).settings)
    for place in ("train", "held_out"):
        value = tree["prompts"][place]
        if isinstance(value, str):
            tree["prompts"][place] = Path(value).name
    return tree


def at(tree: Any, words: list[str]) -> Any:
    name = [word for word in words if word.startswith("--")][-1].partition("=")[0]
    for part in name.removeprefix("--").replace("-", "_").split("."):
        tree = None if tree is None else tree[part]
    return [reward["name"] for reward in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("case", CASES)
def test_both_forms_mean_the_same(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, mapping, words, wanted = CASES[case]
    trees, printed = list[Any](), list[str]()
    for settings in (mapping, words):
        trees.append(read(arguments, settings))
        printed.append("".join(capsys.readouterr()))
    assert trees[0] == trees[1] and at(trees[0], words) == wanted
    assert printed[0] == printed[1]


def test_every_argument_that_has_a_setting_is_tried() -> None:
    arguments = set(inspect.signature(flowrl.Run.__init__).parameters) - NO_SETTING
    assert {case.partition(",")[0] for case in CASES} - {"no recipe", "source alone"} == arguments


@pytest.mark.parametrize(
    ("mapping", "words", "sentence"),
    [
        ({"train": {"lrr": 1}}, ["--train.lrr", "1"], r"train\.lrr'? is not known.*train\.lr|'lr'"),
        ({"train": {"lr": -1}}, ["--train.lr", "-1"], r"train\.lr: input should be greater than 0"),
        ({"recipe": {"name": "nftt"}}, ["--recipe.name", "nftt"], "nftt"),
    ],
)
def test_both_forms_refuse_the_same(mapping: Any, words: list[str], sentence: str) -> None:
    arguments = {key: value for key, value in BESIDE.items() if key != "recipe"}
    for settings in (mapping, words):
        recipe = {} if "recipe" in mapping else {"recipe": "nft"}
        with pytest.raises(UserError) as refused:
            read(arguments | recipe, settings)
        assert re.search(sentence, str(refused.value))


@pytest.mark.parametrize("settings", [{"prompts": {"column": "x"}}, ["--prompts.column", "x"]])
def test_the_rows_of_an_evaluation_are_read_with_its_settings(
    settings: Any, pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = flowrl.Run.of_model(pipeline).evaluate(
        [{"x": "a red ball"}], rewards=["brightness"], samples=1, per_prompt=1, steps=1,
        settings=settings,
    )  # fmt: skip
    assert result.samples.prompts == ["a red ball"]
    with pytest.raises(UserError, match=r"row 1 has no 'prompt'; it has x"):
        flowrl.Run.of_model(pipeline).evaluate([{"x": "a red ball"}], rewards=["brightness"])


def test_arguments_of_a_resume_lie_over_its_words(tmp_path: Path) -> None:
    begun = flowrl.train(settings=own_runs.tree(tmp_path, iterations=1), folder=tmp_path / "run")
    words = ["--train.iterations", "5", "--train.lr", "0.5"]
    run = flowrl.train(resume=begun.folder, iterations=2, settings=words, trust=True)
    assert [line["iteration"] for line in run.metrics] == [0, 1, 2]
    assert run.metrics[-1]["lr"] == 0.5  # which no argument sets
