"""The store through which a run's processes meet, and the attempts of a launcher that share one.

torch's elastic agent, which torchrun and accelerate launch use, restarts all processes of a run
after one has died, and keeps one store for all attempts. torch writes the addresses of every
attempt under the same keys, so a restarted process may read that of a dead one and wait for it
without end. The agent's own count (TORCHELASTIC_RESTART_COUNT) names no attempt: each node counts
its own failures. So the processes of an attempt agree on a name of their own, under which their
group keeps its keys.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from flowrl.errors import UserError

LAUNCHER_NAMES = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")  # of a launcher
OF_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
RESTARTED = "TORCHELASTIC_RESTART_COUNT"
RUN = "TORCHELASTIC_RUN_ID"
OPERATION = timedelta(seconds=10)  # the longest that one operation of the store may take
PAUSES = (0.01, 0.2)  # seconds between two looks, which grow


def check_launcher_variables() -> None:
    """UserError for variables of a launcher that name other processes and are not complete, or are
    no numbers: torch and accelerate read them too, and end with a trace.

    One that a shell or a notebook has left is enough: with LOCAL_RANK alone accelerate waits for
    a group. LOCAL_RANK=-1 is torch's old word for a process without others.
    """
    words = {name: os.environ.get(name, "").strip() for name in LAUNCHER_NAMES}
    numbers = {name: words[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")}
    local = words["LOCAL_RANK"] not in ("", "-1")
    if not local and words["WORLD_SIZE"] in ("", "1"):
        return
    reason = "WORLD_SIZE" if words["WORLD_SIZE"] not in ("", "1") else "LOCAL_RANK"
    cause = f"{reason} is {words[reason]!r:.50}, as in a process that a launcher started, but"
    remedy = (
        f"launch with torchrun or accelerate launch, which set {', '.join(LAUNCHER_NAMES)} "
        f"together; for a single process unset {reason}"
    )
    needed = [name for name in LAUNCHER_NAMES if name != "LOCAL_RANK" or local]
    if lacking := [name for name in needed if not words[name]]:
        raise UserError(f"{cause} {lacking[0]} is not set: {remedy}")
    for name, word in numbers.items():
        if word and word != "-1" and not (word.isascii() and word.isdecimal()):
            raise UserError(f"{name} must be a whole number, not {word!r:.50}: {remedy}")
    if int(words["RANK"]) >= int(words["WORLD_SIZE"]):
        raise UserError(
            f"RANK is {words['RANK']}, but ranks of {words['WORLD_SIZE']} processes (WORLD_SIZE) "
            f"begin at 0: {remedy}"
        )


class NotMet(Exception):
    """Not all processes arrived in time; the text says who is missing."""


@dataclass(frozen=True)
class StorePlace:
    """The meeting place of the processes of a run, and this process among them."""

    address: str
    port: int
    rank: int
    size: int
    of_agent: bool  # whether the launcher's agent keeps the store, through all attempts

    @classmethod
    def given(cls) -> "StorePlace | None":
        """The place that the launcher's variables name; None without a launcher."""
        words = [os.environ.get(name, "") for name in LAUNCHER_NAMES]
        if not all(words) or not all(word.isdecimal() for word in words[2:]):
            return None
        _, address, port, rank, size = words
        return cls(address, int(port), int(rank), int(size), os.environ.get(OF_AGENT) == "True")

    @property
    def opens(self) -> bool:
        """Whether this process opens the store."""
        return self.rank == 0 and not self.of_agent

    def open(self, seconds: float) -> Store:
        """A client of the store, which this process may have to open. NotMet if nobody opens it
        in time; DistError if this process cannot."""
        if not self.opens:
            self._reach(seconds)
        store = TCPStore(
            self.address,
            self.port,
            self.size,
            is_master=self.opens,
            timeout=OPERATION,
            wait_for_workers=False,
            multi_tenant=True,
        )
        # agents of several launches may share one store
        return PrefixStore(f"flowrl/{os.environ.get(RUN, '')}", store)

    def _reach(self, seconds: float) -> None:
        """Wait until the store answers. torch's own client waits up to three times as long, and
        prints a traceback."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            try:
                most = max(min(left, 5.0), 0.1)
                socket.create_connection((self.address, self.port), most).close()
                return
            except OSError as error:
                if left <= 0:
                    raise NotMet(str(error)) from error
                time.sleep(0.2)


def name_attempt(store: Store, rank: int, size: int, seconds: float) -> str:
    """A name that all processes of this attempt, and no earlier ones, have agreed on.

    Every process but the first says a word that it has just made up, and the first answers each of
    these words with the name; words and answers of earlier attempts remain in the store, but nobody
    waits for them. NotMet after `seconds`.
    """
    return _lead(store, size, seconds) if rank == 0 else _follow(store, rank, seconds)


def _lead(store: Store, size: int, seconds: float) -> str:
    name, answered = secrets.token_hex(8), dict[int, str]()
    missing = set(range(1, size))

    def all_here() -> bool:
        for rank in sorted(missing):
            if store.check([f"here/{name}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"word/{rank}"]):
                word = store.get(f"word/{rank}").decode()
                if answered.get(rank) != word:
                    store.set(f"answer/{rank}/{word}", name)
                    answered[rank] = word
        return not missing

    if not _until(all_here, seconds):
        few = ", ".join(map(str, sorted(missing)[:10]))
        raise NotMet(f"no sign of process {few}{', ...' if len(missing) > 10 else ''}")
    store.set(f"complete/{name}", "")
    return name


def _follow(store: Store, rank: int, seconds: float) -> str:
    word, names = secrets.token_hex(8), [""]
    store.set(f"word/{rank}", word)

    def complete() -> bool:
        key = f"answer/{rank}/{word}"
        # another name may follow that of a first process of an earlier attempt, which is ending
        name = store.get(key).decode() if store.check([key]) else ""
        if name != names[-1]:
            store.set(f"here/{name}/{rank}", "")
            names.append(name)
        return bool(name) and store.check([f"complete/{name}"])

    if not _until(complete, seconds):
        missing = "others are missing" if names[-1] else "process 0 has not answered"
        raise NotMet(missing)
    return names[-1]


def _until(true: Callable[[], bool], seconds: float) -> bool:
    end, pause = time.monotonic() + seconds, PAUSES[0]
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, PAUSES[1])
    return True


@dataclass(frozen=True)
class Launch:
    """The memory of all attempts of a launch: the folder of the run that this launch has begun.

    The agent's store remembers it. Where there is none, as for a launcher with a store for each
    attempt, the launcher's own counts of restarts have to do.
    """

    store: Store | None
    counts: tuple[int, ...]  # of all processes

    def begin(self, folder: Path) -> None:
        if self.store is not None:
            self.store.set(_begun(folder), "")

    def forget(self, folder: Path) -> None:
        if self.store is not None:
            self.store.delete_key(_begun(folder))

    def has_begun(self, folder: Path) -> bool:
        """Whether an earlier attempt has begun the run in this folder. Ask on the main process:
        others may not see its files yet."""
        begun = any(self.counts) if self.store is None else self.store.check([_begun(folder)])
        return begun and (folder / "run.yaml").is_file()


def restarts() -> int:
    """The number of restarts of this process, by its launcher's own count."""
    return int(os.environ.get(RESTARTED, "0"))


def _begun(folder: Path) -> str:
    return f"begun/{folder.absolute()}"
