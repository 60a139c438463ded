"""Serve the page of votes until all are in."""

import asyncio
import importlib.util
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from flowrl.errors import UserError
from flowrl.processes.listening import bound_socket
from flowrl.votes.answer import VoteAnswer, check_whole_log, write_results
from flowrl.votes.door import Door, is_loopback
from flowrl.votes.log import VoteLog
from flowrl.votes.plan import VotePlan, check_sample_files

Helper = Callable[[str], None]  # a simulated person, who votes at an address


@dataclass(frozen=True)
class PageAddress:
    """The address that the page listens on. Port 0 is any free one."""

    host: str = "127.0.0.1"
    port: int = 8300

    def opened(self) -> socket.socket:
        """A listening socket. UserError if the address cannot be listened on."""
        listening = bound_socket("vote", self.host, self.port)
        listening.listen(256)
        return listening


def check_extra() -> None:
    """UserError if the extra `serve` is not installed."""
    for library in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(library) is None:
            raise UserError(f"vote: {library} is missing; pip install 'flowrl[serve]'")


def serve_votes(folder: Path, address: PageAddress, person: Helper | None = None) -> VoteAnswer:
    """Serve a folder of votes until every rater is done and has read what was found, or until
    Ctrl-C; return the answer of the votes that are in. `person` votes for every rater in a thread
    of this process, through the same door."""
    check_extra()
    plan = VotePlan.read(folder)
    with VoteLog.opened(folder, plan) as log:
        check_whole_log(folder, log)  # before anybody votes
        if not log.finished:
            check_sample_files(folder, plan)
            with address.opened() as listening:
                _serve(folder, log, listening, address, person)
        return write_results(folder, log)


def _serve(
    folder: Path,
    log: VoteLog,
    listening: socket.socket,
    address: PageAddress,
    person: Helper | None,
) -> None:
    import uvicorn

    from flowrl.votes.server import LIMITS, VotingRoom, create_vote_app
    from rewards.serving.connections import uvicorn_settings

    port = listening.getsockname()[1]
    door = Door.of(folder, list(log.raters))
    room = VotingRoom(folder, log, door)
    links = {rater: f"{_url(address.host, port)}/?token={t}" for rater, t in door.tokens.items()}
    done = sum(len(of_rater.given) for of_rater in log.raters.values())
    total = sum(len(order) for order in log.plan.turns.values())
    print(f"{total - done} of {total} showings are left: {folder}")
    if person is None:
        _print_links(links, address.host, port)
    server = uvicorn.Server(
        uvicorn.Config(
            create_vote_app(room, address.host), log_level="warning", access_log=False,
            server_header=False, **uvicorn_settings(LIMITS),
        )
    )  # fmt: skip
    failed: list[BaseException] = []
    if person is not None:
        Thread(target=_vote_for_all, args=(person, links, server, failed), daemon=True).start()
    asyncio.run(_until_ended(server, room.ended, listening))
    if failed:
        raise failed[0]


def _vote_for_all(
    person: Helper, links: dict[str, str], server: object, failed: list[BaseException]
) -> None:
    import uvicorn

    assert isinstance(server, uvicorn.Server)
    try:
        for link in links.values():
            person(link)
        server.should_exit = True  # nobody is left who would read the answer on a page
    except Exception as error:  # shown by the thread that waits
        failed.append(error)
        server.should_exit = True


async def _until_ended(server: object, ended: asyncio.Event, listening: socket.socket) -> None:
    import uvicorn

    assert isinstance(server, uvicorn.Server)

    async def stop() -> None:
        await ended.wait()
        server.should_exit = True

    waiting = asyncio.create_task(stop())
    try:
        await server.serve(sockets=[listening])
    finally:
        waiting.cancel()


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def _print_links(links: dict[str, str], host: str, port: int) -> None:
    for rater, link in links.items():
        print(f"{rater}: {link}" if len(links) > 1 else link, flush=True)
    print(
        "each link opens the page once, in one browser; Ctrl-C stops, and the same command with "
        "the folder goes on"
    )
    if not is_loopback(host):
        print(
            "warning: votes and links are sent without TLS, and can be read in the network; "
            f"leave --host out and use a tunnel instead: ssh -L {port}:127.0.0.1:{port} "
            f"{socket.gethostname()}"
        )
