"""`flowrl doctor --device`: check a device with short runs of the demo, or of your own run.

Every row of the table has passed, failed, or was not run, with the reason.
"""

import io
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from flowrl.cli.app import version
from flowrl.cli.floor import Floor, Opened
from flowrl.errors import UserError
from flowrl.estimate.memory import estimate, size
from flowrl.iteration.open import open_stages
from flowrl.iteration.ratio_check import FAR_ABOVE_CLIP, noise_floor
from flowrl.iteration.records import TrainingRows
from flowrl.launching.own_python import python_environment
from flowrl.paths import find, run_file
from flowrl.run.model_proof import StartProof
from flowrl.session.learner import load_policy
from flowrl.session.notices import NOTICES_VARIABLE
from flowrl.session.progress import Progress
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings import RunSettings
from flowrl.settings.read import override, read_run
from samplers import Sampling

Outcome = Literal["passed", "failed", "not run"]

DEMO = "demo_flow_grpo"
SMALL_DEMO = [
    "--recipe.steps", "4",
    "--recipe.group", "4",
    "--prompts.per-iteration", "4",
    "--model.lora.rank", "8",
    "--train.updates", "1",
    "--train.schedule.warmup", "0",
]  # fmt: skip
QUIET = ["--train.alarms", "off", "--train.self-test", "off", "--track.trackers", "[]"]
ROUNDING = 10.0  # times the CPU's own rounding: kernels of a device add up in another order
FLOOR_RATIO = (
    1.25  # an iteration to its plain loop; calls of the demo are short, so it is a high one
)
PEAK_SHARE = 0.2  # between a measured peak and its estimate
SMALL_PEAK = 256 * 2**20  # below it libraries' own buffers outweigh a run's
WAIT = "called a synchronizing CUDA operation"  # of torch.cuda.set_sync_debug_mode
FLOOR_TURNS = 3
# what a check on a broken device may raise: the other checks are run all the same
BROKEN = (RuntimeError, ValueError, TypeError, AssertionError, OSError, ImportError)


class Failed(Exception):
    """Raised by a check whose result is wrong."""


class NotRun(Exception):
    """Raised by a check that cannot run here."""


@dataclass(frozen=True)
class CheckRow:
    check: str
    verdict: Outcome
    detail: str

    def __str__(self) -> str:
        detail = " ".join(self.detail.replace("|", "/").split())
        return f"| {self.check} | {self.verdict} | {detail} |"


@cache
def _file(name: str) -> Path:
    return run_file(name)  # says once where it is


@dataclass
class DeviceTrial:
    """A device, and the trial runs on it, in bfloat16: `chosen`, or the demo if None."""

    device: str
    chosen: str | None
    folder: Path
    turns: int = FLOOR_TURNS
    opened: dict[str, Opened] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @cached_property
    def run(self) -> RunSettings:
        small = SMALL_DEMO if self.chosen is None else []
        words = ["--model.device", self.device, "--model.dtype", "bfloat16", *small, *QUIET]
        return override(read_run(_file(self.chosen or DEMO)), words)

    def open(self, run: RunSettings, name: str) -> Session:
        folder = self.folder / name
        folder.mkdir()
        return open_session(run, folder, open_accelerator(run, folder))

    @cached_property
    def session(self) -> Session:
        return self.open(self.run, "run")

    @cached_property
    def kept(self) -> Opened:
        """The run after its first iteration."""
        opened = Opened(self.session)
        opened.turn()
        return opened


def same_samples(trial: DeviceTrial) -> str:
    if trial.device == "cpu":
        raise NotRun("the device is the CPU")

    def latents(device: str, dtype: str) -> Tensor:
        words = ["--model.device", device, "--model.dtype", dtype, *SMALL_DEMO, *QUIET]
        run = override(read_run(_file(DEMO)), words)
        policy, prompts = load_policy(run, torch.device(device)), run.prompts.read("train")
        batch = policy.open(*prompts.take([0, 1]), run.algorithm().steps)
        (rollout,) = batch.rollouts(run.algorithm().plan, [0, 1], seed=0, iteration=0)
        return rollout.x0.double().cpu()

    plain = latents("cpu", "float32")
    rounding = float((plain - latents("cpu", "float64")).abs().max())
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        difference = float((plain - latents(trial.device, "float32")).abs().max())
    sentence = (
        f"latents differ by {difference:.1e}; float32 differs from float64 on the CPU by "
        f"{rounding:.1e}"
    )
    if not difference <= ROUNDING * rounding:
        raise Failed(f"{sentence}: above {ROUNDING:g} times that")
    return sentence


def proof(trial: DeviceTrial) -> str:
    proof = StartProof(trial.session, cache=False)
    proof.prove()
    return proof.sentences[0]


def ratio(trial: DeviceTrial) -> str:
    session = trial.session
    floor = noise_floor(session.learner, rows_of_first_iteration(session))
    if floor is None:
        raise NotRun("the loss of this recipe computes old and new on the same rows")
    clip = vars(session.algorithm.loss).get("clip")
    sentence = f"largest difference between sampled and recomputed log-densities {floor:.1e}"
    if session.run.recomputes_old:
        return f"{sentence}; the update uses the recomputed densities, so its first ratio is 1"
    least = min(clip) if clip else 1.0
    if not floor <= FAR_ABOVE_CLIP * least:
        raise Failed(f"{sentence}: far above the clip range {least:g}")
    return f"{sentence}; clip range {least:g}"


def rows_of_first_iteration(session: Session) -> TrainingRows:
    """The rows of a run's first iteration."""
    return open_stages(session, Progress()).collected(0)


def waits(trial: DeviceTrial) -> str:
    if not trial.cuda:
        raise NotRun("torch counts waits only on CUDA")
    session, opened = trial.session, trial.kept
    policy, algorithm = session.learner.policy, session.algorithm
    batch = policy.open(*session.prompts.take([0, 1]), algorithm.steps)
    with session.learner.policies.using(algorithm.behaviour), _waits() as sampling:
        batch.rollouts(
            algorithm.plan, [0, 1], seed=0, iteration=0,
            sampling=Sampling(algorithm.likelihood.keep_mean),
        )  # fmt: skip
    stages = opened.stages  # whose first update was checked and judged
    rows = stages.collected(opened.progress.iteration)
    with _waits() as training:
        stages.update(rows)
    steps = session.run.train.updates
    sentence = (
        f"sampling {sampling.total()}, update {training.total()} with {steps} optimizer steps"
    )
    lines = [f"{line} ({n})" for line, n in (sampling + training).most_common(5)]
    if sampling.total() or training.total() > steps + 1:
        raise Failed(f"{sentence}; at most 0 and {steps + 1} are allowed: {', '.join(lines)}")
    return sentence


@contextmanager
def _waits() -> Iterator[Counter[str]]:
    """Count the host's waits in the body, by line."""
    counts = Counter[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if WAIT in str(warning.message):
            counts[f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"] += 1


def floor(trial: DeviceTrial) -> str:
    arms = Floor.of(trial.kept).by_turns(trial.turns)
    ratios = [above / below for above, below in zip(*arms, strict=True)]
    middle = statistics.median(ratios)
    spread = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    sentence = (
        f"an iteration {statistics.median(arms[0]):.2f} s, {spread} of a plain loop of its calls"
    )
    if middle > FLOOR_RATIO:
        raise Failed(f"{sentence}: above {FLOOR_RATIO:g}")
    return sentence


def memory(trial: DeviceTrial) -> str:
    if not trial.cuda:
        raise NotRun("only GPUs measure their peak memory")
    planned, opened = estimate(trial.run), trial.kept
    if planned is None:
        raise NotRun("the sizes of this model are unknown")
    torch.cuda.reset_peak_memory_stats()
    opened.turn()
    peak = torch.cuda.max_memory_allocated()
    sentence = f"peak {size(peak)}, `flowrl plan` {size(planned.total)}"
    if peak < SMALL_PEAK:
        raise NotRun(f"{sentence}: too small to compare; use --run with a larger model")
    if abs(planned.total / peak - 1) > PEAK_SHARE:
        raise Failed(f"{sentence}: {planned.total / peak:.2f} of the peak")
    return f"{sentence}: {planned.total / peak:.2f} of the peak"


def compiled(trial: DeviceTrial) -> str:
    if not trial.cuda:
        raise NotRun("model.compile is for GPUs")
    if not has_triton():
        raise NotRun("torch finds no Triton for this device")
    session = trial.open(override(trial.run, ["--model.compile", "true"]), "compiled")
    first = noise_floor(session.learner, rows_of_first_iteration(session))
    opened = Opened(session)
    slow, *rest = [opened.turn() for _ in range(1 + trial.turns)]
    whole = statistics.median(trial.kept.turn() for _ in range(trial.turns))
    ratios = "" if first is None else f", largest difference of log-densities {first:.1e}"
    took = f"first iteration {slow:.0f} s, then {statistics.median(rest):.2f} s"
    return f"{took}; uncompiled {whole:.2f} s{ratios}"


def shared(trial: DeviceTrial) -> str:
    if (count := torch.cuda.device_count() if trial.cuda else 0) < 2:
        raise NotRun(f"needs two GPUs, {count} visible")
    return sharded("configs/accelerate/fsdp2.yaml", trial.device, trial.folder / "shared")


def sharded(config: str, device: str, folder: Path) -> str:
    """Train the demo on two processes under FSDP2."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
               str(find(config)), "--num_processes", "2", "--main_process_port", "0",
               "--log_dir", str(folder.with_name("launcher")),  # else torch leaves one
               "-m", "flowrl", "train", DEMO, "--folder", str(folder), "--model.device", device,
               *SMALL_DEMO, *QUIET, "--train.iterations", "1",
               "--evaluate.samples", "8"]  # fmt: skip
    quiet = python_environment() | {NOTICES_VARIABLE: "off"}
    done = subprocess.run(command, capture_output=True, text=True, env=quiet, check=False)
    if done.returncode:
        raise Failed(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return f"an iteration of {last['seconds']:.1f} s, gradient norm {last['grad_norm']:.2g}"


CHECKS: dict[str, tuple[Callable[[DeviceTrial], str], str]] = {
    "same samples": (same_samples, "the demo in float32 on the CPU and on the device"),
    "proof": (proof, "the pipeline's replay compared with its own call, in bfloat16"),
    "ratio": (ratio, "log-densities from sampling, recomputed by the update, in bfloat16"),
    "waits": (waits, "the host's waits, from torch.cuda.set_sync_debug_mode"),
    "floor": (floor, "seconds of an iteration compared with a plain loop of its calls"),
    "memory": (memory, "an iteration's peak memory compared with `flowrl plan`"),
    "compile": (compiled, "the same with model.compile"),
    "two GPUs": (shared, "an iteration under FSDP2 on two processes"),
}


def check_device(device: str, chosen: str | None = None) -> int:
    """Print the table. Returns 1 if a check has failed, 2 if the device is missing."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(),
             "mps": torch.backends.mps.is_available()}  # fmt: skip
    if device not in available:
        raise UserError(
            f"doctor: --device {device[:60]!r} is not known; choose one of {', '.join(available)}"
        )
    name = torch.cuda.get_device_name() if device == "cuda" and available[device] else device
    built = f"CUDA {torch.version.cuda}, " if device == "cuda" else ""
    where = f"{built}Python {platform.python_version()}, {platform.system()}"
    print(f"{name}: flowrl {version()}, torch {torch.__version__}, {where}, run {chosen or DEMO}\n")
    print("| check | result | detail |\n|---|---|---|")
    if not available[device]:
        for check, (_, question) in CHECKS.items():
            print(CheckRow(check, "not run", question))
        print(f"\nPyTorch sees no device {device}: nothing was run")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        trial, rows = DeviceTrial(device, chosen, Path(folder)), []
        for check in CHECKS:
            rows.append(_row(check, trial))
            print(rows[-1], flush=True)
    failed = [row.check for row in rows if row.verdict == "failed"]
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nno check has failed")
    return int(bool(failed))


def _row(check: str, trial: DeviceTrial) -> CheckRow:
    try:
        with redirect_stdout(io.StringIO()):  # what starts print
            return CheckRow(check, "passed", CHECKS[check][0](trial))
    except NotRun as reason:
        return CheckRow(check, "not run", str(reason))
    except (Failed, UserError, *BROKEN) as error:
        kind = "" if isinstance(error, Failed | UserError) else f"{type(error).__name__}: "
        return CheckRow(check, "failed", f"{kind}{error}"[:600])
