"""`flowrl doctor --device`: on the CPU, without a GPU, and whole on the pretended one."""

import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from flowrl.cli import device_check
from flowrl.errors import UserError
from flowrl.paths import PROJECT
from tests.support import runs
from tests.support.advice import advice
from tests.support.pretended_cuda import compiled

PRETENDED = """
from tests.support.pretended_cuda import compiled
compiled.load()
import torch
torch.set_num_threads(1)
from tests.support.pretended_cuda.runtime import install
install()
from flowrl.cli import device_check
from flowrl.models.diffusers.batch import MediaBatch
from samplers import noise
print("code", device_check.check_device("cuda"))
rollouts, normal = MediaBatch.rollouts, noise.normal
def waiting(self, *args, **named):
    made = rollouts(self, *args, **named)
    float(made[0].x0.sum())
    return made
MediaBatch.rollouts = waiting
device_check.CHECKS = {n: device_check.CHECKS[n] for n in ("same samples", "waits")}
load = device_check.load_policy
def moved(run, device):
    policy = load(run, device)
    if device.type == "cuda":
        next(policy.denoisers[0].parameters()).data.mul_(1.01)
    return policy
device_check.load_policy = moved
print("code", device_check.check_device("cuda"))
"""


def rows(printed: str) -> list[tuple[str, str, str]]:
    return re.findall(r"^\| ([a-z A-Z]+) \| (passed|failed|not run) \| (.+) \|$", printed, re.M)


@pytest.mark.slow
@pytest.mark.long
def test_the_cpu_runs_what_makes_sense_there(monkeypatch, capsys):
    few = {name: device_check.CHECKS[name] for name in ("same samples", "ratio", "waits", "memory")}
    monkeypatch.setattr(device_check, "CHECKS", few)
    assert device_check.check_device("cpu") == 0
    found = {name: (verdict, detail) for name, verdict, detail in rows(capsys.readouterr().out)}
    assert found["ratio"][0] == "passed" and "log-densities" in found["ratio"][1]
    assert [found[name][0] for name in few if name != "ratio"] == ["not run"] * 3


def test_a_device_that_is_not_there_runs_nothing_and_says_what_it_would(capsys):
    assert device_check.check_device("cuda") == 2
    printed = capsys.readouterr().out
    assert [row[0] for row in rows(printed)] == list(device_check.CHECKS)
    assert {row[1] for row in rows(printed)} == {"not run"}
    assert "PyTorch sees no device cuda" in printed
    with pytest.raises(
        UserError, match="--device 'tpu' is not known; choose one of cpu, cuda, mps"
    ):
        device_check.check_device("tpu")


def test_a_check_that_breaks_is_a_row_and_an_exit_code(monkeypatch, capsys):
    def broken(error: Exception, _: object) -> str:
        raise error

    errors = (device_check.Failed("0.3 | above"), RuntimeError("no kernel\nimage"))
    checks = {str(i): (partial(broken, error), "") for i, error in enumerate(errors)}
    monkeypatch.setattr(device_check, "CHECKS", checks)
    assert device_check.check_device("cpu") == 1
    printed = capsys.readouterr().out
    assert "| 0 | failed | 0.3 / above |" in printed
    assert "| 1 | failed | RuntimeError: no kernel image |" in printed
    assert printed.endswith("failed: 0, 1\n")


@pytest.mark.slow
def test_it_runs_to_its_end_on_the_pretended_device_and_finds_what_is_broken():
    try:
        compiled.library()
    except compiled.NoCompiler as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, "-c", PRETENDED], cwd=PROJECT, env=runs.environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    good, code, bad = done.stdout.partition("code 0\n")
    assert code, done.stdout + done.stderr[-3000:]
    verdicts = {name: verdict for name, verdict, _ in rows(good)}
    passed = ("same samples", "proof", "ratio", "waits")
    assert [verdicts[name] for name in passed] == ["passed"] * len(passed), good
    assert verdicts["floor"] != "not run", good  # its seconds are those of a busy machine
    assert verdicts["compile"] == verdicts["two GPUs"] == "not run", good
    assert {name: verdict for name, verdict, _ in rows(bad)} == {
        "same samples": "failed", "waits": "failed"
    }, bad  # fmt: skip
    assert "code 1" in bad


@pytest.mark.slow
def test_the_demo_trains_on_two_processes(tmp_path):
    config = "configs/accelerate/fsdp2_cpu_2.yaml"
    found = device_check.sharded(config, "cpu", tmp_path / "shared")
    assert re.fullmatch(r"an iteration of [0-9.]+ s, gradient norm [0-9.e-]+", found), found


@pytest.mark.slow
def test_a_larger_model_has_a_peak_that_can_be_compared(monkeypatch, tmp_path):
    """The counter of the device's memory is set to what each run is planned to take."""
    peaks: list[int] = []
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: peaks[-1])

    def compared(chosen):
        trial = device_check.DeviceTrial("cuda", chosen, tmp_path)
        vars(trial)["kept"] = SimpleNamespace(turn=lambda: None)
        planned = device_check.estimate(trial.run)
        assert planned is not None
        peaks.append(planned.total)
        try:
            return device_check.memory(trial)
        except device_check.NotRun as error:
            raise RuntimeError(str(error)) from error

    said = advice(
        "too small to compare; use --run with a larger model",
        lambda: compared(None),
        lambda: compared("models/sd35_medium"),
    )
    assert said.endswith("1.00 of the peak")
