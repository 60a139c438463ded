"""A run on a Ray cluster: one Ray task per machine, which starts accelerate's launcher.

Ray places the tasks and provides addresses; the processes communicate by torch.distributed. All
machines see the run file and the run's folder at the same path.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.launching.job import LaunchJob, newest_checkpoint

PORT = 29500
MORE_STARTS = 100  # at most, each with a new checkpoint


def ray_commands(job: LaunchJob, port: int = PORT) -> list[str]:
    """The shell commands of the machines."""
    return [job.command(str(rank), "FIRST_MACHINE", str(port)) for rank in range(job.nodes)]


def run_on_ray(job: LaunchJob, port: int = PORT) -> int:
    """Run one task per machine, with its GPUs or cores, on the cluster that RAY_ADDRESS names or
    that this machine belongs to. Tasks that fail begin again while the run has new checkpoints.
    Returns the first exit code that is not 0, or 0."""
    try:
        import ray  # type: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("launch ray: Ray is not installed: pip install 'flowrl[ray]'") from error
    ray.init(address="auto")
    folder, code = Path(job.folder), 0
    for _ in range(MORE_STARTS):
        before = newest_checkpoint(folder)
        code = _start(job, port)
        if code == 0 or newest_checkpoint(folder) == before:
            break
        print(
            f"ray: exit code {code} at checkpoint {newest_checkpoint(folder)}: begins again",
            flush=True,
        )
    return code


def _start(job: LaunchJob, port: int) -> int:
    import ray  # type: ignore[reportMissingImports]
    from ray.util import placement_group, remove_placement_group  # type: ignore[reportMissingImports]
    from ray.util.scheduling_strategies import (  # type: ignore[reportMissingImports]
        PlacementGroupSchedulingStrategy,
    )

    share = {"GPU": job.gpus, "CPU": 1} if job.gpus else {"CPU": job.cpus}
    place = placement_group([share] * job.nodes, strategy="STRICT_SPREAD")
    ray.get(place.ready())

    def on(rank: int, task: Any) -> Any:
        where = PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=rank)
        wanted = {"num_gpus": job.gpus} if job.gpus else {"num_cpus": job.cpus}
        # a task that dies is seen here, and all begin again together
        return ray.remote(scheduling_strategy=where, max_retries=0, **wanted)(task)

    try:
        address = ray.get(on(0, ray.util.get_node_ip_address).remote())
        commands = [job.command(str(rank), address, str(port)) for rank in range(job.nodes)]
        tasks = [on(rank, _in_shell).remote(text) for rank, text in enumerate(commands)]
        while tasks:
            (done, *_), tasks = ray.wait(tasks)
            if code := _exit_code(done):
                for task in tasks:  # the others wait for one that has ended
                    ray.cancel(task, force=True)
                return code
        return 0
    finally:
        remove_placement_group(place)


def _exit_code(task: Any) -> int:
    """Exit code of a task's command; 1 if its machine has gone."""
    import ray  # type: ignore[reportMissingImports]
    from ray.exceptions import RayError  # type: ignore[reportMissingImports]

    try:
        return ray.get(task)
    except RayError as error:
        print(f"ray: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return 1


def _in_shell(command: str) -> int:
    """Run a command in the environment of this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.call(["bash", "-c", f"exec {command}"], env={**os.environ, "PATH": path})
