"""What a command does, as the kernel sees it: `strace` of the process and of all that it starts.

Unlike `tests.support.watched` it sees libraries and other programs too, but only their calls: not
which variable was read, so a variable's value is looked for in whatever was written or sent.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from flowrl.paths import PROJECT

SHOWN = 4096  # bytes of a text that are written down
SENDING = ("write", "writev", "pwrite64", "sendto", "sendmsg", "sendmmsg")
CHANGING = (  # calls that change what their paths name
    *("creat", "mkdir", "mkdirat", "mknod", "mknodat", "truncate", "rename", "renameat"),
    *("renameat2", "link", "linkat", "symlink", "symlinkat", "unlink", "unlinkat", "rmdir"),
    *("chmod", "fchmodat", "chown", "fchownat", "lchown", "setxattr", "utimensat"),
)
OPENING, STARTING = ("open", "openat", "openat2"), ("execve", "execveat")
TRACED = (*SENDING, *CHANGING, *OPENING, *STARTING, "connect", "bind")
LINE = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>|(\w+)\()(.*)", re.DOTALL)
TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"(\.\.\.)?')
FOLDER = re.compile(r"(?:AT_FDCWD|\d+)<([^>]*)>")
INTERNET = re.compile(r"sa_family=AF_INET6?, sin6?_port=htons\((\d+)\)")
WRITING = ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC")

needed = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@dataclass(frozen=True)
class Call:
    """A system call: its name, its arguments as strace writes them, and whether it succeeded."""

    name: str
    given: str
    worked: bool

    def paths(self) -> Iterator[str]:
        """Absolute paths that it names, with `..` resolved and links as they are. Of a symbolic
        link its own path, not where it leads."""
        texts = list(TEXT.finditer(self.given))
        if self.name in ("symlink", "symlinkat"):
            texts = texts[1:]
        if self.name in (*OPENING, *STARTING, "setxattr"):
            texts = texts[:1]
        for text in texts:
            above = [each.group(1) for each in FOLDER.finditer(self.given, 0, text.start())]
            yield os.path.normpath(os.path.join(above[-1] if above else "/", text.group(1)))


@dataclass(frozen=True)
class Traced:
    """A command's end and its calls."""

    code: int
    said: str
    calls: list[Call]

    def connections(self) -> set[int]:
        """Ports of internet addresses that it tried to connect or send to."""
        names = ("connect", "sendto", "sendmsg", "sendmmsg")
        found = [INTERNET.search(call.given) for call in self.calls if call.name in names]
        return {int(each.group(1)) for each in found if each is not None}

    def opened(self) -> set[str]:
        """Paths that it opened or ran."""
        names = (*OPENING, *STARTING)
        return {p for c in self.calls if c.worked and c.name in names for p in c.paths()}

    def changed(self) -> set[str]:
        """Paths that it wrote, made, moved or removed."""
        found = set[str]()
        for call in self.calls:
            opens = call.name in OPENING and any(flag in call.given for flag in WRITING)
            if call.worked and (opens or call.name in CHANGING):
                found |= set(call.paths())
        return found

    def sent(self, word: str) -> list[str]:
        """Calls that wrote or sent this word, wherever to."""
        return [c.given[:300] for c in self.calls if c.name in SENDING and word in c.given]


def traced(
    words: Sequence[str | Path], place: Path, environment: Mapping[str, str], seconds: float = 600
) -> Traced:
    """Run `flowrl WORDS` under strace, in the project's folder. Its calls are kept in `place`."""
    calls = place / "calls"
    command = ["strace", "-f", "-qq", "-y", "--seccomp-bpf", "-s", str(SHOWN), "-o", str(calls)]
    command += ["-e", f"trace={','.join(TRACED)}", sys.executable, "-m", "flowrl"]
    done = subprocess.run(
        [*command, *map(str, words)], cwd=PROJECT, text=True, check=False, timeout=seconds,
        capture_output=True, stdin=subprocess.DEVNULL, env=dict(environment),
    )  # fmt: skip
    with calls.open(errors="replace") as lines:
        found = list(read(lines))
    return Traced(done.returncode, done.stdout + done.stderr, found)


def read(lines: Iterator[str] | Sequence[str]) -> Iterator[Call]:
    """The calls of a file of strace's. One that another process interrupted has two lines."""
    begun = dict[tuple[str, str], str]()
    for line in lines:
        match = LINE.match(line)
        if match is None:  # a signal, or an end
            continue
        pid, resumed, name, rest = match.groups()
        name = resumed or name
        whole = begun.pop((pid, name), "") + rest
        if (cut := whole.rfind(" <unfinished ...>")) >= 0:
            begun[pid, name] = whole[:cut]
            continue
        given, _, result = whole.rpartition(") = ")
        yield Call(name, given, not result.lstrip().startswith("-1"))
    for (_, name), given in begun.items():  # the process ended in it
        yield Call(name, given, False)
