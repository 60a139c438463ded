"""Command lines and shell scripts as words: the forms that training scripts are made of.

Read are comments, continued lines, quotes, assignments (also exported ones, and arrays), variables
(`$X`, `${X}`, `${X:-word}`), whole-number arithmetic `$((...))` and `basename`. A variable that the
text does not set, one that a condition sets, and every other substitution stays a text with its
`$`: nothing is run, and the environment is not read.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from flowrl.errors import UserError

_MOST_CHARACTERS = 2**18
_MOST_EXPANDED = 2**22  # characters of variables that are put in, of the whole text
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_OPENING = ("if", "for", "while", "until", "case", "function")
_CLOSING = ("fi", "done", "esac")
_BETWEEN = ("then", "else", "do", "elif", "{", "}", "!", "time")
_ENDS = (";", "&&", "||", "|", "&", "(", ")")
_PLACES = {"HOME": "~", "PWD": "."}  # written so that they mean the same, without their values
OPEN = "\0"  # begins a part of a word that the text does not decide


@dataclass
class Script:
    """The commands of a text, and the variables that it sets for them.

    commands   words of each, with variables put in
    assigned   variables that it sets, with their values
    open       variables without a value, and substitutions that would need to be run
    """

    commands: list[list[str]] = field(default_factory=list)
    assigned: dict[str, str] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)


@dataclass
class _Word:
    text: str
    quoted: bool
    parts: list[str] | None = None  # of an array, "${X[@]}"


def read_shell(text: str, source: str) -> Script:
    """The commands of a script or of one command line. UserError for a text that ends inside
    quotes, and for one that grows without bound as its variables are put in."""
    if len(text) > _MOST_CHARACTERS:
        raise UserError(f"{source}: more than {_MOST_CHARACTERS} characters, too many for a script")
    try:
        return _Reader(text, source).script()
    except RecursionError as error:
        raise UserError(f"{source}: its brackets are nested too deep for a script") from error


class _Reader:
    def __init__(self, text: str, source: str) -> None:
        self.text, self.source, self.at = text.replace("\\\r\n", "").replace("\\\n", " "), source, 0
        self.values: dict[str, str | list[str]] = {}
        self.found = Script()
        self.branches: list[bool | None] = []
        self.expanded = 0  # characters

    def script(self) -> Script:
        for words in self._commands():
            self._take(words)
        return self.found

    def _take(self, words: list[_Word]) -> None:
        while words and not words[0].quoted and words[0].text in (*_OPENING, *_CLOSING, *_BETWEEN):
            name = words[0].text
            self._turn(name, words[1:])
            if name == "for" and len(words) > 1:
                self.values.pop(words[1].text, None)
            if name in _OPENING or name == "elif":
                return
            words = words[1:]
        if False in self.branches:
            return
        exported = bool(words) and words[0].text in ("export", "declare", "local", "readonly")
        names = [w for w in words[1:] if not w.text.startswith("-")] if exported else words
        while names and (match := _ASSIGNED.match(names[0].text)):
            self._assign(match.group(1), match.group(2), names[0], match.end())
            names = names[1:]
        if exported or not names:
            return
        plain: list[str] = []
        for word in names:
            plain += word.parts if word.parts is not None else [word.text]
        if plain and plain[0] not in ("[", "[[", "test", "set", "echo", "cd", "source", "."):
            self.found.commands.append(plain)

    def _turn(self, name: str, words: list[_Word]) -> None:
        """Keep which branches run: True, False, or None where the text does not decide."""
        if name in _OPENING:
            self.branches.append(_decided(words) if name == "if" else None)
        elif name in _CLOSING and self.branches:
            self.branches.pop()
        elif name in ("else", "elif") and self.branches:
            before = self.branches[-1]
            after = True if name == "else" else _decided(words)
            self.branches[-1] = None if before is None else False if before else after

    def _assign(self, name: str, plus: str, word: _Word, end: int) -> None:
        value: str | list[str] = word.parts if word.parts is not None else word.text[end:]
        if plus and isinstance(value, list) and isinstance(self.values.get(name), list):
            value = [*self.values[name], *value]
            self._count(sum(map(len, value)))
        elif plus and isinstance(value, str):
            value = f"{self.values.get(name, '')}{value}"
            self._count(len(value))
        if None in self.branches:  # a condition decides whether it is set
            value = f"{OPEN}${name}"
        self.values[name] = value
        self.found.assigned[name] = str(value)

    def _commands(self) -> Iterator[list[_Word]]:
        words: list[_Word] = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "\n" or self._ended():
                self.at += self._ended() or 1
                if words:
                    yield words
                words = []
            elif letter.isspace():
                self.at += 1
            elif letter == "#":
                self._skip_line()
            elif letter == "<" and self.text.startswith("<<", self.at):
                self._skip_here_document()
            elif letter in "<>" or (
                letter.isdigit() and self.text[self.at + 1 : self.at + 2] == ">"
            ):
                self._skip_redirection()
            else:
                words.append(self._word())
        if words:
            yield words

    def _ended(self) -> int:
        return next(
            (len(e) for e in ("&&", "||", ";;", ";", "|", "&") if self.text.startswith(e, self.at)),
            0,
        ) or (1 if self.text[self.at] in "()" else 0)

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _skip_redirection(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in "<>&0123456789":
            self.at += 1
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        if self.at < len(self.text) and not self.text[self.at].isspace():
            self._word()

    def _skip_here_document(self) -> None:
        match = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?").match(self.text, self.at)
        if match is None:
            self.at += 2
            return
        end = re.compile(rf"^\s*{match.group(1)}\s*$", re.MULTILINE).search(self.text, match.end())
        self.at = len(self.text) if end is None else end.end()

    def _word(self) -> _Word:
        text, quoted, parts = "", False, None
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter.isspace() or (self._ended() and not text.endswith("=") and letter != "("):
                break
            if letter == "(" and text.endswith("="):  # an array
                return _Word(text, False, self._array())
            if letter in "()" and not text:
                break
            if letter == "(":
                break
            if letter in "<>":
                break
            if letter == "'":
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    raise UserError(f"{self.source}: a quote ' does not end")
                text, quoted, self.at = text + self.text[self.at + 1 : end], True, end + 1
            elif letter == '"':
                inner, words = self._double_quoted()
                text, quoted = text + inner, True
                parts = words if words is not None else parts
            elif letter == "\\":
                text += self.text[self.at + 1 : self.at + 2]
                self.at += 2
            elif letter == "$":
                inner, words = self._substituted()
                text += inner
                parts = words if words is not None else parts
                if (
                    words is None
                    and not quoted
                    and inner
                    and not text[: -len(inner)]
                    and " " in inner
                ):
                    parts = inner.split()  # an unquoted variable is split into words
            elif letter == "`":
                end = self.text.find("`", self.at + 1)
                end = len(self.text) - 1 if end < 0 else end
                text += self._open(self.text[self.at : end + 1])
                self.at = end + 1
            elif letter == ";" or letter == "\n":
                break
            else:
                text += letter
                self.at += 1
        return _Word(text, quoted, parts)

    def _array(self) -> list[str]:
        self.at += 1
        words: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at].isspace():
                self.at += 1
            elif self.text[self.at] == "#":
                self._skip_line()
            else:
                begin = self.at
                word = self._word()
                words += word.parts if word.parts is not None else [word.text]
                if self.at == begin:
                    self.at += 1
        self.at += 1
        return words

    def _double_quoted(self) -> tuple[str, list[str] | None]:
        self.at += 1
        text, parts = "", None
        while self.at < len(self.text) and self.text[self.at] != '"':
            letter = self.text[self.at]
            if letter == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`"):
                text += self.text[self.at + 1]
                self.at += 2
            elif letter == "$":
                inner, words = self._substituted()
                text += inner
                parts = words if words is not None else parts
            else:
                text += letter
                self.at += 1
        if self.at >= len(self.text):
            raise UserError(f'{self.source}: a quote " does not end')
        self.at += 1
        return text, parts

    def _substituted(self) -> tuple[str, list[str] | None]:
        """The text for a dollar sign, and the words of an array."""
        rest = self.text[self.at :]
        if rest.startswith("$(("):
            end = self._balanced(self.at + 1)
            inside = self.text[self.at + 3 : end - 2]
            whole = self.text[self.at : end]
            self.at = end
            number = self._arithmetic(inside)
            return (self._open(whole), None) if number is None else (str(number), None)
        if rest.startswith("$("):
            end = self._balanced(self.at + 1)
            whole, self.at = self.text[self.at : end], end
            words = whole[2:-1].split()
            if words == ["pwd"]:
                return _PLACES["PWD"], None
            if len(words) == 2 and words[0] == "basename":
                value = self._plain(words[1].strip('"'))
                if OPEN not in value:
                    return value.rstrip("/").rpartition("/")[2], None
            return self._open(whole), None
        if match := re.match(r"\$\{([A-Za-z_]\w*)\[@\]\}", rest):
            self.at += match.end()
            value = self.values.get(match.group(1))
            if isinstance(value, list):
                self._count(sum(map(len, value)))
                return "", value
            return self._open(match.group(0)), None
        if rest.startswith("${"):
            whole = self.text[self.at : self._brace_end()]
            self.at += len(whole)
            return self._braced(whole), None
        if match := re.match(r"\$([@*#?$!0-9-])", rest):  # the arguments of the script
            self.at += match.end()
            return ("", []) if match.group(1) in "@*" else (self._open(match.group(0)), None)
        if match := re.match(r"\$([A-Za-z_]\w*)", rest):
            self.at += match.end()
            return self._value(match.group(1)), None
        self.at += 1
        return "$", None

    def _brace_end(self) -> int:
        depth, i = 0, self.at
        while i < len(self.text):
            if self.text.startswith("${", i):
                depth += 1
                i += 1
            elif self.text[i] == "}":
                depth -= 1
                if depth == 0:
                    return i + 1
            i += 1
        raise UserError(f"{self.source}: a brace {{ does not end")

    def _braced(self, whole: str) -> str:
        """`${X}`, and `${X:-word}` with the word for a variable that the text does not set."""
        match = re.fullmatch(r"\$\{(\w+)(?::?[-=](.*))?\}", whole, re.DOTALL)
        if match is None:
            return self._open(whole)
        name, other = match.groups()
        value = "" if name[0].isdigit() else self._known(name)
        if value and OPEN not in value:
            return value
        if other is not None:
            return self._expanded(other)
        return self._open(whole) if name[0].isdigit() else self._value(name)

    def _known(self, name: str) -> str:
        value = self.values.get(name)
        text = str(value or "") if not isinstance(value, list) else " ".join(value)
        self._count(len(text))
        return text

    def _count(self, characters: int) -> None:
        """UserError if variables that name each other have grown without bound."""
        self.expanded += characters
        if self.expanded > _MOST_EXPANDED:
            raise UserError(
                f"{self.source}: its variables hold more than {_MOST_EXPANDED} characters once "
                "they are put in, too many for a script"
            )

    def _expanded(self, text: str) -> str:
        """The word behind `:-`, with its quotes taken away and its variables put in."""
        held = self.text, self.at
        self.text, self.at, expanded = text, 0, ""
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in "\"'":
                self.at += 1
            elif letter == "$":
                expanded += self._substituted()[0]
            else:
                expanded += letter
                self.at += 1
        self.text, self.at = held
        return expanded

    def _plain(self, text: str) -> str:
        """A text with its variables put in."""
        return re.sub(r"\$\{?([A-Za-z_]\w*)\}?", lambda m: self._value(m.group(1)), text)

    def _value(self, name: str) -> str:
        if name in _PLACES and name not in self.values:
            return _PLACES[name]
        value = self.values.get(name)
        if value is None:
            return self._open(f"${name}")
        text = value[0] if isinstance(value, list) and value else str(value or "")
        self._count(len(text))
        return text

    def _open(self, text: str) -> str:
        self.found.open.add(text)
        return f"{OPEN}{text}"

    def _balanced(self, start: int) -> int:
        depth, i = 0, start
        while i < len(self.text):
            depth += {"(": 1, ")": -1}.get(self.text[i], 0)
            i += 1
            if depth == 0:
                return i
        raise UserError(f"{self.source}: a bracket ( does not end")

    def _arithmetic(self, text: str) -> int | None:
        """Whole numbers with + - * / % and brackets; None for anything else."""
        plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: self._value(m.group(1)), text)
        if not re.fullmatch(r"[\d\s()+*/%-]{1,200}", plain) or "**" in plain:
            return None
        try:
            return _whole(ast.parse(plain.strip(), mode="eval").body)
        except (SyntaxError, ZeroDivisionError, ValueError, RecursionError):
            return None


def _decided(words: list[_Word]) -> bool | None:
    """Whether a test of two texts holds; None for any other."""
    texts = [word.text for word in words if word.text not in ("[", "]", "[[", "]]")]
    if len(texts) == 3 and texts[1] in ("=", "==", "!=") and OPEN not in "".join(texts):
        return (texts[0] == texts[2]) == (texts[1] != "!=")
    return None


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole(node.operand)
    if isinstance(node, ast.BinOp):
        a, b = _whole(node.left), _whole(node.right)
        if isinstance(node.op, ast.Add):
            return a + b
        if isinstance(node.op, ast.Sub):
            return a - b
        if isinstance(node.op, ast.Mult):
            return a * b
        if isinstance(node.op, ast.Div):  # bash rounds towards 0
            return int(a / b)
        if isinstance(node.op, ast.Mod):
            return a - b * int(a / b)
    raise ValueError("not whole-number arithmetic")
