"""Files for SkyPilot and for Kubernetes."""

from dataclasses import dataclass
from typing import Any

import yaml

from flowrl.launching.job import LaunchJob

SAVING_SECONDS = 300  # between SIGTERM and SIGKILL: an iteration has to fit in
_PORT = "29500"


@dataclass(frozen=True)
class CloudPlace:
    """Names that a cloud needs beside the job."""

    gpu: str = "H100"  # SkyPilot's name of the GPU
    image: str = ""  # a container image with flowrl in it
    volume: str = ""  # of the runs: a volume of SkyPilot, a claim of Kubernetes
    mount: str = "/runs"  # where it is mounted; the run's folder is below


def sky_task(job: LaunchJob, place: CloudPlace) -> str:
    """A task of SkyPilot (`sky jobs launch`), which starts it again after a preemption. The
    variables are SkyPilot's: the rank of a node, and the addresses of all, one a line."""
    address = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
    resources: dict[str, Any] = {}
    if job.gpus:
        resources["accelerators"] = f"{place.gpu}:{job.gpus}"
    else:
        resources["cpus"] = f"{job.cpus}+"
    if place.image:
        resources["image_id"] = f"docker:{place.image}"
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "resources": resources}
    task["resources"]["job_recovery"] = {"max_restarts_on_errors": 3}
    if place.volume:
        task["volumes"] = {place.mount: place.volume}
    if not place.image:
        task["setup"] = "pip install flowrl"
    task["run"] = job.command('"$SKYPILOT_NODE_RANK"', address, _PORT) + "\n"
    return _yaml(task)


def kubernetes_job(job: LaunchJob, place: CloudPlace) -> str:
    """An indexed Job of Kubernetes with a headless service, by which the machines find the first
    one. Exit code 2, a mistake that every further start would have too, ends a job of one
    process."""
    name = job.name
    command = job.command('"$JOB_COMPLETION_INDEX"', f"{name}-0.{name}", _PORT)
    limits = {"nvidia.com/gpu": job.gpus} if job.gpus else {"cpu": job.cpus}
    container = {
        "name": "train",
        "image": place.image or "IMAGE",
        "command": ["bash", "-c", f"exec {command}"],
        "env": [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(SAVING_SECONDS - 10)}],
        "resources": {"limits": limits},
        "volumeMounts": [
            {"name": "runs", "mountPath": place.mount},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    refused = {"onExitCodes": {"operator": "In", "values": [2]}, "action": "FailJob"}
    evicted = {"onPodConditions": [{"type": "DisruptionTarget"}], "action": "Ignore"}
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVING_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": place.volume or "CLAIM"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    work = {
        "completions": job.nodes,
        "parallelism": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 20,
        "podFailurePolicy": {"rules": [refused, evicted]},
        "template": {"spec": pod},
    }
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": name},
    }
    named = {"metadata": {"name": name}}
    return "---\n".join(
        _yaml(document)
        for document in (
            {"apiVersion": "v1", "kind": "Service", **named, "spec": service},
            {"apiVersion": "batch/v1", "kind": "Job", **named, "spec": work},
        )
    )


def _yaml(tree: dict[str, Any]) -> str:
    return yaml.dump(tree, Dumper=_Block, sort_keys=False, width=100)


class _Block(yaml.SafeDumper):
    """Texts of several lines stay readable."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Block.add_representer(str, _text)
