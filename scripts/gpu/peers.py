"""Other trainers of the same method, each of which does its own iterations by turns with flowrl's.

A peer is a process: it runs the peer's own trainer, from sources in an ignored folder
(`.gpu/peers/NAME`, where scripts/gpu/pack.py puts them), with its tracker replaced by one that
writes nothing. At the start of each of its iterations it waits for a line of this program, and
answers with the seconds and bytes of the last one. Nothing of a peer's is part of this repository.

    python -m scripts.gpu.peers flow_grpo --try      # here, on the CPU: one iteration of a tiny SD3

A peer travels only if that has worked, with the versions of the packages that the machine has:
--try writes `.gpu/peers/NAME/tried.json`, which scripts/gpu/pack.py demands.
"""

import argparse
import functools
import importlib
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any
from unittest.mock import patch

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from flowrl.errors import UserError  # noqa: E402
from scripts.gpu.lines import PACKED, Line, versions  # noqa: E402

PEERS = PACKED / "peers"
SAME = ("transformers", "accelerate")  # packages whose versions decide whether a peer runs
GIB = 2**30


@dataclass(frozen=True)
class Source:
    """The files of a peer's repository that its trainer of SD3 needs, and the packages beside those
    that flowrl needs or the machine has."""

    files: tuple[str, ...]
    needs: tuple[str, ...] = ()


SOURCES = {
    "flow_grpo": Source(
        ("config/*.py", "flow_grpo/*.py", "scripts/*.py", "flow_grpo/assets/*.txt", "LICENSE"),
        ("ml-collections",),
    ),
    "flow_factory": Source(("src/*.py", "LICENSE")),
}


class EnoughTurns(Exception):
    """Ends a peer's loop, which has no end of its own."""


@dataclass(frozen=True)
class Job:
    """An iteration as all sides do it. Without a folder, a pipeline of SD3.5-medium's size is
    made on the device and handed over.

    rows      of a call of the denoiser, before guidance doubles them
    calls     of so many rows in sampling; the samples of an iteration are rows times calls
    trained   steps of each sample that the update evaluates
    model     a folder to load, or empty
    device    cuda or cpu
    mixed     the precision of accelerate: bf16 or no
    """

    rows: int
    calls: int
    updates: int
    steps: int
    trained: int
    side: int
    guidance: float
    kl: float
    eta: float
    rank: int
    alpha: int
    lr: float
    model: str = ""
    device: str = "cuda"
    mixed: str = "bf16"


class Turns:
    """A peer's side of the pipe: it measures iterations, one per line that it reads.

    rows     of the denoiser's calls in this iteration, without gradients and with
    figures  that the peer's driver adds to those of the iteration
    """

    def __init__(self, source: IO[str], answers: IO[str], device: str) -> None:
        self.source, self.answers, self.device = source, answers, device
        self.began: float | None = None
        self.update_began = math.nan
        self.rows = {False: 0, True: 0}
        self.figures: Line = {}

    def now(self) -> float:
        """Seconds once the device has finished."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> float | None:
        """The most GiB of the device since the last call; None on a CPU."""
        if self.device != "cuda":
            return None
        import torch

        most = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        return most

    def boundary(self) -> None:
        """Answer for the iteration that has ended, and wait until another is asked for. Raise
        EnoughTurns if the pipe has been closed instead."""
        if self.began is not None:
            ended = self.now()
            self.answer(
                seconds=ended - self.began, sampling=self.update_began - self.began,
                update=ended - self.update_began, GiB=self.peak(),
                rows=self.rows[False], graded=self.rows[True], **self.figures,
            )  # fmt: skip
        else:
            self.answer(ready=True)
        if not self.source.readline().strip():
            raise EnoughTurns
        self.figures, self.update_began = {}, math.nan
        self.rows = {False: 0, True: 0}
        self.began = self.now()

    def sampled(self) -> None:
        """Mark the end of sampling and scoring: the update begins."""
        self.update_began = self.now()

    def answer(self, **figures: Any) -> None:
        self.answers.write(json.dumps(figures) + "\n")
        self.answers.flush()


@dataclass(frozen=True)
class Peer:
    """The other end: a started peer that waits for turns."""

    name: str
    process: subprocess.Popen[str]

    def turn(self, limit: float) -> Line:
        """The figures of one iteration."""
        self._write("go\n")
        return self.answer(limit)

    def answer(self, limit: float) -> Line:
        """The next line of the peer. UserError if it ends, or is silent for so many seconds."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        if not ready:
            raise UserError(f"{self.name}: no answer within {limit:.0f} s; see log.txt")
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f"{self.name}: its process has ended; see log.txt for its last words")
        return json.loads(line)

    def _write(self, text: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(text)
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise UserError(f"{self.name}: its process has ended; see log.txt") from error


def command(name: str, job: Job) -> list[str]:
    """The words that start a peer."""
    words = ["-m", "scripts.gpu.peers", name, "--job", json.dumps(asdict(job))]
    return [sys.executable, *words]


@contextmanager
def started(name: str, words: Sequence[str]) -> Iterator[Peer]:
    """A peer whose process has begun; its first answer says that it is ready for turns. It is ended
    with the block, or with the stage, whose process group it belongs to."""
    with subprocess.Popen(
        words, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Peer(name, process)
        finally:
            process.kill()


def packed() -> list[str]:
    """The peers whose sources are here."""
    return [name for name in SOURCES if (PEERS / name / "source.json").is_file()]


def run_peer(name: str, job: Job, turns: Turns, folder: Path) -> None:
    """Run the peer's own trainer until no further turn is asked for."""
    if name not in packed():
        raise UserError(
            f"{PEERS / name}: no sources are there: python scripts/gpu/pack.py --peer "
            f"{name}=FOLDER copies them from a checkout"
        )
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    trainer = importlib.import_module(f"scripts.gpu.peer_{name}")
    with ExitStack() as patches:
        forward = counting(SD3Transformer2DModel.forward, turns)
        patches.enter_context(patch.object(SD3Transformer2DModel, "forward", forward))
        if not job.model:
            pipe = full_sd3(folder)
            loads = patch.object(StableDiffusion3Pipeline, "from_pretrained", lambda *_, **__: pipe)
            patches.enter_context(loads)
        patches.enter_context(suppress(EnoughTurns))
        trainer.train(PEERS / name, job, turns, folder)


def counting(forward: Callable[..., Any], turns: Turns) -> Callable[..., Any]:
    """The denoiser's call, which counts its rows."""

    @functools.wraps(forward)
    def counted(model: Any, hidden_states: Any, *more: Any, **named: Any) -> Any:
        import torch

        turns.rows[torch.is_grad_enabled()] += len(hidden_states)
        return forward(model, hidden_states, *more, **named)

    return counted


def full_sd3(folder: Path) -> Any:
    """SD3.5-medium's size on the device, in float32, as both peers load it."""
    import torch

    from scripts.gpu.subjects import SD35, built, settings

    return built(SD35, settings(SD35, folder / "ours")).to(torch.float32)


def tiny_job(folder: Path, device: str = "cpu") -> Job:
    """One iteration of a tiny SD3: eight samples of three steps, from a folder."""
    tiny_sd3().save_pretrained(folder)
    return Job(
        rows=4, calls=2, updates=2, steps=3, trained=2, side=16, guidance=4.5, kl=0.01, eta=0.7,
        rank=4, alpha=8, lr=3e-4, model=str(folder), device=device, mixed="no",
    )  # fmt: skip


def tiny_sd3() -> Any:
    """A tiny SD3 with all three encoders, since peers ask for each, of as many tokens as their
    calls pad to."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection, T5EncoderModel

    from tests.support import tiny_pipelines_image
    from tests.support.tiny_pipelines_parts import clip_config, ready, t5_config, tokenizer

    small, width = tiny_pipelines_image.sd3(), clip_config().hidden_size
    joint = small.transformer.config["joint_attention_dim"]
    config = t5_config().to_dict() | {"d_model": joint}
    clip = [CLIPTextModelWithProjection(clip_config(77)) for _ in range(2)]
    assert joint >= 2 * width, "states of both CLIPs are padded to the joint width"
    return ready(StableDiffusion3Pipeline(
        transformer=small.transformer, vae=small.vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=clip[0], tokenizer=tokenizer(77), text_encoder_2=clip[1],
        tokenizer_2=tokenizer(77), text_encoder_3=T5EncoderModel(type(t5_config())(**config)),
        tokenizer_3=tokenizer(256),
    ))  # fmt: skip


def attempt(name: str) -> Line:
    """One iteration of the peer's own trainer on the CPU, from a tiny folder. Returns what it did
    and the versions it ran with; UserError unless its loss is a number."""
    with TemporaryDirectory() as outer:
        folder = Path(outer)
        job = tiny_job(folder / "model")
        with started(name, command(name, job)) as peer:
            peer.answer(limit=600)
            figures = peer.turn(limit=600)
    if not all(math.isfinite(figures[part]) for part in ("loss", "seconds", "update")):
        raise UserError(f"{name}: its iteration has no finite loss: {figures}")
    source = json.loads((PEERS / name / "source.json").read_text())
    return {**source, "figures": figures, "versions": versions()}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=list(SOURCES))
    parser.add_argument("--try", action="store_true", dest="attempt")
    parser.add_argument("--job", type=json.loads, default={}, help="the fields of a Job, in JSON")
    options = parser.parse_args(words)
    try:
        if options.attempt:
            result = attempt(options.name)
            (PEERS / options.name / "tried.json").write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result))
            return 0
        job = Job(**options.job)
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a peer prints goes to the log, not between the answers
        with TemporaryDirectory() as folder:
            run_peer(options.name, job, Turns(sys.stdin, answers, job.device), Path(folder))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
