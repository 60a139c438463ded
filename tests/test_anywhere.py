"""Any working folder: files of flowrl by name, and user files called rewards.py or samplers.py."""

import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from flowrl.cli.app import exit_code
from flowrl.errors import UserError
from flowrl.package_alias import bind_packages
from flowrl.paths import CONFIGS_FOLDER, PROJECT, find, own_runs, run_file
from flowrl.settings.read import check_run, read_run

REWARD = """
from rewards.types import Samples

def warmth(samples: Samples):
    return [float((x[0] - x[2]).mean()) for x in samples.media]
"""
TINY = "--train.iterations 1 --evaluate.samples 4 --prompts.per-iteration 2 --recipe.group 4"
MAZE = "--train.iterations 1 --evaluate.samples 4 --prompts.per-iteration 2"
OWN = f"train demo {TINY} --rewards [rewards.py:warmth] --held-out-rewards []"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the user's rewards.py, and a samplers.py that fails when imported."""
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "samplers.py").write_text("raise RuntimeError('the samplers.py of the user')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(*words: str, cwd: Path, path: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    environment["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_a_name_of_flowrl_is_found_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in ("demo", "demo.yaml", "configs/demo", "configs/demo.yaml"):
        assert run_file(word) == CONFIGS_FOLDER / "demo.yaml"
        assert capsys.readouterr().err.startswith(f"{word}: configs/demo.yaml of flowrl (")
    assert run_file("papers/awm_sd35m_ocr").parent == CONFIGS_FOLDER / "papers"
    assert find("configs/suites/shapes.jsonl").is_file() and find("flowrl/demo/sums-lm").is_dir()
    assert find("LICENSE") == Path("LICENSE")  # no other file of the source tree, or of a wheel's
    with pytest.raises(
        UserError, match="none of flowrl's runs has this name; did you mean 'demo_lora'"
    ):
        run_file("demo_lorra")
    with pytest.raises(UserError, match=r"choose one of demo, .*, or papers/"):
        run_file("none")


def test_the_users_own_file_wins_and_a_folder_with_a_run_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert run_file("demo") == CONFIGS_FOLDER / "demo.yaml"  # a folder is no run
    (tmp_path / "demo.yaml").touch()
    assert run_file("demo") == Path("demo.yaml")
    assert "demo: demo.yaml\n" in capsys.readouterr().err
    assert run_file("demo.yaml") == Path("demo.yaml") and not capsys.readouterr().err
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").touch()
    assert run_file("configs/demo.yaml") == Path("configs/demo.yaml")
    (tmp_path / "demo" / "run.yaml").touch()
    with pytest.raises(UserError, match=r"write demo/run\.yaml or configs/demo\.yaml of flowrl"):
        run_file("demo")


@pytest.mark.parametrize(("there", "asked"), [("run.yaml", "run.yml"), ("run.yml", "run.yaml")])
def test_the_other_ending_of_a_file_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, asked: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / there).touch()
    with pytest.raises(UserError, match=rf"{asked}: no such file; did you mean {there}\?"):
        run_file(asked)


def test_another_program_gets_a_file_of_flowrl_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "configs/accelerate/ddp.yaml"
    assert exit_code(["path", name]) == 0
    assert Path(capsys.readouterr().out.strip()) == CONFIGS_FOLDER / "accelerate" / "ddp.yaml"
    (tmp_path / "configs" / "accelerate").mkdir(parents=True)
    (tmp_path / name).touch()
    assert exit_code(["path", name]) == 0 and capsys.readouterr().out == f"{name}\n"
    assert exit_code(["path", "configs/none.yaml"]) == 2 == exit_code(["path"])


@pytest.mark.parametrize("name", ["demo", "maze_demo"])
def test_a_run_of_flowrl_passes_its_checks_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert name in dict(own_runs())
    check_run(read_run(run_file(name)))


NOTEBOOK = """
import sys
assert sys.path[0] == "", sys.path
import flowrl
from importlib.util import find_spec
print(find_spec("rewards").origin, find_spec("samplers").origin, "torch" in sys.modules)
"""


def test_a_notebook_beside_such_files_finds_flowrls_packages(folder: Path) -> None:
    done = python("-c", NOTEBOOK, cwd=folder)
    packages = [str(PROJECT / name / "__init__.py") for name in ("rewards", "samplers")]
    assert done.stdout.split() == [*packages, "False"], done.stderr


def test_a_users_module_imported_before_stays_in_use_and_is_said(folder: Path) -> None:
    (folder / "rewards.py").write_text("mine = 1\n")
    code = "import rewards as own, flowrl\nfrom importlib.util import find_spec\n"
    done = python("-c", code + "print(own.mine, find_spec('rewards').origin)", cwd=folder)
    assert done.stdout.split() == ["1", str(PROJECT / "rewards" / "__init__.py")], done.stderr
    assert "`import rewards` means flowrl's package instead of" in done.stderr
    before = list(sys.meta_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind_packages()  # ours are imported here
    assert sys.meta_path == before


BARE = """
import importlib, pkgutil, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

def needed(name):  # a package with all that it requires
    try:
        lines = [Requirement(line) for line in requires(name) or ()]
    except PackageNotFoundError:
        return {name}
    below = [r.name for r in lines if r.marker is None or r.marker.evaluate({"extra": ""})]
    left = {canonicalize_name(each) for each in below} - seen
    seen.update(left)
    return {name}.union(*map(needed, left))

seen = set()
core = needed("flowrl")
wanted = [Requirement(line) for line in requires("flowrl")]
extras = {canonicalize_name(r.name) for r in wanted if "extra" in str(r.marker)} - core
found = {m: {canonicalize_name(d) for d in names} for m, names in packages_distributions().items()}
modules = {module for module, names in found.items() if names & extras}
assert {"httpx", "fastapi", "rapidocr"} <= modules, modules
for module in modules:
    sys.modules[module] = None  # importing it fails
import flowrl.cli, rewards.catalogue
for package in (flowrl.cli, rewards.catalogue):
    for each in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(each.name)
print("all imported")
"""


@pytest.mark.slow
def test_no_command_and_no_reward_needs_an_extra_to_be_imported(tmp_path: Path) -> None:
    done = python("-c", BARE, cwd=tmp_path)
    assert done.stdout.strip() == "all imported", done.stderr


LAUNCHERS = {
    "flowrl": ("-c", "import sys; sys.path[0] = ''; from flowrl.cli.app import main; main()"),
    "module": ("-m", "flowrl"),
    "accelerate": (
        *("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("-m", "flowrl"),
    ),
    "torchrun": (
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "flowrl"),
    ),
    "notebook": ("-c", f"from flowrl.cli import main\nmain({OWN.split()})"),
    "pytest": ("-m", "pytest", "-q", "test_mine.py"),
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_such_files_break_no_launcher_and_are_rewards(folder: Path, launcher: str) -> None:
    test = "import flowrl.cli, pytest\ndef test():\n    with pytest.raises(SystemExit) as done:\n"
    test += f"        flowrl.cli.main({OWN.split()})\n    assert done.value.code == 0\n"
    (folder / "test_mine.py").write_text(test)
    words = OWN.split() if launcher not in ("notebook", "pytest") else []
    done = python(*LAUNCHERS[launcher], *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    (metrics,) = folder.glob("runs/demo-0001/metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert "reward/warmth" in last or "held_out/warmth" in last


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with the contents of the wheel, and the files of the source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    files = source_files()
    zipfile.ZipFile(built_wheel(folder, files)).extractall(folder / "site")
    return folder / "site", files


def source_files() -> list[str]:
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(listed, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    return [name for name in names.split("\n") if (PROJECT / name).is_file()]


def copy_sources(folder: Path, files: Iterable[str]) -> None:
    """A copy of these files, which are as old as the copy, with the modes that umask gives."""
    for name in files:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_bytes((PROJECT / name).read_bytes())


def built_wheel(folder: Path, files: Iterable[str]) -> Path:
    """The wheel of a copy of these files."""
    copy_sources(folder, files)
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    made = python("-m", "pip", "wheel", *options, str(folder / "source"), cwd=folder)
    assert made.returncode == 0, made.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
@pytest.mark.parametrize("date", [None, "1700000000"])
def test_wheels_of_equal_sources_have_equal_bytes(
    date: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built at another place, of files that were written in another order and at another time."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    if date is not None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", date)
    files = source_files()
    first = built_wheel(tmp_path / "first", files)
    second = built_wheel(tmp_path / "a longer name" / "second", files[::-1])
    assert first.name == second.name and first.read_bytes() == second.read_bytes()


BUILD_SOURCES = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
MACHINES = {  # umask, and what differs between two machines' environments
    "one": (0o022, {"LC_ALL": "C", "TZ": "UTC", "PYTHONHASHSEED": "1"}),
    "a longer name": (0o077, {"LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2"}),
}


@pytest.mark.slow
def test_umask_locale_and_time_zone_change_no_byte_of_a_wheel_or_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    files, built = source_files(), list[tuple[str, bytes, str, bytes]]()
    for name, (mask, environment) in MACHINES.items():
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        before = os.umask(mask)
        try:
            wheel = built_wheel(tmp_path / name, files)
            done = python("-c", BUILD_SOURCES, str(tmp_path / name), cwd=tmp_path / name / "source")
        finally:
            os.umask(before)
        assert done.returncode == 0, done.stderr
        (sources,) = (tmp_path / name).glob("*.tar.gz")
        built.append((wheel.name, wheel.read_bytes(), sources.name, sources.read_bytes()))
    assert built[0] == built[1]


@pytest.mark.slow
def test_the_wheel_holds_every_file_and_trains_in_an_empty_folder(
    tmp_path: Path, wheel: tuple[Path, list[str]]
) -> None:
    site, files = wheel
    for name in files:
        if name.startswith(("flowrl/", "rewards/", "samplers/")):
            assert (site / name).is_file(), name
        if name.startswith("configs/"):
            assert (site / "flowrl" / name).is_file(), name
    assert (site / "flowrl" / "cli" / "schema.json").is_file()  # made by the build
    done = python("-m", "flowrl", "train", "demo", *TINY.split(), cwd=tmp_path, path=site)
    assert done.returncode == 0, done.stderr
    assert str(site / "flowrl" / "configs" / "demo.yaml") in done.stderr
    done = python("-m", "flowrl", "train", "maze_demo", *MAZE.split(), cwd=tmp_path, path=site)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_wheel_imports_and_explains_itself_without_extras(
    tmp_path: Path, wheel: tuple[Path, list[str]]
) -> None:
    help = (
        "from flowrl.cli.app import exit_code\nfrom flowrl.cli.help import COMMANDS\n"
        "assert not any(exit_code([name, '--help']) for name in COMMANDS)\n"
    )
    done = python("-c", BARE + help, cwd=tmp_path, path=wheel[0])
    assert done.returncode == 0 and "all imported" in done.stdout, done.stderr


VERSIONS = ("3.11", "3.12", "3.13", "3.14")
OF_AN_INTERPRETER = """
import sys
print("%d.%d" % sys.version_info[:2])
import accelerate, datasets, diffusers, jaxtyping, peft, pydantic, torch, transformers, yaml
"""


def interpreter(version: str) -> Path:
    """An interpreter of this version with flowrl's dependencies, from FLOWRL_PYTHONS (paths, as in
    PATH) or by its name in PATH. Skips the test where there is none."""
    listed = [Path(each) for each in os.environ.get("FLOWRL_PYTHONS", "").split(os.pathsep) if each]
    named = shutil.which(f"python{version}")
    missing = f"no Python {version} in FLOWRL_PYTHONS or PATH"
    for path in [*listed, *([Path(named)] if named else [])]:
        bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [str(path), "-c", OF_AN_INTERPRETER]
        done = subprocess.run(command, env=bare, capture_output=True, text=True)
        if done.stdout.strip() != version:
            continue
        if done.returncode == 0:
            return path
        missing = f"{path} lacks a dependency of flowrl: {done.stderr.strip().splitlines()[-1]}"
    pytest.skip(missing)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_trains_under_every_python(
    tmp_path: Path, wheel: tuple[Path, list[str]], version: str
) -> None:
    path = interpreter(version)

    def flowrl(*words: str, cwd: Path = tmp_path) -> str:
        environment = os.environ | {"PYTHONPATH": str(wheel[0]), "OMP_NUM_THREADS": "1"}
        command = [str(path), "-W", "error::SyntaxWarning", "-m", "flowrl", *words]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    flowrl("new", "mine")
    own = ["--train.iterations", "1", "--evaluate.samples", "4", "--prompts.per-iteration", "2"]
    assert "memory: about" in flowrl("plan", "run.yaml", cwd=tmp_path / "mine")
    flowrl("train", "run.yaml", *own, "--recipe.group", "4", cwd=tmp_path / "mine")
    flowrl("sample", "runs/run-0001", "a green circle", cwd=tmp_path / "mine")
    flowrl("train", "text_demo", "--train.iterations", "1", "--evaluate.samples", "4")
    assert "arXiv:2402.03300" in flowrl("recipes", "text_grpo")
