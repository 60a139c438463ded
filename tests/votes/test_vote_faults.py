"""Votes under faults: kills while they arrive, many raters at once, a full disk. None is lost, none
counts twice."""

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from flowrl.votes.door import Door
from flowrl.votes.log import VoteLog
from flowrl.votes.serve import PageAddress, serve_votes
from flowrl.votes.server import VotingRoom, create_vote_app
from tests.support.disks import mounted
from tests.support.voting import log_lines, written_plan

KILLS = 50


def _serve(folder: str, port: int, said: str) -> None:
    with (
        open(said, "w", buffering=1) as out,
        contextlib.redirect_stdout(out),
    ):  # pytest has one of its own
        serve_votes(Path(folder), PageAddress(port=port))


class Killed:
    """A page in a forked process, which is killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said, self.port, self.kills = folder, folder.parent / "said", 0, 0
        self.process, self.token = None, ""
        self.start()

    def start(self) -> None:
        """Start the page, and read its port and token."""
        self.said.unlink(missing_ok=True)
        context = multiprocessing.get_context("fork")
        given = (str(self.folder), self.port, str(self.said))
        self.process = context.Process(target=_serve, args=given, daemon=True)
        self.process.start()
        while self.process.is_alive():  # it ends at once if all votes are in
            text = self.said.read_text() if self.said.exists() else ""
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", text):
                self.port, self.token = int(found[1]), found[2]
                return
            time.sleep(0.005)


def asked(port: int, method: str, path: str, cookie: str, body=None, form=None):
    """One request on a connection of its own; None if the page is gone."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Cookie": cookie} if cookie else {}
    content = None
    if body is not None:
        content, headers["Content-Type"] = json.dumps(body), "application/json"
    if form is not None:
        content, headers["Content-Type"] = form, "application/x-www-form-urlencoded"
    try:
        connection.request(method, path, content, headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def sent_under_a_kill(page: Killed, cookie: str, body, rng: random.Random):
    """Send a vote while the page is killed, before, during or after it is recorded."""
    pid = page.process.pid
    timer = threading.Timer(rng.random() * 0.008, os.kill, (pid, signal.SIGKILL))
    timer.start()
    got = asked(page.port, "POST", "/vote", cookie, body)
    timer.join()
    page.process.join()
    page.kills += 1
    page.start()
    return got


@pytest.mark.slow
def test_fifty_kills_while_votes_arrive(tmp_path):
    folder = tmp_path / "votes"
    plan = written_plan(folder, pairs=150, prompts=30)
    page, rng, said, sends, kept = Killed(folder), random.Random(0), {}, 0, 0
    answer = asked(page.port, "POST", "/begin", "", form=f"token={page.token}")
    cookie = answer[2]["Set-Cookie"].partition(";")[0]
    while True:
        got = asked(page.port, "GET", "/now", cookie)
        if got is None:
            if page.process.is_alive():
                continue
            break  # it ends by itself once all votes are in
        state = json.loads(got[1])
        if state["open"] is None:
            break
        verdict = rng.choice(["left", "right", "equal", "skip"])
        sent = {"id": state["open"]["id"], "verdict": verdict, "seconds": 1.0}
        for body in (sent, {**sent, "verdict": "both_bad"}):  # sent twice, then differently
            if body is not sent and sent["id"] not in said:
                body = sent  # the first one was not answered
            killed = page.kills < KILLS and rng.random() < 0.25
            got = (
                sent_under_a_kill(page, cookie, body, rng)
                if killed
                else asked(page.port, "POST", "/vote", cookie, body)
            )
            sends, kept = sends + 1, kept + (killed and got is not None)
            if got is not None and got[0] == 200:
                said.setdefault(sent["id"], verdict)
    page.process.join(timeout=30)
    given = VoteLog.read(folder, plan).raters["rater-1"].given
    found = {each.id: each.verdict or "skip" for each in given}
    assert page.kills == KILLS and 0 < kept < KILLS, "kills before and after the answer"
    assert len(given) == len(found) == len(plan.turns["rater-1"]) == 165
    assert not {showing for showing, verdict in said.items() if found.get(showing) != verdict}
    votes = [each["id"] for each in log_lines(folder) if each["event"] in ("vote", "skip")]
    assert len(votes) == len(set(votes)) == 165
    print(f"{page.kills} kills ({kept} after the answer), {sends} votes sent, 165 counted")


def test_a_full_disk_loses_nothing_and_the_votes_go_on_when_there_is_room(tmp_path):
    with mounted(tmp_path / "disk", "size=192k") as disk:
        folder = disk / "votes"
        plan = written_plan(folder, pairs=10)
        with VoteLog.opened(folder, plan) as log:
            first = log.show("rater-1")
            assert log.vote("rater-1", first, "left", 1.0)
            ballast, showing = disk / "ballast", log.show("rater-1")
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * 512)
            refused = 0
            for _ in range(300):  # what is left of the log's last page still takes some lines
                try:
                    if not log.vote("rater-1", showing, "right", 1.0):
                        break
                    showing = log.show("rater-1")
                except OSError:
                    refused += 1
                    break
                if showing is None:
                    break
            before = len(log.raters["rater-1"].given)
            ballast.unlink()
            if refused:
                assert log.vote("rater-1", log.show("rater-1"), "right", 1.0)
                assert len(log.raters["rater-1"].given) == before + 1
        given = VoteLog.read(folder, plan).raters["rater-1"].given
        assert given[0].id == first and len({each.id for each in given}) == len(given)


def test_a_clock_that_jumps_changes_nothing_but_what_it_says(tmp_path, monkeypatch):
    """The log's order is that of its lines, whatever the wall clock says of them."""
    plan, rng = written_plan(tmp_path, pairs=20), random.Random(0)
    jumps = 0
    with VoteLog.opened(tmp_path, plan) as log:
        while (showing := log.show("rater-1")) is not None:
            monkeypatch.setattr(time, "time", lambda: rng.choice([0.0, 1e9, 4e9, -1e6]))
            jumps += 1
            log.vote(
                "rater-1", showing, rng.choice(["left", "right"]), rng.choice([-5.0, 1.0, 1e9])
            )
    read = VoteLog.read(tmp_path, plan).raters["rater-1"]
    assert len(read.given) == len({each.id for each in read.given}) == 22
    assert all(0 <= each.seconds <= 86_400 for each in read.given)
    assert [each.id for each in read.given] == [each.id for each in log.raters["rater-1"].given]
    print(f"{jumps} jumps of the clock, 22 votes counted")


@pytest.mark.slow
def test_a_hundred_raters_at_once(tmp_path):
    plan = written_plan(tmp_path, pairs=100, prompts=20, raters=100)

    async def rater(room, name):
        transport = httpx.ASGITransport(app=room.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            await client.post("/begin", data={"token": room.door.tokens[name]})
            state = (await client.get("/now")).json()
            for _ in range(3):
                sent = {"id": state["open"]["id"], "verdict": "left"}
                twice = await asyncio.gather(*(client.post("/vote", json=sent) for _ in range(2)))
                assert [each.status_code for each in twice] == [200, 200]
                state = twice[0].json()
            assert state["done"] == 3

    with VoteLog.opened(tmp_path, plan) as log:
        room = VotingRoom(tmp_path, log, Door.of(tmp_path, list(log.raters)))
        room.app = create_vote_app(room, "127.0.0.1")

        async def everybody():
            await asyncio.gather(*(rater(room, name) for name in log.raters))

        asyncio.run(everybody())
    read = VoteLog.read(tmp_path, plan)
    assert [len(own.given) for own in read.raters.values()] == [3] * 100
    assert sum(each["event"] == "vote" for each in log_lines(tmp_path)) == 300
    print("100 raters at once, 600 votes sent (each twice), 300 counted")


@pytest.mark.slow
def test_two_thousand_damaged_bodies(tmp_path):
    plan = written_plan(tmp_path)
    rng = np.random.default_rng(0)

    async def send(room):
        transport = httpx.ASGITransport(app=create_vote_app(room, "127.0.0.1"))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            await client.post("/begin", data={"token": room.door.tokens["rater-1"]})
            state = (await client.get("/now")).json()
            good = json.dumps({"id": state["open"]["id"], "verdict": "left"}).encode()
            before, codes = (tmp_path / "events.jsonl").read_bytes(), {}
            for _ in range(2000):
                body = bytearray(good)
                for at in rng.integers(0, len(body), rng.integers(1, 30)):
                    body[at] = rng.integers(0, 256)
                if bytes(body) == good:
                    continue
                kind = {"content-type": "application/json"}
                answer = await client.post("/vote", content=bytes(body), headers=kind)
                codes[answer.status_code] = codes.get(answer.status_code, 0) + 1
            assert (tmp_path / "events.jsonl").read_bytes() == before
            return codes

    with VoteLog.opened(tmp_path, plan) as log:
        room = VotingRoom(tmp_path, log, Door.of(tmp_path, list(log.raters)))
        codes = asyncio.run(send(room))
    assert set(codes) <= {409, 422}, codes
    print(f"{sum(codes.values())} damaged bodies, none counted; statuses {codes}")
