"""UniGenBench's question to its judge, read from the authors' own file without running it.

The texts are the authors' (github.com/CodeGoat24/UniGenBench, English and Chinese)
and are not part of this project: the definition of each test point, the lines that list them, and
the instruction around them. Since February 2026 (commit 9d5b7d8) the texts of both languages are in
`eval/src/eval_common.py`; it is read as of 49d0bce. Before that, each script had its own texts,
which were read as of 17947366, 236a92c8 and 2e2ff15a.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from rewards.rights import Right, need

SCRIPTS = "eval/src/eval_common.py of github.com/CodeGoat24/UniGenBench at commit 49d0bce"
BY_LANGUAGE = "LANG_CONFIGS"  # of that file: a table of each language's texts, by these keys
DEFINITIONS, TEMPLATE = "explanation_dict", "system_prompt_template"
FILLED = ("prompt", "testpoint", "explanation", "test_explanation")
LINE_FIELDS: tuple[str, ...] = ("point", "explanation_dict[point]", "test_desc[idx]")
LISTS = ("explanation", "test_explanation")

TextPieces = tuple[tuple[str, bool], ...]  # texts, and names of fields (True)


@dataclass(frozen=True)
class PointList:
    """A list of test points inside the question: its opening, a line per point, and its closing."""

    opening: str
    line: TextPieces
    closing: str

    def filled(self, rows: Sequence[Mapping[str, str]]) -> str:
        return self.opening + "".join(_joined(self.line, row) for row in rows) + self.closing


@dataclass(frozen=True)
class CheckpointQuestion:
    """UniGenBench's question about one sample, for any prompt and its test points."""

    definitions: Mapping[str, str]
    lists: Mapping[str, PointList]
    whole: TextPieces

    @classmethod
    def read(cls, reward: str, file: str) -> "tuple[CheckpointQuestion, ...]":
        """Read one question per language from the authors' file. ValueError if it holds no such
        question."""
        path = Path(file)
        need(Right.FILES, file, path=path)
        if not path.is_file():
            raise ValueError(f"{reward}: question: no such file: {file}; use {SCRIPTS}")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{reward}: question: {file} cannot be read: {error}") from error
        candidates = list(_by_language(tree)) or [_of_script(tree)]
        questions = tuple(question for question in candidates if question is not None)
        if len(questions) < len(candidates):
            raise ValueError(
                f"{reward}: question: {file} does not hold UniGenBench's question (definitions "
                f"of test points, two lists of them, and an instruction): use {SCRIPTS}"
            )
        return questions

    def fill(self, prompt: str, points: Sequence[str], descriptions: Sequence[str]) -> str:
        """Fill in the question. Every point must be in `definitions`."""
        rows: list[dict[str, str]] = [
            dict(zip(LINE_FIELDS, (point, self.definitions[point], text), strict=True))
            for point, text in zip(points, descriptions, strict=True)
        ]
        listed = {name: self.lists[name].filled(rows) for name in LISTS}
        return _joined(self.whole, {"prompt": prompt, "testpoint": str(list(points)), **listed})


def _of_script(tree: ast.AST) -> CheckpointQuestion | None:
    """The question of a script of one language."""
    whole = [p for p in _strings_with_fields(tree) if _fields(p) >= set(FILLED)]
    return _question(tree, {}, max(_text_tables(tree), key=len, default={}), whole)


def _by_language(tree: ast.AST) -> Iterator[CheckpointQuestion | None]:
    """The questions of a file with a table of languages."""
    named = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    table = named.get(BY_LANGUAGE)
    for config in table.values if isinstance(table, ast.Dict) else ():
        if not isinstance(config, ast.Dict):
            continue
        of_language = {
            _text(key): named.get(value.id, value) if isinstance(value, ast.Name) else value
            for key, value in zip(config.keys, config.values, strict=True)
            if key is not None
        }
        texts = {f"config[{key!r}]": _text(value) for key, value in of_language.items()}
        definitions = next(_text_tables(of_language.get(DEFINITIONS, config)), {})
        template = _text(of_language[TEMPLATE]) if TEMPLATE in of_language else ""
        pieces = [
            (text, is_field)
            for before, field, _, _ in Formatter().parse(template)
            for text, is_field in ((before, False), (field, True))
            if text
        ]
        whole = [tuple(pieces)] if _fields(pieces) == set(FILLED) else []
        yield _question(tree, texts, definitions, whole)


def _question(
    tree: ast.AST,
    texts: Mapping[str, str],
    definitions: Mapping[str, str],
    whole: Sequence[TextPieces],
) -> CheckpointQuestion | None:
    lists = {name: _list(tree, name, texts) for name in LISTS}
    wordings = {name: wording for name, wording in lists.items() if wording is not None}
    if len(wordings) < len(LISTS) or len(whole) != 1 or not definitions:
        return None
    return CheckpointQuestion(definitions, wordings, whole[0])


def _fields(pieces: Iterable[tuple[str, bool]]) -> set[str]:
    return {text for text, is_field in pieces if is_field}


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
    """The f-strings that are assigned to a name and have only the question's fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.JoinedStr):
            pieces = _pieces(node.value)
            if _fields(pieces) <= set(FILLED):
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


def _list(tree: ast.AST, name: str, texts: Mapping[str, str]) -> PointList | None:
    """The text assigned to a name, with `texts` for its fields, and the additions to it: a line,
    then the closing."""
    opening, lines, closing = "", [], ""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign):
            targets = [node.target]
        if not any(isinstance(target, ast.Name) and target.id == name for target in targets):
            continue
        assert isinstance(node, ast.Assign | ast.AugAssign)
        pieces = _pieces(node.value) if isinstance(node.value, ast.JoinedStr) else None
        if pieces is not None and isinstance(node, ast.Assign) and _fields(pieces) <= set(texts):
            opening = _joined(pieces, texts)
        elif pieces is not None:
            lines.append(pieces)
        elif isinstance(node, ast.AugAssign):
            closing = _text(node.value)
        else:
            opening = _text(node.value)
    if len(lines) != 1 or not _fields(lines[0]) <= set(LINE_FIELDS):
        return None
    return PointList(opening, lines[0], closing) if opening and closing else None
