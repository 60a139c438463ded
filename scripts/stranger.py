"""A stranger's machine: the wheel in a fresh environment, an empty folder, the pages' commands.

    python scripts/stranger.py [--oldest] [--only TEXT] [--folder DIR]

The wheel is installed without extras, with the newest packages that pip resolves, or with
--oldest the oldest that pyproject.toml admits. torch alone has the version of constraints.txt: a
newer one would be gigabytes for a GPU. Then every command of README.md, docs/ and `flowrl new` that
needs no weights, GPU or network is run (training for one iteration), each command's --help, and
`flowrl doctor`. Exit code 1 if one fails. Prints versions, seconds, and the commands left out.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

from make_venv import PROJECT, torch_index
from packaging.requirements import Requirement
from PIL import Image

sys.path.insert(0, str(PROJECT))

from flowrl.cli.help import COMMANDS
from tests.support.page_blocks import NOT_HERE, SMALL, commands, smaller

DEMOS = ("demo", "demo_lora", "demo_edit", "text_demo")  # the runs that pages name
SECONDS = 900  # of one command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--oldest", action="store_true")
    parser.add_argument("--only", default="", help="run the commands with this text alone")
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="stranger-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    python = installed(folder, given.oldest)
    print(f"installed in {time.monotonic() - began:.0f} s", flush=True)
    print(run(f"{python} -m pip freeze", folder).stdout)
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    Image.new("RGB", (32, 32)).save(empty / "photo.png")
    failed = [line for line in lines(empty, python, given.only) if not works(line, empty, python)]
    left = sorted({line for _, line in commands() if why(line)})
    print("\nleft out:", *(f"  {why(line)}: {line}" for line in left), sep="\n")
    print(f"\n{len(failed)} failed{''.join(f'{chr(10)}  {line}' for line in failed)}")
    print(f"{time.monotonic() - began:.0f} s in all")
    sys.exit(bool(failed))


def installed(folder: Path, oldest: bool) -> Path:
    """The interpreter of a new environment with the wheel of this source tree."""
    run(
        f"{sys.executable} -m pip wheel -q --no-deps --no-build-isolation -w {folder} {PROJECT}",
        folder, check=True,
    )  # fmt: skip
    (wheel,) = folder.glob("flowrl-*.whl")
    venv.create(folder / "venv", with_pip=True, clear=True)
    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip"]
    limits = folder / "limits.txt"
    pinned = (PROJECT / "constraints.txt").read_text()
    torch = re.findall(r"^torch==.*$", pinned, re.MULTILINE)
    limits.write_text("\n".join([*torch, *(lower_bounds() if oldest else ())]) + "\n")
    index = " ".join(torch_index(pip, ["-c", str(limits)]))
    install = f"{' '.join(pip)} install -q --no-compile -c {limits}"
    run(f"{install} {index} torch", folder, check=True)
    run(f"{install} {wheel}", folder, check=True)
    return Path(pip[0])


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


def lines(empty: Path, python: Path, only: str) -> list[str]:
    """The commands in an order in which each finds what it needs."""
    helps = [f"flowrl {name} --help" for name in COMMANDS]
    made = run(f"{python} -m flowrl new mine", empty, check=True).stdout
    new = [
        f"cd mine && {line.partition('#')[0].strip()}"
        for line in made.splitlines()
        if line.startswith("  flowrl ")
    ]
    new = [f"{line} {SMALL}" if " train " in line else line for line in new]
    runs = [
        f"flowrl train {name} {SMALL} --train.iterations 2 --track.training 2" for name in DEMOS
    ]
    pages = sorted({smaller(line).split(" > ")[0] for _, line in commands() if not why(line)})
    return [line for line in ("flowrl doctor", *helps, *new, *runs, *pages) if only in line]


def why(line: str) -> str:
    """The reason for which a command of a page is left out; empty if it runs."""
    return next((reason for part, reason in NOT_HERE.items() if part in line), "")


def works(line: str, folder: Path, python: Path) -> bool:
    began = time.monotonic()
    done = run(line, folder, path=python.parent)
    fine = (0, 1) if "plan" in line and "--memory" in line else (0,)  # 1: it does not fit
    good = done.returncode in fine
    print(f"{'ok' if good else 'FAILED':<7}{time.monotonic() - began:5.0f} s  {line}", flush=True)
    if not good or line == "flowrl doctor":
        print((done.stdout + done.stderr)[-3000:])
    return good


def run(
    line: str, folder: Path, *, check: bool = False, path: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a line of a shell, with one thread and without this environment's packages."""
    own = {
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "FLOWRL_CACHE": str(folder / "cache"),
    }
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | own
    if path is not None:
        environment |= {"PATH": f"{path}{os.pathsep}{environment['PATH']}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-c", line],
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
