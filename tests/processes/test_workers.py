"""Workers on two Ray nodes of this machine: the bits of the run in one process, whatever happens to
them."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowrl.paths import PROJECT
from tests.support.runs import environment
from tests.support.worker_runs import RECIPES

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def check(*words: str, out: Path) -> None:
    """Run scripts/benchmarks/workers.py, which fails where an end has other bits."""
    command = [sys.executable, "scripts/benchmarks/workers.py", *words, "--out", str(out)]
    done = subprocess.run(command, cwd=PROJECT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.parametrize("recipe", RECIPES)
def test_workers_change_no_bit(recipe, tmp_path):
    """1, 2 and 3 workers, and a reward in replicas; bytes as planned."""
    check("bits", "--only", f"{recipe}-lag0", "--iterations", "2", out=tmp_path)


@pytest.mark.parametrize("lag", [1, 2])
def test_a_lag_is_of_the_run_and_not_of_its_timing(lag, tmp_path):
    """One worker, three, and three of which one is killed."""
    check("bits", "--only", f"flow_grpo-lag{lag}", out=tmp_path)


def test_kills_change_nothing(tmp_path):
    """An eighth of the 60, at every place, and a worker that hangs."""
    check("kills", "--kills", "8", "--hung", "1", "--iterations", "12", out=tmp_path)


def test_workers_are_as_important_as_training_unless_the_user_has_set_it(monkeypatch):
    from flowrl.run.workers.cluster import NICENESS, RAY_OPTIONS, priority

    monkeypatch.setenv(NICENESS, "7")
    assert priority("local") == {} == priority("auto")
    monkeypatch.delenv(NICENESS)
    ray.init(address="local", **RAY_OPTIONS, **priority("local"))
    try:
        nice = ray.remote(num_cpus=0)(lambda: os.nice(0)).remote()
        assert ray.get(nice) == os.nice(0)
    finally:
        ray.shutdown()


class Answers:
    """In place of `ray.get`: a result, or an error, for each reference."""

    def __init__(self, **of) -> None:
        self.of, self.asked = of, list[str]()

    def __call__(self, reference, timeout=None):
        self.asked.append(reference)
        found = self.of[reference]
        if isinstance(found, Exception):
            raise found
        return found


class Replica:
    """An actor whose `score` names a reference after it."""

    def __init__(self, name: str) -> None:
        self.score = SimpleNamespace(remote=lambda samples: f"{name}_{samples}")


@pytest.fixture
def pool():
    """A pool of two workers, of which no process exists, with one unit asked of the first."""
    from flowrl.run.workers.pool import Flight, SamplingPool, Sent
    from flowrl.run.workers.scoring import ReplicatedReward

    made = object.__new__(SamplingPool)
    reward = ReplicatedReward("r", [Replica("first"), Replica("second")], 5.0)
    made.session, made.settings = SimpleNamespace(rewards={"r": reward}), SimpleNamespace(limit=5)
    made.sizes, made.busy, lost = {}, {}, list[str]()
    made.crew = SimpleNamespace(lost=lambda worker, why: lost.append(worker))
    workers = iter(("b", "c"))

    def asked(unit, version):
        worker = next(workers)
        return Sent(worker, f"made_{worker}", f"of_{worker}", {"r": reward.ask(f"of_{worker}")})

    made._ask, made._whole = asked, lambda known, place, unit, scores: scores["r"]
    sent = Sent("a", "made_a", "of_a", {"r": reward.ask("of_a")})
    return made, Flight(0, ["unit"], [sent]), lost


LOST = ["a replica", "a call of it", "the samples", "a worker"]


@pytest.mark.parametrize("what", LOST)
def test_what_is_lost_is_asked_for_again_and_only_lost_workers_are_counted(what, monkeypatch, pool):
    made, flight, lost = pool
    unit, scores = SimpleNamespace(seconds={}, sizes=(0, 0)), ([], {}, 0.0)
    again = {"made_b": unit, "second_of_b": scores}
    dead, failed = ray.exceptions.RayActorError(), ray.exceptions.RaySystemError("of a call")
    gone = ray.exceptions.ObjectLostError("00", None, "")
    answers, counted, by = {
        "a replica": ({"made_a": unit, "first_of_a": dead, "second_of_a": scores}, [], "a"),
        "a call of it": ({"made_a": unit, "first_of_a": failed, **again}, [], "b"),
        "the samples": ({"made_a": unit, "first_of_a": gone, **again}, ["a"], "b"),
        "a worker": ({"made_a": dead, **again}, ["a"], "b"),
    }[what]
    get = Answers(**answers)
    monkeypatch.setattr(ray, "get", get)
    assert made._result(flight, 0, {}) is scores
    assert lost == counted and flight.sent[0].worker == by and get.asked == [*answers]
