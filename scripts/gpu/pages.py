"""Write what GPUs have shown into the pages, from docs/results/gpu.jsonl.

    python scripts/gpu/pages.py                          # after a change of the lines
    python scripts/gpu/pages.py --add .gpu/lines.jsonl   # the lines of a visit join them first

docs/results/speed.md has the figures, each beside its prediction; README.md, the index of results
and docs/first_hour_on_a_gpu.md say in a sentence what has run. The last also has the predicted
seconds of each stage (predicted.json) and the size of what travels (packed.json, which
scripts/gpu/pack.py writes). A test fails if a page differs from what this writes.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from flowrl.errors import UserError  # noqa: E402
from scripts.gpu.lines import Line, Lines, read_lines  # noqa: E402
from scripts.gpu.stages import STAGES, predictions  # noqa: E402

KNOWN = PROJECT / "docs" / "results" / "gpu.jsonl"
SIZES = Path(__file__).with_name("packed.json")
MOST = 64  # MiB that travel in a call
STAGE_HEAD = "| stage | call | predicted | is ended after |\n|---|---|---|---|"
SEEN_HEAD = "| what | found |\n|---|---|"
HEAD = "| stage | what | measured | predicted |\n|---|---|---|---|"
ABOUT = ("card", "torch", "cuda", "cudnn", "commit", "differs")  # what a visit's lines share
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
UNITS = {"copy": ("TB/s", 1e12), "product": ("TFLOP/s", 1e12)}  # of rates


def visits(lines: Sequence[Line]) -> list[list[Line]]:
    """Lines by visit: those of one card, versions and commit, in the order of the file."""
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(line.get(name) for name in ABOUT), []).append(line)
    return list(found.values())


def minutes(lines: Sequence[Line]) -> int:
    """Minutes of GPUs in all: those that a line states, and the seconds of stages that ended."""
    stated = sum(line.get("minutes", 0) for line in lines)
    staged = sum(line["seconds"] for line in lines if line["kind"] == "ended")
    return round(stated + staged / 60)


def cards(lines: Sequence[Line]) -> str:
    """The number of GPUs that have run flowrl, in words."""
    number = len(visits([line for line in lines if line["kind"] in ("seen", "measured")]))
    word = NUMBERS[number] if number < len(NUMBERS) else str(number)
    return f"{word} GPU{'' if number == 1 else 's'}"


def has(lines: Sequence[Line]) -> str:
    return "has" if cards(lines).startswith("one ") else "have"


def readme(lines: Sequence[Line]) -> str:
    link = "docs/results/speed.md#on-a-gpu"
    return f"[{cards(lines)}]({link}) {has(lines)} run flowrl, for {minutes(lines)} minutes"


def index(lines: Sequence[Line]) -> str:
    return f"[{cards(lines)}](speed.md#on-a-gpu) for {minutes(lines)} minutes"


def opening(lines: Sequence[Line]) -> str:
    return f"[{cards(lines)}](#on-a-gpu) for {minutes(lines)} minutes"


def first_hour(lines: Sequence[Line]) -> str:
    return f"{cards(lines)} {has(lines)} run flowrl ([figures](results/speed.md#on-a-gpu))"


def stages(_: Sequence[Line]) -> str:
    """The predicted seconds of each stage, those of a call, and the size of what travels."""
    predicted, rows = predictions(), [STAGE_HEAD]
    for stage in STAGES:
        own = predicted[stage.name]
        call = "both" if stage.needed else stage.call
        rows.append(
            f"| `{stage.name}` | {call} | {own['seconds']:.0f} s | {stage.limit(own):.0f} s |"
        )
    calls = [
        sum(predicted[s.name]["seconds"] for s in STAGES if s.needed or s.call == call)
        for call in (1, 2)
    ]
    packed = json.loads(SIZES.read_text())
    whole = sum(packed.values())
    parts = ", ".join(f"{name} {size:.1f} MiB" for name, size in packed.items())
    return (
        "\n".join(rows) + f"\n\nThe stages of call 1 take {calls[0] / 60:.1f} minutes by these "
        f"predictions, those of call 2 {calls[1] / 60:.1f}. {whole:.1f} of {MOST} MiB travel: "
        f"{parts}."
    )


def section(lines: Sequence[Line]) -> str:
    """The findings of each visit."""
    parts = [seen(v) if v[0]["kind"] == "seen" else visit(v) for v in visits(lines)]
    return "\n\n".join(parts)


def seen(lines: Sequence[Line]) -> str:
    first, total = lines[0], minutes(lines)
    where = f"One {first['card']} (torch {first['torch']}, CUDA {first['cuda']}), {total} minutes"
    rows = [f"| {line['what']} | {line['found']} |" for line in lines]
    return "\n".join([f"{where}; large networks have random weights.\n", SEEN_HEAD, *rows])


def visit(lines: Sequence[Line]) -> str:
    """The table of a visit of the kit: figures beside their predictions, checks, what failed."""
    first, total = lines[0], minutes(lines)
    changed = f", changed ({first['differs']})" if first.get("differs") else ""
    where = (
        f"One {first.get('card')} (torch {first['torch']}, CUDA {first.get('cuda')}, cuDNN "
        f"{first.get('cudnn')}), stages of {total} minute{'' if total == 1 else 's'} at "
        f"{first['commit'][:12]}"
        f"{changed}; predictions are of that commit, networks have random weights."
    )
    rows = [row for line in lines for row in rows_of(line)]
    table = [HEAD, *(f"| {' | '.join(row)} |" for row in rows)]
    follows = [
        f"\nWhat follows for `model.cudnn_attention`: `{line['figures']['setting']}`."
        for line in lines
        if line["kind"] == "measured" and line["what"] == "default"
    ]
    return "\n".join([f"{where}\n", *table, *follows])


def rows_of(line: Line) -> Iterator[tuple[str, str, str, str]]:
    stage, what = line["stage"], line["what"].replace("|", "/")
    if line["kind"] == "measured":
        left_out = ("spread", "ratios")  # a spread stands in brackets behind its median
        figures = {
            n: v for n, v in line["figures"].items() if n not in left_out and v not in ("", None)
        }
        found = ", ".join(shown(what, n, v, line["figures"]) for n, v in figures.items())
        expected = ", ".join(shown(what, n, v, {}) for n, v in line["predicted"].items())
        yield stage, what, found, expected
    elif line["kind"] == "checked":
        figures = ", ".join(shown(what, n, v, {}) for n, v in line["figures"].items())
        yield stage, what, f"{'passed' if line['passed'] else '**failed**'}: {figures}", ""
    elif line["kind"] == "tried":
        found = f"works: {line['found']}" if line["works"] else f"does not work: {line['why']}"
        yield stage, what, found.replace("|", "/"), ""
    elif line["kind"] == "ended":
        expected = shown(what, "seconds", line["predicted"]["seconds"], {})
        yield stage, "the whole stage", f"{line['outcome']} after {line['seconds']:.0f} s", expected


def shown(what: str, name: str, value: Any, beside: Mapping[str, Any]) -> str:
    """A figure with its unit, and the spread of a median."""
    if isinstance(value, Mapping):
        return f"{name} " + " ".join(shown(what, n, v, {}) for n, v in value.items())
    if isinstance(value, list):
        return f"{name}: {'; '.join(map(str, value[:1])) or 'none'}"
    if isinstance(value, bool):
        return f"{name.replace('_', ' ')}: {'yes' if value else 'no'}"
    if not isinstance(value, int | float):
        return f"{name} {value}"
    if name == "seconds":
        around = beside.get("spread", {"number": 1})
        if around["number"] == 1:
            return seconds(value)
        return f"{seconds(value)} ({seconds(around['least'])} to {seconds(around['most'])})"
    if name == "rate":
        unit, size = UNITS[what.split()[0]]
        return f"{value / size:.3g} {unit}"
    if name.endswith("GiB"):
        return f"{name.replace('_', ' ').removesuffix('GiB').strip()} {value:.1f} GiB".strip()
    return f"{name.replace('_', ' ')} {value:.3g}"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


PARTS = {  # by page: the part's name, and what writes it
    "README.md": {"gpu": readme},
    "docs/results/index.md": {"gpu": index},
    "docs/results/speed.md": {"gpu": opening, "gpu visits": section},
    "docs/first_hour_on_a_gpu.md": {"gpu": first_hour, "gpu stages": stages},
}


def written(page: str, text: str, lines: Sequence[Line]) -> str:
    """The page with its generated parts. UserError for a page that lacks their marks."""
    for name, make in PARTS[page].items():
        start, end = f"<!-- {name}, by scripts/gpu/pages.py -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise UserError(f"{page}: it lacks {start} or {end}: put them where the part belongs")
        block = "" if name == "gpu" else "\n"  # a table, or words within a sentence
        text = f"{before}{start}{block}{make(lines)}{block}{end}{after}"
    return text


def device_of(lines: Sequence[Line]) -> Line:
    """The card and its software, of a visit's lines. UserError for lines of several."""
    found = [{n: line[n] for n in ("card", "cuda", "cudnn")} for line in lines if "card" in line]
    if any(each != found[0] for each in found):
        raise UserError("--add: these are lines of several devices: add each device's own")
    return found[0] if found else {}


def add(file: Path) -> None:
    """Append a visit's lines to those that are known. UserError for a rehearsal's."""
    lines = read_lines([file])
    if not lines:
        raise UserError(f"--add {file}: there are no lines in it")
    if any(line.get("rehearsal") for line in lines):
        raise UserError(f"--add {file}: these are lines of a rehearsal, which no page reports")
    known, device = Lines(KNOWN), device_of(lines)
    for line in lines:
        if line["kind"] != "predicted":  # stands beside what was measured
            own = {**device, **line}  # how a stage ended is written by a process without the device
            rest = {n: v for n, v in own.items() if n not in ("stage", "kind", "what")}
            if line["kind"] == "ended" and "why" in rest:  # the error, without the machine's paths
                rest["why"] = rest["why"].strip().rpartition("\n")[2]
            known.add(line["stage"], line["kind"], line["what"], **rest)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--add", type=Path, metavar="FILE", help="lines of a visit")
    given = parser.parse_args(words)
    try:
        if given.add is not None:
            add(given.add)
        lines = read_lines([KNOWN])
        pages = {name: written(name, (PROJECT / name).read_text(), lines) for name in PARTS}
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    for name, text in pages.items():
        (PROJECT / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
