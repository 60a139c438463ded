"""A run as a scheduler starts it: the words of `train`, the machines, and the launcher on each."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from flowrl.launching.own_python import SAFE_PATH

SINGLE, SHARDED = "ddp", "fsdp2"


@dataclass(frozen=True)
class LaunchJob:
    """A run on several machines with as many processes on each.

    Its first start begins the run, every later one resumes it, and one after its end does nothing.
    """

    config: str  # the run file, as all machines find it
    folder: str  # the run's folder, on a disk that all machines see
    options: tuple[str, ...] = ()  # settings and rights, as of `flowrl train`
    nodes: int = 1
    gpus: int = 0  # of each machine, a process on each; 0: processes without GPUs
    cpus: int = 1  # processes on each machine without GPUs
    accelerate: str = ""  # accelerate's configuration file; empty: the one that fits
    sharded: bool = True  # whether the GPUs shard the weights (FSDP2), or hold all of them (DDP)

    @property
    def name(self) -> str:
        """The run folder's name, of letters that schedulers take."""
        letters = (c if c.isascii() and c.isalnum() else "-" for c in Path(self.folder).name)
        return "".join(letters).strip("-").lower()[:50] or "flowrl"

    @property
    def on_each(self) -> int:
        """Processes on each machine."""
        return self.gpus or self.cpus

    @property
    def processes(self) -> int:
        return self.nodes * self.on_each

    @property
    def train(self) -> tuple[str, ...]:
        """The words after `flowrl`."""
        start = ("train", self.config, "--folder", self.folder, "--resume", "auto", "--wait")
        return (*start, *self.options)

    @property
    def launcher_file(self) -> str:
        """Accelerate's configuration file, a name of `flowrl path` or the user's own."""
        if self.accelerate:
            return self.accelerate
        if not self.gpus:
            return f"configs/accelerate/{SINGLE}_cpu_2.yaml"
        return shipped_file(SHARDED if self.sharded else SINGLE, self.nodes)

    def command(self, rank: str = "0", address: str = "127.0.0.1", port: str = "29500") -> str:
        """The shell command of one machine, on several lines. `rank`, `address` (of the first
        machine) and `port` are shell words, such as "$SLURM_NODEID". One process alone needs no
        launcher, and the program `flowrl` imports nothing of the working folder by itself."""
        if self.processes == 1 and not self.accelerate:
            return shlex.join(("flowrl", *self.train))
        launch = {
            "config_file": f'"$(flowrl path {shlex.quote(self.launcher_file)})"',
            "num_machines": str(self.nodes),
            "num_processes": str(self.processes),
            "machine_rank": rank,
            "main_process_ip": address,
            "main_process_port": port,
        }
        options = [f"--{name} {value}" for name, value in launch.items()]
        lines = (
            f"env {SAFE_PATH}=1 accelerate launch",
            *options,
            f"-m flowrl {shlex.join(self.train)}",
        )
        return " \\\n  ".join(lines)


def shipped_file(kind: str, nodes: int) -> str:
    """The included accelerate configuration for GPUs of one machine or several."""
    return f"configs/accelerate/{kind}{'_nodes' if nodes > 1 else ''}.yaml"


def newest_checkpoint(folder: Path) -> str:
    """Name of a run's newest checkpoint, such as 000010; empty if there is none. Without a look
    inside: a start passes over one that is damaged."""
    names = (path.name for path in (folder / "checkpoints").glob("[0-9]*"))
    return max((name for name in names if name.isdigit()), default="")
