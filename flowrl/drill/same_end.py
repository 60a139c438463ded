"""Whether two runs ended alike, to the bit, and what a run's folder shows of its progress."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

EXACT_FILES = ("policies.safetensors", "optimizer.pt")  # of a checkpoint


def differences(folder: Path, unbroken: Path, untimed: tuple[str, ...] = ("seconds",)) -> list[str]:
    """List what differs between two finished runs: exported weights, best weights, the weights and
    the optimizer of the last checkpoint, and every line of metrics.jsonl but entries that begin
    with a word of `untimed`. Empty if nothing does."""
    unequal = []
    names = sorted(p.relative_to(unbroken) for p in unbroken.rglob("*.safetensors"))
    exported = [name for name in names if name.parts[0] != "checkpoints"]
    if not exported:
        unequal.append("the unbroken run has no weights")
    for name in exported:
        if not (folder / name).is_file():
            unequal.append(f"{name} is missing")
        elif not _equal(folder / name, unbroken / name):
            unequal.append(f"{name} has other weights")
    last = max((path.name for path in numbered_in(unbroken / "checkpoints")), default="none")
    for name in EXACT_FILES:
        saved, expected = (run / "checkpoints" / last / name for run in (folder, unbroken))
        if expected.is_file() and not (
            saved.is_file() and saved.read_bytes() == expected.read_bytes()
        ):
            unequal.append(f"checkpoints/{last}/{name} differs")
    best = [sorted(p.name for p in numbered_in(run / "best")) for run in (folder, unbroken)]
    if best[0] != best[1]:
        unequal.append(f"the best weights are of {best[0]}, not {best[1]}")
    return [*unequal, *_lines_that_differ(folder, unbroken, untimed)]


def _equal(file: Path, other: Path) -> bool:
    weights, expected = load_file(file), load_file(other)
    return weights.keys() == expected.keys() and all(
        torch.equal(weights[k], expected[k]) for k in expected
    )


def _lines_that_differ(folder: Path, unbroken: Path, untimed: tuple[str, ...]) -> Iterator[str]:
    lines_of_both = [
        [{k: v for k, v in line.items() if not k.startswith(untimed)} for line in lines]
        for lines in (metric_lines(folder), metric_lines(unbroken))
    ]
    numbers = [[line.get("iteration") for line in lines] for lines in lines_of_both]
    if numbers[0] != numbers[1]:
        yield f"metrics.jsonl has the iterations {_listed(numbers[0])}, not {_listed(numbers[1])}"
        return
    for line, wanted in zip(*lines_of_both, strict=True):
        # as texts, since NaN, which older versions write, is not equal to itself
        if json.dumps(line, sort_keys=True) != json.dumps(wanted, sort_keys=True):
            names = [k for k in {**line, **wanted} if repr(line.get(k)) != repr(wanted.get(k))]
            yield f"metrics.jsonl differs in iteration {line.get('iteration')}: {', '.join(names)}"
            return


def _listed(numbers: list[Any]) -> str:
    text = ", ".join(map(str, numbers))
    return text if len(text) < 60 else f"{text[:28]} ... {text[-28:]}"


def metric_lines(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    metrics = []
    for line in text.splitlines():
        with suppress(ValueError):  # one that was cut
            metrics.append(json.loads(line))
    return metrics


def numbered_in(folder: Path) -> list[Path]:
    """Folders by number, such as whole checkpoints."""
    return sorted(path for path in folder.glob("[0-9]*") if path.name.isdigit())


def trained_until(folder: Path) -> int:
    """The last iteration that metrics.jsonl tells of."""
    return max((int(line.get("iteration", 0)) for line in metric_lines(folder)), default=0)


def saved(folder: Path) -> int:
    """The iteration of the newest checkpoint; 0 without one."""
    return max((int(path.name) for path in numbered_in(folder / "checkpoints")), default=0)


def unfinished(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield what is half-written or half-removed at this moment: paths and their numbers."""
    for end in ("**/.*.tmp", "**/.*.old", "*.tmp"):
        for path in folder.glob(end):
            with suppress(OSError):  # gone in between
                yield path, path.stat().st_ino
