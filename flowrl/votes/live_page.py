"""The page of votes of a run: it stays open while the run goes on, and shows one folder of votes
after the other."""

import asyncio
import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.errors import UserError, in_words
from flowrl.votes.door import Door
from flowrl.votes.log import VoteLog
from flowrl.votes.plan import VotePlan
from flowrl.votes.serve import PageAddress, check_extra
from flowrl.votes.simulated import PairGone, SimulatedPerson, VotesBrowser

if TYPE_CHECKING:
    import uvicorn

    from flowrl.votes.server import VotingRoom

RATER = "rater-1"
_ADDRESS_OF_A_RUN = {"vote: cannot listen": "ask: cannot listen", "--port or --host": "ask.port"}


@dataclass
class LivePage:
    """A page in a thread of this process.

    root     has the door's secret, so that a browser that was let in stays in over all folders,
             and after the run is resumed
    person   votes in place of people
    """

    root: Path
    address: PageAddress
    person: SimulatedPerson | None = None
    _room: "VotingRoom | None" = None
    _loop: asyncio.AbstractEventLoop | None = None
    _server: "uvicorn.Server | None" = None
    _thread: threading.Thread | None = None
    _link: str = ""
    _browser: VotesBrowser | None = None
    _at_the_browser: threading.Lock = field(default_factory=threading.Lock)
    _failed: list[BaseException] = field(default_factory=list)
    _log: ExitStack = field(default_factory=ExitStack)

    def turn_to(self, folder: Path, place: str) -> VoteLog:
        """Show the pairs of a folder that are left; returns its log. `place` is the folder's name
        for the simulated person's errors.

        The log before is closed once nothing is recorded in it any more: somebody may be voting.
        """
        opened = ExitStack()
        try:
            log = opened.enter_context(VoteLog.opened(folder, VotePlan.read(folder)))
            if self._room is None:
                self._begin(folder, log)
            else:
                self._on_loop(folder, log)
        except BaseException:
            opened.close()
            raise
        self._log.close()
        self._log = opened
        if self.person is not None and not log.finished:
            threading.Thread(target=self._vote, args=(place,), daemon=True).start()
        return log

    @property
    def link(self) -> str:
        """The page's address with its token, which works once."""
        return self._link

    def check(self) -> None:
        """Raise what ended the page or the simulated person."""
        if self._failed:
            raise self._failed[0]
        if self._thread is not None and not self._thread.is_alive():
            raise UserError("ask: the page of votes has ended; resume the run to ask again")

    def close(self) -> None:
        """End the page, and give the log free."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(10)
        self._log.close()

    def _begin(self, folder: Path, log: VoteLog) -> None:
        check_extra()
        import uvicorn

        from flowrl.votes.server import LIMITS, VotingRoom, create_vote_app
        from rewards.serving.connections import uvicorn_settings

        with in_words(_ADDRESS_OF_A_RUN):
            listening = self.address.opened()
        port = listening.getsockname()[1]
        door = Door.of(self.root, [RATER])
        self._link = f"http://{self.address.host}:{port}/?token={door.tokens[RATER]}"
        self._room = VotingRoom(folder, log, door, goes_on=True)
        app = create_vote_app(self._room, self.address.host)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False,
            **uvicorn_settings(LIMITS),
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(listening, ready), daemon=True)
        self._thread.start()
        ready.wait()

    def _serve(self, listening: socket.socket, ready: threading.Event) -> None:
        assert self._server is not None
        server = self._server

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            ready.set()
            await server.serve(sockets=[listening])

        try:
            asyncio.run(serve())
        except Exception as error:  # shown by the thread that waits
            self._failed.append(error)
            ready.set()

    def _on_loop(self, folder: Path, log: VoteLog) -> None:
        """Change what is shown between two requests, on the thread that answers them."""
        room, loop, changed = self._room, self._loop, threading.Event()
        assert room is not None and loop is not None

        def change() -> None:
            room.turn_to(folder, log)
            changed.set()

        loop.call_soon_threadsafe(change)
        while not changed.wait(0.5):
            self.check()

    def _vote(self, place: str) -> None:
        """Vote on the pairs of a folder until another one is shown."""
        assert self.person is not None
        try:
            with self._at_the_browser:  # after the votes on the folder before
                if self._browser is None:
                    self._browser = self.person.entered(self._link)
                self.person.vote_all(self._browser, place)
        except PairGone:
            pass  # the page has turned to other pairs, which have a thread of their own
        except Exception as error:  # shown by the thread that waits
            self._failed.append(error)
