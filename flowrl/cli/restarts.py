"""`flowrl train --restarts N`: a parent process that does not import torch, and the training as its
child.

Launchers restart by themselves: `accelerate launch --max_restarts N` starts its processes again
with the same arguments, and `flowrl.run.start.begun_before` recognises such a start as a resume.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from flowrl.errors import UserError
from flowrl.launching.job import newest_checkpoint
from flowrl.paths import numbered, run_path
from flowrl.session.output import ending_signals

RESTARTS, FOLDER, RESUME, TRUST = "--restarts", "--folder", "--resume", "--trust"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP)
ENDS = {0, 2, *(128 + number for number in ENDING)}  # exit codes without a restart
LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "WORLD_SIZE")


def split_keys(arguments: Sequence[str], keys: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split `--key value` and `--key=value` for the keys in `keys` from the other arguments."""
    values, rest = dict[str, str](), list[str]()
    words = iter(arguments)
    for word in words:
        key, _, value = word.partition("=")
        if key in keys:
            value_given = value or next(words, "")
            if not value_given or value_given.startswith("--"):
                raise UserError(f"{key} needs a value")
            if key in values:
                raise UserError(
                    f"{key} is given twice, with {values[key]} and {value_given}: keep one"
                )
            values[key] = value_given
        else:
            rest.append(word)
    return values, rest


def grants(word: str) -> bool:
    """Whether a word is --trust or --trust=RIGHTS."""
    return word.partition("=")[0] == TRUST


def trust_of(words: Sequence[str]) -> bool | str:
    """The rights that the words grant: the last --trust counts."""
    grants_given = [word for word in words if grants(word)]
    return (grants_given[-1].partition("=")[2] or True) if grants_given else False


def launched() -> bool:
    """Whether a launcher started this process that may start it again."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def supervised(arguments: Sequence[str]) -> tuple[list[str], int | None]:
    """Run `train` with these arguments in a child process, and restart it whenever it dies.

    Returns the arguments, and None in the child or the last exit code in the parent.
    UserError under a launcher, and for an invalid count.
    """
    ours, words = split_keys(arguments, (RESTARTS,))
    if RESTARTS not in ours:
        return words, None
    if not ours[RESTARTS].isdecimal():
        raise UserError(f"{RESTARTS}: {ours[RESTARTS][:100]!r} is not a number of restarts")
    if any(name in os.environ for name in LAUNCHER_VARIABLES):
        raise UserError(
            f"{RESTARTS} is for single-process runs, but this one has a launcher: pass "
            f"`--max_restarts {ours[RESTARTS]}` to the launcher instead, and {FOLDER} to the run"
        )
    words, folder = _with_folder(words)
    return _Parent(int(ours[RESTARTS]), folder).run(words)


def _with_folder(words: list[str]) -> tuple[list[str], Path]:
    """The arguments with the run's folder, and that folder."""
    folder_keys, rest = split_keys(words, (FOLDER, RESUME))
    if folder_keys:
        named = folder_keys.get(FOLDER) or folder_keys[RESUME]  # --resume auto has its folder there
        return words, Path(named).expanduser()
    config = run_path(rest[0]) if rest and not rest[0].startswith("-") else None
    if config is None:  # the child has the sentence
        return words, Path()
    folder = numbered(Path("runs"), config.stem)
    return [*words, FOLDER, str(folder)], folder


class _Parent:
    """Waits for one child at a time, and forwards the signals that end a run."""

    def __init__(self, restarts: int, folder: Path) -> None:
        self.restarts, self.folder = restarts, folder
        self.child: int | None = None
        self.asked = False  # to stop

    def run(self, words: list[str]) -> tuple[list[str], int | None]:
        left, reached = self.restarts, newest_checkpoint(self.folder)
        handlers = {number: signal.signal(number, self._pass_on) for number in ending_signals()}
        ends = os.pipe()  # the second closes when this process ends, however it ends
        while True:
            sys.stdout.flush()
            sys.stderr.flush()
            self.child = os.fork()
            if self.child == 0:
                os.setsid()  # Ctrl-C in a terminal reaches the parent alone, which hands it on
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                os.close(ends[1])
                threading.Thread(target=_end_with_parent, args=ends[:1], daemon=True).start()
                return words, None
            code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
            self.child = None
            ended = code if code >= 0 else 128 - code
            if ended in ENDS or self.asked:
                return words, ended
            if (newest := newest_checkpoint(self.folder)) != reached:
                left, reached = self.restarts, newest
            if not left:
                said = (
                    f"{_cause(code)}; all of {RESTARTS} {self.restarts} are used {_since(newest)}"
                )
                if sender := self._report(code, said, last=True):
                    os.waitpid(sender, 0)  # a scheduler may end what outlives this process
                return words, ended
            left -= 1
            words = self._again(words)
            at = f"resumes from checkpoint {newest}" if newest else "begins again"
            restart = f"restart {self.restarts - left} of {self.restarts}"
            self._report(code, f"{_cause(code)}; it {at} ({restart})")

    def _report(self, code: int, said: str, *, last: bool = False) -> int:
        """Say what ended a child, and send it to a user who wants notices if the child could not,
        because a signal has killed it: in a process of its own, since that imports torch. Returns
        that process, or 0. Of the `last` child it also writes the run's page, which no other
        process writes then."""
        _say(said)
        sender = os.fork() if code < 0 else -1
        if sender == 0:
            try:
                from flowrl.session.notices import open_notices

                notices = open_notices(self.folder, lambda text: _say(f"warning: {text}"))
                if notices is not None:
                    notices.send("failed", said)
                    notices.close()
                if last:
                    from flowrl.pages.records import EndRecord
                    from flowrl.run.save.ends import keep_end

                    keep_end(self.folder, EndRecord("failed", said))
            finally:
                os._exit(0)
        return max(sender, 0)

    def _again(self, words: list[str]) -> list[str]:
        if not (self.folder / "run.yaml").is_file() or split_keys(words, (RESUME,))[0]:
            return words  # options of a resume are part of it; without a folder nothing was begun
        return [
            RESUME,
            str(self.folder),
            *(word for word in words if word == "--no-cache" or grants(word)),
        ]

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.asked = True
        if self.child:  # 0 in a child that has just begun
            os.kill(self.child, number)


def _end_with_parent(end: int) -> None:
    """Let this process save and end once its parent has died: nobody would forward a signal."""
    os.read(end, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _since(newest: str) -> str:
    return f"since checkpoint {newest}" if newest else "before the first checkpoint"


def _cause(code: int) -> str:
    if code < 0:
        return f"the training was ended by {signal.Signals(-code).name}"
    return f"the training ended with code {code}"


def _say(sentence: str) -> None:
    print(f"flowrl: {sentence}", file=sys.stderr, flush=True)
