"""`flowrl launch WHERE FILE --folder RUN`: the script, file or command that trains a run on other
machines."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from flowrl.errors import UserError
from flowrl.estimate.devices import GPU_KINDS
from flowrl.estimate.memory import estimate, size
from flowrl.launching.cloud import CloudPlace, kubernetes_job, sky_task
from flowrl.launching.job import SHARDED, SINGLE, LaunchJob, shipped_file
from flowrl.launching.slurm import TIME, SlurmLimits, slurm_script, submit_to_slurm
from flowrl.paths import find, own_file, own_runs, run_file
from flowrl.settings import RunSettings
from flowrl.settings.checks.sharding import can_be_sharded, check_sharded
from flowrl.settings.command_line.arguments import AtLeastOne, Word
from flowrl.settings.read import check_plan, override, read_run

LaunchPlace = Literal["slurm", "ray", "sky", "k8s", "accelerate"]
_USUAL = "H100"  # the GPU whose memory decides between DDP and FSDP2
SUBMITTED: tuple[LaunchPlace, ...] = ("slurm", "ray", "accelerate")
_CLOUDS = ("sky", "k8s")
_ONLY_FOR: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("time", "partition", "account", "notice"), ("slurm",)),
    "gpu": ("sky",),
    **dict.fromkeys(("image", "volume", "mount"), _CLOUDS),
    "port": ("ray",),
}


@dataclass
class LaunchArguments:
    """Print what starts a run on other machines, or submit it: a job script for Slurm, tasks for
    Ray, a task file for SkyPilot, a Job for Kubernetes, or accelerate's command for this machine.
    Each start goes on from the newest checkpoint (`train --resume auto`), and a failed one is
    followed by another while there are new checkpoints. Settings are options, as of train:
    --train.lr 1e-4."""

    where: Word[LaunchPlace]
    """slurm, ray, sky, k8s or accelerate."""
    config: Word[str]
    """The file of a run, which all machines find at the same path, or a name of flowrl's."""
    folder: Path | None = None
    """The run's folder, on a disk that all machines see; required."""
    nodes: AtLeastOne = 1
    """Number of machines."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs of each machine, a process on each; give this or --cpus."""
    cpus: AtLeastOne | None = None
    """Processes on each machine, without GPUs, a core for each."""
    accelerate_config: str = ""
    """Accelerate's configuration file; by default one of configs/accelerate: DDP where adapters are
    trained and an H100 would hold the run, or where FSDP2 is refused; FSDP2 for all else on GPUs.
    Its numbers of machines and processes are replaced."""
    submit: bool = False
    """Hand it to sbatch, run it on the Ray cluster, or start it here, instead of printing it."""
    trust: bool | str = False
    """As of train: rights for a folder that was not started here, also at later starts."""
    time: str = ""
    """slurm: the time limit of one start, such as 24:00:00."""
    partition: str = ""
    """slurm: the partition."""
    account: str = ""
    """slurm: the account."""
    notice: Annotated[int, Field(ge=30)] = 300
    """slurm: seconds before the time limit at which the run gets a signal to save; an iteration has
    to fit in."""
    gpu: str = "H100"
    """sky: SkyPilot's name of the GPU."""
    image: str = ""
    """sky, k8s: a container image with flowrl."""
    volume: str = ""
    """sky, k8s: the volume, or the persistent volume claim, that holds the run's folder."""
    mount: str = "/runs"
    """sky, k8s: where the volume is mounted; --folder is below it."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29500
    """ray: the port of the first machine at which the processes meet."""


def launch_job(arguments: LaunchArguments, options: Sequence[str]) -> int:
    """Print, or submit with --submit. The settings are checked before either."""
    job = job_of(arguments, options)
    if arguments.submit and arguments.where not in SUBMITTED:
        tool = {"sky": "sky jobs launch", "k8s": "kubectl apply -f"}[arguments.where]
        raise UserError(
            f"launch {arguments.where}: flowrl does not submit there: leave --submit out, write "
            f"the output into a file, and hand that to `{tool}`"
        )
    place = CloudPlace(arguments.gpu, arguments.image, arguments.volume, arguments.mount)
    if arguments.where == "slurm":
        limits = SlurmLimits(
            arguments.time, arguments.partition, arguments.account, arguments.notice
        )
        script = slurm_script(job, limits)
        print(submit_to_slurm(script) if arguments.submit else script)
    elif arguments.where == "sky":
        print(sky_task(job, place), end="")
    elif arguments.where == "k8s":
        print(kubernetes_job(job, place), end="")
    elif arguments.where == "ray":
        from flowrl.launching.on_ray import ray_commands, run_on_ray  # Ray is an extra

        if arguments.submit:
            return run_on_ray(job, arguments.port)
        print("\n".join(ray_commands(job, arguments.port)))
    elif arguments.submit:
        from flowrl.launching.accelerate import run_here

        sys.stdout.flush()
        return run_here(job)
    else:
        print(job.command())
    return 0


def job_of(arguments: LaunchArguments, options: Sequence[str]) -> LaunchJob:
    """The job that is asked for. UserError for settings that a start would refuse on any machine,
    and for places that its machines could not find."""
    if arguments.folder is None:
        raise UserError(
            f"launch {arguments.where}: name the run's folder with --folder: every start resumes "
            "the run that is in it"
        )
    if arguments.gpus == 0:
        raise UserError(
            f"launch {arguments.where}: --gpus 0: give --cpus in its place, the processes on each "
            "machine without GPUs, such as --cpus 1"
        )
    if (arguments.gpus is None) == (arguments.cpus is None):
        raise UserError(
            f"launch {arguments.where}: give either --gpus, those of each machine, or --cpus, the "
            "processes on each without GPUs"
        )
    _check_words(arguments)
    if arguments.where in _CLOUDS and not arguments.folder.is_relative_to(arguments.mount):
        raise UserError(
            f"launch {arguments.where}: --folder {arguments.folder} is not below "
            f"{arguments.mount}, where the "
            "volume is mounted (--mount), so that the run would end with its machine"
        )
    config = run_file(arguments.config)
    run = override(read_run(config), options)
    check_plan(run)
    if arguments.accelerate_config and not find(arguments.accelerate_config).is_file():
        raise UserError(f"launch: --accelerate-config {arguments.accelerate_config}: no such file")
    words = [f"--trust={arguments.trust}" if isinstance(arguments.trust, str) else "--trust"]
    sharded = True
    several = arguments.nodes * (arguments.gpus or 0) > 1
    if several and not arguments.accelerate_config:
        sharded, reason = sharded_by_default(run)
        kind = "FSDP2" if sharded else "DDP"
        other = shipped_file(SINGLE if sharded else SHARDED, arguments.nodes)
        if can_be_sharded(run):
            reason = f"{reason}; --accelerate-config {other} is the other way"
        print(f"{kind}: {reason}", file=sys.stderr)
    return LaunchJob(
        config=_for_all(arguments.config, config),
        folder=str(arguments.folder if arguments.where in _CLOUDS else arguments.folder.absolute()),
        options=(*options, *(words if arguments.trust else ())),
        nodes=arguments.nodes,
        gpus=arguments.gpus or 0,
        cpus=arguments.cpus or 1,
        accelerate=arguments.accelerate_config,
        sharded=sharded,
    )


def _check_words(arguments: LaunchArguments) -> None:
    """UserError for an option that the place would ignore, and for words that would end a line of
    its script or file."""
    defaults = LaunchArguments(arguments.where, arguments.config)
    for name, places in _ONLY_FOR.items():
        value = getattr(arguments, name)
        if arguments.where not in places and value != getattr(defaults, name):
            raise UserError(
                f"launch {arguments.where}: --{name} is of {' and '.join(places)}: leave it out"
            )
    for name in ("gpu", "image", "volume", "partition", "account"):
        value = getattr(arguments, name)
        if value and not (value.isprintable() and value == "".join(value.split())):
            raise UserError(
                f"launch {arguments.where}: --{name} {value!r} is not a name: give one without "
                "spaces"
            )
    if arguments.time and not TIME.fullmatch(arguments.time):
        raise UserError(
            f"launch slurm: --time {arguments.time!r} is not a time of Slurm's: give hours, "
            "minutes and seconds, such as 24:00:00, or days before them, such as 2-12:00:00"
        )
    for name, word in (("", arguments.config), ("--folder ", str(arguments.folder))):
        if not word or not word.isprintable():
            raise UserError(
                f"launch {arguments.where}: {name}{word!r} is a name that a job's script cannot "
                "hold: choose one of letters, numbers and signs on one line"
            )


def sharded_by_default(run: RunSettings) -> tuple[bool, str]:
    """Whether GPUs shard the weights by default, and why: not where a start would refuse it. FSDP2
    gathers the weights for every call, which adapters do not repay while a GPU holds the frozen
    model. A cluster's GPUs are not known here, so the line is the memory of an H100."""
    try:
        check_sharded(run)
    except UserError as error:
        return False, f"the weights of this run cannot be sharded ({error})"
    if run.model.lora is None:
        return True, "all weights are trained, with their gradients and optimizer states"
    needed = estimate(run)
    if needed is None:
        return True, "the memory of the run is unknown, since its model is not on this machine"
    most = int(GPU_KINDS[_USUAL].memory * 10**9)
    about = f"the run takes about {size(needed.total)}, an {_USUAL} has {size(most)}"
    if needed.total > most:
        return True, about
    return False, f"only adapters are trained, and {about}"


def _for_all(word: str, path: Path) -> str:
    """The name by which other machines find a run file: one of flowrl's own, or the whole path."""
    names = {file: name for name, file in own_runs()}
    if path in names:
        return names[path]
    shipped = own_file(Path(word))
    return word if shipped is not None and shipped == path else str(path.absolute())
