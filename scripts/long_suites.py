"""Run what takes longer than CI has, and record when each suite last passed, on which commit.

    .ci/long                        all suites, those first that passed longest ago
    .ci/long demo wheel             these
    .ci/long --list                 when each last passed, and what it runs
    .ci/long --stale --minutes 60   those that have not passed on this commit; begins none after

The record is .ci/long.json, which is committed. A suite that runs on uncommitted changes is not
recorded. A failure keeps the time of the last pass, and stands beside it. Exit code 1 if a suite
fails. `python3 scripts/long_suites.py` needs the environment of `make setup`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
RECORD = PROJECT / ".ci" / "long.json"
ROOMS = (  # folders of tests with slow ones
    "api", "budget", "cli", "demo", "drill", "evaluation", "image_tokens", "importing", "iteration",
    "language", "launching", "models", "pages", "processes", "prompts", "recipes", "rewards", "run",
    "samplers", "scripts", "settings", "votes",
)  # fmt: skip
PYTEST = ("-m", "pytest", "-q", "-m", "slow and not gpu", "--durations=5")


@dataclass(frozen=True)
class Suite:
    """Commands that pass together; words after the interpreter of the environment, or a program."""

    name: str
    about: str
    commands: tuple[tuple[str, ...], ...]


def room(name: str) -> Suite:
    return Suite(name, f"slow tests of tests/{name}", ((*PYTEST, f"tests/{name}"),))


SUITES = (
    *(room(name) for name in ROOMS),
    Suite(
        "root",
        "slow tests that stand in tests/ itself",
        ((*PYTEST, "tests/test_anywhere.py", "tests/test_site.py", "tests/test_tutorials.py"),),
    ),
    Suite(
        "wheel",
        "commands, programs and settings of all pages, and the notebooks in Jupyter, from a bare "
        "wheel with the newest packages",
        (("scripts/stranger.py",),),
    ),
    Suite("oldest", "the same with the oldest packages", (("scripts/stranger.py", "--oldest"),)),
    Suite("shapes", "the calculus with shapes checked at run time", (("make", "shapes"),)),
    Suite("open_clip", "tests that need open_clip and torchvision", (("make", "test-open-clip"),)),
    Suite(
        "zoo",
        "all pipelines of diffusers, by whole samples",
        (
            ("scripts/benchmarks/pipelines.py", "--only", ""),
            ("scripts/benchmarks/sound_pipelines.py", "--only", ""),
        ),
    ),
    Suite(
        "browser",
        "the page of votes in Chromium: images, videos, texts and edits, by keys and by taps",
        (("-m", "pytest", "-q", "-m", "browser", "tests/votes"),),
    ),
    Suite("kills", "200 SIGKILLs over five recipes", (("scripts/benchmarks/kills.py",),)),
    Suite("mutants", "each mutant fails a test", (("scripts/mutants/run.py", "--jobs", "2"),)),
)
Record = dict[str, dict[str, Any]]


def main(words: Sequence[str] | None = None, suites: Sequence[Suite] = SUITES) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = [suite.name for suite in suites]
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(known))
    parser.add_argument("--list", action="store_true", help="print the record, and run nothing")
    parser.add_argument("--stale", action="store_true", help="leave out what passed on this commit")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    given = parser.parse_args(words)
    if odd := [name for name in given.suites if name not in known]:
        parser.error(f"no suite is called {odd[0]}; choose from {', '.join(known)}")
    record, commit = read(), git("rev-parse", "HEAD")
    chosen = [suite for suite in suites if not given.suites or suite.name in given.suites]
    if given.list:
        print("\n".join(line(suite, record) for suite in chosen))
        return 0
    if given.stale:
        chosen = [suite for suite in chosen if passed_on(suite, record) != commit]
    began, failed = time.monotonic(), list[str]()
    for suite in sorted(chosen, key=lambda each: last_pass(each, record)):
        if time.monotonic() - began > given.minutes * 60:
            print(f"{suite.name}: left for another time", flush=True)
            continue
        failed += [] if passes(suite, given.python, commit) else [suite.name]
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all passed")
    return int(bool(failed))


def passes(suite: Suite, python: str, commit: str) -> bool:
    """Run a suite and record it, unless the tree differs from the commit before or after."""
    print(f"\n== {suite.name}: {suite.about}", flush=True)
    clean, began = is_clean(commit), time.monotonic()
    good = all(runs(command, python) for command in suite.commands)
    minutes = round((time.monotonic() - began) / 60, 1)
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    entry = {"commit": commit, "date": at, "minutes": minutes}
    print(f"== {suite.name}: {'passed' if good else 'FAILED'} in {minutes} minutes", flush=True)
    if clean and is_clean(commit):
        write(suite.name, "passed" if good else "failed", entry)
    else:
        print(f"== {suite.name}: not recorded, since the tree is not the commit's", flush=True)
    return good


def runs(command: tuple[str, ...], python: str) -> bool:
    program = command if command[0] == "make" else (python, *command)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(program, cwd=PROJECT, env=environment, check=False).returncode == 0


def is_clean(commit: str) -> bool:
    """Whether the tree is this commit's, but for the record itself."""
    changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
    own = RECORD.relative_to(PROJECT).as_posix() if RECORD.is_relative_to(PROJECT) else ""
    return git("rev-parse", "HEAD") == commit and all(each[3:] == own for each in changed)


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=PROJECT, capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")


def read() -> Record:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def write(name: str, state: str, entry: Mapping[str, Any]) -> None:
    """A pass removes the failure before it."""
    record = read()
    own = record.setdefault(name, {})
    own[state] = dict(entry)
    if state == "passed":
        own.pop("failed", None)
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def passed_on(suite: Suite, record: Record) -> str:
    return record.get(suite.name, {}).get("passed", {}).get("commit", "")


def last_pass(suite: Suite, record: Record) -> str:
    return record.get(suite.name, {}).get("passed", {}).get("date", "")


def line(suite: Suite, record: Record) -> str:
    own = record.get(suite.name, {})
    return f"{suite.name:<10} {'; '.join(states(own)) or 'never ran'}: {suite.about}"


def states(own: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for state, entry in sorted(own.items(), reverse=True):
        commit, date, minutes = entry["commit"][:8], entry["date"], entry["minutes"]
        yield f"{state} {date} on {commit}, {minutes} minutes"


if __name__ == "__main__":
    sys.exit(main())
