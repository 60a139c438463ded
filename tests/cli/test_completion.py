"""Completion: the words that the schema gives are those that the settings know, without torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.cli.command_table import COMMANDS
from flowrl.cli.completion import SHELLS, candidates, completion_command, recipe_options
from flowrl.cli.help import command_options
from flowrl.cli.schema import read_schema
from flowrl.errors import UserError
from flowrl.paths import PROJECT
from flowrl.recipes import RECIPES
from flowrl.settings import RECIPE_SETTINGS
from flowrl.settings.command_line.options import option_names


def begun(*words: str) -> list[str]:
    return [word for word in candidates(words) if word.startswith(words[-1])]


def test_recipes_and_settings_are_those_of_the_imported_ones() -> None:
    assert list(read_schema()["recipes"]) == list(RECIPES)
    for name, settings in RECIPE_SETTINGS.items():
        own = {f"--recipe.{key.replace('_', '-')}" for key in settings.model_fields}
        assert {*recipe_options(name)} == own - {"--recipe.name"}, name
    assert list(recipe_options("anchors")) == [] == list(recipe_options("nothing"))


def test_every_option_of_train_is_offered() -> None:
    names = {f"--{n.replace('_', '-')}" for n in option_names(RECIPE_SETTINGS["nft"])}
    extra = {"--folder", "--resume", "--no-cache", "--help", "--restarts", "--trust", "--wait"}
    assert {*begun("train", "demo", "--")} == names | extra
    assert "--guidance" in command_options("sample") and "--run" not in command_options("sample")


def test_words_follow_what_stands_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/demo-0001/run.yaml", "mine.yaml", "notes.txt", "images/a.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("recipe:\n  name: mix_grpo\n")
    assert begun("t") == ["train"] and set(COMMANDS) < set(begun(""))
    assert begun("train", "mi") == ["mine.yaml"] and begun("plan", "demo_l")[-1] == "demo_lora"
    assert "--recipe.window" in begun("train", "mine.yaml", "--recipe.w")
    assert "--recipe.window" not in begun("train", "demo", "--recipe.w")
    assert begun("train", "demo", "--recipe.name", "mix") == ["mix_grpo", "mix_grpo_flash"]
    assert begun("train", "demo", "--recipe.name", "mix_grpo", "--recipe.wind") == [
        "--recipe.window"
    ]
    assert begun("new", "x", "--recipe", "aw") == ["awm"] == begun("recipes", "aw")
    assert begun("train", "--resume", "") == ["runs/demo-0001", "images/", "runs/"]
    assert begun("sample", "runs/d") == ["runs/demo-0001"]
    assert begun("train", "demo", "--model.dtype", "b") == ["bfloat16"]
    assert begun("train", "demo", "--prompts.train", "no") == ["notes.txt"]
    assert begun("score", "images", "--rewards", "bri") == ["brightness"]
    assert begun("serve-reward", "win") == ["win_rate"]
    assert begun("launch", "s") == ["slurm", "sky"] and begun("runs", "runs/d") == [
        "runs/demo-0001"
    ]
    assert begun("launch", "slurm", "mi") == ["mine.yaml"]
    assert "--train.lr" in begun("launch", "slurm", "mine.yaml", "--train.l")
    assert begun("completion", "") == list(SHELLS) and begun("nothing", "") == []
    with pytest.raises(UserError, match="give a shell, one of bash, zsh, fish"):
        completion_command(["tcsh"])


def test_a_word_takes_a_third_of_a_second_and_no_torch() -> None:
    code = (
        "import sys\n"
        "from flowrl.cli.app import exit_code\n"
        "assert exit_code('completion words train demo --recipe.'.split()) == 0\n"
        "assert exit_code(['completion', 'words', 'train', '--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    read_schema()  # renewed here where the code has changed
    before = os.times().children_user
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert os.times().children_user - before < 0.6  # in processor time, of both
    assert "--recipe.levels-per-sample" in done.stdout.split() and "--help" in done.stdout.split()


ASK = {
    "bash": "COMP_WORDS=(flowrl train demo_lo); COMP_CWORD=2; _flowrl; echo ${COMPREPLY[*]}",
    "zsh": "words=(flowrl train demo_lo); CURRENT=3; _flowrl",
    "fish": 'complete -C "flowrl train demo_lo"',
}
BEFORE = {"zsh": "compdef() { }; compadd() { echo ${@:#-*} }; "}  # as its completion system


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_runs_its_script(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    own = tmp_path / "flowrl"
    own.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flowrl "$@"\n')
    own.chmod(0o755)
    (tmp_path / "script").write_text(SHELLS[shell])
    code = f"{BEFORE.get(shell, '')}source {tmp_path}/script; {ASK[shell]}"
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(PROJECT), "HOME": str(tmp_path)}
    done = subprocess.run(
        [shell, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.stdout.split() == ["demo_lora"], done.stderr
