"""Notices of a run to its user: by a command or a webhook of the user's own configuration.

A notice is a JSON object on the command's standard input, or in the body of a POST. No run's file
names a receiver. Sending is bounded in time, beside the training, and no failure of it hinders a
run: the first one is a warning.
"""

import http.client
import os
import platform
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, get_args
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from flowrl.errors import UserError
from flowrl.json_text import json_text
from flowrl.pages.run_folder import RunFolder
from flowrl.pages.stack import number
from rewards.configuration import configuration_file, configured_section, passed_on

NoticeState = Literal["finished", "failed", "stopped", "alarm"]
STATES: tuple[NoticeState, ...] = get_args(NoticeState)
TEST = "test"  # the state of what `flowrl doctor` sends
NOTICES_VARIABLE = "FLOWRL_NOTIFY"  # off: send none, for commands that train runs to try something
SECONDS, MOST_SECONDS, POLL_SECONDS = 10.0, 60.0, 0.05
LONGEST_TEXT = 1000  # characters
_KEYS = ("command", "url", "environment", "on", "seconds")
_EXAMPLE = 'command = ["my-program"], or url = "https://...", below [notify]'


@dataclass(frozen=True)
class HeldOut:
    """The held-out score that decides which weights are best: the base's, the best, and the
    iteration that has it."""

    name: str
    base: float
    best: float
    best_at: int


@dataclass(frozen=True)
class Notice:
    """The JSON object that a receiver gets.

    text        a sentence
    state       finished, failed, stopped or alarm; test from `flowrl doctor`
    run         absolute path of the run's folder
    host        name of the machine
    iteration   iterations done, of `iterations`; None before a folder can be read
    alarms      number of alarms so far
    held_out    None without held-out scores
    """

    text: str
    state: str
    run: str
    host: str
    iteration: int | None = None
    iterations: int | None = None
    alarms: int = 0
    held_out: HeldOut | None = None

    @classmethod
    def of(cls, folder: Path, state: str, text: str) -> "Notice":
        """The notice about a run, with the numbers of its folder as far as they exist."""
        place, host = folder.absolute(), platform.node()
        said = f"{place.name}: {text[:LONGEST_TEXT].rstrip('.')}"
        try:
            run = RunFolder.read(folder)
        except (UserError, OSError):  # removed, or not yet whole
            return cls(said, state, str(place), host)
        score = _held_out(run.key, run.column(f"held_out/{run.key}"), run.best)
        stands = f"{run.done} of {run.planned} iterations"
        if score is not None:
            stands += f"; held-out {score.name} {number(score.base)} -> {number(score.best)}"
            stands += f" at {score.best_at}"
        said += f" ({stands})"
        return cls(
            text=said,
            state=state,
            run=str(place),
            host=host,
            iteration=run.done,
            iterations=run.planned,
            alarms=int(run.raised),
            held_out=score,
        )


def _held_out(
    name: str, scores: Sequence[tuple[float, float]], best_at: float | None
) -> HeldOut | None:
    if not scores or best_at is None:
        return None
    return HeldOut(name, scores[0][1], dict(scores)[best_at], int(best_at))


@dataclass(frozen=True)
class Receiver:
    """The section `notify` of the user's configuration.

    command      words of a program, which gets the notice on standard input; or
    url          a webhook, which gets it by POST. It may be a secret, and is never printed
    environment  variables that the command gets, beside those of `rewards.configuration`
    states       of which notices are sent
    seconds      after which a command is ended, and a webhook given up
    folder       in which the command starts: that of the configuration
    """

    command: tuple[str, ...]
    url: str = field(repr=False)
    environment: tuple[str, ...]
    states: frozenset[str]
    seconds: float
    folder: Path

    def __str__(self) -> str:
        if self.command:
            return f"the command {self.command[0]}"
        parts = urlsplit(self.url)
        return f"the webhook at {parts.scheme}://{parts.hostname}"

    def deliver(self, notice: Notice) -> str:
        """Send a notice. Returns why that failed, or nothing."""
        content = json_text(asdict(notice)).encode()
        return self._started(content) if self.command else self._posted(content)

    def _started(self, content: bytes) -> str:
        reading_end, into = (
            os.pipe()
        )  # which holds a whole notice, whether or not the command reads it
        os.write(into, content)
        os.close(into)
        try:
            process = subprocess.Popen(
                self.command, stdin=reading_end, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                env=passed_on(self.environment), cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"it cannot be started ({error.strerror})"
        finally:
            os.close(reading_end)
        with process:
            last = _last_words(process, self.seconds)
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                return f"it did not end within {self.seconds:g} seconds"
        if process.returncode == 0:
            return ""
        return f"it ended with code {process.returncode}" + (f": {last}" if last else "")

    def _posted(self, content: bytes) -> str:
        outcome: list[str] = []
        # A thread of its own: urllib bounds each call of a socket, but not all of them together.
        thread = threading.Thread(target=self._post, args=(content, outcome), daemon=True)
        thread.start()
        thread.join(self.seconds)
        return outcome[0] if outcome else f"it did not answer within {self.seconds:g} seconds"

    def _post(self, content: bytes, outcome: list[str]) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "flowrl"}
        try:
            request = Request(self.url, data=content, headers=headers)
            build_opener(_NoRedirect).open(request, timeout=self.seconds).close()
        except HTTPError as error:
            outcome.append(f"it answered {error.code} {error.reason}")
        except (OSError, http.client.HTTPException) as error:
            outcome.append(f"it cannot be reached ({' '.join(str(error).split())[:200]})")
        else:
            outcome.append("")


def _last_words(process: "subprocess.Popen[bytes]", seconds: float) -> str:
    """Wait until a process ends, at most for these seconds, and return the end of what it wrote to
    standard error. What it leaves behind may keep that open, and is not waited for."""
    assert process.stderr is not None
    file, until, last = process.stderr.fileno(), time.monotonic() + seconds, b""
    os.set_blocking(file, False)
    open_end = True
    while (left := until - time.monotonic()) > 0:
        ended = process.poll() is not None
        wait = 0.0 if ended else min(left, POLL_SECONDS)
        if not open_end:
            time.sleep(wait)
        elif select.select([file], [], [], wait)[0]:
            part = os.read(file, 2**16)
            last, open_end = (last + part)[-300:], bool(part)
            continue
        if ended:
            break
    return " ".join(last.decode("utf-8", "replace").split())


class _NoRedirect(HTTPRedirectHandler):
    """Follow no redirect: it would lead a notice to another place, as a GET without its body."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        del req, fp, code, msg, headers, newurl


def configured_receiver() -> Receiver | None:
    """The receiver of the user's configuration; None where it has none, or where FLOWRL_NOTIFY is
    off. ValueError, in a sentence, for a section of another form, and for another word there."""
    word = os.environ.get(NOTICES_VARIABLE, "")
    if word == "off":
        return None
    if word not in ("", "on"):  # such as 0, by which somebody means to send none
        raise ValueError(f"{NOTICES_VARIABLE} is {word!r:.50}, and its words are off and on")
    section = configured_section("notify")
    if section is None:
        return None
    try:
        return _receiver(section)
    except ValueError as error:
        raise ValueError(f"{configuration_file()}: {error}") from error


def _receiver(section: Mapping[str, Any]) -> Receiver:
    other = next((key for key in section if key not in _KEYS), None)
    if other is not None:
        raise ValueError(f"[notify] has no key {other[:100]!r}, but {', '.join(_KEYS)}")
    if ("command" in section) == ("url" in section):
        raise ValueError(f"write one of {_EXAMPLE}")
    command = _words(section, "command", ())
    if "command" in section and not command:
        raise ValueError(f"[notify] command is empty: write {_EXAMPLE}")
    states = _words(section, "on", STATES)
    if wrong := [word for word in states if word not in STATES]:
        raise ValueError(f"[notify] on: {wrong[0][:100]!r} is none of {', '.join(STATES)}")
    seconds = section.get("seconds", SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ValueError("[notify] seconds is not a number")
    if not 0 < seconds <= MOST_SECONDS:
        raise ValueError(f"[notify] seconds must be above 0 and at most {MOST_SECONDS:g}")
    return Receiver(
        command=command,
        url=_address(section["url"]) if "url" in section else "",
        environment=_words(section, "environment", ()),
        states=frozenset(states),
        seconds=seconds,
        folder=configuration_file().absolute().parent,
    )


def _words(section: Mapping[str, Any], key: str, otherwise: tuple[str, ...]) -> tuple[str, ...]:
    words = section.get(key, otherwise)
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"[notify] {key} must be a list of words")
    return tuple(words)


def _address(url: object) -> str:
    """The address of a webhook. ValueError, which does not repeat it, for something else."""
    plain = isinstance(url, str) and url.isascii() and url.isprintable() and " " not in url
    try:
        parts = urlsplit(url if isinstance(url, str) and plain else "")
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or an address that are none
        sound = False
    if not isinstance(url, str) or not sound or "@" in urlsplit(url).netloc:
        raise ValueError("[notify] url must be an address such as https://hooks.example.org/NAME")
    return url


class Notices:
    """Sends a run's notices from a thread, so that no training waits for a receiver.

    `close` waits for the last one. While it does, alarms that have not been sent are left out:
    their number stands in the last notice.
    """

    def __init__(self, receiver: Receiver, folder: Path, warn: Callable[[str], None]) -> None:
        self.receiver, self.folder, self.warn = receiver, folder, warn
        self._queue: queue.SimpleQueue[tuple[NoticeState, str] | None] = queue.SimpleQueue()
        self._closing = self._warned = False
        self._thread = threading.Thread(target=self._send_all, name="notices", daemon=True)
        self._thread.start()

    def send(self, state: NoticeState, text: str) -> None:
        """Send a sentence about the run, if the user wants notices of this state."""
        if state in self.receiver.states:
            self._queue.put((state, text))

    def close(self) -> None:
        """Wait until all is sent, at most for the time of two notices: one that is on its way, and
        the last one."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(2 * self.receiver.seconds + 1)

    def _send_all(self) -> None:
        while (asked := self._queue.get()) is not None:
            if self._closing and asked[0] == "alarm":
                continue
            notice = Notice.of(self.folder, *asked)
            if (failure := self.receiver.deliver(notice)) and not self._warned:
                self._warned = True
                self.warn(f"a notice was not sent by {self.receiver}: {failure}")


def open_notices(folder: Path, warn: Callable[[str], None]) -> Notices | None:
    """The notices of a run, on its main process; None if the user's configuration asks for none, or
    for some in a wrong form, which is a warning."""
    try:
        receiver = configured_receiver()
    except ValueError as error:
        warn(f"no notice of this run is sent: {error}")
        return None
    return None if receiver is None else Notices(receiver, folder, warn)


def try_receiver(receiver: Receiver) -> tuple[str, float]:
    """Send a notice with the state `test`. Returns why that failed, or nothing, and the seconds."""
    began = time.monotonic()
    text = "a test by flowrl doctor: notices of runs arrive here"
    failure = receiver.deliver(Notice(text, TEST, str(Path.cwd()), platform.node()))
    return failure, time.monotonic() - began


@contextmanager
def closing_notices(notices: Notices | None) -> Iterator[Notices | None]:
    """Close the notices however the body ends."""
    try:
        yield notices
    finally:
        if notices is not None:
            notices.close()
