"""A stranger's machine: the wheel in a fresh environment, an empty folder, the pages' commands.

    python scripts/stranger.py [--oldest] [--only TEXT] [--folder DIR] [--jobs 2]
    python scripts/stranger.py --renew

The wheel is installed without extras, with the newest packages that pip resolves, or with --oldest
the oldest that pyproject.toml admits. torch alone has the version of constraints.txt: a newer one
would be gigabytes for a GPU. Then every command of README.md, docs/ and `flowrl new` that needs no
weights, GPU or network is run (training for one iteration), each command's --help, `flowrl doctor`,
every block of Python (the demo's weights stand in for those of the hub), and `flowrl plan` for
every block of YAML; commands that do not need each other run side by side. Each extra is laid over
this environment and tried, so is Jupyter, with the notebooks of examples/, and the wheel is tried
under other interpreters (those of FLOWRL_PYTHONS, paths as in PATH, and python3.N of PATH). Exit
code 1 if one fails. Prints versions, seconds, and the commands left out.

--renew writes constraints.txt, and the versions that `flowrl doctor` names: the newest that pip
resolves for flowrl with its tools, if all commands run with them. Packages of extras that were not
installed keep their versions.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import yaml
from make_venv import PROJECT, torch_index
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

sys.path.insert(0, str(PROJECT))

from flowrl.cli.command_table import COMMANDS
from flowrl.cli.doctor import PROVEN_VERSIONS
from tests.support.page_blocks import (
    NOT_HERE,
    PLAN_REFUSES,
    SMALL,
    blocks,
    commands,
    named_files,
    own_files,
    programs,
    readers_files,
    smaller,
    tree_of,
    write_runs,
)

DEMOS = ("demo", "demo_lora", "demo_edit", "text_demo")  # the runs that pages name
SECONDS = 900  # of one command
CONSTRAINTS, DOCTOR = PROJECT / "constraints.txt", PROJECT / "flowrl" / "cli" / "doctor.py"
SERVED = "http://127.0.0.1:8791"
OF_EXTRAS = {  # a command that needs it; not tried: rewards (make test-open-clip), ray, trl, docs
    "track": f"flowrl train demo {SMALL} --track.with tensorboard",
    "serve,remote": "flowrl serve-reward shapes --port 8791 & server=$!; for _ in $(seq 200); do "
    "(: < /dev/tcp/127.0.0.1/8791) 2> /dev/null && break; sleep 1; done; flowrl score . --rewards "
    f"'{{name: remote, url: \"{SERVED}\"}}'; code=$?; kill $server; exit $code",
    "ocr": "flowrl score . --rewards ocr",
    "math": "python -c 'import rewards; rewards.load(\"math_answer\")'",
    "video": "python -c 'import av'",
    "gguf": "python -c 'import gguf'",
}
MISSING = (
    "pip install 'flowrl[",
    "is not installed",
    "no folder ",
    "no such file",
    "has no column",
    "no row of",  # ... has a column: the file that stands in for the reader's has other rows
    "above the model's longest side",  # the demo's model stands in for the reader's
    "has texts, but the run's model makes images",  # texts stand in for the reader's pairs
)
SHORT = ("flowrl doctor", "flowrl recipes nft", f"flowrl train demo {SMALL}")
SHORT += (f"flowrl train text_demo {SMALL}", "flowrl sample runs/demo-0001 'a green circle'")


def main() -> None:
    parser = argparse.ArgumentParser(description="A stranger's machine")
    parser.add_argument("--oldest", action="store_true")
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--only", default="", help="run the commands with this text alone")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="side by side")
    given = parser.parse_args()
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="stranger-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    wheel, limits = built(folder), folder / "limits.txt"
    limits.write_text("\n".join([pinned_torch(), *(lower_bounds() if given.oldest else ())]) + "\n")
    if given.renew:
        limits.write_text(newest(folder / "tools", wheel, limits))
    python = installed(folder / "venv", wheel, limits)
    size = gigabytes(folder / "venv" / "lib")
    print(f"installed in {time.monotonic() - began:.0f} s, {size:.1f} GB", flush=True)
    print(run(f"{python} -m pip freeze", folder).stdout)
    empty, failed = made(folder / "empty"), list[str]()
    more: list[Callable[[], list[str]]] = []
    if not given.oldest:
        more = extras(folder, python, wheel, limits, given.only)
        more += notebooks(folder, python, limits, given.only)
        more += interpreters(folder, wheel, limits, given.only)
    for stage in stages(empty, python, given.only):
        chains, more = [*(partial(tried, chain, empty, python) for chain in stage), *more], []
        with ThreadPoolExecutor(given.jobs) as pool:
            failed += [line for found in pool.map(lambda chain: chain(), chains) for line in found]
    left = sorted({line for _, line in commands() if why(line)})
    print("\nleft out:", *(f"  {why(line)}: {line}" for line in left), sep="\n")
    print(f"\n{len(failed)} failed{''.join(f'{chr(10)}  {line}' for line in failed)}")
    print(f"{time.monotonic() - began:.0f} s in all")
    if given.renew and not failed:
        renewed(limits.read_text(), write=not given.only)
    sys.exit(bool(failed))


def built(folder: Path) -> Path:
    """The wheel of this source tree."""
    build = f"{sys.executable} -m pip wheel -q --no-deps --no-build-isolation -w {folder} {PROJECT}"
    run(build, folder, check=True)
    (wheel,) = folder.glob("flowrl-*.whl")
    return wheel


def installed(folder: Path, wheel: Path, limits: Path, extra: str = "", python: str = "") -> Path:
    """The interpreter of a new environment with the wheel."""
    if python:
        run(f"{python} -m venv --clear {folder}", folder.parent, check=True)
    else:
        venv.create(folder, with_pip=True, clear=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    index = " ".join(torch_index(pip, ["-c", str(limits)]))
    install = f"{' '.join(pip)} install -q --no-compile -c {limits}"
    run(f"{install} {index} torch", folder, check=True)
    run(f"{install} '{wheel}{extra}'", folder, check=True)
    return Path(pip[0])


def gigabytes(folder: Path) -> float:
    """Size of all files below a folder, links not followed."""
    files = (path.lstat() for path in folder.rglob("*") if not path.is_dir())
    return sum(file.st_size for file in files) / 1e9


def pinned_torch() -> str:
    return re.findall(r"^torch==.*$", CONSTRAINTS.read_text(), re.MULTILINE)[0]


def lower_bounds() -> list[str]:
    """The oldest version of each dependency that pyproject.toml admits, but torch's."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    return [
        f"{each.name}=={bound.version}"
        for each in wanted
        for bound in each.specifier
        if each.name != "torch" and bound.operator == ">="
    ]


def newest(folder: Path, wheel: Path, limits: Path) -> str:
    """Pins of the newest packages for flowrl with its tools, in the form of constraints.txt."""
    python = installed(folder, wheel, limits, "[dev]")
    frozen = run(f"{python} -m pip freeze --exclude flowrl", folder, check=True).stdout
    pins = [re.sub(r"\+.*$", "", line) for line in frozen.splitlines() if "==" in line]
    return "\n".join(sorted(pins, key=str.lower)) + "\n"


def renewed(pins: str, write: bool) -> None:
    """Print what changes in the pins, and write them where the tests and `doctor` read them."""
    before = set(CONSTRAINTS.read_text().splitlines())
    pins, kept = with_kept(pins, before)
    changes = sorted(before ^ set(pins.splitlines()), key=str.lower)
    print("\n".join(f"{'-' if line in before else '+'} {line}" for line in changes) or "no change")
    print(f"kept as they were, since not installed: {', '.join(kept) or 'none'}")
    if not write:
        return print("not written: --only ran a part of the commands")
    CONSTRAINTS.write_text(pins)
    text = DOCTOR.read_text()
    for name, old in PROVEN_VERSIONS.items():
        (new,) = re.findall(rf"^{name}==(.*)$", pins, re.MULTILINE)
        text = text.replace(f'"{name}": "{old}"', f'"{name}": "{new}"')
    DOCTOR.write_text(text)


def with_kept(pins: str, before: Iterable[str]) -> tuple[str, list[str]]:
    """The new pins with the former ones of all packages that have no new one, and the latter."""
    new = pins.splitlines()
    installed = {canonicalize_name(line.partition("==")[0]) for line in new}
    kept = [
        line
        for line in before
        if "==" in line and canonicalize_name(line.partition("==")[0]) not in installed
    ]
    kept.sort(key=str.lower)
    return "\n".join(sorted([*new, *kept], key=str.lower)) + "\n", kept


def made(empty: Path) -> Path:
    """The folder that commands run in, with the files that they name."""
    empty.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (32, 32)).save(empty / "photo.png")
    write_runs(empty)
    return empty


def stages(empty: Path, python: Path, only: str) -> Iterator[list[list[str]]]:
    """Commands in two stages of chains; those of a stage's chains do not need each other, and the
    second needs the runs of the first. A chain's commands read or write the same run."""
    helps = [f"flowrl {name} --help" for name in COMMANDS]
    said = run(f"{python} -m flowrl new mine", empty, check=True).stdout
    new = [
        f"cd mine && {line.partition('#')[0].strip()}"
        for line in said.splitlines()
        if line.startswith("  flowrl ")
    ]
    new = [f"{line} {SMALL}" if " train " in line else line for line in new]
    runs = [[f"flowrl train {name} {SMALL} --track.training 1"] for name in DEMOS]
    pages = [smaller(line).split(" > ")[0] for _, line in commands() if not why(line)]
    scripts = [[f"python {name}"] for name in program_files(empty)]
    plans = [[f"cd {name} && flowrl plan block.yaml"] for name in yaml_folders(empty)]
    for stage in ([["flowrl doctor", *helps], new, *runs, *plans], [*run_chains(pages), *scripts]):
        yield [[line for line in chain if only in line] for chain in stage]


def run_chains(lines: Iterable[str]) -> list[list[str]]:
    """Different lines by the run that they name first, in the pages' order: a page's first line
    about a run may be the one that makes it."""
    chains: dict[str, list[str]] = {}
    for line in dict.fromkeys(lines):
        named = re.search(r"runs/\w+", line)
        chains.setdefault(named[0] if named else line, []).append(line)
    return list(chains.values())


def program_files(empty: Path) -> list[str]:
    """Write the Python blocks of the pages as files; returns their names."""
    readers_files(empty)
    names = []
    for program in programs():
        names.append(f"{re.sub(r'[.:]', '_', program.name)}.py")
        (empty / names[-1]).write_text(program.text)
    return names


def yaml_folders(empty: Path) -> list[str]:
    """Write the YAML blocks of the pages as run files, each in a folder with the files that it
    names; returns the folders."""
    names = []
    for block in blocks("yaml"):
        folder = empty / re.sub(r"[.:]", "_", str(block))
        folder.mkdir(exist_ok=True)
        named_files(folder)
        own_files(block, folder)
        tree = tree_of(block, folder)
        (folder / "block.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        names.append(folder.name)
    return names


def extras(
    folder: Path, python: Path, wheel: Path, limits: Path, only: str
) -> list[Callable[[], list[str]]]:
    """For each extra: lay it over the environment below; `doctor` must then find it, and its
    command run. Each returns the commands that failed."""

    def overlaid(extra: str, line: str) -> list[str]:
        here, error = laid_over(folder, python, limits, extra, f"{wheel}[{extra}]")
        if error:
            return [f"flowrl[{extra}] cannot be installed: {error}"]
        empty, over = made(folder / f"empty-{extra}"), here.parent.parent
        row = {"file": "photo.png", "prompt": 'the word "SALE" in a red circle'}
        (empty / "prompts.jsonl").write_text(json.dumps(row) + "\n")
        launch = f"#!{here}\nfrom flowrl.cli.app import main\nmain()\n"
        (over / "bin" / "flowrl").write_text(launch)
        (over / "bin" / "flowrl").chmod(0o755)
        found = [f"flowrl doctor | grep -E '^ok +extra {each} '" for each in extra.split(",")]
        return [f"flowrl[{extra}]: {each}" for each in tried([*found, line], empty, here)]

    wanted = [pair for pair in OF_EXTRAS.items() if only in f"flowrl[{pair[0]}] {pair[1]}"]
    return [partial(overlaid, *pair) for pair in wanted]


def laid_over(
    folder: Path, python: Path, limits: Path, name: str, *packages: str
) -> tuple[Path, str]:
    """The interpreter of an environment with these packages over the wheel's, and what failed."""
    below = next((folder / "venv" / "lib").glob("python3*/site-packages"))
    over = folder / f"over-{name}"
    venv.create(over, with_pip=False, clear=True)
    own = over / "lib" / below.parent.name / "site-packages"
    (own / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    here = over / "bin" / "python"
    pip = f"{python} -m pip --python {here} install -q --no-compile"
    done = run(f"{pip} -c {limits} {shlex.join(packages)}", folder)
    return here, done.stderr[-300:] if done.returncode else ""


def notebooks(folder: Path, python: Path, limits: Path, only: str) -> list[Callable[[], list[str]]]:
    """The notebooks of examples/, in Jupyter, each in an empty folder; one call, which returns
    those that failed."""
    names = [path.name for path in sorted((PROJECT / "examples").glob("*.ipynb"))]
    lines = {f"jupyter execute --kernel_name=python3 {name}": name for name in names}
    chosen = {line: name for line, name in lines.items() if only in line}

    def executed() -> list[str]:
        here, error = laid_over(folder, python, limits, "jupyter", "nbclient", "ipykernel")
        if error:
            return [f"Jupyter cannot be installed: {error}"]
        failed = list[str]()
        for line, name in chosen.items():
            empty = made(folder / f"empty-{name}")
            shutil.copy(PROJECT / "examples" / name, empty)
            failed += tried([line], empty, here)
        return failed

    return [executed] if chosen else []


def interpreters(
    folder: Path, wheel: Path, limits: Path, only: str
) -> list[Callable[[], list[str]]]:
    """For each other version of Python: try the wheel; each returns the commands that failed."""

    def under(version: str, path: str) -> list[str]:
        print(f"\nPython {version}: {path}", flush=True)
        try:
            python = installed(folder / f"venv-{version}", wheel, limits, python=path)
        except SystemExit as error:
            if str(wheel) in str(error):
                return [f"Python {version}: {str(error)[:300]}"]
            print(f"not tried: Python {version}, for which torch cannot be installed", flush=True)
            return []
        found = tried(list(SHORT), made(folder / f"empty-{version}"), python)
        return [f"Python {version}: {line}" for line in found]

    known = list(others())
    if not known:
        print("\nno other interpreter: name some in FLOWRL_PYTHONS")
    return [partial(under, *each) for each in known if only in f"python{each[0]}"]


def others() -> Iterator[tuple[str, str]]:
    """Version and path of interpreters that flowrl admits, one of each minor version but ours."""
    seen = {sys.version_info[:2]}
    listed = [path for path in os.environ.get("FLOWRL_PYTHONS", "").split(os.pathsep) if path]
    named = [path for minor in range(11, 20) if (path := shutil.which(f"python3.{minor}"))]
    ask = "import sys, venv; print(*sys.version_info[:2])"
    for path in (*listed, *named):
        done = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        if done.returncode:
            continue
        major, minor = map(int, done.stdout.split())
        if (major, minor) >= (3, 11) and (major, minor) not in seen:
            seen.add((major, minor))
            yield f"{major}.{minor}", path


def why(line: str) -> str:
    """The reason for which a command of a page is left out; empty if it runs."""
    return next((reason for part, reason in NOT_HERE.items() if part in line), "")


def tried(listed: list[str], folder: Path, python: Path) -> list[str]:
    """Run commands; returns those that failed."""
    return [line for line in listed if not works(line, folder, python)]


def works(line: str, folder: Path, python: Path) -> bool:
    began = time.monotonic()
    done = run(line, folder, path=python.parent)
    fine = (0, 1) if "plan" in line and "--memory" in line else (0,)  # 1: it does not fit
    fine = (1,) if any(part in line for part in PLAN_REFUSES) else fine
    good = done.returncode in fine or ("block.yaml" in line and lacks_something(done))
    print(f"{'ok' if good else 'FAILED':<7}{time.monotonic() - began:5.0f} s  {line}", flush=True)
    if not good or line == "flowrl doctor":
        print((done.stdout + done.stderr)[-3000:])
    return good


def lacks_something(done: "subprocess.CompletedProcess[str]") -> bool:
    """Whether `flowrl plan` refused settings only for what a bare wheel and an empty folder
    lack: extras, and the reader's own files and model."""
    said = (done.stdout + done.stderr).splitlines()
    refused = [line for line in said if line.startswith(("refused: ", "flowrl: "))]
    return bool(refused) and all(any(part in line for part in MISSING) for line in refused)


def run(
    line: str, folder: Path, *, check: bool = False, path: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a line of a shell, with one thread and without this environment's packages."""
    own = {
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "FLOWRL_CACHE": str(folder / "cache"),
    }
    theirs = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # uncompiled, each start takes a minute
    environment = {k: v for k, v in os.environ.items() if k not in theirs} | own
    if path is not None:
        environment |= {"PATH": f"{path}{os.pathsep}{environment['PATH']}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if check and done.returncode:
        sys.exit(f"failed: {line}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done


if __name__ == "__main__":
    main()
