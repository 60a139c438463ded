"""Advice of messages about settings, their files and their command line: each is raised, and what
it says is done."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl.errors import UserError
from flowrl.prompts import PromptSet
from flowrl.settings import PipelineSettings
from flowrl.settings.checks import machine
from flowrl.settings.checks.machine import check_texts, check_workers
from flowrl.settings.command_line.arguments import TrainArguments, parse_arguments
from flowrl.settings.file.strict_yaml import parse_yaml
from flowrl.settings.model.engine import OwnEngineSettings
from flowrl.settings.model.quantization import Quantization
from flowrl.settings.read import (
    check_named_rewards,
    check_plan,
    check_rewards,
    override,
    read_run,
    run_from,
    settings_of_words,
)
from flowrl.settings.sections.data import RewardSpec
from flowrl.settings.sections.run import RunSettings
from flowrl.settings.words.short_forms import spelled_out
from tests.prompts.test_followed_advice import rows
from tests.settings.test_advice_works import IMAGES, TEXTS
from tests.support.advice import advice
from tests.votes.test_asking import FITTED
from tests.votes.test_asking import RUN as ASKING

DEMO = Path("configs/demo.yaml")


def checked(tree: Mapping[str, Any], **changes: Any) -> RunSettings:
    """The run of settings, some of them changed, once all checks of settings alone have passed."""
    run = run_from({**tree, **changes}, "the run")
    check_plan(run)
    check_rewards(run)
    check_named_rewards(run)
    return run


def test_a_run_that_asks_has_one_fitted_reward() -> None:
    advice(
        "ask: its votes renew the run's reward {}; name one of them in rewards, for all prompts",
        lambda: checked(ASKING, rewards=["shapes"]),
        lambda: checked(ASKING, rewards=[FITTED]),
    )


def test_a_run_that_asks_has_a_reward_that_stays() -> None:
    """Another reward, or the fit of a folder."""
    for held_out in ([{"name": "shapes", "kind": "strict"}], [FITTED]):
        advice(
            "and alarms need a reward that stays the same: name one in held_out_rewards",
            lambda: checked(ASKING, held_out_rewards=[]),
            lambda held_out=held_out: checked(ASKING, held_out_rewards=held_out),
        )


def test_ray_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is looked for, and neither imported nor begun before weights load."""
    run = run_from({**IMAGES, "workers": {"sampling": 1}}, "the run")
    monkeypatch.setattr(machine, "find_spec", lambda _: None)

    def installed() -> None:
        monkeypatch.setattr(machine, "find_spec", lambda _: object())
        check_workers(run, run.algorithm())

    advice(
        "workers need Ray: pip install 'flowrl[ray]'",
        lambda: check_workers(run, run.algorithm()),
        installed,
    )


@pytest.mark.parametrize("backend", ["bitsandbytes", "torchao", "quanto", "gguf"])
def test_the_package_of_a_quantization_is_installed(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "flowrl.settings.model.quantization.find_spec"
    monkeypatch.setattr(place, lambda _: None)
    tree: dict[str, Any] = {"backend": backend, "bits": 8}
    if backend == "gguf":
        (tmp_path / "a.gguf").write_bytes(b"GGUF\x03" + bytes(27))
        tree = {"backend": backend, "file": str(tmp_path / "a.gguf")}
    quantized = Quantization.model_validate(tree)

    def installed() -> None:
        monkeypatch.setattr(place, lambda _: object())
        quantized.check()

    advice("model.quantization: {} needs: pip install", quantized.check, installed)


def test_a_pipeline_reads_a_column_of_texts(tmp_path: Path) -> None:
    """The setting that the message names is the one that is changed."""
    chat = [{"role": "user", "content": "draw a cat"}]
    source = rows(tmp_path, {"prompt": chat, "caption": "a cat"})
    model = PipelineSettings(pipeline="x")

    def read(prompts: dict[str, Any]) -> PromptSet:
        run = run_from({**IMAGES, "prompts": {"train": str(source), **prompts}}, "the run")
        check_texts(run.prompts.read("train"), model)
        return run.prompts.read("train")

    found = advice(
        "the prompt is a list of chat messages, but model.{} takes a text: name another column",
        lambda: read({}),
        lambda: read({"column": "caption"}),
    )
    assert found.texts == ("a cat",)


@pytest.mark.parametrize("kept", ["a", "b"])
def test_an_option_that_is_given_twice(kept: str) -> None:
    advice(
        "{}: --{} is given twice, with {}: keep one",
        lambda: parse_arguments(TrainArguments, ["--folder", "a", "--folder=b"], "train"),
        lambda: parse_arguments(TrainArguments, ["--folder", kept], "train"),
    )
    run = run_from(IMAGES, "the run")
    changed = advice(
        "--{} is given twice, with {}: keep one",
        lambda: override(run, ["--train.lr", "1e-3", "--train.lr=1e-4"]),
        lambda: override(run, ["--train.lr", "1e-3"]),
    )
    assert changed.train.lr == 1e-3
    name = advice(
        "{} is given twice, with {} and {}: keep one",
        lambda: override(run, ["--recipe.name", "nft", "--recipe.name=dpo"]),
        lambda: override(run, ["--recipe.name", "nft"]),
    )
    assert name.recipe.name == "nft"


def test_an_option_is_written_with_dashes_and_its_section() -> None:
    run = run_from(IMAGES, "the run")
    changed = advice(
        "is not an option; write --SECTION.SETTING VALUE",
        lambda: override(run, ["train.lr", "1e-3"]),
        lambda: override(run, ["--train.lr", "1e-3"]),
    )
    assert changed.train.lr == 1e-3


@pytest.mark.parametrize(
    ("written", "read"), [("010", 8), ("-0_17", -15), ("1:30:00", 5400), ("1:30.5", 90.5)]
)
def test_a_number_of_another_base_is_written_as_it_is_read_or_in_quotes(
    written: str, read: float
) -> None:
    found = advice(
        "{} would be read as {}: write {}, or put quotes around a text",
        lambda: parse_yaml(f"a: {written}", "run.yaml"),
        lambda: parse_yaml(f"a: {read}\nb: '{written}'", "run.yaml"),
    )
    assert found == {"a": read, "b": written}


def test_a_runs_file_of_an_older_windows_program(tmp_path: Path) -> None:
    text = f"base: {DEMO.resolve()}\ntrack: {{panel: false}}  # caf\xe9\n"
    (tmp_path / "a.yaml").write_bytes(text.encode("cp1252"))

    def saved() -> RunSettings:
        (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
        return read_run(tmp_path / "a.yaml")

    run = advice(
        "{}: not valid YAML: line {} is not UTF-8; save the file as UTF-8",
        lambda: read_run(tmp_path / "a.yaml"),
        saved,
    )
    assert not run.track.panel


@pytest.mark.parametrize("kept", ["lr: 1.0e-3", "lr: 1.0e-4"])
def test_a_setting_that_a_file_has_twice(kept: str) -> None:
    found = advice(
        "{} is given twice, in line {} and in line {}: keep one of them",
        lambda: parse_yaml("train:\n  lr: 1.0e-3\n  lr: 1.0e-4\n", "run.yaml"),
        lambda: parse_yaml(f"train:\n  {kept}\n", "run.yaml"),
    )
    assert found == {"train": {"lr": float(kept.partition(": ")[2])}}


def checked_engine(file: Path, methods: Sequence[str]) -> None:
    """Checks an engine that has these methods."""
    lines = [f"    def {name}(self, *words): ..." for name in methods]
    file.write_text("\n".join(["class Mine:", "    pass", *lines, ""]))
    OwnEngineSettings(name=f"{file}:Mine").check()


def test_an_engine_gets_the_method_that_it_lacks(tmp_path: Path) -> None:
    """One after the other: the next message names the next method."""
    methods = ("load", "sample", "close")
    for number, name in enumerate(methods):
        with pytest.raises(UserError, match=f"has no method {name}: "):
            checked_engine(tmp_path / f"{name}.py", methods[:number])
    advice(
        "has no method {}: an engine has load, sample and close; see",
        lambda: checked_engine(tmp_path / "none.py", ()),
        lambda: checked_engine(tmp_path / "whole.py", methods),
    )


def test_steps_get_a_reward() -> None:
    tree = TEXTS | {
        "recipe": {"name": "text_process"},
        "model": {"language": "flowrl/demo/sums-lm", "steps": {"separator": "\n\n"}},
    }
    for name in ("process_reward", "judge"):
        advice(
            "model.steps: no reward scores the steps: name one in intermediate_rewards, such as",
            lambda: check_plan(run_from(tree, "the run")),
            lambda name=name: check_plan(
                run_from({**tree, "intermediate_rewards": [name]}, "the run")
            ),
        )


def test_a_file_in_place_of_its_folder() -> None:
    run = advice(
        "{} is a folder: give a run's file, such as configs/demo.yaml",
        lambda: read_run(Path("configs")),
        lambda: read_run(DEMO),
    )
    assert run.recipe.name == "nft"


def test_the_base_of_settings_is_named_itself() -> None:
    run = advice(
        "base: only a run file can have a base: name that file itself",
        lambda: run_from({"base": "configs/demo.yaml", "train": {"lr": 1e-3}}, "settings"),
        lambda: override(read_run(DEMO), {"train": {"lr": 1e-3}}),
    )
    assert run.train.lr == 1e-3


def test_the_recipe_that_the_message_shows_is_passed() -> None:
    shown = flowrl.recipe("nft", steps=8)
    settings = advice(
        "pass a recipe, such as recipe=flowrl.recipe('nft', steps=8)",
        lambda: settings_of_words(["--train.lr", "1e-3"], None),
        lambda: settings_of_words(["--train.lr", "1e-3"], shown),
    )
    assert checked(IMAGES, recipe=dict(shown), **settings).train.lr == 1e-3


def test_a_recipe_gets_its_name() -> None:
    run = advice(
        "recipe.name: missing: write one, such as `recipe: {}`",
        lambda: checked(IMAGES, recipe={"steps": 8}),
        lambda: checked(IMAGES, **parse_yaml("recipe: {name: nft, steps: 8}", "run.yaml")),
    )
    assert run.recipe.name == "nft"


def test_a_weight_is_changed() -> None:
    same = {"name": "brightness", "label": "again"}
    advice(
        "add up to 0, so no sample is better than another: change a weight",
        lambda: checked(IMAGES, rewards=["brightness", same | {"weight": -1}]),
        lambda: checked(IMAGES, rewards=["brightness", same | {"weight": -0.5}]),
    )


@pytest.mark.parametrize("before", [["brightness"], ["brightness", "jpeg"]])
def test_a_reward_that_only_compares_has_weight_0(before: list[str]) -> None:
    """Missing, and with a weight; or another reward is named in the recipe."""

    def gated(auxiliary: str, rewards: list[Any]) -> RunSettings:
        gate = {"name": "proxy_gate", "auxiliary": [auxiliary], "share": 0.5}
        anchors = [{"weight": 0.1, "gated": True}]
        recipe = {
            "name": "nft",
            "advantage": ["standardize", gate],
            "loss": {"name": "nft", "anchors": anchors},
        }
        return checked(IMAGES, recipe=recipe, rewards=rewards)

    silent = {"name": "jpeg", "weight": 0}

    def followed() -> None:
        gated("jpeg", ["brightness", silent])
        gated("loudness", ["brightness", "jpeg", {**silent, "name": "loudness"}])

    advice(
        "but this recipe only compares samples by it: write {}, or name another reward in the",
        lambda: gated("jpeg", before),
        followed,
    )


def test_the_label_of_scores_and_the_setting_label() -> None:
    def followed() -> list[RewardSpec]:
        trees = (
            {"name": "safety", "settings": {"label": "a"}},
            {"name": "safety", "label": "risk", "settings": {"label": "a"}},
        )
        return [RewardSpec.model_validate(tree) for tree in trees]

    setting, both = advice(
        "has a setting `label` too: write that as settings: {}; to name the scores, give both",
        lambda: RewardSpec.model_validate({"name": "safety", "label": "a"}),
        followed,
    )
    assert (setting.label, both.label) == ("safety", "risk")
    assert setting.settings == both.settings == {"label": "a"}


def test_data_sets_get_names() -> None:
    twice = {"source": "a.jsonl", "split": "train"}, {"source": "a.jsonl", "split": "test"}
    run = advice(
        "are not unique; give each data set a `name`",
        lambda: checked(IMAGES, prompts={"train": [*twice]}),
        lambda: checked(IMAGES, prompts={"train": [one | {"name": one["split"]} for one in twice]}),
    )
    assert [one.label for one in run.prompts.train] == ["train", "test"]


def test_each_part_has_rewards_and_each_reward_a_part() -> None:
    def routed(modalities: dict[str, list[str]]) -> RunSettings:
        recipe = {"name": "flow_grpo", "modalities": modalities}
        return checked(IMAGES, recipe=recipe, rewards=["brightness", "loudness"])

    whole = {"video": ["brightness"], "audio": ["loudness"]}
    advice(
        "modalities: name the rewards of each part, {}",
        lambda: routed({"video": ["brightness", "loudness"], "audio": []}),
        lambda: routed(whole),
    )
    advice(
        "is none of the rewards: name one of {}",
        lambda: routed({**whole, "audio": ["loud"]}),
        lambda: routed(whole),
    )
    advice(
        "trains no part: name it for one",
        lambda: routed({"video": ["brightness"]}),
        lambda: routed(whole),
    )


@pytest.mark.parametrize("kind", ["pipeline", "language"])
def test_a_model_that_is_no_folder_says_its_kind(kind: str) -> None:
    """A recipe of one's own is of either kind."""
    tree = {"recipe": {"name": "mine.py:grpo"}, "model": "owner/name"}
    spelled = advice(
        "model: {} is not a folder, and the recipe does not say which kind it is: write",
        lambda: spelled_out(tree),
        lambda: spelled_out({**tree, "model": {kind: "owner/name"}}),
    )
    assert spelled["model"] == {kind: "owner/name"}
