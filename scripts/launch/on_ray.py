"""flowrl on a Ray cluster: one Ray task per machine, which starts accelerate's launcher.

    python scripts/launch/on_ray.py --nodes 2 --gpus 8 configs/papers/flow_grpo_flux.yaml
    python scripts/launch/on_ray.py --nodes 2 --gpus 8 -- --resume runs/flux
    python scripts/launch/on_ray.py --nodes 2 --cpus 1 configs/demo.yaml  # machines without GPUs
    python scripts/launch/on_ray.py --dry-run --nodes 2 --gpus 8 configs/demo.yaml

Ray places the tasks and provides addresses; the processes communicate by torch.distributed. All
machines see the project and the run's folder at the same path. `--dry-run` prints the commands and
needs no Ray. The other arguments are those of `flowrl train`.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

CONFIG = "configs/accelerate/fsdp2_nodes.yaml"
CPU_CONFIG = "configs/accelerate/ddp_cpu_2.yaml"


def count(word: str) -> int:
    """A number of at least 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no number of at least 1")
    return int(word)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=count, required=True, help="machines")
    each = parser.add_mutually_exclusive_group(required=True)
    each.add_argument("--gpus", type=count, help="GPUs of each, all of them used")
    each.add_argument("--cpus", type=count, help="processes on each, without GPUs, a core for each")
    parser.add_argument("--accelerate-config", help=f"{CONFIG}, or {CPU_CONFIG} with --cpus")
    parser.add_argument("--port", type=int, default=29500, help="on the first machine")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="what flowrl train takes")
    given = parser.parse_args(words)
    given.train = [word for i, word in enumerate(given.train) if (i, word) != (0, "--")]
    if not given.train:
        parser.error("name what to train: a configuration, or -- --resume RUN")
    given.processes = given.gpus or given.cpus
    given.accelerate_config = given.accelerate_config or (CONFIG if given.gpus else CPU_CONFIG)
    return given


def command(given: argparse.Namespace, rank: int, address: str) -> list[str]:
    """The command of machine number `rank`; `address` is that of the first."""
    launch = {
        "config_file": given.accelerate_config,
        "num_machines": given.nodes,
        "num_processes": given.nodes * given.processes,
        "machine_rank": rank,
        "main_process_ip": address,
        "main_process_port": given.port,
    }
    options = [word for name, value in launch.items() for word in (f"--{name}", str(value))]
    start = [sys.executable, "-m", "accelerate.commands.launch"]
    return [*start, *options, "-m", "flowrl", "train", *given.train]


def run(given: argparse.Namespace) -> int:
    """Run one task per machine, with its GPUs or cores; the first exit code that is not 0, or 0."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(address="auto")
    share = {"GPU": given.gpus, "CPU": 1} if given.gpus else {"CPU": given.cpus}
    place = placement_group([share] * given.nodes, strategy="STRICT_SPREAD")
    ray.get(place.ready())

    def on(rank: int, task: Any) -> Any:
        where = PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=rank)
        wanted = {"num_gpus": given.gpus} if given.gpus else {"num_cpus": given.cpus}
        return ray.remote(scheduling_strategy=where, **wanted)(task)

    address = ray.get(on(0, ray.util.get_node_ip_address).remote())
    tasks = [
        on(rank, subprocess.call).remote(command(given, rank, address))
        for rank in range(given.nodes)
    ]
    while tasks:
        (done, *_), tasks = ray.wait(tasks)
        if code := ray.get(done):
            for task in tasks:  # the others wait for one that has ended
                ray.cancel(task, force=True)
            return code
    return 0


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(words)
    if not given.dry_run:
        return run(given)
    for rank in range(given.nodes):
        print(shlex.join(command(given, rank, "FIRST_MACHINE")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
