"""What the messages of `flowrl import` advise is done, and the input is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import UserError
from flowrl.importing.readers.python_config import evaluated_config
from flowrl.importing.result import ImportedRun, imported
from flowrl.importing.sources import IMPORTERS, read_source
from flowrl.importing.writing import write_import
from flowrl.settings import RunSettings
from flowrl.settings.file.strict_yaml import parse_yaml
from flowrl.settings.read import check_rewards, run_from
from tests.importing.test_peers import (
    BASE,
    NO_COUNTS,
    OWN_ARGUMENTS,
    SMALL_FACTORY,
    TRL_WORDS,
    factory_file,
    flow_grpo_files,
    simple_tuner_file,
)
from tests.importing.test_readers import PYTHON
from tests.support.advice import advice

SCRIPT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

def short(completions, **columns):
    return [-len(text) for text in completions]

data = load_dataset("openai/gsm8k", "main", split="train")
GRPOTrainer(args=GRPOConfig(), reward_funcs=[short], train_dataset=data)
"""


def small_factory(folder: Path, trainer: str = "grpo", **train: Any) -> str:
    text = SMALL_FACTORY.replace("TRAINER", trainer).replace(", LEAF", "")
    tree = parse_yaml(text, "factory")
    tree["train"] |= train
    (folder / "run.json").write_text(json.dumps(tree))
    return str(folder / "run.json")


def grpo(words: str, devices: int = 1) -> ImportedRun:
    return imported(f"trl grpo {TRL_WORDS} {words}", "trl", devices)


@pytest.mark.parametrize("peer", ["flow_grpo", "Flow-Factory", "SimpleTuner"])
def test_a_word_of_none_is_replaced_by_one_of_the_library(tmp_path: Path, peer: str) -> None:
    def read(word: str) -> ImportedRun:
        if peer == "SimpleTuner":
            return imported(simple_tuner_file(tmp_path, mixed_precision=word))
        if peer == "Flow-Factory":
            change = ('mixed_precision: "bf16"', f'mixed_precision: "{word}"')
            return imported(factory_file(tmp_path, change), None, 8)
        what = flow_grpo_files(tmp_path)
        file = tmp_path / "base.py"
        line = f"    config.seed = 42\n    config.mixed_precision = '{word}'\n"
        file.write_text(BASE.replace("    config.seed = 42\n", line))
        return imported(what, None, 4)

    run = advice(
        "{}: {} is not one of {}, the words of {}: write one of them",
        lambda: read("bf17"),
        lambda: read("fp16"),
    )
    assert run.tree["model"]["dtype"] == "float16"


@pytest.mark.parametrize("what", NO_COUNTS)
def test_a_count_of_the_environment_is_written(what: str) -> None:
    words, name = NO_COUNTS[what]
    of = "trl" if what.startswith("trl") else None
    run = advice(
        "{}: {} is a value that the input does not hold, and the run is computed with it: write "
        "the number itself",
        lambda: imported(f"{words}=$ROWS", of, 1),
        lambda: imported(f"{words}=8", of, 1),
    )
    assert any(line.name.endswith(name) or name in line.name for line in run.lines)


def test_the_devices_of_a_flow_factory_file_are_given(tmp_path: Path) -> None:
    file = small_factory(tmp_path, "dgpo", group_size=8, per_device_batch_size=2)
    run = advice(
        "train.group_size: {} samples are more than {} processes x {} samples, which "
        "group_distributed refuses: give the --devices that the file is for",
        lambda: imported(file, "flow-factory", 1),
        lambda: imported(file, "flow-factory", 4),
    )
    assert run.tree["recipe"]["group"] == 8


def ready(run: ImportedRun, folder: Path) -> RunSettings:
    """The written run with a function in the place of its rewards."""
    write_import(run, folder / "run")
    (folder / "mine.py").write_text("def length(samples):\n    return [1.0] * len(samples.media)\n")
    tree = parse_yaml((folder / "run" / "run.yaml").read_text(), "run.yaml")
    settings = run_from(tree | {"rewards": [f"{folder}/mine.py:length"]}, "run.yaml")
    check_rewards(settings)
    return settings


def test_a_reward_that_flowrl_lacks_is_replaced(tmp_path: Path) -> None:
    """By another one in the file; and that by a function in the run. The advice was to write the
    function into run.yaml, which an import that is refused does not write."""
    text = SMALL_FACTORY.replace("TRAINER", "grpo").replace(", LEAF", "")

    def factory(model: str) -> ImportedRun:
        (tmp_path / "factory.yaml").write_text(text.replace("PickScore", model))
        return imported(f"{tmp_path}/factory.yaml", "flow-factory", 1)

    run = advice(
        "rewards: flowrl has none of {}: name another in the file, such as PickScore; a function "
        "of yours takes its place in the run.yaml that the import writes (docs/own_rewards.md)",
        lambda: factory("odd"),
        lambda: factory("PickScore"),
    )
    assert [reward["name"] for reward in run.tree["rewards"]] == ["pickscore"]
    (tmp_path / "1").mkdir()
    assert ready(run, tmp_path / "1").rewards[0].name.endswith("mine.py:length")

    def flow_grpo(name: str) -> ImportedRun:
        what = flow_grpo_files(tmp_path)
        file = tmp_path / "grpo.py"
        file.write_text(file.read_text().replace('{"ocr": 1.0, "qwenvl": 0.5}', f'{{"{name}": 1}}'))
        return imported(what, None, 4)

    run = advice(
        "reward_fn: flowrl has none of {}: name another in the file, such as pickscore; a function "
        "of yours takes its place in the run.yaml that the import writes (docs/own_rewards.md)",
        lambda: flow_grpo("qwenvl"),
        lambda: flow_grpo("pickscore"),
    )
    assert [reward["name"] for reward in run.tree["rewards"]] == ["pickscore"]
    (tmp_path / "2").mkdir()
    assert ready(run, tmp_path / "2").rewards[0].name.endswith("mine.py:length")


def test_the_devices_of_a_flow_grpo_file_are_given(tmp_path: Path) -> None:
    what = flow_grpo_files(tmp_path)
    run = advice(
        "--devices {}: {} x {} samples a call are no multiple of the {} samples of a prompt, which "
        "flow_grpo refuses: give the --devices that the file is for",
        lambda: imported(what, None, 1),
        lambda: imported(what, None, 4),
    )
    assert run.tree["prompts"]["per_iteration"] == 16


@pytest.mark.parametrize(
    "named", [{"model_family": "odd"}, {"model_family": "flux", "model_flavour": "odd"}]
)
def test_a_family_that_is_not_known_names_its_model(tmp_path: Path, named: dict[str, str]) -> None:
    run = advice(
        "model_family: the model of {} is not known: add pretrained_model_name_or_path",
        lambda: imported(simple_tuner_file(tmp_path, **named)),
        lambda: imported(simple_tuner_file(tmp_path, **named, pretrained_model_name_or_path="a/b")),
    )
    assert run.tree["model"]["pipeline"] == "a/b"


def test_a_model_is_added_to_a_command_or_to_a_script(tmp_path: Path) -> None:
    words = "trl grpo --dataset_name a/b --reward_funcs accuracy_reward"
    (tmp_path / "train.py").write_text(SCRIPT)
    for refused, mended in (
        (words, f"{words} --model_name_or_path c/d"),
        (
            f"{tmp_path}/train.py",
            f"python {tmp_path}/train.py --model_name_or_path c/d",
        ),
    ):
        run = advice(
            "model_name_or_path: the input names no model: add --model_name_or_path; a script's "
            "command goes into quotes, 'python SCRIPT.py --model_name_or_path NAME'",
            lambda refused=refused: imported(refused),
            lambda mended=mended: imported(mended),
        )
        assert run.tree["model"]["language"] == "c/d"


def test_one_of_two_sizes_of_a_generation_is_kept() -> None:
    for kept in ("--generation_batch_size 16", "--steps_per_generation 2"):
        run = advice(
            "generation_batch_size and steps_per_generation exclude each other in TRL: keep one",
            lambda: grpo("--generation_batch_size 16 --steps_per_generation 2"),
            lambda kept=kept: grpo(kept),
        )
        assert run.tree["prompts"]["per_iteration"] == 2  # groups of 8


def test_the_devices_of_a_command_of_trl_are_given() -> None:
    rows = "--per_device_train_batch_size 3 --generation_batch_size 24"
    run = advice(
        "generation_batch_size: {} is no multiple of {} processes x {} rows, which TRL refuses: "
        "give the --devices that the command is for",
        lambda: grpo(rows, 3),
        lambda: grpo(rows, 4),
    )
    assert run.tree["prompts"]["per_iteration"] == 3
    rows = "--per_device_train_batch_size 2 --steps_per_generation 1"
    run = advice(
        "num_generations: {} processes x {} rows x {} calls = {} samples are no multiple of {}, "
        "which TRL refuses: give the --devices that the command is for",
        lambda: grpo(rows, 1),
        lambda: grpo(rows, 4),
    )
    assert run.tree["prompts"]["per_iteration"] == 1


def test_a_reward_comes_from_the_script_or_is_added(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = "--model_name_or_path c/d --dataset_name a/b"
    for mended, name in (
        (f"python {tmp_path}/train.py {words}", f"{tmp_path}/train.py:short"),
        (
            f"python away.py {words} --reward_funcs accuracy_reward",
            "trl_rewards.py:accuracy_reward",
        ),
        (f"python away.py {words} --reward_model_name_or_path e/f", "sequence_classifier"),
    ):
        run = advice(
            "reward_funcs: the input names no reward: the script holds it, so import the script "
            "itself, or add --reward_funcs or --reward_model_name_or_path",
            lambda: imported(f"python away.py {words}"),
            lambda mended=mended: imported(mended),
        )
        assert [reward["name"] for reward in run.tree["rewards"]] == [name]


def test_rows_that_a_script_makes_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_ARGUMENTS)
    run = advice(
        "dataset_name: the script makes its rows by code, which an import does not run: write them "
        "to a file, and import the command in quotes, 'python SCRIPT.py --dataset_name FILE.jsonl'",
        lambda: imported(str(file)),
        lambda: imported(f"python {file} --dataset_name rows.jsonl"),
    )
    assert run.tree["prompts"]["train"] == "rows.jsonl"


def test_a_value_that_code_makes_is_written(tmp_path: Path) -> None:
    file = tmp_path / "c.py"

    def read(body: str) -> object:
        file.write_text(PYTHON.format(body=body))
        return evaluated_config(file, "one")[0]["a"]

    assert (
        advice(
            "{}: line {}: {} is not read, since an import runs no code: write the value itself",
            lambda: read("c.a = open('three').read()"),
            lambda: read("c.a = 3"),
        )
        == 3
    )


def test_an_input_that_no_library_claims_is_told_its_library(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learning_rates: 1.0\n")
    for of in (peer.name for peer in IMPORTERS.values()):
        source = advice(
            "{}: no library is recognised: add --of, one of {}",
            lambda: read_source(str(file), None),
            lambda of=of: read_source(str(file), of),
        )
        assert source.peer.name == of


def test_a_file_elsewhere_is_named_by_its_path(tmp_path: Path, monkeypatch) -> None:
    """The options of the command stay, which an import of the file itself would lose."""
    (tmp_path / "away").mkdir()
    (tmp_path / "here").mkdir()
    what = flow_grpo_files(tmp_path / "away")
    factory = factory_file(tmp_path / "away")
    monkeypatch.chdir(tmp_path / "here")
    options = "--config.train.learning_rate=0.5"
    run = advice(
        "{}: the file is not here: write the path that it has on this machine into the command",
        lambda: imported(f"python train.py --config grpo.py:ocr {options}", None, 4),
        lambda: imported(f"python train.py --config {what} {options}", None, 4),
    )
    assert run.tree["train"]["lr"] == 0.5
    run = advice(
        "{}: the file is not here: write the path that it has on this machine into the command",
        lambda: imported("ff-train default.yaml --train.learning_rate 0.5", None, 8),
        lambda: imported(f"ff-train {factory} --train.learning_rate 0.5", None, 8),
    )
    assert run.tree["train"]["lr"] == 0.5
    advice(
        "ff-train: the command names no file: give one, ff-train FILE.yaml",
        lambda: imported("ff-train --train.learning_rate 0.5", None, 8),
        lambda: imported(f"ff-train {factory}", None, 8),
    )


def test_a_file_of_configurations_is_told_which(tmp_path: Path) -> None:
    """Its base is one of them if it has no other: the message ended with no name at all."""
    flow_grpo_files(tmp_path)
    for name, function in (("grpo", "shared"), ("base", "get_config")):
        fields = advice(
            "{}: name one of its functions, such as {}:{}; it has {}",
            lambda name=name: read_source(f"{tmp_path}/{name}.py", "flow_grpo"),
            lambda name=name, function=function: (
                read_source(f"{tmp_path}/{name}.py:{function}", "flow_grpo").leaves
            ),
        )
        assert fields["resolution"] == 768
        with pytest.raises(UserError, match=f"{name}.py:{function}; it has {function}"):
            read_source(f"{tmp_path}/{name}.py", "flow_grpo")
        with pytest.raises(UserError, match=f"no function odd; it has {function}"):
            read_source(f"{tmp_path}/{name}.py:odd", "flow_grpo")
    (tmp_path / "empty.py").write_text("rows = 3\n")
    with pytest.raises(UserError, match="it has no function without arguments"):
        read_source(f"{tmp_path}/empty.py", "flow_grpo")
    with pytest.raises(UserError, match="no function odd; it has none without arguments"):
        read_source(f"{tmp_path}/empty.py:odd", "flow_grpo")
