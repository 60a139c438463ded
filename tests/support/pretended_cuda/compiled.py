"""The device's guard and hooks, compiled once for a source and a torch, and loaded."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


class NoCompiler(RuntimeError):
    """This machine cannot compile C++ against torch."""


def load() -> None:
    """Load the device's guard and hooks. torch looks for hooks once, so it must not be there."""
    if "torch" in sys.modules:
        raise RuntimeError("the pretended CUDA device must be installed before torch is imported")
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)


def guard_again() -> None:
    """Put the device's guard back, once torch has been imported: one that is built with CUDA has
    registered its own."""
    ctypes.CDLL(str(library())).guard_again()


def library() -> Path:
    """The compiled file. NoCompiler, in one sentence, where there is none and none can be made."""
    if (compiler := shutil.which("g++")) is None:
        raise NoCompiler("the pretended CUDA device needs g++, which is not on this machine")
    command = _command(compiler)
    key = (SOURCE.read_text(), version("torch"), command)
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"flowrl-pretended-cuda-{os.getuid()}"
    found = folder / f"{digest}.so"
    if found.exists():
        return found
    folder.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        new = Path(made) / "device.so"
        done = subprocess.run([*command, "-o", str(new)], capture_output=True, text=True)
        if done.returncode:
            raise NoCompiler(f"g++ cannot compile {SOURCE.name}: {done.stderr.strip()[:300]}")
        new.replace(found)  # whole or not at all, where several processes compile it
    return found


def _command(compiler: str) -> list[str]:
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    include, libraries = (Path(found.origin).parent / name for name in ("include", "lib"))
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{include}"]
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
    return [compiler, *flags, str(SOURCE), *linked]
