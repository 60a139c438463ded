"""What a user sees where torchvision was built for another torch: `flowrl[rewards]` on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.cli import installed

CPU = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"


def fake(folder: Path, torch: str, vision: str, wanted: str = "==2.13.0") -> Path:
    """Packages that cannot be imported, with the version files and metadata of real ones."""
    for name, text in (("torch", torch), ("torchvision", f"__version__ = '{vision}'\n")):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('no operator nms')\n")
        (folder / name / "version.py").write_text(text)
    about = folder / "torchvision-0.28.0.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
        f"Requires-Dist: torch ({wanted})\n"
    )
    return folder


def flowrl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line of a process that finds the fake packages first."""
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from flowrl.cli.app import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(folder), *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_line_names_the_way_out(tmp_path):
    said = flowrl(fake(tmp_path, CPU, "0.28.0+cu130"), "plan", "demo")
    assert said.returncode == 2 and "Traceback" not in said.stderr
    assert "torchvision 0.28.0+cu130 is built for a GPU, but torch 2.13.0+cpu for the CPU" in (
        said.stderr
    )
    assert "torchvision==0.28.0 --index-url https://download.pytorch.org/whl/cpu" in said.stderr
    assert said.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("torch", "vision", "wanted", "said"),
    [
        (CPU, "0.28.0+cpu", "==2.13.0", None),
        (CUDA, "0.28.0+cu130", "==2.13.0", None),
        (CPU, "0.28.0", "==2.13.0", None),  # macOS
        (CPU, "0.28.0+rocm7.0", "==2.13.0", "built for a GPU"),
        (CUDA, "0.28.0+cu130", "==2.12.1", "needs torch ==2.12.1, but torch 2.13.0+cu130"),
    ],
    ids=["cpu", "cuda", "macos", "rocm", "another torch"],
)
def test_what_fits_and_what_does_not(tmp_path, monkeypatch, torch, vision, wanted, said):
    folder = fake(tmp_path, torch, vision, wanted)
    monkeypatch.setattr(
        installed, "_version_file", lambda name: (folder / name / "version.py").read_text()
    )
    monkeypatch.syspath_prepend(str(folder))
    found = installed.torchvision_misfit()
    assert found is None if said is None else said in found


def test_the_environment_of_the_tests_fits():
    assert installed.torchvision_misfit() is None
