"""Every text of a run's records, one after the other, replaced by a hostile one: the page is made,
has the elements of the harmless one, and no character that a terminal obeys."""

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.pages.compare_page import comparison_page
from flowrl.pages.records import read_evaluations, read_trees
from flowrl.pages.run_folder import RunFolder
from flowrl.pages.run_page import run_page
from tests.pages.test_pages import Page, check
from tests.support.page_runs import write_run

HOSTILE = (
    "\"'><img src=x id=injected onerror=alert(1)></script></title></style><script>alert(1)</script>"
    "{{7*7}}{% raw %}${7*7} javascript:alert(1) \x1b]0;title\x07\x9b2J \u202eturned" + "y" * 10_000
)
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
FILES = (
    "run.yaml", "metrics.jsonl", "report/evaluation-000004.json", "report/tree-000004.json",
    "report/starts.jsonl", "report/alarms.jsonl",
)  # fmt: skip
Step = str | int


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("pages") / "run")


def texts(value: Any, path: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], bool]]:
    """Places of keys (True) and texts, of the first two items of each list."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key), True
            yield from texts(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value[:2]):
            yield from texts(inner, (*path, number))
    elif isinstance(value, str):
        yield path, False


def changed(tree: Any, path: tuple[Step, ...], is_key: bool) -> Any:
    whole = deepcopy(tree)
    inner = whole
    for step in path[:-1]:
        inner = inner[step]
    if is_key:
        inner[HOSTILE] = inner.pop(path[-1])
    else:
        inner[path[-1]] = HOSTILE
    return whole


def wrong_in(page: str) -> list[Any]:
    """What no page has: scripts beside its own, elements that a text has begun, addresses."""
    parsed = Page(page)  # it fails for elements that do not close
    wrong: list[Any] = [CONTROLS.findall(page)] if CONTROLS.search(page) else []
    wrong += parsed.all("script")[1:]
    for tag, attrs in parsed.found:
        handlers = [name for name in attrs if name.startswith("on")]
        sources = [attrs[name] for name in ("src", "srcset", "href") if name in attrs]
        if handlers or attrs.get("id") == "injected":
            wrong.append((tag, attrs))
        wrong += [source for source in sources if not source.startswith(("data:", "#"))]
    return wrong


def read(file: Path) -> list[Any]:
    text = file.read_text()
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return [yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(text)]


def put(file: Path, trees: list[Any]) -> None:
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(tree) + "\n" for tree in trees))
    else:
        dump = yaml.safe_dump if file.suffix == ".yaml" else json.dumps
        file.write_text(dump(trees[0]))


@pytest.mark.quick_cases("alarms")
@pytest.mark.parametrize("name", FILES)
def test_no_text_of_a_run_changes_its_page(name: str, written: Path) -> None:
    file = written / name
    before, shown = file.read_bytes(), 0
    *others, last = read(file)
    try:
        for path, is_key in texts(last):
            put(file, [*others, changed(last, path, is_key)])
            page = run_page(RunFolder.read(written))
            assert wrong_in(page) == [], path
            shown += "{{7*7}}" in page
    finally:
        file.write_bytes(before)
    assert shown or name == "report/tree-000004.json"


def test_two_runs_with_hostile_records_are_compared(written: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "javascript:alert(1)<img src=x onerror=alert(1)>")
    for run in (written, other):
        check(run_page(RunFolder.read(run)))
    file = written / "report/alarms.jsonl"
    before = file.read_bytes()
    put(file, [{**alarm, "text": HOSTILE} for alarm in read(file)])
    page = comparison_page([RunFolder.read(written), RunFolder.read(other)])
    file.write_bytes(before)
    assert not CONTROLS.search(page) and "<img src=x onerror" not in page


def scores_of(record: dict[str, Any]) -> Any:
    return record["scores"][record["key"]]


TORN: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a key without scores": ("evaluation", lambda r: r.update(key="another")),
    "no scores": ("evaluation", lambda r: r.update(scores={})),
    "scores of other lengths": ("evaluation", lambda r: scores_of(r).pop()),
    "more prompts than digests": ("evaluation", lambda r: r["prompts"].append("x")),
    "a prompt without samples": (
        "evaluation", lambda r: (r["prompts"].append("x"), r["digests"].append("x")),
    ),
    "a leaf of no node": ("tree", lambda r: r["levels"][1]["node"].__setitem__(0, 99)),
    "a leaf of a node before the first": (
        "tree", lambda r: r["levels"][1]["node"].__setitem__(0, -1),
    ),
    "nodes without advantages": ("tree", lambda r: r["levels"][0]["advantages"].clear()),
    "leaves without totals": ("tree", lambda r: r["totals"].clear()),
    "a level with fewer leaves": ("tree", lambda r: r["levels"][0]["node"].pop()),
}  # fmt: skip


@pytest.mark.parametrize("damage", TORN)
def test_a_record_whose_parts_do_not_belong_together_is_left_out(
    damage: str, written: Path, tmp_path: Path
) -> None:
    kind, change = TORN[damage]
    file = written / f"report/{kind}-000004.json"
    before = file.read_bytes()
    kept = len(read_evaluations(written)), len(read_trees(written))
    (record,) = read(file)
    change(record)
    put(file, [record])
    left = len(read_evaluations(written)), len(read_trees(written))
    page = run_page(RunFolder.read(written))
    other = write_run(tmp_path / "other")
    comparison_page([RunFolder.read(written), RunFolder.read(other)])
    file.write_bytes(before)
    assert sum(left) == sum(kept) - 1
    check(page)
