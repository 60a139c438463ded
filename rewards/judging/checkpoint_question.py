"""UniGenBench's question to its judge, read from the authors' own script without running it.

The texts are the authors' (github.com/CodeGoat24/UniGenBench, eval/*_eval.py, English or Chinese)
and are not part of this project: the definition of each test point, the lines that list them, and
the instruction around them. Read were commits 17947366, 236a92c8 and 2e2ff15a of the repository.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = "eval/qwenvl_72b_en_eval.py of github.com/CodeGoat24/UniGenBench, or another of eval/"
FILLED = ("prompt", "testpoint", "explanation", "test_explanation")
LINE_FIELDS: tuple[str, ...] = ("point", "explanation_dict[point]", "test_desc[idx]")
LISTS = ("explanation", "test_explanation")

TextPieces = tuple[tuple[str, bool], ...]  # texts, and names of fields (True)


@dataclass(frozen=True)
class PointList:
    """A list of test points inside the question: its opening, a line per point, its closing."""

    opening: str
    line: TextPieces
    closing: str

    def filled(self, rows: Sequence[Mapping[str, str]]) -> str:
        return self.opening + "".join(_joined(self.line, row) for row in rows) + self.closing


@dataclass(frozen=True)
class CheckpointQuestion:
    """The question about one sample, for any prompt with its test points."""

    definitions: Mapping[str, str]
    lists: Mapping[str, PointList]
    whole: TextPieces

    @classmethod
    def read(cls, reward: str, given: str) -> "CheckpointQuestion":
        """From one of the authors' scripts. ValueError if it does not hold such a question."""
        path = Path(given)
        if not path.is_file():
            raise ValueError(f"{reward}: question: no such file: {given}; it is {SCRIPTS}")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{reward}: question: {given} cannot be read: {error}") from error
        lists = {name: _list(tree, name) for name in LISTS}
        whole = [p for p in _strings_with_fields(tree) if {f for f, is_ in p if is_} >= set(FILLED)]
        definitions = max(_text_tables(tree), key=len, default={})
        known = {name: found for name, found in lists.items() if found is not None}
        if len(known) < len(LISTS) or len(whole) != 1 or not definitions:
            raise ValueError(
                f"{reward}: question: {given} does not hold UniGenBench's question (definitions of "
                f"test points, two lists of them, and an instruction): it is in {SCRIPTS}"
            )
        return cls(definitions, known, whole[0])

    def fill(self, prompt: str, points: Sequence[str], descriptions: Sequence[str]) -> str:
        """The question. Every point must be in `definitions`."""
        rows: list[dict[str, str]] = [
            dict(zip(LINE_FIELDS, (point, self.definitions[point], text), strict=True))
            for point, text in zip(points, descriptions, strict=True)
        ]
        listed = {name: self.lists[name].filled(rows) for name in LISTS}
        return _joined(self.whole, {"prompt": prompt, "testpoint": str(list(points)), **listed})


def _joined(pieces: TextPieces, values: Mapping[str, str]) -> str:
    return "".join(values[text] if is_field else text for text, is_field in pieces)


def _pieces(string: ast.JoinedStr) -> TextPieces:
    return tuple(
        (str(part.value), False)
        if isinstance(part, ast.Constant)
        else (ast.unparse(part.value) if isinstance(part, ast.FormattedValue) else "", True)
        for part in string.values
    )


def _strings_with_fields(tree: ast.AST) -> Iterator[TextPieces]:
    """The f-strings that are assigned to a name and need no other field than the question's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.JoinedStr):
            pieces = _pieces(node.value)
            if {text for text, is_field in pieces if is_field} <= set(FILLED):
                yield pieces


def _text_tables(tree: ast.AST) -> Iterator[dict[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and node.keys:
            pairs = list(zip(node.keys, node.values, strict=True))
            texts = {_text(key): _text(value) for key, value in pairs if key is not None}
            if len(texts) == len(pairs) and all(texts) and all(texts.values()):
                yield texts


def _text(node: ast.expr) -> str:
    text = node.value if isinstance(node, ast.Constant) else None
    return text if isinstance(text, str) else ""


def _list(tree: ast.AST, name: str) -> PointList | None:
    """The text assigned to a name, and the texts added to it: a line, then the closing."""
    opening, lines, closing = "", [], ""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign):
            targets = [node.target]
        if not any(isinstance(target, ast.Name) and target.id == name for target in targets):
            continue
        assert isinstance(node, ast.Assign | ast.AugAssign)
        if isinstance(node.value, ast.JoinedStr):
            lines.append(_pieces(node.value))
        elif isinstance(node, ast.AugAssign):
            closing = _text(node.value)
        else:
            opening = _text(node.value)
    if len(lines) != 1 or not {f for f, is_field in lines[0] if is_field} <= set(LINE_FIELDS):
        return None
    return PointList(opening, lines[0], closing) if opening and closing else None
