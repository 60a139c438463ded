"""Command lines and shell scripts as words: the forms that training scripts are made of.

Read are comments, continued lines, quotes, here-documents, assignments (also exported ones, arrays
and their entries), variables (`$X`, `${X}`, `${X:-word}` and its kin, `${X[1]}`), whole-number
arithmetic, `basename`, tests of texts and numbers, `&&` and `||`, `if`, `case`, loops, subshells
and functions. Nothing is run, and the environment is not read: a variable that the text does not
set, one that an undecided condition or a loop sets, and every other substitution stays a text
with its `$`, and a command that an undecided condition guards stands in a list of its own.

bashlex reads the syntax of such texts, but no values, and its licence (GPL) is not this package's.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise

from flowrl.errors import UserError

_MOST_CHARACTERS = 2**18
_MOST_EXPANDED = 2**22  # characters of variables and functions that are put in, of the whole text
_CALL, _ITEM = 1000, 8  # characters that a call of a function, and a word of an array, count as
_MOST_CALLS = 20  # functions inside each other
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^\]\s]*\])?(\+?)=")
_FUNCTION = re.compile(r"(?:function\s+)?([\w-]+)\s*\(\s*\)\s*\{(?=\s)|function\s+([\w-]+)\s*\{")
_OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[;|&()\n]")
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:>>|>\||>&|<&|<>|>|<)(?!\()-?")
_HERE_DOCUMENT = re.compile(r"\d*<<-?[ \t]*(['\"\\]?)([\w.-]+)['\"]?")
_BRACES = re.compile(r"\{[^{}\s]*(,|\.\.)[^{}\s]*\}")  # which the shell makes several words of
_BRACE = re.compile(r"\$\{|\}")
_PARAMETER = re.compile(
    r"\$\{(?P<length>#?)(?P<name>[A-Za-z_]\w*|\d+)(?:\[(?P<index>[^\]]*)\])?"
    r"(?:(?P<how>:?[-=+?])(?P<word>.*))?\}",
    re.DOTALL,
)
_SET_BY_ARITHMETIC = re.compile(
    r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
_ASSIGNING = ("export", "declare", "local", "readonly", "typeset")
_READING = ("read", "mapfile", "readarray", "getopts", "let", "printf")
_QUIET = (  # programs that matter to no setting
    ":", "echo", "cd", "source", ".", "mkdir", "set", "wait", "trap", "ulimit", "sleep", "break",
    "continue", "true", "false", "pushd", "popd",
)  # fmt: skip
_ASKING = (
    "read",
    "getopts",
    "command",
    "grep",
    "which",
    "type",
    "hash",
    "nvidia-smi",
    "diff",
    "cmp",
    "pgrep",
)
_PLACES = {"HOME": "~", "PWD": "."}  # written so that they mean the same, without their values
_NUMBER_SIGNS: Mapping[str, str] = {
    "==": "-eq", "!=": "-ne", "<": "-lt", "<=": "-le", ">": "-gt", ">=": "-ge",
}  # fmt: skip
OPEN = "\0"  # begins a part of a word that the text does not decide
_KEPT_SPACE = "\N{NO-BREAK SPACE}"  # inside such a part, which is one word


@dataclass
class Script:
    """The commands of a text, and the variables that it sets for them.

    commands     words of each that runs, with variables put in
    conditional  words of each that runs under a condition that the text does not decide
    assigned     variables that it sets, with their values
    """

    commands: list[list[str]] = field(default_factory=list)
    conditional: list[list[str]] = field(default_factory=list)
    assigned: dict[str, str] = field(default_factory=dict)


@dataclass
class _Word:
    """A word before it is split.

    pieces  texts, or the words of an array; with whether the shell splits them at spaces
    plain   its letters outside of quotes and substitutions
    quoted  whether a part stands in quotes
    array   the words of `NAME=(...)`
    """

    pieces: list[tuple[str | list[str], bool]] = field(default_factory=list)
    plain: str = ""
    quoted: bool = False
    array: list[str] | None = None

    @property
    def text(self) -> str:
        return "".join(" ".join(p) if isinstance(p, list) else p for p, _ in self.pieces)

    @property
    def is_bare(self) -> bool:
        """Whether it is written as it is read, so that it may be a word of the shell's own."""
        return not self.quoted and self.plain == self.text

    def fields(self) -> list[str]:
        """The words that the shell makes of it."""
        if _BRACES.search(self.plain):
            return [OPEN + re.sub(r"\s", _KEPT_SPACE, self.text.replace(OPEN, ""))]
        fields: list[str] = []
        current: str | None = "" if self.quoted and self._is_empty() else None
        for piece, splits in self.pieces:
            parts = _parts(piece, splits)
            for i, part in enumerate(parts):
                if i and current is not None:
                    fields.append(current)
                    current = None
                if part is not None:
                    current = (current or "") + part
        return fields if current is None else [*fields, current]

    def _is_empty(self) -> bool:
        """Whether nothing but quotes is left; an array without words leaves no word."""
        return all(piece == "" for piece, _ in self.pieces)


def _parts(piece: str | list[str], splits: bool) -> list[str | None]:
    """The parts of a piece, which stand in words of their own; None at an end where it has a
    space."""
    if isinstance(piece, list):
        return [*piece]
    if not splits:
        return [piece]
    return [part or None for part in re.split(r"[ \t\n]+", piece)]


@dataclass
class _Frame:
    """A compound command, or a part of the text that is read by itself.

    kind      if, loop, case, group, subshell, function, call, or text
    runs      whether its part that is read now runs; None where the text does not decide
    enters    whether it was reached
    taken     whether one of its branches was taken before
    begins    where a function's body begins
    name      of a function
    subject   what a case compares; None if that is open
    patterns  whether a case's next words are patterns
    tests     the word of a loop whose test is read, while or until; do behind it; else empty
    values    of the variables before, where they are set back at its end
    """

    kind: str
    enters: bool | None = True
    runs: bool | None = True
    taken: bool | None = False
    begins: int = 0
    name: str = ""
    subject: str | None = None
    patterns: bool = False
    tests: str = ""
    values: dict[str, str | list[str] | None] = field(default_factory=dict)


def shown_word(word: str) -> str:
    """A word as its text has it, without the mark of what is open."""
    return word.replace(OPEN, "").replace(_KEPT_SPACE, " ")


def _both(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def _not(a: bool | None) -> bool | None:
    return None if a is None else not a


def _either(a: bool | None, b: bool | None) -> bool | None:
    return _not(_both(_not(a), _not(b)))


def read_shell(text: str, source: str) -> Script:
    """The commands of a script or of one command line. UserError for a text that ends inside
    quotes, and for one that grows without bound as its variables are put in."""
    if len(text) > _MOST_CHARACTERS:
        raise UserError(f"{source}: more than {_MOST_CHARACTERS} characters, too many for a script")
    try:
        return _Reader(text.replace("\r\n", "\n"), source).script()
    except RecursionError as error:
        raise UserError(f"{source}: its brackets are nested too deep for a script") from error


class _Reader:
    def __init__(self, text: str, source: str) -> None:
        self.text, self.source, self.at = text, source, 0
        self.values: dict[str, str | list[str]] = {}
        self.found = Script()
        self.frames = [_Frame("text")]
        self.functions: dict[str, str] = {}
        self.arguments: list[str] | None = None  # None: those of the script, which are unknown
        self.status: bool | None = True  # whether the last command succeeded
        self.reached: bool | None = True  # whether the last command ran
        self.here_documents: list[str] = []
        self.expanded = 0  # characters

    def script(self) -> Script:
        self._read()
        return self.found

    # Commands

    def _read(self) -> None:
        """Take each command of the text as soon as it ends, so that the next one's words see the
        variables that it sets."""
        words: list[_Word] = []
        before = ";"
        while self.at < len(self.text):
            if not words and (match := _FUNCTION.match(self.text, self.at)):
                self.at = match.end()
                name = match.group(1) or match.group(2)
                self.frames.append(_Frame("function", True, False, begins=self.at, name=name))
                before = ";"
                continue
            if self._skipped():
                continue
            word = self._own_word(words)
            match = None if word else _OPERATOR.match(self.text, self.at)
            if word is not None:
                words.append(word)
            elif match is None:
                begin = self.at
                words.append(self._word())
                self.at += self.at == begin
            else:
                self.at = match.end()
                words, before = self._ended(words, before, match.group())
        self._ended(words, before, "\n")

    def _skipped(self) -> bool:
        """Whether spaces, a comment or a redirection stood here, and were skipped."""
        text, begin = self.text, self.at
        if text[begin] == "#":
            end = text.find("\n", begin)
            self.at = len(text) if end < 0 else end
        elif text.startswith("\\\n", begin):
            self.at += 2
        elif text[begin].isspace() and text[begin] != "\n":
            self.at += 1
        elif text.startswith("<<<", begin):
            self.at += 3
            self._skip_word()
        elif match := _HERE_DOCUMENT.match(text, begin):
            self.here_documents.append(match.group(2))
            self.at = match.end()
        elif match := _REDIRECTION.match(text, begin):
            self.at = match.end()
            self._skip_word()
        return self.at > begin

    def _skip_word(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        if self.at < len(self.text) and self.text[self.at] != "\n":
            self._word()

    def _own_word(self, words: Sequence[_Word]) -> _Word | None:
        """A word that only stands where a command does: `((...))`, or a sign between `[[` and
        `]]`, which ends no command there."""
        begins = all(word.is_bare and word.text in (*_COMPOUND, "!", "time") for word in words)
        if self.text.startswith("((", self.at) and begins:
            end = self._balanced(self.at)
            word = _Word([(self.text[self.at : end], False)], quoted=True)
            self.at = end
            return word
        inside = bool(words) and words[0].is_bare and words[0].text in ("[[", "!", "if", "while")
        inside = inside and any(w.is_bare and w.text == "[[" for w in words)
        if not inside or any(w.is_bare and w.text == "]]" for w in words):
            return None
        match = re.compile(r"&&|\|\||[()<>]|\n").match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return _Word([(match.group(), False)], match.group())

    def _ended(self, words: list[_Word], before: str, sign: str) -> tuple[list[_Word], str]:
        """Take the words before a sign. The words that stay, and the sign before the next."""
        case = self.frames[-1]
        if case.patterns:
            if sign == ")":
                self._compare(case, words)
            elif words and words[0].is_bare and words[0].text == "esac":
                self.frames.pop()
            elif sign == "|":
                return words, before
            return [], ";"
        if words:
            self._take(words, before)
            before = ";"
        if sign == "\n":
            self._skip_here_documents()
            return [], before if before in ("&&", "||", "|") else ";"
        if sign == "(":
            runs = self._reaches(before)
            self.frames.append(_Frame("subshell", runs, values=dict(self.values)))
            return [], ";"
        if sign == ")":
            self._close("subshell")
            return [], ";"
        if sign in (";;", ";&", ";;&") and self.frames[-1].kind == "case":
            self.frames[-1].patterns, self.frames[-1].runs = True, False
            return [], ";"
        return [], "|" if sign == "|&" else sign

    def _skip_here_documents(self) -> None:
        for name in self.here_documents:
            end = re.compile(rf"^\s*{re.escape(name)}[ \t]*$", re.MULTILINE)
            match = end.search(self.text, self.at)
            self.at = len(self.text) if match is None else match.end()
        self.here_documents = []

    def _compare(self, case: _Frame, words: Sequence[_Word]) -> None:
        """Whether a branch of a case runs, whose patterns the words are."""
        case.patterns, matches = False, False
        for word in words:
            if case.subject is None or OPEN in word.text:
                matches = _either(matches, None)
            else:
                alike = _like(case.subject, word)
                matches = _either(matches, alike)
        case.runs = _both(matches, _not(case.taken))
        case.taken = _either(case.taken, matches)

    def _running(self) -> bool | None:
        runs: bool | None = True
        for frame in self.frames:
            runs = _both(runs, _both(frame.enters, frame.runs))
        return runs

    def _reaches(self, before: str) -> bool | None:
        """Whether a command runs that stands behind a sign."""
        runs = self._running()
        if before == "&&":
            runs = _both(runs, self.status)
        elif before == "||":
            runs = _both(runs, _not(self.status))
        elif before == "|":
            runs = _both(runs, self.reached)
        return runs

    def _take(self, words: list[_Word], before: str) -> None:
        runs, negated = self._reaches(before), False
        while words and words[0].is_bare:
            name = words[0].text
            if name == "!":
                negated = not negated
            elif name in _COMPOUND:
                if not self._turn(name, words, runs):
                    return
                runs = self._running()
            elif name != "time":
                break
            words = words[1:]
        if not words:
            return
        self.reached = runs
        if runs is False:
            return
        status = self._simple(words, runs)
        if runs is None:
            status = None
        if status is None and self.frames[-1].tests == "while" and self._asks_arguments(words):
            status = False
        self.status = _not(status) if negated else status

    def _turn(self, name: str, words: Sequence[_Word], runs: bool | None) -> bool:
        """Begin, continue or end a compound command. Whether a command follows in its words."""
        frame = self.frames[-1]
        if name in ("if", "{"):
            self.frames.append(_Frame("if" if name == "if" else "group", runs))
        elif name in ("while", "until"):
            self.frames.append(_Frame("loop", runs, tests=name))
        elif name in ("for", "select"):
            items = [part for word in words[3:] for part in word.fields()]
            counted = len(words) == 2 and words[1].text.startswith("((")
            # without words, a loop is over the arguments
            is_empty = not (items or counted or (len(words) == 2 and self.arguments))
            self.frames.append(_Frame("loop", runs, not is_empty))
            named = words[1].text if len(words) > 1 else ""
            if _NAME.fullmatch(named) and runs is not False:
                self.values[named] = self._open(f"${named}")
            return False
        elif name == "case":
            subject = words[1].text if len(words) > 1 else OPEN
            open_subject = None if OPEN in subject else subject
            case = _Frame("case", runs, False, subject=open_subject, patterns=True)
            self.frames.append(case)
            return False
        elif name in ("then", "elif", "else") and frame.kind == "if":
            self._branch(frame, name)
        elif name == "do" and frame.kind == "loop":
            if frame.tests:
                ended = self.status is (frame.tests == "until")
                frame.runs, frame.tests = False if ended else None, "do"
        elif name in _ENDS_OF:
            self._close(_ENDS_OF[name])
        return True

    def _asks_arguments(self, words: Sequence[_Word]) -> bool:
        """Whether a test is about the arguments of the script, which has none: the loop over them
        ends at once."""
        text = " ".join(word.text for word in words)
        of_script = self.arguments is None
        return of_script and (words[0].text == "getopts" or re.search(r"\$[#1]", text) is not None)

    def _branch(self, frame: _Frame, name: str) -> None:
        if name == "then":
            holds = _both(frame.runs, self.status)
            frame.runs, frame.taken = holds, _either(frame.taken, holds)
        else:
            frame.runs = _not(frame.taken)

    def _close(self, kind: str) -> None:
        """End the compound command of a kind, if it is the innermost."""
        frame = self.frames[-1]
        if kind == "group" and frame.kind == "function":
            self.functions[frame.name] = self.text[frame.begins : self.text.rindex("}", 0, self.at)]
            self.frames.pop()
        elif frame.kind == kind and len(self.frames) > 1:
            self.frames.pop()
            if kind == "subshell":
                self.values = {k: v for k, v in frame.values.items() if v is not None}
        if frame.enters is not False and frame.taken is None:
            self.status = None

    def _simple(self, words: list[_Word], runs: bool | None) -> bool | None:
        """Take a command that is not compound: whether it succeeds."""
        first = words[0].fields()
        if words[0].quoted and words[0].text.startswith("(("):
            return self._arithmetic_command(words[0].text[2:-2])
        assigning = words[0].is_bare and words[0].text in _ASSIGNING
        if assigning:
            self._assign_all([w for w in words[1:] if not w.text.startswith("-")], first[0], runs)
            return True
        prefix = 0
        while prefix < len(words) and _assignment(words[prefix]):
            prefix += 1
        if prefix == len(words):
            self._assign_all(words, "", runs)
            return True
        for word in words[:prefix]:  # for this command alone
            if match := _assignment(word):
                self.found.assigned[match.group(1)] = word.text[match.end() :]
        words = words[prefix:]
        if words[0].is_bare and words[0].text in ("[", "[[", "test"):
            return _decided(words)
        plain = [part for word in words for part in word.fields()]
        return self._program(plain, runs) if plain else True

    def _program(self, plain: list[str], runs: bool | None) -> bool | None:
        name = plain[0]
        if name in _READING:
            self._set_by_reading(plain)
        elif name == "unset":
            for unset in plain[1:]:
                self.values.pop(unset, None)
                if runs is None:
                    self.values[unset] = self._open(f"${unset}")
        elif name == "set" and "--" in plain:
            self.arguments = plain[plain.index("--") + 1 :] if runs else None
        elif name == "shift":
            self.arguments = self.arguments[1:] if self.arguments and runs else None
        elif name in ("exit", "return"):
            self._leave(name, runs)
        elif name == "eval" and OPEN not in "".join(plain):
            self._read_inside(" ".join(plain[1:]), self.arguments, runs)
            return self.status
        elif name in self.functions:
            self._read_inside(self.functions[name], plain[1:], runs)
            return self.status
        elif name not in _QUIET:
            plain = plain[1:] if name in ("eval", "exec") else plain
            (self.found.commands if runs else self.found.conditional).append(plain)
            if name == "exec" and plain:
                self._leave("exit", runs)
        return False if name == "false" else None if name in _ASKING else True

    def _leave(self, name: str, runs: bool | None) -> None:
        """Leave out all that follows. A condition that the text does not decide guards an exit
        for what is wrong, such as too few arguments: the text is read as if it were not met."""
        kinds = ("call", "subshell", "text") if name == "return" else ("subshell", "text")
        if runs:
            last = next(f for f in reversed(self.frames) if f.kind in kinds)
            last.runs = False

    def _read_inside(self, text: str, arguments: list[str] | None, runs: bool | None) -> None:
        """Read the body of a function, or the words of `eval`, where it is called."""
        calls = sum(frame.kind == "call" for frame in self.frames)
        self._count(len(text) + _CALL)
        if calls >= _MOST_CALLS:
            raise UserError(f"{self.source}: its functions call each other too deep for a script")
        held = self.text, self.at, self.arguments, self.here_documents, len(self.frames)
        self.text, self.at, self.arguments, self.here_documents = text, 0, arguments, []
        self.frames.append(_Frame("call", runs))
        self._read()
        frame = self.frames[held[-1]]
        del self.frames[held[-1] :]
        for name, value in frame.values.items():
            self.values.pop(name, None)
            if value is not None:
                self.values[name] = value
        self.text, self.at, self.arguments, self.here_documents = held[:-1]

    # Variables

    def _assign_all(self, words: Sequence[_Word], declared: str, runs: bool | None) -> None:
        for word in words:
            if match := _assignment(word):
                if declared == "local":
                    self._make_local(match.group(1))
                self._assign(word, match, runs)

    def _make_local(self, name: str) -> None:
        calls = [frame for frame in self.frames if frame.kind == "call"]
        if calls:
            calls[-1].values.setdefault(name, self.values.get(name))

    def _assign(self, word: _Word, match: re.Match[str], runs: bool | None) -> None:
        name, index, plus = match.groups()
        held = self.values.get(name)
        value: str | list[str] = word.array if word.array is not None else word.text[match.end() :]
        if index:
            value = self._with_entry(name, index[1:-1], str(value))
        elif plus and isinstance(value, list) and isinstance(held, list):
            value = [*held, *value]
            self._count(sum(len(item) + _ITEM for item in value))
        elif plus and isinstance(value, str):
            value = f"{'' if isinstance(held, list) else held or ''}{value}"
            self._count(len(value))
        looped = any(frame.kind == "loop" for frame in self.frames)
        mixed = plus and held is not None and isinstance(held, list) is not isinstance(value, list)
        if runs is None or looped or mixed:
            value = self._open(f"${name}")
        self.values[name] = value
        self.found.assigned[name] = str(value)

    def _with_entry(self, name: str, index: str, value: str) -> str | list[str]:
        """An array of which one entry is set; open where the text does not say which."""
        held = self.values.get(name)
        if isinstance(held, list) and index.isdigit() and int(index) < len(held):
            return [*held[: int(index)], value, *held[int(index) + 1 :]]
        if isinstance(held, list) and index.isdigit() and int(index) == len(held):
            return [*held, value]
        return self._open(f"${name}")

    def _set_by_reading(self, plain: Sequence[str]) -> None:
        """Variables that a builtin sets, to what the text does not say."""
        names = [word for word in plain[1:] if _NAME.fullmatch(word)]
        if plain[0] == "printf":
            names = [name for flag, name in pairwise(plain) if flag == "-v"]
        if plain[0] == "let":
            names = [a or b for word in plain[1:] for a, b in _SET_BY_ARITHMETIC.findall(word)]
        for name in names:
            self.values[name] = self._open(f"${name}")

    def _arithmetic_command(self, text: str) -> bool | None:
        """Whether `((...))` holds. Variables that it sets are open."""
        for a, b in _SET_BY_ARITHMETIC.findall(text):
            self.values[a or b] = self._open(f"${a or b}")
        sides = re.split(r"(==|!=|<=|>=|<|>)", text)
        if len(sides) != 3:
            return None
        left, right = (self._arithmetic(side) for side in sides[::2])
        if left is None or right is None:
            return None
        return _number_test(left, _NUMBER_SIGNS[sides[1]], right)

    # Words

    def _word(self) -> _Word:
        word = _Word()
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "(" and _ASSIGNED.fullmatch(word.text) and not word.quoted:
                word.array = self._array()
                return word
            if letter in "<>" and self.text.startswith("(", self.at + 1) and not word.pieces:
                end = self._balanced(self.at + 1)
                word.pieces.append((self._open(self.text[self.at : end]), False))
                self.at = end
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif letter.isspace() or letter in "<>" or _OPERATOR.match(self.text, self.at):
                break
            else:
                self._piece(word, letter)
        return word

    def _piece(self, word: _Word, letter: str, splits: bool = False) -> None:
        """Add a quoted part, a substitution or a letter. `splits`: letters are split at spaces."""
        text = self.text
        following = text[self.at + 1 : self.at + 2]
        if letter == "'" or (letter == "$" and following == "'"):
            begin = self.at + (2 if letter == "$" else 1)
            end = text.find("'", begin)
            if end < 0:
                raise UserError(f"{self.source}: a quote ' does not end")
            inner = text[begin:end]
            if letter == "$" and "\\" in inner:
                inner = self._open(inner)
            word.pieces.append((inner, False))
            word.quoted, self.at = True, end + 1
        elif letter == '"' or (letter == "$" and following == '"'):
            self.at += letter == "$"
            word.pieces += self._double_quoted()
            word.quoted = True
        elif letter == "\\":
            word.pieces.append((following, False))
            word.quoted, self.at = True, self.at + 2
        elif letter in "$`":
            word.pieces += self._substituted()
        else:
            word.pieces.append((letter, splits))
            word.plain += letter
            self.at += 1

    def _array(self) -> list[str]:
        self.at += 1
        words: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at].isspace():
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                begin = self.at
                words += self._word().fields()
                if self.at == begin:
                    self.at += 1
        self.at += 1
        return words

    def _double_quoted(self) -> list[tuple[str | list[str], bool]]:
        self.at += 1
        pieces: list[tuple[str | list[str], bool]] = [("", False)]
        only_array = False
        while self.at < len(self.text) and self.text[self.at] != '"':
            letter, following = self.text[self.at], self.text[self.at + 1 : self.at + 2]
            if letter == "\\" and following in ('"', "\\", "$", "`", "\n"):
                pieces.append(("" if following == "\n" else following, False))
                self.at += 2
            elif letter in "$`":
                for piece, _ in self._substituted(quoted=True):
                    only_array = only_array or isinstance(piece, list)
                    pieces.append((piece, False))
            else:
                pieces.append((letter, False))
                self.at += 1
        if self.at >= len(self.text):
            raise UserError(f'{self.source}: a quote " does not end')
        self.at += 1
        # "${A[@]}" of an array without words is no word, and "" is one
        return [p for p in pieces if p != ("", False)] if only_array else pieces

    def _substituted(self, quoted: bool = False) -> list[tuple[str | list[str], bool]]:
        """The pieces that a dollar sign or a backquote stands for."""
        text = self.text
        if text[self.at] == "`":
            end = text.find("`", self.at + 1)
            end = len(text) - 1 if end < 0 else end
            whole, self.at = text[self.at : end + 1], end + 1
            return [self._told(whole, whole.strip("`"), quoted)]
        if text.startswith("$((", self.at):
            end = self._balanced(self.at + 1)
            whole, self.at = text[self.at : end], end
            number = self._arithmetic(whole[3:-2])
            return [(self._open(whole) if number is None else str(number), False)]
        if text.startswith("$(", self.at):
            end = self._balanced(self.at + 1)
            whole, self.at = text[self.at : end], end
            return [self._told(whole, whole[2:-1], quoted)]
        if text.startswith("${", self.at):
            whole = text[self.at : self._brace_end()]
            self.at += len(whole)
            return self._braced(whole, quoted)
        if match := re.compile(r"\$([@*#?$!0-9-])").match(text, self.at):
            self.at = match.end()
            return self._argument(match.group(1), quoted)
        if match := re.compile(r"\$([A-Za-z_]\w*)").match(text, self.at):
            self.at = match.end()
            return self._pieces_of(self._value(match.group(1)), quoted)
        self.at += 1
        return [("$", False)]

    def _pieces_of(self, value: str, quoted: bool) -> list[tuple[str | list[str], bool]]:
        """A variable's text, which outside of quotes is split at spaces."""
        if not quoted and "IFS" in self.values and " " not in value:
            return [(self._open(value.replace(OPEN, "")), False)]
        return [(value, not quoted)]

    def _told(self, whole: str, command: str, quoted: bool) -> tuple[str, bool]:
        """The output of the two commands whose output the text tells."""
        words = command.split()
        if words == ["pwd"]:
            return _PLACES["PWD"], False
        if len(words) == 2 and words[0] == "basename":
            value = self._plain(words[1].strip('"'))
            if OPEN not in value:
                return value.rstrip("/").rpartition("/")[2], not quoted
        return self._open(whole), False

    def _argument(self, sign: str, quoted: bool) -> list[tuple[str | list[str], bool]]:
        """An argument of the function that is read, or of the script, which has none."""
        if sign == "@" or (sign == "*" and not quoted):
            return [([*(self.arguments or [])], False)]
        if sign == "*":
            return [(" ".join(self.arguments or []), False)]
        if self.arguments is not None and sign == "#":
            return [(str(len(self.arguments)), False)]
        if self.arguments is not None and sign.isdigit() and sign != "0":
            value = (self.arguments[int(sign) - 1 :] or [""])[0]
            return self._pieces_of(value, quoted)
        return [(self._open(f"${sign}"), False)]

    def _brace_end(self) -> int:
        depth = 0
        for match in _BRACE.finditer(self.text, self.at):
            depth += 1 if match.group() == "${" else -1
            if depth == 0:
                return match.end()
        raise UserError(f"{self.source}: a brace {{ does not end")

    def _braced(self, whole: str, quoted: bool) -> list[tuple[str | list[str], bool]]:
        """A variable in braces: `${X}`, an entry of an array, or a word if it is not set."""
        match = _PARAMETER.fullmatch(whole)
        still_open: list[tuple[str | list[str], bool]] = [(self._open(whole), False)]
        if match is None:
            return still_open
        name, index, how = match["name"], match["index"], match["how"]
        held = self._held(name)
        if index is not None:
            return self._entries(match, held, quoted) or still_open
        if match["length"]:
            if isinstance(held, str) and OPEN not in held and how is None:
                return [(str(len(held)), False)]
            return still_open
        value = held[0] if isinstance(held, list) and held else held
        value = "" if isinstance(value, list) else value
        if how is None:
            return (
                self._argument(name, quoted)
                if name.isdigit()
                else self._pieces_of(self._value(name), quoted)
            )
        if value is not None and OPEN in value:  # what it holds is open, and whether it is empty
            return still_open
        is_set = value is not None and (bool(value) or ":" not in how)
        if how[-1] == "+":
            return self._inner(match["word"], quoted) if is_set else [("", True)]
        if is_set or how[-1] == "?":
            self._count(len(value or ""))
            return still_open if value is None else self._pieces_of(value, quoted)
        inner = self._inner(match["word"], quoted)
        if how[-1] == "=" and not name.isdigit():
            text = _Word(inner).text
            runs = self._running()
            if runs is not False:
                self.values[name] = text if runs else self._open(f"${name}")
                self.found.assigned[name] = text
        return inner

    def _held(self, name: str) -> str | list[str] | None:
        """The value of a variable or an argument; None if the text sets none."""
        if not name.isdigit():
            return self.values.get(name)
        if self.arguments is None or name == "0":
            return None
        return (self.arguments[int(name) - 1 :] or [None])[0]

    def _entries(
        self, match: re.Match[str], held: str | list[str] | None, quoted: bool
    ) -> list[tuple[str | list[str], bool]]:
        """Entries of an array, or their number; none if the text does not say them."""
        index = match["index"]
        if not isinstance(held, list) or match["how"] is not None:
            return []
        self._count(sum(len(item) + _ITEM for item in held))
        if index in ("@", "*") and match["length"]:
            return [(str(len(held)), False)]
        if index == "@" or (index == "*" and not quoted):
            plain = [part for item in held for part in (item.split(" ") if not quoted else [item])]
            return [(plain if quoted else [part for part in plain if part], False)]
        if index == "*":
            return [(" ".join(held), False)]
        number = self._arithmetic(index)
        if number is None or not 0 <= number < len(held) or match["length"]:
            return []
        return self._pieces_of(held[number], quoted)

    def _inner(self, text: str, quoted: bool) -> list[tuple[str | list[str], bool]]:
        """The word behind `:-`, with its quotes taken away and its variables put in."""
        held = self.text, self.at
        self.text, self.at = text, 0
        word = _Word()
        while self.at < len(self.text):
            letter = self.text[self.at]
            if quoted and letter == "'":
                word.pieces.append((letter, False))
                self.at += 1
            else:
                self._piece(word, letter, splits=not quoted)
        self.text, self.at = held
        return [(piece, splits and not quoted) for piece, splits in word.pieces]

    def _count(self, characters: int) -> None:
        """UserError if variables that name each other have grown without bound."""
        self.expanded += characters
        if self.expanded > _MOST_EXPANDED:
            raise UserError(
                f"{self.source}: its variables hold more than {_MOST_EXPANDED} characters once "
                "they are put in, too many for a script"
            )

    def _plain(self, text: str) -> str:
        """A text with its variables put in."""
        return re.sub(r"\$\{?([A-Za-z_]\w*)\}?", lambda m: self._value(m.group(1)), text)

    def _value(self, name: str) -> str:
        if name in _PLACES and name not in self.values:
            return _PLACES[name]
        value = self.values.get(name)
        if value is None:
            return self._open(f"${name}")
        text = (value[0] if value else "") if isinstance(value, list) else value
        self._count(len(text))
        return text

    def _open(self, text: str) -> str:
        return OPEN + re.sub(r"\s", _KEPT_SPACE, text)

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


_ENDS_OF: Mapping[str, str] = {
    "fi": "if", "done": "loop", "esac": "case", "}": "group",
}  # fmt: skip
_COMPOUND = (
    "if", "then", "elif", "else", "while", "until", "for", "select", "do", "case", "{", *_ENDS_OF,
)  # fmt: skip


def _assignment(word: _Word) -> re.Match[str] | None:
    """The name of a word that sets a variable, which stands outside of quotes."""
    match = _ASSIGNED.match(word.plain)
    return match if match is not None and word.text.startswith(match.group()) else None


def _like(text: str, pattern: _Word) -> bool | None:
    """Whether a text is a pattern's; None for one that quotes a part of itself."""
    if not re.search(r"[*?\[]", pattern.text) or (pattern.quoted and not pattern.plain):
        return text == pattern.text
    return None if pattern.quoted else fnmatchcase(text, pattern.text)


def _decided(words: Sequence[_Word]) -> bool | None:
    """Whether a test of texts or numbers holds; None for any other, and for what is open."""
    double = words[0].text == "[["
    inner = [word for word in words[1:] if not (word.is_bare and word.text in ("]", "]]"))]
    if not double:
        inner = [_Word([(text, False)], quoted=True) for word in inner for text in word.fields()]
    return _test(inner, ("||",) if double else ("-o",), ("&&",) if double else ("-a",))


def _test(words: list[_Word], any_of: tuple[str, ...], all_of: tuple[str, ...]) -> bool | None:
    texts = [word.text for word in words]
    if "(" in texts or "\n" in texts:
        return None
    for signs, join in ((any_of, _either), (all_of, _both)):
        at = next((i for i, text in enumerate(texts) if text in signs), None)
        if at is not None:
            sides = [_test(part, any_of, all_of) for part in (words[:at], words[at + 1 :])]
            return join(*sides)
    if texts[:1] == ["!"]:
        return _not(_test(words[1:], any_of, all_of))
    if OPEN in "".join(texts):
        return None
    if len(texts) < 2:
        return bool(texts and texts[0])
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return bool(texts[1]) is (texts[0] == "-n")
    if len(texts) != 3:
        return None
    left, sign, right = texts
    if sign in ("=", "==", "!="):
        alike = _like(left, words[2])
        return alike if sign != "!=" else _not(alike)
    if sign in _NUMBER_SIGNS.values() and all(
        re.fullmatch(r"-?\d{1,18}", side) for side in (left, right)
    ):
        return _number_test(int(left), sign, int(right))
    return None


def _number_test(left: int, sign: str, right: int) -> bool:
    return {
        "-eq": left == right, "-ne": left != right, "-lt": left < right,
        "-le": left <= right, "-gt": left > right, "-ge": left >= right,
    }[sign]  # fmt: skip


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
