"""Killed at any moment and resumed, a run ends as if nothing had happened: to the bit."""

import os
import random
import time
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.warm import Warm, agree, small

KILLS, SEED = 50, 20_26


@pytest.mark.slow
def test_fifty_random_kills_change_nothing(warm: Warm, pipeline, tmp_path):
    """Half of them anywhere in a process's life, half at a random time after it began a save."""
    config, unbroken = runs.write(small(pipeline, tmp_path), tmp_path), tmp_path / "unbroken"
    began = time.monotonic()
    assert warm.run("train", config, "--folder", unbroken, out=tmp_path / "out.txt") == 0
    life = time.monotonic() - began
    rng, kills, ends, inside, at = random.Random(SEED), 0, 0, 0, []
    folder = tmp_path / "run0"
    while kills < KILLS:
        words = ("--resume", folder) if folder.exists() else (config, "--folder", folder)
        pid = warm.start("train", *words, out=tmp_path / "out.txt")
        caught = outlast(warm, pid, folder, rng, life, saving=kills % 2 == 1)
        if caught is None:
            assert warm.wait(pid) == 0, (tmp_path / "out.txt").read_text()[-2000:]
            agree(folder, unbroken)
            ends += 1
            folder = tmp_path / f"run{ends}"
            continue
        os.kill(pid, 9)
        assert warm.wait(pid) in (-9, 0)
        kills, inside, at = kills + 1, inside + bool(half(folder)), [*at, caught]
    if folder.exists():
        assert warm.run("train", "--resume", folder, out=tmp_path / "out.txt") == 0
        agree(folder, unbroken)
        ends += 1
    print(
        f"{kills} kills of a life of {life:.1f} s, after {min(at):.2f} to {max(at):.2f} s, {inside}"
        f" of them inside a write, over {ends} runs: all ended as the unbroken one"
    )
    assert inside >= 5


def half(folder: Path) -> list[Path]:
    """What is half-written or half-removed at this moment."""
    ends = ("tmp", "old")
    return [path for end in ends for path in (*folder.glob(f"**/.*.{end}"), *folder.glob("*.tmp"))]


def outlast(
    warm: Warm, pid: int, folder: Path, rng: random.Random, life: float, saving: bool
) -> float | None:
    """Wait for the moment of the kill, and give its age in seconds; None if the run ends first."""
    began, moment, blink = time.monotonic(), rng.uniform(0, life), rng.uniform(0, 0.004)
    while time.monotonic() - began < moment:
        if warm.poll(pid) is not None:
            return None
        time.sleep(0.001)
    while saving and not half(folder):
        if warm.poll(pid) is not None:
            return None
    if saving:
        time.sleep(blink)
    return time.monotonic() - began
