"""`flowrl doctor`: what this machine can run, what is missing, and how to get it."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

Verdict = Literal["ok", "note", "missing"]


class Finding(NamedTuple):
    state: Verdict
    subject: str
    detail: str


@dataclass
class Doctor:
    """Check Python, devices, versions, extras, the hub's cache, write access and launchers."""


def findings() -> Iterator[Finding]:
    yield _python()
    yield from _packages()
    yield from _devices()
    yield from _extras()
    yield _hub()
    yield _write_access(Path.cwd())
    yield _launchers()


def print_findings() -> int:
    """Print a line per finding. Return 1 where something that every run needs is missing."""
    found = list(findings())
    width = max(len(each.subject) for each in found)
    for each in found:
        print(f"{each.state:<8}{each.subject:<{width}}  {each.detail}")
    return int(any(each.state == "missing" for each in found))


def _python() -> Finding:
    system = f"{platform.system()} {platform.machine()}"
    state: Verdict = "ok" if platform.system() == "Linux" else "note"
    tested = "" if state == "ok" else "; flowrl is tested on Linux only"
    return Finding(state, "python", f"{sys.version.split()[0]} on {system}{tested}")


def _packages() -> Iterator[Finding]:
    """The required packages, compared with the versions that flowrl needs."""
    for line in distribution("flowrl").requires or ():
        wanted = Requirement(line)
        if wanted.marker is not None:  # extras are looked at by themselves
            continue
        try:
            here = version(wanted.name)
        except PackageNotFoundError:
            yield Finding("missing", wanted.name, f"pip install '{wanted}'")
            continue
        fits = wanted.specifier.contains(here, prereleases=True)
        detail = here if fits else f"{here}, but flowrl needs {wanted.specifier}"
        yield Finding("ok" if fits else "missing", wanted.name, detail)


def _devices() -> Iterator[Finding]:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding("ok", "memory", f"{memory:.0f} GiB, {os.cpu_count()} CPUs")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            half = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
            size = f"{device.total_memory / 2**30:.0f} GiB, {half}"
            yield Finding("ok", f"cuda:{i}", f"{device.name}, {size}")
    elif torch.backends.mps.is_available():
        yield Finding(
            "note", "mps", "visible, but flowrl was never run on it; set model.device: cpu"
        )
    else:
        yield Finding("note", "cuda", "none visible: runs use the CPU")


def _extras() -> Iterator[Finding]:
    """Each extra, what it makes available, and its missing packages."""
    opens = {
        "track": "trackers: TensorBoard",
        "rewards": "HPSv2 and open_clip's CLIP",
        "remote": "rewards behind HTTP, judges",
        "serve": "flowrl serve-reward",
        "ocr": "the reward ocr",
        "math": "the reward math_answer",
        "video": "video files for score and evaluate-rewards",
        "gguf": "quantized weights",
    }
    lines = [Requirement(line) for line in distribution("flowrl").requires or ()]
    for extra, purpose in opens.items():
        wanted = [r for r in lines if r.marker and r.marker.evaluate({"extra": extra})]
        lost = [r.name for r in wanted if not _installed(r.name)]
        detail = f"{purpose}: pip install 'flowrl[{extra}]'" if lost else purpose
        yield Finding("note" if lost else "ok", f"extra {extra}", detail)


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _hub() -> Finding:
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    cache = Path(HF_HUB_CACHE)
    models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    where = f"{models} models in {cache}"
    return Finding("note" if HF_HUB_OFFLINE else "ok", "hub cache", where)


def _write_access(folder: Path) -> Finding:
    if not os.access(folder, os.W_OK):
        return Finding("missing", "disk", f"{folder} cannot be written; runs go to ./runs")
    free = shutil.disk_usage(folder).free / 2**30
    return Finding("ok" if free > 5 else "note", "disk", f"{free:.0f} GiB free in {folder}")


def _launchers() -> Finding:
    beside = Path(sys.executable).parent
    names = [name for name in ("accelerate", "torchrun") if (beside / name).exists()]
    return Finding("ok" if names else "note", "launchers", ", ".join(names) or "none found")
