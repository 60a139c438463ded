"""Several threads ask one client: the cap, the counts and `cancel` hold over all of them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("httpx")

from rewards.serving.client import Client
from rewards.serving.in_flight import InFlight
from rewards.serving.requests import Ask, Patience
from tests.rewards.test_remote_client import GOOD, answering, read


def test_a_place_is_passed_on_between_threads_and_after_a_cancellation():
    flight, inside, most, lock = InFlight(2), 0, 0, threading.Lock()
    full, go = threading.Event(), threading.Event()

    async def hold() -> None:
        nonlocal inside, most
        async with flight.slot():
            with lock:
                inside, most = inside + 1, max(most, inside + 1)
                if inside == 2:
                    full.set()
            await asyncio.to_thread(go.wait, 30)
            with lock:
                inside -= 1

    async def several() -> None:
        await asyncio.gather(*(hold() for _ in range(3)))

    async def gives_up() -> None:
        waits = asyncio.create_task(hold())
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(asyncio.run, several()) for _ in range(2)]
        assert full.wait(30)
        pool.submit(asyncio.run, gives_up()).result(30)
        go.set()
        for call in calls:
            call.result(30)
    assert most == 2 and flight._free == 2 and not flight._waiting


def test_counts_of_several_threads_add_up_and_ids_differ(tmp_path):
    log = tmp_path / "log.jsonl"
    with answering((200, GOOD, {})) as url, ThreadPoolExecutor(4) as pool:
        client = Client(url, patience=Patience(at_once=2), log=str(log))
        asks = [Ask("/score", {})] * 5
        assert list(pool.map(lambda _: client.ask(asks, read), range(4))) == [[1.5] * 5] * 4
    assert client.report()["requests"] == 20 and client.report()["tries"] == 0
    assert len({line.split(",")[0] for line in log.read_text().splitlines()}) == 20


def test_cancel_ends_a_call_that_waits_for_an_answer():
    async def silent(client: Client, pool: ThreadPoolExecutor) -> None:
        asked = asyncio.Event()

        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            asked.set()
            await reader.read()  # until the client closes the connection
            writer.close()

        async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
            client.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            call = pool.submit(client.ask, [Ask("/score", {})], read)
            await asked.wait()
            client.cancel()
            with pytest.raises(RuntimeError, match="were cancelled"):
                await asyncio.wrap_future(call)

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(asyncio.wait_for(silent(Client("http://localhost"), pool), 30))


def test_the_folder_of_a_log_is_made_and_may_exist(tmp_path):
    log = tmp_path / "logs" / "today" / "log.jsonl"
    with answering((200, GOOD, {})) as url:
        client = Client(url, log=str(log))
        for _ in range(2):
            assert client.ask([Ask("/score", {})], read) == [1.5]
    assert len(log.read_text().splitlines()) == 2
