"""Commands on the pages: each is understood, and each that needs no network and no server runs."""

import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NoReturn

import pytest
import yaml
from PIL import Image

import flowrl.api
from flowrl.cli import main
from flowrl.paths import PROJECT
from tests.support import page_blocks
from tests.support.page_blocks import NOT_HERE, PLAN_REFUSES, SMALL, smaller

ACTIONS = (  # what a command does after it has understood its words
    "flowrl.cli.run_start.start", "flowrl.cli.run_start.resume", "flowrl.cli.sample.sample_prompts",
    "flowrl.cli.evaluate.evaluate_weights", "flowrl.cli.report.print_report",
    "flowrl.cli.report.print_comparison", "flowrl.cli.export.export_run",
    "flowrl.cli.prove.prove_run", "flowrl.cli.serve.run_reward_server",
    "flowrl.cli.new.write_new_run", "flowrl.cli.doctor.print_findings",
    "flowrl.cli.device_check.check_device",
    "flowrl.evaluation.scoring.score_folder", "flowrl.evaluation.suites.list_suites",
    "flowrl.pages.reward_page.report_rewards", "flowrl.cli.drill.drill_run",
    "flowrl.cli.launch.launch_job", "flowrl.cli.vote.ask_for_votes",
    "flowrl.votes.fit.fit_reward_to", "flowrl.cli.convert.convert_file",
)  # fmt: skip
COMMANDS = page_blocks.commands()
OF_FLOWRL = sorted({line[line.index("flowrl ") :] for _, line in COMMANDS if "flowrl " in line})


class Understood(Exception):
    """The command has reached what it does."""


@pytest.fixture
def patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file and a run, where every action only says that it was reached."""

    def reached(*given: Any, **named: Any) -> NoReturn:
        raise Understood

    for module in iter_modules(flowrl.api.__path__, "flowrl.api."):
        import_module(module.name)  # one that a command imports would keep what stands here now
    actions = [action.rpartition(".") for action in ACTIONS]
    functions = [(name, getattr(import_module(module), name)) for module, _, name in actions]
    users = [module for name, module in sys.modules.items() if name.startswith("flowrl")]
    for name, function in functions:
        for user in users:  # also those that imported it before, whatever ran first
            if vars(user).get(name) is function:
                monkeypatch.setattr(user, name, reached)
    monkeypatch.setattr("flowrl.api.run.check_start", lambda run, given: None)
    run = yaml.safe_load((PROJECT / "configs" / "demo.yaml").read_text())
    for file in ("run.yaml", "RUN.yaml", "my_run.yaml", "runs/demo-0001/run.yaml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(yaml.safe_dump(run))
    page_blocks.write_runs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def seconds(line: str) -> Any:
    """Plans of whole published models count for seconds."""
    return pytest.param(line, marks=[pytest.mark.slow] if "plan models/" in line else [])


def exit_codes(line: str) -> tuple[int, ...]:
    """0; of `plan` also 1 where a run may not fit, and 1 alone where files are missing."""
    if "flowrl plan" not in line:
        return (0,)
    if any(part in line for part in PLAN_REFUSES):
        return (1,)
    return (0, 1) if "--memory" in line else (0,)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("line", [seconds(line) for line in OF_FLOWRL])
def test_a_command_of_a_page_is_understood(line: str) -> None:
    words = shlex.split(line.split(" '>'")[0])[1:]
    try:
        with pytest.raises(SystemExit) as done:
            main(words)
        assert done.value.code in exit_codes(line)
    except Understood:
        pass


@pytest.mark.parametrize("line", [line for _, line in COMMANDS if "flowrl " not in line])
def test_other_commands_name_files_that_are_there(line: str) -> None:
    words = shlex.split(line)
    files = [word for word in words if word.startswith(("configs/", "scripts/"))]
    modules = [f"{words[i + 1].replace('.', '/')}.py" for i, w in enumerate(words) if w == "-m"]
    own = [name for name in modules if name.startswith("flowrl/")]
    assert all((PROJECT / name).exists() for name in files + own)


def test_every_reason_leaves_a_command_out() -> None:
    reasons = (*NOT_HERE, *PLAN_REFUSES)
    unused = [part for part in reasons if not any(part in line for _, line in COMMANDS)]
    assert not unused


def shell(line: str, folder: Path) -> None:
    """Run a command as its reader does; one thread, and no network."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **own, "PYTHONPATH": str(PROJECT)}
    line = (
        line.replace("flowrl ", f"{sys.executable} -m flowrl ", 1)
        if line[:7] == "flowrl "
        else line
    )
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in exit_codes(line), (
        f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )


@pytest.fixture(scope="module")
def with_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short run of each demo, under the names that the pages use."""
    folder = tmp_path_factory.mktemp("pages")
    Image.new("RGB", (32, 32)).save(folder / "photo.png")
    page_blocks.write_runs(folder)
    for name in ("demo", "demo_lora", "demo_edit", "text_demo"):
        two = SMALL.replace("--train.iterations 1", "--train.iterations 2 --track.training 2")
        shell(f"flowrl train {name} {two}", folder)
    return folder


@pytest.mark.slow
def test_the_pages_commands_run(with_runs: Path) -> None:
    """Those of the tutorials follow from each other: tests/test_tutorials.py runs them in order."""
    tutorials = {path.name for path in (PROJECT / "docs" / "tutorials").glob("*.md")}
    failures = []
    for line in sorted({line for page, line in COMMANDS if page not in tutorials}):
        if any(part in line for part in NOT_HERE):
            continue
        try:
            shell(smaller(line).split(" > ")[0], with_runs)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n\n".join(failures)


@pytest.mark.slow
def test_own_run(tmp_path: Path) -> None:
    """The README's three blocks of a run of one's own, with its reward."""
    shell("flowrl new my_run", tmp_path)
    own = tmp_path / "my_run"
    block = next(b for b in page_blocks.blocks("python") if b.page == "README.md")
    assert "def warmth" in block.text
    (own / "my_reward.py").write_text(block.text)
    shell("flowrl plan run.yaml", own)
    shell("flowrl train run.yaml --train.iterations 2 --evaluate.samples 8", own)
    shell("flowrl sample runs/run-0001 'a green circle'", own)


@pytest.mark.slow
def test_programs_of_the_pages_run(with_runs: Path) -> None:
    """In processes of their own, where the pages' runs are, and nothing of flowrl's source."""
    page_blocks.readers_files(with_runs)
    failures = []
    for program in page_blocks.programs():
        (with_runs / "program.py").write_text(program.text)
        try:
            shell(f"{shlex.quote(sys.executable)} program.py", with_runs)
        except AssertionError as error:
            failures.append(f"{program.name}: {error}")
    assert not failures, "\n\n".join(failures)
