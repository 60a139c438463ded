"""Make or refresh the project's virtual environment. Standard library only; safe to repeat.

    python3 scripts/make_venv.py [--venv .venv]

Versions are those of constraints.txt. torch comes first: the installed build if it is a CPU build,
else torch's own CPU index on a machine without an NVIDIA driver, so that nothing pulls gigabytes of
CUDA packages by surprise.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


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
    if not (folder / "bin" / "python").exists():
        print(f"making {folder}", flush=True)
        venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    install = [*pip, "install", "-q", *lazily()]
    limits = ["-c", str(PROJECT / "constraints.txt")]
    if not run_quietly([*pip, "show", "-q", "torch"]):
        print("installing torch", flush=True)
        run([*install, *limits, *torch_index(pip, limits), "torch"])
    print("installing flowrl and its tools", flush=True)
    run([*install, *limits, "-e", f"{PROJECT}[dev]"])
    print(f"environment ready in {time.monotonic() - began:.0f} s", flush=True)


def lazily() -> list[str]:
    """Compile modules when they are first imported, and not all, which takes a minute; unless
    compiled modules are never written, which would double the time of every start."""
    return [] if os.environ.get("PYTHONDONTWRITEBYTECODE") else ["--no-compile"]


def torch_index(pip: list[str], limits: list[str]) -> list[str]:
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
    if not any(name.startswith("nvidia") for name in names) or shutil.which("nvidia-smi"):
        return []
    return ["--index-url", CPU_INDEX]


def run(command: list[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"failed: {' '.join(command)}")


def run_quietly(command: list[str]) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
