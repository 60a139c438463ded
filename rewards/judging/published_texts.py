"""The long instructions that published reward models were trained with, known by their digests.

The texts are their authors' and are not part of this project. A file with the text can be given, or
the authors' own Python file: its strings are read without running it, and the one with the right
digest is used. A blank at the end of a line changes the tokens and therefore the scores.
"""

import ast
import hashlib
import os
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, permutations
from pathlib import Path
from typing import ClassVar

from rewards.rights import Right, need

MOST_TEXT_BYTES = 2**20
FETCH_TIMEOUT = 30.0  # seconds without an answer


@dataclass(frozen=True)
class PublishedText:
    """A published text, identified by its length in characters and the first 16 digits of its
    SHA-256.

    what    its name in messages
    source  where the authors publish it, for messages
    url     a file with the text, at a fixed commit; empty if no such file is known
    tail    text that the model's own code appends; the digest includes it
    scale   the number that replaces 10 in parts of the text; 0: no replacement
    parts   maximum number of strings of the authors' file that are joined to one text, by line
            breaks
    """

    what: str
    length: int
    digest: str
    source: str
    url: str = ""
    tail: str = ""
    scale: int = 0
    parts: int = 1
    field: ClassVar[str] = "{text_prompt}"

    def read(self, reward: str, setting: str, file: str | None) -> str:
        """Read the text from the given `file`, or from `url`. ValueError if it is not the
        published text."""
        if file is None:
            return self._fetched(reward, setting)
        path = Path(file)
        need(Right.FILES, file, path=path)
        if not path.is_file():
            raise ValueError(f"{reward}: {setting}: no such file: {file}")
        return self._found(reward, setting, file, path.read_bytes())

    def _found(self, reward: str, setting: str, place: str, content: bytes) -> str:
        try:
            text = content.decode("utf-8").replace("\r\n", "\n")
            strings = list(_strings(text)) if place.endswith(".py") else [text, text[:-1]]
        except (UnicodeDecodeError, SyntaxError, ValueError) as error:
            raise ValueError(f"{reward}: {setting}: {place} cannot be read: {error}") from error
        for candidate in self._candidates(strings):
            if len(candidate) == self.length and _digest(candidate) == self.digest:
                return candidate
        raise ValueError(
            f"{reward}: {setting}: {place} does not hold {self.what} ({self.length} characters, "
            f"SHA-256 {self.digest}...), but a text with SHA-256 "
            f"{(_digest(strings[0]) if strings else '-')}... and "
            f"{(len(strings[0]) if strings else 0)} characters. Blanks at line ends count. The "
            f"published text is in {self.source}"
        )

    def _candidates(self, strings: list[str]) -> Iterator[str]:
        """Each string, with and without the tail; then some of them joined."""
        named = [s.replace("{prompt}", self.field) for s in strings]
        yield from chain.from_iterable((s, s + self.tail) for s in named)
        if self.parts > 1:
            short = [s for s in named if 40 < len(s) < self.length]
            short += [s.replace("10", str(self.scale)) for s in short if self.scale and "10" in s]
            for count in range(2, self.parts + 1):
                for chosen in permutations(short, count):
                    if sum(map(len, chosen)) + count - 1 == self.length:
                        yield "\n".join(chosen)

    def _fetched(self, reward: str, setting: str) -> str:
        way_out = f"name a file with `{setting}`; the text is in {self.source}"
        if not self.url:
            raise ValueError(f"{reward}: {self.what} is not included in flowrl: {way_out}")
        from huggingface_hub import cached_assets_path

        folder = cached_assets_path("flowrl", namespace="instructions", subfolder=self.digest)
        cached = folder / self.url.rpartition("/")[2]
        if not cached.is_file():
            try:
                with urllib.request.urlopen(self.url, timeout=FETCH_TIMEOUT) as answer:
                    content = answer.read(MOST_TEXT_BYTES)
            except OSError as error:
                raise ValueError(
                    f"{reward}: {self.what} could not be fetched from {self.url} ({error}): "
                    f"{way_out}"
                ) from error
            text = self._found(reward, setting, self.url, content)
            _keep(cached, content)
            return text
        return self._found(reward, setting, str(cached), cached.read_bytes())


def _keep(file: Path, content: bytes) -> None:
    """Keep a downloaded text, whole or not at all. Where nothing can be written, it is downloaded
    again the next time."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(file)
    except OSError:
        with suppress(OSError):
            part.unlink()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _strings(source: str) -> Iterator[str]:
    """The values of strings that a Python file assigns, including sums of strings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and (text := _text_of(node.value)):
            yield text


def _text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text_of(node.left), _text_of(node.right)
        return left + right if left and right else ""
    return ""
