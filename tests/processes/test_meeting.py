"""Processes that wait for others before a run wait a bounded time, and say for whom."""

import os
import subprocess
import sys

import pytest

from flowrl.errors import UserError
from flowrl.paths import PROJECT
from flowrl.processes.meeting import MEETING_SECONDS, MEETING_VARIABLE, _seconds
from tests.support import runs

PAIR = f"""
import sys
sys.path.insert(0, {str(PROJECT)!r})
import torch.distributed as dist
from flowrl.errors import UserError
from flowrl.processes.meeting import meet
try:
    state = meet(cpu=True)
except UserError as error:
    print(error)
    sys.exit(2)
print(state.num_processes, dist.distributed_c10d._get_default_group()._get_backend(
    __import__("torch").device("cpu")).options._timeout)
dist.barrier()
"""


def start(rank: int, port: int, seconds: str) -> subprocess.Popen:
    named = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    named |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, MEETING_VARIABLE: seconds}
    named |= {"ACCELERATE_USE_CPU": "true"}
    environment = runs.environment() | {name: str(value) for name, value in named.items()}
    return subprocess.Popen(
        [sys.executable, "-c", PAIR], env=environment, text=True, stdout=subprocess.PIPE
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_partner_is_gone_ends_with_a_sentence(rank):
    process = start(rank, runs.free_port(), "3")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "waited 3 s" in said and "the 2 processes" in said


@pytest.mark.slow
def test_processes_that_have_met_wait_as_long_as_torch_does():
    port = runs.free_port()
    pair = [start(rank, port, "50") for rank in (0, 1)]
    said = [process.communicate(timeout=60)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert said == ["2 0:30:00\n"] * 2


def test_the_variable_is_a_number_of_seconds(monkeypatch):
    monkeypatch.delenv(MEETING_VARIABLE, raising=False)
    assert _seconds() == MEETING_SECONDS
    monkeypatch.setenv(MEETING_VARIABLE, "7.5")
    assert _seconds() == 7.5 and os.environ[MEETING_VARIABLE] == "7.5"
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(MEETING_VARIABLE, wrong)
        with pytest.raises(UserError, match="number of seconds above 0"):
            _seconds()
