"""Measurements as JSON lines: each is on the disk before the next one begins.

A line has `stage`, `kind` and `what`, the figures of its kind, and what it was measured on: the
card, versions, the commit and a digest of what differs from it.

predicted   of a stage, before it starts: its figures in `predicted`
measured    figures, with `predicted` beside them where there is a prediction
checked     `passed`, and the figures it rests on
tried       a capability of the device: `works`, and the reason if not
ended       of a stage: `outcome` (done, failed, timeout, killed) and `seconds`
seen        of an earlier visit, in words: `found`
"""

import hashlib
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flowrl.errors import UserError

PROJECT = Path(__file__).resolve().parents[2]
PACKED = PROJECT / ".gpu"  # an ignored folder: what travels beside the tree
COMMIT = PACKED / "commit.json"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "diffusers", "datasets", "trl")
Line = dict[str, Any]


@dataclass(frozen=True)
class Lines:
    """A file of lines; `about` joins each."""

    file: Path
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def add(self, stage: str, kind: str, what: str, **figures: Any) -> Line:
        """Append a line, and return once it is on the disk."""
        line = {"stage": stage, "kind": kind, "what": what, **figures, **self.about}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(line, allow_nan=True) + "\n"
        with self.file.open("a") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        return line

    def read(self) -> list[Line]:
        return read_lines([self.file])


def read_lines(files: Iterable[Path]) -> list[Line]:
    """All lines of files, of those that exist. A last line that was cut by a kill is left out;
    UserError for another line that is no JSON object."""
    lines = list[Line]()
    for file in files:
        if not file.is_file():
            continue
        texts = file.read_text().splitlines(keepends=True)
        for number, text in enumerate(texts, 1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                if number == len(texts) and not text.endswith("\n"):
                    continue
                raise UserError(f"{file}, line {number}: not JSON ({error.msg})") from error
            if not isinstance(line, dict) or not {"stage", "kind", "what"} <= line.keys():
                raise UserError(f"{file}, line {number}: a line needs stage, kind and what")
            lines.append(line)
    return lines


def spread(values: Sequence[float]) -> Line:
    """The median of values, with the smallest, the largest, and how many there are."""
    return {
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
        "number": len(values),
    }


def tree_state() -> Line:
    """The commit of this tree, and a digest of what differs from it: empty if nothing does. A copy
    of the tree without git has what was written when it was packed."""
    try:
        commit = git("rev-parse", "HEAD").strip()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        if not COMMIT.is_file():
            raise UserError(
                f"{COMMIT}: this copy of the tree has neither git nor that file: run "
                "scripts/gpu/pack.py where the tree comes from"
            ) from error
        return json.loads(COMMIT.read_text())
    differs = git("diff", "HEAD") + git("status", "--porcelain")
    digest = hashlib.sha256(differs.encode()).hexdigest()[:12] if differs.strip() else ""
    return {"commit": commit, "differs": digest}


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=PROJECT, capture_output=True, text=True, check=True)
    return done.stdout


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that measurements rest on; those that lack are
    left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
