"""Runs as processes of their own, without the seconds of their start-up.

A warm process has imported everything and computed nothing; it forks one child a command, which
calls the command line's own `main`. `python -m tests.support.warm` is that process; `Warm` speaks
to it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from flowrl import cli
from flowrl.drill.same_end import differences, unfinished
from flowrl.paths import PROJECT
from tests.support import process_runs, runs, watched
from tests.support.runs import environment, lines

__all__ = ["Process", "Warm", "agree", "small", "together", "unfinished"]

JOBS = "@jobs"  # the first word of a command that `process_runs` carries out


class Warm:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.support.warm"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=PROJECT, env=environment(), **pipes)
        assert self._read() == "ready"

    def _read(self):
        return json.loads(self.process.stdout.readline())

    def _ask(self, **what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._read()

    def start(
        self, *words: str | Path, out: Path, cwd: Path = PROJECT, env: Mapping[str, str] = {}
    ) -> int:
        """`flowrl WORDS`; gives its pid. What it says goes to `out`."""
        texts = [str(word) for word in words]
        return self._ask(words=texts, out=str(out), cwd=str(cwd), env=dict(env))

    def poll(self, pid: int) -> int | None:
        """The exit code, or minus the signal; None while it runs. To be asked until it is known."""
        return self._ask(pid=pid)

    def wait(self, pid: int, seconds: float = 120) -> int:
        end = time.monotonic() + seconds
        while (code := self.poll(pid)) is None:
            assert time.monotonic() < end, f"{pid} still runs"
            time.sleep(0.01)
        return code

    def signal_when(self, pid: int, ready: Callable[[], bool], number: int) -> None:
        end = time.monotonic() + 120
        while not ready():
            assert self.poll(pid) is None and time.monotonic() < end
            time.sleep(0.002)
        os.kill(pid, number)
        self.wait(pid)

    def run(self, *words: str | Path, out: Path, **where) -> int:
        return self.wait(self.start(*words, out=out, **where))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(300)  # runs that were left are ended first, on a busy machine too


class Process:
    """The processes of one start of a run."""

    def __init__(
        self, warm: Warm, words: Sequence[Any], out: Path, processes: int, launched: bool
    ) -> None:
        self.warm, self.out, self.launched = warm, out, None
        out.write_text("")
        if launched:
            config = PROJECT / "configs/accelerate/ddp_cpu_2.yaml"
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
            self.launched = subprocess.Popen(
                [*map(str, command), "-m", "flowrl", "train", *map(str, words)],
                env=runs.environment() | {"PYTHONPATH": str(PROJECT)},
                stdout=out.open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=PROJECT,
            )
            self.pids = [self.launched.pid]
            return
        self.pids, port = [], str(runs.free_port())
        for rank in range(processes):
            env = {} if processes == 1 else rank_environment(rank, processes, port)
            where = out if rank == 0 else out.with_suffix(f".{rank}.txt")
            self.pids.append(warm.start("train", *words, out=where, env=env))

    def codes(self) -> list[int | None]:
        if self.launched is not None:
            return [self.launched.poll()]
        return [self.warm.poll(pid) for pid in self.pids]

    def running(self) -> bool:
        return any(code is None for code in self.codes())

    def kill(self, only: int | None = None) -> None:
        pids = self.pids if only is None else [self.pids[only]]
        if self.launched is not None:  # it puts its processes into sessions of their own
            pids = [p.pid for p in psutil.Process(pids[0]).children(recursive=True)] + pids
        else:  # the number of one that has ended may be another's by now
            pids = [pid for pid in pids if self.warm.poll(pid) is None]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self) -> list[int | None]:
        # a process whose others die before all have met waits 120 seconds for them
        end = time.monotonic() + 240 * (2 if self.launched else 1)
        while self.running() and time.monotonic() < end:
            time.sleep(0.01)
        return self.codes()


def rank_environment(
    rank: int, processes: int, port: str, config: Path = process_runs.DDP
) -> dict[str, str]:
    """What `accelerate launch --config_file CONFIG` gives to a process."""
    parser = launch_command_parser()
    args = parser.parse_args(["--config_file", str(config), "x.py"])
    args, _, _ = _validate_launch_command(args)
    chosen = {
        k: v for k, v in prepare_multi_gpu_env(args).items() if k.startswith(("ACCEL", "FSDP"))
    }
    ranks = {"RANK": rank, "LOCAL_RANK": rank}
    sizes = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in (chosen | ranks | sizes | address).items()}


def together(
    warm: Warm, config: Path, jobs: Mapping[str, process_runs.Job], out: Path
) -> dict[str, process_runs.Weights]:
    """`process_runs.together` for two processes without the seconds of their start-up."""
    out.mkdir(exist_ok=True)
    (out / "jobs.json").write_text(json.dumps(jobs))
    port, logs = str(runs.free_port()), [out / f"log.{rank}.txt" for rank in range(2)]
    pids = [
        warm.start(
            JOBS, out / "jobs.json", out, out=log, env=rank_environment(rank, 2, port, config)
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [warm.wait(pid, 300) for pid in pids]
    finally:
        for pid in pids:
            if warm.poll(pid) is None:
                os.kill(pid, signal.SIGKILL)
    (out / "log.txt").write_text("".join(log.read_text() for log in logs))
    assert codes == [0, 0], (out / "log.txt").read_text()[-9000:]
    return process_runs.trained(jobs, out)


def small(pipeline: Path, folder: Path) -> dict:
    """Settings of a run whose saves are a good part of its life."""
    recipe = {"name": "nft", "steps": 2, "group": 2, "levels_per_sample": 1}
    tree = runs.tree(pipeline, folder, recipe, updates=2)
    tree["train"]["iterations"] = 4
    tree["evaluate"] |= {"steps": 2, "samples": 2, "per_prompt": 1, "average": 0.5}
    tree["track"]["images"] = 1
    return tree


def agree(folder: Path, unbroken: Path, untimed: tuple[str, ...] = ("seconds",)) -> None:
    """Weights, raw and averaged, optimizer, best and every line but what begins with a word of
    `untimed` are the same."""
    names = [p.relative_to(unbroken) for p in unbroken.rglob("*.safetensors")]
    assert len([name for name in names if name.parts[0] != "checkpoints"]) >= 3
    assert [line["iteration"] for line in lines(folder)] == list(range(len(lines(unbroken))))
    assert not differences(folder, unbroken, untimed)


def imports() -> None:
    """What a run imports, also late."""
    import datasets  # noqa: F401
    import peft  # noqa: F401
    from diffusers import AutoencoderKL, StableDiffusion3Pipeline  # noqa: F401
    from transformers import (  # noqa: F401
        CLIPTextModelWithProjection,
        CLIPTokenizerFast,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        T5EncoderModel,
        T5TokenizerFast,
    )

    torch.set_num_threads(1)


def child(words: list[str], out: str, cwd: str, env: dict[str, str]) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.update(env)
    output = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    code = 1  # of a trace
    if watched.EVENTS in env:
        watched.watch_command()
    try:
        if words[0] == JOBS:
            process_runs.main(words[1:])
        else:
            cli.main(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:  # never back into the warm process's own loop
        if code == 1:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    imports()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed is no answer

    def answer(what: object) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    answer("ready")
    ended: dict[int, int] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "words" in asked:
            pid = os.fork()
            if pid == 0:
                child(**asked)
            answer(pid)
            continue
        pid = asked["pid"]
        if pid not in ended:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status)
        answer(ended.get(pid))


if __name__ == "__main__":
    serve()
