"""The machine in front of you, under accelerate's launcher."""

import os

from flowrl.launching.job import LaunchJob


def run_here(job: LaunchJob) -> int:
    """Become the launcher: its signals, output and exit code are this process's."""
    os.execvp("bash", ["bash", "-c", f"exec {job.command()}"])
