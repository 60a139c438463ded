"""Processes that wait for others before a run wait a bounded time, and say for whom."""

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from flowrl.errors import UserError
from flowrl.paths import PROJECT
from flowrl.processes.meeting import (
    MEETING_SECONDS,
    MEETING_VARIABLE,
    _seconds,
    meet,
    not_alone,
)
from flowrl.processes.store import check_launcher_variables
from flowrl.processes.watch import HANG_VARIABLE
from tests.support import runs
from tests.support.advice import advice

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

ALONE = f"""
import os, sys
sys.path.insert(0, {str(PROJECT)!r})
from flowrl.errors import UserError
from flowrl.processes.meeting import agreed, meet
state = meet(cpu=True)
if state.process_index == 1:
    os._exit(9)
try:
    for made in range(5):
        agreed(state, lambda: made, lambda done: print("undone", done))
except UserError as error:
    print(error)
    sys.exit(2)
"""


def start(rank: int, port: int, seconds: str, code: str = PAIR) -> subprocess.Popen:
    named = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    named |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, MEETING_VARIABLE: seconds}
    named |= {"ACCELERATE_USE_CPU": "true"}
    environment = runs.environment() | {name: str(value) for name, value in named.items()}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_partner_is_gone_ends_with_a_sentence(rank):
    process = start(rank, runs.free_port(), "3")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "waited 3 s" in said and "not all 2 processes" in said


def test_a_store_that_nobody_opened_is_awaited_once_and_without_a_trace(monkeypatch, capfd):
    named = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (named | {"MASTER_PORT": runs.free_port(), MEETING_VARIABLE: 1.5}).items():
        monkeypatch.setenv(name, str(value))
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"process 1 waited 1.5 s at 127\.0\.0\.1:.* refused"):
        meet(cpu=True)
    assert 1.5 <= time.monotonic() - begun < 4 and capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_process_that_dies_after_the_meeting_is_a_sentence_and_leaves_nothing():
    port = runs.free_port()
    main, other = (start(rank, port, "50", ALONE) for rank in (0, 1))
    said, _ = main.communicate(timeout=60)
    assert main.returncode == 2 and other.wait() == 9
    assert said.startswith("undone ")

    def again():
        pair = [start(rank, runs_port, "50") for rank in (0, 1)]
        assert [process.wait(timeout=60) for process in pair] == [0, 0]

    def refused():
        raise UserError(said)

    runs_port = runs.free_port()
    advice(
        "another process of this run ended before training began ({}); read its output, and start "
        "all processes again",
        refused,
        again,
    )


@pytest.mark.parametrize("lost", [RuntimeError("[0] Connection closed by peer"), dist.DistError()])
def test_a_collective_that_fails_for_a_lost_process_is_a_sentence(lost):
    undone: list[str] = []
    with (
        pytest.raises(UserError, match="another process of this run ended before training began"),
        not_alone(lambda: undone.append("undone")),
    ):
        raise lost
    with pytest.raises(RuntimeError, match="of its own"), not_alone(lambda: undone.append("more")):
        raise RuntimeError("a failure of its own")
    assert undone == ["undone"]


@pytest.mark.slow
def test_processes_that_have_met_wait_until_the_watch_ends_them():
    port = runs.free_port()
    pair = [start(rank, port, "50") for rank in (0, 1)]
    said = [process.communicate(timeout=60)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert said == ["2 365 days, 0:00:00\n"] * 2


def test_the_variable_is_a_number_of_seconds(monkeypatch):
    monkeypatch.delenv(MEETING_VARIABLE, raising=False)
    assert _seconds() == MEETING_SECONDS
    monkeypatch.setenv(MEETING_VARIABLE, "7.5")
    assert _seconds() == 7.5 and os.environ[MEETING_VARIABLE] == "7.5"
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(MEETING_VARIABLE, wrong)
        with pytest.raises(UserError, match="number of seconds above 0"):
            _seconds()


WHOLE = {
    "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0",
    "WORLD_SIZE": "2",
}  # fmt: skip
TORN: dict[str, tuple[dict[str, str], str]] = {
    "a rank that a notebook has left": (
        {"LOCAL_RANK": "5"},
        "LOCAL_RANK is '5', as in a process that a launcher started, but MASTER_ADDR is not set: "
        "launch with torchrun or accelerate launch",
    ),
    "a size alone": ({"WORLD_SIZE": "2"}, "but MASTER_ADDR is not set: .* unset WORLD_SIZE"),
    "no rank": (WHOLE | {"RANK": ""}, "WORLD_SIZE is '2', .* but RANK is not set"),
    "a size in words": (WHOLE | {"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number"),
    "a size below 0": (WHOLE | {"WORLD_SIZE": "-2"}, "WORLD_SIZE must be a whole number"),
    "a rank in words": (WHOLE | {"RANK": "x"}, "RANK must be a whole number, not 'x'"),
    "a port in words": (WHOLE | {"MASTER_PORT": "abc"}, "MASTER_PORT must be a whole number"),
    "a rank behind the last": (WHOLE | {"RANK": "2"}, "RANK is 2, but ranks of 2 processes"),
}


@pytest.mark.parametrize("case", TORN)
def test_variables_of_a_launcher_that_do_not_fit_are_a_sentence(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate and torch read the same ones, and end with a trace."""
    words, says = TORN[case]
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)
    for name, word in words.items():
        monkeypatch.setenv(name, word)
    with pytest.raises(UserError, match=says):
        meet(cpu=True)


def test_the_limit_of_a_hang_is_checked_without_others_too(monkeypatch) -> None:
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(HANG_VARIABLE, "half an hour")
    with pytest.raises(UserError, match=f"{HANG_VARIABLE} must be a number of seconds above 0"):
        meet(cpu=True)


@pytest.mark.parametrize(
    "words", [{}, WHOLE, {"LOCAL_RANK": "-1"}, {"RANK": "0"}, {"WORLD_SIZE": "1"},
              {**WHOLE, "LOCAL_RANK": ""}]
)  # fmt: skip
def test_variables_of_a_launcher_that_fit_are_taken(
    words: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)
    for name, word in words.items():
        monkeypatch.setenv(name, word)
    check_launcher_variables()
