"""Make or refresh the project's virtual environment. Standard library only; safe to repeat.

    python3 scripts/make_venv.py [--venv .venv]

Versions are those of constraints.txt. uv installs them, in a third of pip's time; pip does where uv
cannot be had, or fails, or where pip is configured by an option that uv has no word for. torch's
build is the one that is found if it is a CPU build, else torch's own CPU index on a machine without
an NVIDIA driver, so that nothing pulls gigabytes of CUDA packages by surprise.
"""

import argparse
import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LIMITS = ("-c", str(PROJECT / "constraints.txt"))
# Modules are compiled when they are first imported, and not all at once, which takes a minute;
# unless compiled modules are never written, which would double the time of every start.
COMPILE = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
# Options of pip's configuration and uv's word for each; and those that change no package.
SAME = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "constraint": "--constraints",
}
WITHOUT_EFFECT = (
    "cache-dir",
    "default-timeout",
    "disable-pip-version-check",
    "no-input",
    "progress-bar",
    "timeout",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=PROJECT / ".venv")
    folder = parser.parse_args().venv.absolute()
    if sys.version_info < (3, 11):  # noqa: UP036 this is what says so
        sys.exit(f"flowrl needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    inputs = [PROJECT / name for name in ("pyproject.toml", "setup.py", "constraints.txt")]
    inputs.append(Path(__file__))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    stamp = folder / "flowrl-stamp"
    if not (stamp.is_file() and stamp.read_text() == digest + str(PROJECT)):
        install_all(folder)
        stamp.write_text(digest + str(PROJECT))
    make = "from flowrl.cli.schema import read_schema; read_schema()"
    run([str(folder / "bin" / "python"), "-c", make])  # help and editors read it


def install_all(folder: Path) -> None:
    """The environment with torch, flowrl and its tools."""
    began = time.monotonic()
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder}", flush=True)
        venv.create(folder, with_pip=True)
    print("installing flowrl and its tools", flush=True)
    if not install_by_uv(python):
        install_by_pip([str(python), "-m", "pip"])
    print(f"environment ready in {time.monotonic() - began:.0f} s", flush=True)


def install_by_uv(python: Path) -> bool:
    """Whether uv has installed everything; what stands in its way is left to pip's messages."""
    pip = [str(python), "-m", "pip"]
    given = as_uv(output(*pip, "config", "list"))
    if given is None or not succeeds([*pip, "install", "-q", *LIMITS, "uv"]):
        return False
    options, environment = given
    install = [str(python), "-m", "uv", "pip", "install", "--python", str(python)]
    install += [*LIMITS, *options, *(["--compile-bytecode"] if COMPILE else [])]
    dry = subprocess.run(
        [*install, "--dry-run", "torch"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    if dry.returncode:
        return False
    if " + nvidia-" in dry.stderr and not has_driver():
        if not succeeds([*install, "--index-url", CPU_INDEX, "torch"], environment):
            return False
    return succeeds([*install, "-e", f"{PROJECT}[dev]"], environment)


def as_uv(listed: str) -> tuple[list[str], dict[str, str]] | None:
    """The options and the environment with which uv finds what pip finds, from the lines of
    `pip config list`; None if pip is configured by an option that is not known here."""
    values = dict[str, str]()
    lines = [line.partition("=") for line in listed.splitlines()]
    for section in ("global.", "install.", ":env:."):  # a later one wins, as in pip
        for name, _, value in lines:
            if name.startswith(section):
                values[name.removeprefix(section)] = ast.literal_eval(value)
    if not {*values} <= {*SAME, "no-index", "cert", *WITHOUT_EFFECT}:
        return None
    # pip takes a version from any index that has it, uv by itself from the first that has the name
    options = ["--index-strategy", "unsafe-best-match"]
    for name, option in SAME.items():
        for word in values.get(name, "").split():
            options += [option, word]
    if values.get("no-index", "0").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    return options, {"SSL_CERT_FILE": values["cert"]} if "cert" in values else {}


def install_by_pip(pip: list[str]) -> None:
    compiled = [] if COMPILE else ["--no-compile"]
    install = [*pip, "install", "-q", *compiled, *LIMITS]
    if not succeeds([*pip, "show", "-q", "torch"]):
        run([*install, *torch_index(pip, LIMITS), "torch"])
    run([*install, "-e", f"{PROJECT}[dev]"])


def torch_index(pip: Sequence[str], limits: Sequence[str]) -> list[str]:
    """The index for torch; a dry run of pip shows its build without downloading it."""
    report = subprocess.run(
        [*pip, "install", "--dry-run", "-q", "--report", "-", *limits, "torch"],
        capture_output=True,
        text=True,
        check=False,
    )
    if report.returncode:
        sys.exit(f"torch cannot be installed:\n{report.stderr}")
    names = [item["metadata"]["name"] for item in json.loads(report.stdout)["install"]]
    if not any(name.startswith("nvidia") for name in names) or has_driver():
        return []
    return ["--index-url", CPU_INDEX]


def has_driver() -> bool:
    return shutil.which("nvidia-smi") is not None


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run(command: list[str]) -> None:
    if not succeeds(command, quiet=False):
        sys.exit(f"failed: {' '.join(command)}")


def succeeds(command: list[str], environment: Mapping[str, str] = {}, quiet: bool = True) -> bool:
    done = subprocess.run(
        command, check=False, capture_output=quiet, env={**os.environ, **environment}
    )
    return done.returncode == 0


if __name__ == "__main__":
    main()
