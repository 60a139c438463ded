"""`flowrl doctor`: what this machine can run, what is missing, and how to install it."""

import importlib
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

from packaging.requirements import Requirement

from flowrl.cli import app
from flowrl.cli.installed import torchvision_misfit
from flowrl.models.peft_version import peft_misfit
from flowrl.paths import CACHE_VARIABLE, PROJECT, cache_folder
from flowrl.session.notices import NOTICES_VARIABLE, STATES, configured_receiver, try_receiver
from flowrl.settings.command_line.arguments import Word
from rewards.configuration import configuration_file

Verdict = Literal["ok", "note", "missing"]

# the versions that the tests ran with, and that docs/pipelines.md was measured with
PROVEN_VERSIONS = {
    "accelerate": "1.15.0",
    "diffusers": "0.42.1",
    "peft": "0.21.2",
    "torch": "2.13.0",
    "transformers": "5.23.0",
}
EXTRAS = {
    "track": "trackers: TensorBoard",
    "rewards": "HPSv2 and open_clip's CLIP",
    "remote": "rewards over HTTP, judges, vLLM and SGLang servers",
    "serve": "flowrl serve-reward",
    "ocr": "the reward ocr",
    "math": "the reward math_answer",
    "video": "video files for score and evaluate-rewards",
    "gguf": "quantized weights (model.gguf_file)",
    "ray": "sampling by workers (workers.sampling)",
    "trl": "comparisons with TRL in tests and scripts",
    "docs": "the documentation as a site (make docs)",
}
OPTIONAL = {
    "bitsandbytes": "train.optimizer: adamw8bit, model.quantization",
    "optimum-quanto": "model.quantization",
    "torchao": "model.quantization",
    "wandb": "track.with: [wandb]",
    "trackio": "track.with: [trackio]",
    "mlflow": "track.with: [mlflow]",
}
HUB_SECONDS = 3.0
FREE = 5  # GiB of disk; a run of a large model writes more


class Finding(NamedTuple):
    state: Verdict
    subject: str
    detail: str


@dataclass
class Doctor:
    """Check Python, devices, memory, versions, extras, the hub and its cache, write access and
    launchers, and send a test to whatever your configuration has for notices of runs. Exit code 1
    if something that every run needs is missing. With a run's folder: which
    rights its run.yaml asks for, and whether they are granted; exit code 1 if one is not. Nothing
    that the folder names is imported."""

    folder: Word[Path | None] = None
    """A run's folder, whose rights are listed instead."""
    device: str | None = None
    """Test this device instead (cuda, cpu): proof, ratio, waits, speed and memory of short runs in
    a table. Exit code 1 if a check has failed, 2 if the device is missing."""
    run: str | None = None
    """With --device: a run to use in place of the demo, by its file or name."""
    sandbox: bool = False
    """Try the sandbox of the reward code_tests instead: programs that try to leave it run on this
    machine, each with a ceiling, below which it harms no host. A table says what held. Exit code 1
    if something did not, or if `isolation: full` would refuse to start here."""
    isolation: Literal["full", "external"] = "full"
    """With --sandbox: flowrl's own sandbox, or the external one of your configuration."""
    program: str | None = None
    """With --sandbox: the Python of another environment, whose sandbox is tried."""


def findings() -> Iterator[Finding]:
    yield _python()
    yield from _packages()
    yield from _torchvision()
    yield from _together()
    yield _memory()
    yield from _devices()
    yield _compiler()
    yield _sandbox()
    yield from _extras()
    yield from _optional()
    yield from _rewards()
    yield from _hub()
    yield _write_access("disk", Path.cwd(), "runs are written to ./runs")
    remedy = f"proofs are not cached; set {CACHE_VARIABLE}"
    yield _write_access("proof cache", cache_folder() / "proofs", remedy)
    yield _launchers()
    yield _notices()


def print_findings() -> int:
    """Print a line per finding. Returns 1 if something that every run needs is missing."""
    rows = list(findings())
    width = max(len(row.subject) for row in rows)
    for row in rows:
        print(f"{row.state:<8}{row.subject:<{width}}  {row.detail}")
    missing = [row.subject for row in rows if row.state == "missing"]
    print(
        f"missing: {', '.join(missing)}" if missing else "nothing that every run needs is missing"
    )
    return int(bool(missing))


def _python() -> Finding:
    system = platform.system()
    names = {"Darwin": "macOS"}
    where = f"{sys.version.split()[0]} on {names.get(system, system)} {platform.machine()}"
    if system == "Linux":
        return Finding("ok", "python", where)
    lost = "flowrl is tested on Linux only"
    return Finding("note", "python", f"{where}: {lost}")


def _wanted() -> dict[str, list[Requirement]]:
    """The packages of each extra, and under "" those that every run needs; of a source tree that is
    not installed, from its pyproject.toml."""
    try:
        ours = distribution("flowrl")
    except PackageNotFoundError:
        project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
        named = {"": project["dependencies"], **project["optional-dependencies"]}
        return {extra: [Requirement(line) for line in lines] for extra, lines in named.items()}
    all_of_them = [Requirement(line) for line in ours.requires or ()]
    extras = ours.metadata.get_all("Provides-Extra") or ()
    return {"": [requirement for requirement in all_of_them if requirement.marker is None]} | {
        extra: [r for r in all_of_them if r.marker and r.marker.evaluate({"extra": extra})]
        for extra in extras
    }


def _packages() -> Iterator[Finding]:
    """The required packages, compared with the versions that flowrl needs and was tested with."""
    if not _installed("flowrl"):
        yield Finding("note", "flowrl", app.version())
    for wanted in _wanted()[""]:
        try:
            installed = version(wanted.name)
        except PackageNotFoundError:
            yield Finding("missing", wanted.name, f"pip install '{wanted}'")
            continue
        if not wanted.specifier.contains(installed, prereleases=True):
            detail = f"{installed}, but flowrl needs {wanted.specifier}: pip install '{wanted}'"
            yield Finding("missing", wanted.name, detail)
            continue
        if wanted.name == "peft" and (sentence := peft_misfit()) is not None:
            yield Finding("missing", "peft", f"of language models' adapters: {sentence}")
            continue
        proven = PROVEN_VERSIONS.get(wanted.name)
        if proven is None or installed.partition("+")[0] == proven:
            yield Finding("ok", wanted.name, installed)
            continue
        detail = (
            f"{installed}; tested with {proven}. Each start compares the pipeline with its own call"
        )
        yield Finding("note", wanted.name, detail)


def _torchvision() -> Iterator[Finding]:
    if (sentence := torchvision_misfit()) is not None:
        yield Finding("missing", "torchvision", sentence)
    elif _installed("torchvision"):
        yield Finding("ok", "torchvision", f"{version('torchvision')}, for open_clip")


def _together() -> Iterator[Finding]:
    """Whether the model libraries can be imported together, which some versions cannot."""
    if torchvision_misfit() is not None or not _installed("diffusers"):
        return  # said already
    try:
        importlib.import_module("diffusers.pipelines.pipeline_utils")
    except (ImportError, RuntimeError) as error:  # diffusers makes the first into the second
        reason = " ".join(str(error).split("\n")[-1].split())[:200]
        way = "pip install -U diffusers transformers peft"
        yield Finding("missing", "imports", f"diffusers cannot be imported ({reason}): {way}")


def _memory() -> Finding:
    import psutil

    total, available = psutil.virtual_memory()[:2]
    bound = Path("/sys/fs/cgroup/memory.max")
    text = bound.read_text().strip() if bound.is_file() else "max"
    limit = int(text) if text.isdigit() else total
    inside = f", a container's limit of {limit / 2**30:.0f} GiB" if limit < total else ""
    detail = f"{total / 2**30:.0f} GiB, {available / 2**30:.0f} GiB available{inside}"
    return Finding("ok", "memory", f"{detail}; {os.cpu_count()} CPUs")


def _devices() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            half = "bfloat16" if torch.cuda.is_bf16_supported() else "float16, no bfloat16"
            size = f"{device.total_memory / 2**30:.0f} GiB, {half}"
            yield Finding("ok", f"cuda:{i}", f"{device.name}, {size}, CUDA {torch.version.cuda}")
        return
    if torch.backends.mps.is_available():
        detail = "visible, but flowrl was never tested on it: set model.device: cpu"
        yield Finding("note", "mps", f"Apple's GPU (MPS) is {detail}; no bitsandbytes, no CUDA")
        return
    driver = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").is_file()
    built = torch.version.cuda
    if driver and built is None:
        detail = (
            f"an NVIDIA driver is installed, but torch {torch.__version__} is built without CUDA: "
            "install torch with CUDA (https://pytorch.org/get-started/locally)"
        )
    elif driver:
        detail = f"torch is built for CUDA {built}, but sees no device: check the driver's version"
    else:
        detail = "no GPU is visible: runs use the CPU, which is enough for the demos"
    yield Finding("note", "cuda", detail)


def _compiler() -> Finding:
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        lost = "no C++ compiler: model.compile will not work; install g++ or clang"
        return Finding("note", "compiler", lost)
    return Finding("ok", "compiler", f"{compiler}, for model.compile")


def _sandbox() -> Finding:
    if platform.system() == "Linux":
        how = "Linux, for the reward code_tests; `flowrl doctor --sandbox` tries each protection"
        return Finding("ok", "sandbox", how)
    less = "the reward code_tests isolates programs less strictly than on Linux"
    return Finding("note", "sandbox", less)


def _rewards() -> Iterator[Finding]:
    """Rewards with published models, by how they were verified (`rewards.checks.proofs`)."""
    from rewards.checks.proofs import by_basis

    means = {
        "authors' code run": "score like their authors' code on tiny random weights",
        "read": "follow their authors' code, which was not run",
        "from memory": "partly from memory: compare with published scores before use",
    }
    for basis, names in by_basis().items():
        state: Verdict = "ok" if basis == "authors' code run" else "note"
        yield Finding(state, f"rewards, {basis}", f"{', '.join(names)}: {means[basis]}")


def _extras() -> Iterator[Finding]:
    """Each extra, what it makes available, and its missing packages."""
    for extra, wanted in _wanted().items():
        if extra in ("", "dev"):
            continue
        lost = [r.name for r in wanted if not _installed(r.name)]
        purpose = EXTRAS.get(extra, ", ".join(r.name for r in wanted))
        get = f"{purpose}: pip install 'flowrl[{extra}]' ({', '.join(lost)})" if lost else purpose
        yield Finding("note" if lost else "ok", f"extra {extra}", get)


def _optional() -> Iterator[Finding]:
    for name, purpose in OPTIONAL.items():
        if _installed(name):
            yield Finding("ok", name, f"{version(name)}, for {purpose}")
        else:
            yield Finding("note", name, f"for {purpose}: pip install {name}")


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _hub() -> Iterator[Finding]:
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        detail = "HF_HUB_OFFLINE is set: only folders and cached models can be used"
        yield Finding("note", "hub", detail)
    else:
        yield _reachable(ENDPOINT)
    cache = Path(HF_HUB_CACHE)
    models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    finding = _write_access("hub cache", cache, "HF_HUB_CACHE sets another folder")
    yield finding._replace(detail=f"{models} models; {finding.detail}")


def _reachable(url: str) -> Finding:
    try:
        with urlopen(Request(url, method="HEAD"), timeout=HUB_SECONDS):
            return Finding("ok", "hub", f"{url} answers; gated models need `hf auth login`")
    except (URLError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:80]
        way = "run `hf download` on a machine with a network, or set HF_ENDPOINT to a mirror"
        return Finding("note", "hub", f"{url} cannot be reached ({reason}): {way}")


def _write_access(subject: str, folder: Path, otherwise: str) -> Finding:
    """Whether a folder, or its nearest existing parent, is writable."""
    existing = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    if not os.access(existing, os.W_OK):
        state: Verdict = "missing" if subject == "disk" else "note"
        return Finding(state, subject, f"{folder} cannot be written; {otherwise}")
    free = shutil.disk_usage(existing).free / 2**30
    detail = f"{free:.0f} GiB free in {folder}"
    return Finding("ok" if free > FREE else "note", subject, detail)


def _launchers() -> Finding:
    beside = Path(sys.executable).parent
    present = [n for n in ("flowrl", "accelerate", "torchrun") if (beside / n).exists()]
    lost = [name for name in ("accelerate", "torchrun") if name not in present]
    detail = ", ".join([*present, "python -m flowrl"])
    if lost:
        detail += f"; no {' and no '.join(lost)} next to {sys.executable}: one process only"
    return Finding("note" if lost else "ok", "launchers", detail)


def _notices() -> Finding:
    """The user's command or webhook for notices, which gets one with the state `test`."""
    where = "docs/interruptions.md, Notices"
    try:
        receiver = configured_receiver()
    except ValueError as error:
        return Finding("note", "notices", f"none are sent: {error}")
    if receiver is None:
        off = os.environ.get(NOTICES_VARIABLE) == "off"
        none = f"{NOTICES_VARIABLE} is off" if off else f"no [notify] in {configuration_file()}"
        return Finding("note", "notices", f"none: {none} ({where})")
    failure, seconds = try_receiver(receiver)
    if failure:
        return Finding("note", "notices", f"{receiver} did not take a test: {failure} ({where})")
    states = ", ".join(state for state in STATES if state in receiver.states)
    detail = f"{receiver} took a test in {seconds:.1f} s; it gets {states or 'nothing else'}"
    return Finding("ok", "notices", detail)
