"""The words that docstrings, messages and pages do without; CONTRIBUTING.md has the list."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from flowrl.paths import PROJECT

WORDS = (
    "mend", "mends", "mended", "told", "hear", "hears", "heard", "apart", "whoever", "a thing",
    "bear", "bears", "borne", "anew", "film", "films", "paint", "paints", "painted", "spoilt",
    "picture", "pictures",
)  # fmt: skip
BANNED = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
NAMES = {"told", "anew", "apart", "film", "films", "mend", "heard", "painted", "spoilt", "whoever"}
TURNS = re.compile(  # "resume" for the first two
    r"\b(?:go|goes|going) on with\b|\bcontinues? with\b|\bnone is\b|\bat hand\b|\bin its name\b"
    r"|\bas ever\b|(?:^|\. )(?:Those|That) of\b|\bon the way\b|\bway out\b|\bfor ever\b"
    r"|\bone's own\b|\b(?:someone|somebody) else\b|\btaken off\b|\breckoning\b|\bmakes NaN\b",
    re.MULTILINE,
)
OPENINGS = re.compile(r"(What|Which|How|Who|Where|Gives|Says|Tells|Of|To|By) ")
PACKAGES = ("samplers", "rewards", "flowrl", "scripts")
PAGES = ("*.md", "docs/**/*.md", "configs/**/*.md")
DEFINITIONS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


PROMPT_DATA = PROJECT / "scripts" / "generate" / "make_suites.py"  # its strings are prompts


def room_of(path: Path) -> str:
    """The room of a source file: a member of flowrl, or the package; the folder of a page."""
    above = path.relative_to(PROJECT).parent.parts
    return "/".join(above[: 2 if above[:1] == ("flowrl",) else 1]) or "."


def by_room(paths: Iterable[Path]) -> dict[str, list[Path]]:
    rooms: dict[str, list[Path]] = {}
    for path in sorted(set(paths) - {PROMPT_DATA}):
        rooms.setdefault(room_of(path), []).append(path)
    return rooms


SOURCES = by_room(path for package in PACKAGES for path in (PROJECT / package).rglob("*.py"))
PAGES_BY_ROOM = by_room(path for pattern in PAGES for path in PROJECT.glob(pattern))


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def strings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Strings that hold at least two words, with their lines."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def names(node: ast.AST) -> list[str]:
    """Identifiers that a node introduces or reads."""
    fields = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr", ast.keyword: "arg"}
    return [getattr(node, fields[type(node)]) or ""] if type(node) in fields else []


def plain(text: str) -> str:
    """The text without code, quotations, links and file names."""
    text = re.sub(
        r"```.*?```|`[^`]*`|\]\([^)]*\)|\"[^\"]*\"|[\w/.-]*[/.]\w+", " ", text, flags=re.DOTALL
    )
    return text


def faults_of_source(source: str) -> Iterator[str]:
    """Words, names and openings of a source file that the rules refuse, with their places."""
    nodes = list(ast.walk(ast.parse(source)))
    # comments and names are lines of the file as they stand; most files need no second look
    suspect = bool(BANNED.search(source) or TURNS.search(source))
    for line, text in [*(comments(source) if suspect else ()), *strings(nodes)]:
        spoken = plain(text)
        for rule in (BANNED, TURNS):
            yield from (f"line {line}: {hit.group(0)!r}" for hit in rule.finditer(spoken))
    for node in nodes:
        if suspect:
            yield from (f"the name {each}" for each in names(node) if each in NAMES)
        if isinstance(node, DEFINITIONS) and (text := ast.get_docstring(node)):
            if OPENINGS.match(text):
                place = getattr(node, "name", "the file")
                yield f"{place} opens with {text.split()[0]!r}"


def faults_of_page(page: str) -> Iterator[str]:
    text = plain(page)
    for rule in (BANNED, TURNS):
        yield from sorted({hit.group(0).lower() for hit in rule.finditer(text)})


def faults(paths: list[Path], of: Callable[[str], Iterator[str]]) -> list[str]:
    return [
        f"{path.relative_to(PROJECT)}: {each}" for path in paths for each in of(path.read_text())
    ]


@pytest.mark.parametrize("room", SOURCES)
def test_code_speaks_plainly(room: str) -> None:
    found = faults(SOURCES[room], faults_of_source)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", PAGES_BY_ROOM)
def test_pages_speak_plainly(room: str) -> None:
    found = faults(PAGES_BY_ROOM[room], faults_of_page)
    assert not found, "\n".join(found)


def test_the_list_catches_what_it_names() -> None:
    assert BANNED.search(plain("Mend the reward.")) and not BANNED.search(plain("`told` is code"))
    assert TURNS.search("It goes on with the next.") and TURNS.search("One. Those of the base are")
    assert TURNS.search("scores on the way") and TURNS.search("a model of one's own")
    assert not TURNS.search("It goes on.")
    for source in (
        "x = 1  # told\n",
        "told = 1\n",
        "x = 'he ' 'told us'\n",
        'def f():\n  """What x."""\n',
    ):
        assert list(faults_of_source(source))
    assert OPENINGS.match("What a run is.") and not OPENINGS.match("A run as data.")
