"""Messages that ask for one more option: the same command with it goes on."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from flowrl.cli import drill
from flowrl.cli.given_model import model_run
from flowrl.errors import UserError
from flowrl.paths import PROJECT
from flowrl.settings.trust import remember
from tests.support import runs, tiny_lm
from tests.support.advice import advice

OWN = """
def bright(samples):
    return samples.media.flatten(1).mean(1)
"""
FAST = ("--steps", "2", "--model.device", "cpu")


class Commands:
    """Runs commands in this process; UserError with what one said on stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def run(self, *words: str | Path) -> str:
        self.capsys.readouterr()
        code = runs.flowrl(*words)
        said = self.capsys.readouterr()
        if code:
            raise UserError(said.err)
        return said.out


@pytest.fixture
def commands(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


def from_elsewhere(settings: dict, folder: Path) -> Path:
    """The folder of a run that was not started here, whose reward is a file beside it."""
    (folder / "own.py").write_text(OWN)
    settings["rewards"] = [{"name": f"{folder / 'own.py'}:bright"}]
    settings.pop("held_out_rewards", None)
    run = folder / "run"
    run.mkdir()
    (run / "run.yaml").write_text(yaml.safe_dump(settings))
    return run


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["a model", "a run from elsewhere"])
def test_a_selection_has_rewards(
    pipeline: Path, tmp_path: Path, commands: Commands, subject: str
) -> None:
    words: tuple[str | Path, ...] = ("--model", pipeline)
    lacking = "--model has none"
    if subject != "a model":
        tree = runs.tree(pipeline, tmp_path, runs.NFT)
        words = (from_elsewhere(tree, tmp_path), "--weights", "base")
        lacking = "the run's are not loaded"
    sample = ("sample", *words, "a red ball", "--count", "1", *FAST)

    def with_rewards(*more: str) -> str:
        out = tmp_path / more[0]
        return commands.run(*sample, *more, "--rewards", "brightness", "--out", out)

    said = advice(
        "--steer needs rewards for the selection, and {}: add --rewards",
        lambda: commands.run(*sample, "--steer", "best"),
        lambda: with_rewards("--steer", "best", "--particles", "2"),
    )
    assert "steered by brightness" in said
    said = advice(
        "--optimise needs rewards for the selection, and {}: add --rewards",
        lambda: commands.run(*sample, "--optimise", "best"),
        lambda: with_rewards("--optimise", "best", "--rounds", "1"),
    )
    assert "brightness" in said
    with pytest.raises(UserError, match=lacking):
        commands.run(*sample, "--steer", "best")


@pytest.mark.slow
def test_the_best_rewriting_has_rewards_to_be_chosen_by(tmp_path: Path, commands: Commands) -> None:
    tree = yaml.safe_load((PROJECT / "configs" / "demo_joint.yaml").read_text())
    run = from_elsewhere(tree, tmp_path)
    words = ("sample", run, "a scarlet block", "--weights", "base", "--count", "1", *FAST)
    rewritten = ("--rewrite", "2", "--out", tmp_path / "out")
    said = advice(
        "--rewrite needs rewards for the selection, and {}: add --rewards",
        lambda: commands.run(*words, *rewritten),
        lambda: commands.run(*words, *rewritten, "--rewards", "brightness"),
    )
    assert "'a scarlet block': '" in said
    rewritten = ("--rewrite", "2", "--rewards", "brightness", "--out", tmp_path / "more")
    said = advice(
        "--rewrite cannot be combined with --steer, --optimise or --base-steps: leave them out",
        lambda: commands.run(*words, *rewritten, "--steer", "best"),
        lambda: commands.run(*words, *rewritten),
    )
    assert "'a scarlet block': '" in said


@pytest.mark.parametrize("more", [(), ("--rewards", "brightness")])
def test_a_model_that_rewrites_nothing_is_not_told_to_add_rewards(
    pipeline: Path, commands: Commands, more: tuple[str, ...]
) -> None:
    words = ("sample", "--model", pipeline, "a ball", *FAST)
    with pytest.raises(UserError, match="--rewrite is for runs of the recipe joint: leave it out"):
        commands.run(*words, "--rewrite", "2", *more)


@pytest.mark.slow
def test_an_evaluation_has_a_subject_rewards_and_prompts(
    pipeline: Path, tmp_path: Path, commands: Commands
) -> None:
    prompts = tmp_path / "new.txt"
    prompts.write_text("a ball\na cube\n")
    model: tuple[str | Path, ...] = ("--model", pipeline)
    few = ("--alone", "--per-prompt", "1", "--samples", "2", *FAST)
    whole = (*model, "--prompts", prompts, "--rewards", "brightness", *few)
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    del tree["prompts"]["held_out"]
    tree["evaluate"] = {"steps": 2}
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.yaml").write_text(yaml.safe_dump(tree))
    remember(run, tree)
    for refused in (("--rewards", "brightness"), (run, *model)):
        said = advice(
            "give either a run's folder or, with --model, the folder or hub name of a pipeline",
            lambda words=refused: commands.run("evaluate", *words),
            lambda: commands.run("evaluate", *whole),
        )
        assert "brightness" in said
    advice(
        "evaluate: --model has no rewards: add some with --rewards",
        lambda: commands.run("evaluate", *model, "--prompts", prompts, *few),
        lambda: commands.run("evaluate", *whole),
    )
    own = (run, "--weights", "base", *few)
    for owner in ((*model, "--rewards", "brightness", *few), own):
        said = advice(
            "evaluate: {}: add --prompts FILE",
            lambda words=owner: commands.run("evaluate", *words),
            lambda words=owner: commands.run("evaluate", *words, "--prompts", prompts),
        )
        assert "brightness" in said


@pytest.mark.parametrize("key", ["r", "lora_alpha", "target_modules"])
def test_an_adapter_with_a_damaged_description_is_copied_again(tmp_path: Path, key: str) -> None:
    model = tiny_lm.write(tmp_path / "model")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    whole = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({name: value for name, value in whole.items() if name != key}))
    halves = {f"a.lora_{half}.weight": torch.ones(2, 2) for half in "AB"}
    save_file(halves, adapter / "adapter_model.safetensors")

    def copied() -> object:
        file.write_text(json.dumps(whole))
        return model_run(str(model), adapter)

    assert advice(
        "--adapter: {} has no {}: copy the adapter again",
        lambda: model_run(str(model), adapter),
        copied,
    )


@pytest.mark.slow
def test_a_drill_begins_without_being_asked(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What then follows is what tests/drill test."""
    file = runs.write(runs.tree(pipeline, tmp_path, runs.NFT, iterations=1), tmp_path)
    assert runs.flowrl("train", file, "--folder", tmp_path / "run") == 0
    begun: list[Path] = []

    def drilled(_: object, faults: object, folder: Path) -> int:
        begun.append(folder)
        return 0

    monkeypatch.setattr(drill, "_drilled", drilled)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)

    def with_words(*, yes: bool) -> int:
        arguments = drill.DrillArguments(tmp_path / "run", out=tmp_path / "page", yes=yes)
        return drill.drill_run(arguments, True)

    advice(
        "drill: add --yes to begin without being asked",
        lambda: with_words(yes=False),
        lambda: with_words(yes=True),
    )
    assert begun == [tmp_path / "page"]
