"""A job script for Slurm that requeues itself while the run gets on."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import UserError
from flowrl.launching.job import LaunchJob

# The tasks get SIGTERM; they finish their iteration, save and end, and then the script, which gets
# no signal, decides whether another start would get on. A cancelled job is left alone.
_END = r"""
newest() {
  { find "$RUN_FOLDER/checkpoints" -maxdepth 1 -regex '.*/[0-9]+' 2>/dev/null || true; } \
    | sort | tail -n 1
}

before=$(newest)
code=0
# --kill-on-bad-exit: where one machine fails, the others would wait for it
${SRUN:-srun} --kill-on-bad-exit=1 bash -c "$TRAIN" || code=$?
after=$(newest)

if [ "$code" -eq 0 ]; then
  exit 0
fi
if [ "$before" = "$after" ]; then
  echo "slurm: exit code $code without a new checkpoint: not requeued" >&2
  exit "$code"
fi
if [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" != RUNNING ]; then
  exit "$code"  # cancelled, or requeued by Slurm itself
fi
echo "slurm: ended at checkpoint ${after##*/}: requeued, and goes on from there" >&2
scontrol requeue "$SLURM_JOB_ID"
"""

# the forms of sbatch's --time: minutes, [hours:]minutes:seconds, days-hours[:minutes[:seconds]]
TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}|UNLIMITED|INFINITE", re.I)


@dataclass(frozen=True)
class SlurmLimits:
    """Limits of a job beside its machines; empty: the cluster's default."""

    time: str = ""  # of one start, such as 24:00:00
    partition: str = ""
    account: str = ""
    notice: int = 300  # seconds before the limit at which the run gets a signal to save

    def directives(self, job: LaunchJob) -> Iterator[str]:
        yield f"--job-name={job.name}"
        yield f"--nodes={job.nodes}"
        yield "--ntasks-per-node=1"
        if job.gpus:
            yield f"--gpus-per-node={job.gpus}"
        else:
            yield f"--cpus-per-task={job.cpus}"
        for name in ("time", "partition", "account"):
            if value := getattr(self, name):
                yield f"--{name}={value}"
        yield f"--signal=TERM@{self.notice}"
        yield "--requeue"
        yield "--open-mode=append"
        yield f"--output={job.name}-%j.out"


def slurm_script(job: LaunchJob, limits: SlurmLimits, python: str = sys.executable) -> str:
    """The text for `sbatch`: one task a machine, and in it accelerate's launcher with a process for
    each GPU. Its environment is that of `python`, which all machines see."""
    tasks = job.command('"$SLURM_NODEID"', '"$MAIN_ADDRESS"', '"$MAIN_PORT"')
    head = [
        "#!/usr/bin/env bash",
        f"# Trains {job.config}. Each start goes on from the newest checkpoint, and the job",
        "# requeues itself while there are new ones.",
        *(f"#SBATCH {word}" for word in limits.directives(job)),
        "set -euo pipefail",
        "",
        f"export PATH={shlex.quote(str(Path(python).parent))}:$PATH",
        f"RUN_FOLDER={shlex.quote(job.folder)}",
        'MAIN_ADDRESS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "# not always the same port: two jobs may share a machine",
        "MAIN_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "# how long processes may take to save; torch's own 30 seconds are short",
        f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(limits.notice - 10, 30)}",
        "export RUN_FOLDER MAIN_ADDRESS MAIN_PORT TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        "",
        "read -r -d '' TRAIN <<'END' || true",
        f"exec {tasks}",
        "END",
    ]
    return "\n".join(head) + "\n" + _END


def submit_to_slurm(script: str) -> str:
    """Hand a script to `sbatch` and return what it says. UserError if that fails."""
    try:
        done = subprocess.run(
            ["sbatch"], input=script, capture_output=True, text=True, env=os.environ, check=False
        )
    except FileNotFoundError as error:
        raise UserError(
            "launch slurm: sbatch is not on this machine: leave --submit out"
        ) from error
    if done.returncode:
        raise UserError(f"launch slurm: sbatch refused the job: {done.stderr.strip()[:500]}")
    return done.stdout.strip()
