"""Prompt sets with their own metrics: prompts, rewards, and the kind of mean.

`flowrl suites` lists them. Our own are files in `configs/suites`; published suites are read from
the user's copy of the official file: `geneval:path/to/evaluation_metadata.jsonl`. Rows have a
`prompt` and a `category`; rewards receive all other columns.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch

from flowrl.bounded_files import bounded_bytes
from flowrl.errors import UserError
from flowrl.evaluation import suite_layouts as layouts
from flowrl.evaluation.official_files import OFFICIAL_FILES, download_official
from flowrl.evaluation.outputs import check_output_file
from flowrl.evaluation.tables import table_of
from flowrl.json_text import json_text
from flowrl.paths import find
from flowrl.prompts import PromptSet
from flowrl.prompts.files import LINE_END, utf8_text
from flowrl.prompts.table_limits import MOST_TABLE_BYTES
from flowrl.settings.command_line.arguments import Word
from rewards import Scores

Mean = Literal["prompts", "categories"]  # of all prompts, or of the categories' means
SuiteRow = dict[str, Any]
SUITES_FOLDER = "configs/suites"


@dataclass(frozen=True)
class Suite:
    name: str
    about: str
    rewards: tuple[str, ...]  # as --rewards takes them
    mean: Mean
    rows: tuple[SuiteRow, ...]

    @property
    def prompts(self) -> PromptSet:
        return PromptSet(tuple(row["prompt"] for row in self.rows), self.rows)

    @property
    def categories(self) -> dict[str, int]:
        return dict(Counter(row["category"] for row in self.rows))


@dataclass(frozen=True)
class SuiteKind:
    """A suite's metrics and the reader of its official file (None for our own)."""

    about: str
    rewards: tuple[str, ...]
    mean: Mean = "prompts"
    read: Callable[[Path], list[SuiteRow]] | None = None


def _geneval(path: Path) -> list[SuiteRow]:
    """evaluation_metadata.jsonl: tag, include, exclude, prompt."""
    return [{**row, "category": row["tag"]} for row in _table(path, "tag", "include", "prompt")]


def _ocr(path: Path) -> list[SuiteRow]:
    """One prompt per line, with the text to show in double quotes (Flow-GRPO's ocr files)."""
    rows = []
    for i, line in enumerate(_lines(path)):
        quotes = re.findall(r'"([^"]+)"', line)
        if not quotes:
            raise UserError(f"{path}, line {i + 1}: no text in double quotes")
        words = len(quotes[0].split())
        length = "one word" if words == 1 else "2 to 4 words" if words <= 4 else "5 words or more"
        rows.append({"prompt": line, "category": length, "text": quotes[0]})
    return rows


def _drawbench(path: Path) -> list[SuiteRow]:
    """One prompt per line; or a table with Prompts and Category, as first published. Some copies
    repeat every prompt, which counts once."""
    if path.suffix == ".txt":
        return [{"prompt": line, "category": "all"} for line in dict.fromkeys(_lines(path))]
    rows = _table(path, "Prompts", "Category")
    return [{"prompt": row["Prompts"], "category": row["Category"]} for row in rows]


def _parti(path: Path) -> list[SuiteRow]:
    """PartiPrompts.tsv: Prompt, Category, Challenge, Note."""
    rows = _table(path, "Prompt", "Category", "Challenge")
    return [
        {"prompt": r["Prompt"], "category": r["Category"], "challenge": r["Challenge"]}
        for r in rows
    ]


def _compbench(path: Path) -> list[SuiteRow]:
    """T2I-CompBench's `color_val.txt` and the like, or a folder of them; the file is the category.

    Lines of some files end with a full stop and a tab; both are removed.
    """
    files = sorted(path.glob("*_val.txt")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: no file that ends in _val.txt")
    return [
        {"prompt": line.split("\t")[0].strip(), "category": _subset(file)}
        for file in files
        for line in _lines(file)
    ]


def _subset(file: Path) -> str:
    return file.stem.removeprefix("t2i_compbench_").removesuffix("_val")


STRICT, GRADED = "{name: shapes, kind: strict}", "{name: shapes, kind: graded}"

SUITES: dict[str, SuiteKind] = {
    "shapes": SuiteKind(
        "the demo's world: objects, number, relation", (STRICT, GRADED), "categories"
    ),
    "compositional": SuiteKind(
        "everyday objects: number, colour, position, in GenEval's columns",
        ("{name: geneval, kind: strict}", "{name: geneval, kind: graded}"),
        "categories",
    ),
    "text": SuiteKind("texts to render, from a word to a line", ("ocr",), "categories"),
    "taxonomy": SuiteKind("a mixture of ten themes", ("clip",), "categories"),
    "geneval": SuiteKind(
        "GenEval, arXiv:2310.11513: 553 prompts, six tasks, mean of the tasks",
        ("{name: geneval, kind: official}",),
        "categories",
        _geneval,
    ),
    "ocr": SuiteKind("Flow-GRPO's OCR test prompts, arXiv:2505.05470", ("ocr",), "prompts", _ocr),
    "drawbench": SuiteKind(
        "DrawBench, arXiv:2205.11487: 200 prompts",
        ("aesthetic", "imagereward", "pickscore"),
        "prompts",
        _drawbench,
    ),
    "parti": SuiteKind(
        "PartiPrompts, arXiv:2206.10789: 1,632 prompts, 12 categories",
        ("aesthetic", "imagereward", "pickscore"),
        "prompts",
        _parti,
    ),
    "geneval2": SuiteKind(
        "GenEval 2, arXiv:2512.16853: 800 prompts of 3 to 10 atoms, for the reward soft_tifa",
        (),
        "prompts",
        layouts.geneval2_rows,
    ),
    "unigenbench": SuiteKind(
        "UniGenBench, arXiv:2510.18701: 600 prompts, 10 dimensions, for the reward unigenbench",
        (),
        "prompts",
        layouts.unigenbench_rows,
    ),
    "dpg_bench": SuiteKind(
        "DPG-Bench, arXiv:2403.05135: 1,065 long prompts with questions, for the reward dpg_bench",
        (),
        "prompts",
        layouts.dpg_rows,
    ),
    "vbench": SuiteKind(
        "VBench, arXiv:2311.17982: its dimensions of motion and consistency, approximated",
        ("flicker", "smoothness", "motion", "consistency", "{name: consistency, kind: clip}"),
        "prompts",
        layouts.vbench_rows,
    ),
    "t2i_compbench": SuiteKind(
        "T2I-CompBench, arXiv:2307.06350: colour, shape, texture, space, number, complex. Scored "
        "by CLIP; the reward compbench implements its rule for attributes",
        ("clip",),
        "categories",
        _compbench,
    ),
}


def load_suite(name: str) -> Suite:
    """Load `shapes`, `geneval:FILE`, or your own file with prompt (and category).

    UserError: an unknown name, an official suite without its file, a file with another layout.
    """
    head, _, path = name.partition(":")
    if head in SUITES:
        return _known(head, SUITES[head], path)
    if not path and find(name).is_file():
        rows = [{"category": "all", **row} for row in _table(find(name), "prompt")]
        return _made(Path(name).stem, SuiteKind(f"prompts of {name}", ()), rows, name)
    near = get_close_matches(head, SUITES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(SUITES)}, or a file"
    raise UserError(f"there is no suite {name!r}; {hint}")


def _known(name: str, kind: SuiteKind, path: str) -> Suite:
    if kind.read is None:
        if path:
            raise UserError(f"the suite {name} has its own prompts; leave the file out")
        file = find(f"{SUITES_FOLDER}/{name}.jsonl")
        return _made(name, kind, _table(file, "prompt", "category"), str(file))
    if not path:
        hint = f"; flowrl suites {name} --get FILE downloads it" * (name in OFFICIAL_FILES)
        raise UserError(f"the suite {name} needs its official file: {name}:FILE{hint}")
    if not find(path).exists():
        raise UserError(f"{name}:{path}: no such file")
    return _made(name, kind, kind.read(find(path)), path)


def _made(name: str, kind: SuiteKind, rows: list[SuiteRow], place: str) -> Suite:
    for i, row in enumerate(rows):
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise UserError(f"{place}, row {i + 1}: the prompt is empty")
    if not rows:
        raise UserError(f"{place}: no prompts")
    return Suite(name, kind.about, kind.rewards, kind.mean, tuple(rows))


def _table(path: Path, *needed: str) -> list[SuiteRow]:
    table, _ = table_of(path)
    for row, at in zip(table.rows, table.places, strict=True):
        if lacking := [column for column in needed if column not in row]:
            raise UserError(f"{path}, {at}: no column {', '.join(lacking)}")
    return list(table.rows)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise UserError(f"{path}: no such text file")
    try:
        text = utf8_text(bounded_bytes(path, MOST_TABLE_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return [line.strip() for line in LINE_END.split(text) if line.strip()]


def by_category(scores: Scores, meta: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean of each reward in each category over scored samples; NaN if there are none."""
    of = [str(row["category"]) for row in meta]
    means: dict[str, dict[str, float]] = {}
    for column, name in enumerate(scores.names):
        means[name] = {}
        for category in dict.fromkeys(of):
            inside = torch.tensor([c == category for c in of])
            scored = scores.scored[:, column] & inside
            values = scores.values[scored, column].double()
            means[name][category] = float(values.mean()) if len(values) else float("nan")
    return means


def suite_summary(suite: Suite, scores: Scores, meta: Sequence[Mapping[str, Any]]) -> str:
    """A line per category and reward, and the suite's own mean."""
    lines = []
    for name, means in by_category(scores, meta).items():
        scored = [m for m in means.values() if m == m]
        if suite.mean == "categories" and scored:
            lines.append(
                f"{suite.name} {name}: {sum(scored) / len(scored):.4f} (mean of categories)"
            )
        lines += [f"  {category}: {mean:.4f}" for category, mean in means.items()]
    return "\n".join(lines)


@dataclass
class Suites:
    """List the prompt sets with their own metrics, show one, or write its prompts."""

    name: Word[str] = ""
    """A suite, as NAME or NAME:FILE; by default all are listed."""
    out: Path | None = None
    """Write the prompts to this file as JSON lines, for `prompts:` of a run or --prompts."""
    get: Path | None = None
    """Download the official file of geneval, ocr, drawbench or parti to this path."""


def list_suites(arguments: Suites) -> None:
    """Print the prompt sets, or one of them; or write its prompts or its official file."""
    if not arguments.name:
        width = max(map(len, SUITES))
        for name, kind in SUITES.items():
            file = "" if kind.read is None else f" ({name}:FILE)"
            print(f"{name:<{width}}  {kind.about}{file}")
        print("\nflowrl suites NAME shows one; flowrl evaluate RUN --suite NAME scores a run on it")
        return
    if arguments.get is not None:
        print(download_official(arguments.name, arguments.get))
        return
    suite = load_suite(arguments.name)
    if arguments.out is not None:
        check_output_file(arguments.out, begins=b"{")
        arguments.out.write_text("".join(json_text(row) + "\n" for row in suite.rows))
        print(f"{len(suite.rows)} prompts: {arguments.out}")
        return
    print(f"{suite.name}: {suite.about}\n{len(suite.rows)} prompts, mean of {suite.mean}")
    print(f"rewards: {', '.join(suite.rewards) or 'none of its own; give --rewards'}\n")
    shown: set[str] = set()
    for row in suite.rows:
        if row["category"] not in shown:
            shown.add(row["category"])
            count = suite.categories[row["category"]]
            print(f"  {row['category']} ({count}): {row['prompt'][:90]}")
