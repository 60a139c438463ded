"""The page of votes: who may come in, and what a browser gets."""

import io
import json
import logging
import re

import httpx
import numpy as np
import pytest
from PIL import Image

from flowrl.evaluation.tables import rows_of
from flowrl.votes.answer import write_results
from flowrl.votes.door import HEADERS, Door, allowed_host
from flowrl.votes.log import VoteLog
from flowrl.votes.server import MOST_BODY, VotingRoom, create_vote_app
from tests.support.voting import colour_of, log_lines, written_plan

pytestmark = pytest.mark.anyio
BASE = "http://127.0.0.1:8300"


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def room(tmp_path):
    plan = written_plan(tmp_path, pairs=20, raters=1)
    with VoteLog.opened(tmp_path, plan) as log:
        yield VotingRoom(tmp_path, log, Door.of(tmp_path, list(log.raters)))


def client_of(room, bound="127.0.0.1", base=BASE):
    transport = httpx.ASGITransport(app=create_vote_app(room, bound))
    return httpx.AsyncClient(transport=transport, base_url=base)


async def entered(client, room, rater="rater-1"):
    answer = await client.post("/begin", data={"token": room.door.tokens[rater]})
    assert answer.status_code == 303, answer.text
    return (await client.get("/now")).json()


async def test_a_token_is_exchanged_once_for_a_cookie_and_a_redirect(room):
    token = room.door.tokens["rater-1"]
    async with client_of(room) as client:
        for _ in range(2):  # looking at the link, as a preview does, does not use it up
            shown = await client.get("/", params={"token": token})
            assert shown.status_code == 200 and "Begin" in shown.text
        answer = await client.post("/begin", data={"token": token})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and token not in cookie
        assert "vote.js" in (await client.get("/")).text
    async with client_of(room) as other:
        assert (await other.post("/begin", data={"token": token})).status_code == 403
        assert (await other.get("/", params={"token": token})).status_code == 403
        assert (await other.get("/")).status_code == 401


async def test_a_pair_whose_file_is_gone_is_said_without_its_name(room, monkeypatch):
    logger = logging.getLogger("uvicorn.error")  # which an earlier server may have set up
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(said := io.StringIO())])
    async with client_of(room) as client:
        left = (await entered(client, room))["open"]["left"]
        for file in (room.folder / "samples").iterdir():
            file.unlink()
        answer = await client.get(left)
    assert answer.status_code == 500 and ".png" not in answer.text, answer.text
    assert ".png cannot be read" in said.getvalue()


@pytest.mark.parametrize("cookie", ["", "x", "rater-1", "rater-1.", "rater-1." + "0" * 64, "."])
async def test_nothing_is_answered_without_the_cookie(room, cookie):
    async with client_of(room) as client:
        client.cookies.set(room.door.cookie, cookie)
        for path in ("/now", "/media/" + "0" * 32):
            assert (await client.get(path)).status_code in (401, 404)
        for path in ("/vote", "/undo"):
            body = {"id": "0" * 24, "verdict": "left"}
            assert (await client.post(path, json=body)).status_code == 401
        assert (await client.get("/")).status_code == 401


async def test_a_cookie_outlives_the_process_and_the_log_goes_on(tmp_path):
    plan = written_plan(tmp_path)
    with VoteLog.opened(tmp_path, plan) as log:
        room = VotingRoom(tmp_path, log, Door.of(tmp_path, list(log.raters)))
        async with client_of(room) as client:
            before = await entered(client, room)
            cookies = client.cookies
    with VoteLog.opened(tmp_path, plan) as log:
        room = VotingRoom(tmp_path, log, Door.of(tmp_path, list(log.raters)))
        async with client_of(room) as client:
            client.cookies = cookies
            after = (await client.get("/now")).json()
            assert after == before, "the same pair, id and media"
            sent = {"id": after["open"]["id"], "verdict": "left", "seconds": 1}
            assert (await client.post("/vote", json=sent)).json()["done"] == 1
    assert (tmp_path / "door.key").stat().st_mode & 0o77 == 0


@pytest.mark.parametrize(
    ("host", "bound", "allowed"),
    [
        ("127.0.0.1:8300", "127.0.0.1", True),
        ("localhost:9000", "127.0.0.1", True),  # through a tunnel
        ("[::1]:8300", "127.0.0.1", True),
        ("evil.example:8300", "127.0.0.1", False),  # a name that now points here
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("192.168.0.7:8300", "127.0.0.1", False),
        ("192.168.0.7:8300", "0.0.0.0", True),
        ("evil.example:8300", "0.0.0.0", False),
        ("", "127.0.0.1", False),
        ("[bad", "127.0.0.1", False),
    ],
)
async def test_only_names_that_are_ours_are_answered(room, host, bound, allowed):
    assert allowed_host(host, bound) is allowed
    async with client_of(room, bound) as client:
        answer = await client.get("/", headers={"host": host})
        assert (answer.status_code == 403) is not allowed


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "null", "sec-fetch-site": "cross-site"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "http://127.0.0.1:8300.evil.example"},
        {"origin": "http://[bad"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_another_site_can_send_nothing(room, headers):
    async with client_of(room) as client:
        state = await entered(client, room)
        sent = {"id": state["open"]["id"], "verdict": "left"}
        assert (await client.post("/vote", json=sent, headers=headers)).status_code == 403
        ours = {"origin": BASE, "sec-fetch-site": "same-origin"}
        assert (await client.post("/vote", json=sent, headers=ours)).status_code == 200
        form = {"origin": "null", "sec-fetch-site": "same-origin"}  # of our page, without referrer
        assert (await client.post("/vote", json=sent, headers=form)).status_code == 200


async def test_a_form_of_another_site_is_no_vote_even_without_an_origin(room):
    async with client_of(room) as client:
        state = await entered(client, room)
        body = json.dumps({"id": state["open"]["id"], "verdict": "left"})
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            answer = await client.post("/vote", content=body, headers={"content-type": kind})
            assert answer.status_code == 415
        assert (await client.get("/now")).json()["done"] == 0


async def test_every_answer_has_the_headers(room):
    async with client_of(room) as client:
        answers = [
            await client.get("/"), await client.get("/nowhere"), await client.get("/vote.css"),
            await client.get("/", headers={"host": "evil.example"}),
            await client.post("/vote", content=b"x" * (MOST_BODY + 1)),
        ]  # fmt: skip
        state = await entered(client, room)
        answers += [await client.get("/now"), await client.get(state["open"]["left"])]
        for answer in answers:
            for name, value in HEADERS.items():
                assert answer.headers.get_list(name) == [value], (answer.url, name)
        assert answers[4].status_code == 413
        policy = HEADERS["content-security-policy"]
        assert "unsafe" not in policy and "default-src 'none'" in policy
        page = (await client.get("/")).text
        assert not re.search(r"<script(?! src=\"/vote\.js\" defer></script>)|\son\w+=|style=", page)


async def test_media_say_nothing_of_their_sample(room, tmp_path):
    """No file name, time, tag, metadata or size; ids differ for each showing."""
    async with client_of(room) as client:
        state, ids, shown = await entered(client, room), set(), 0
        plan, turns = room.log.plan, room.log.plan.turns["rater-1"]
        while state["open"] is not None:
            turn = turns[shown]
            a, b = plan.pairs[turn.pair]
            for side, row in zip(("left", "right"), (a, b) if turn.a_left else (b, a), strict=True):
                path = state["open"][side]
                assert re.fullmatch(r"/media/[0-9a-f]{32}", path) and path not in ids
                ids.add(path)
                answer = await client.get(path)
                assert not {"etag", "last-modified", "content-disposition"} & set(answer.headers)
                file = tmp_path / plan.samples[row].file
                assert colour_of(answer.content) == colour_of(file.read_bytes())
                assert not Image.open(file).info
            text = json.dumps(state)
            assert not re.search("trained|base|samples/|again|swap|a_left", text)
            sent = {"id": state["open"]["id"], "verdict": "left", "seconds": 0.5}
            old, state = state, (await client.post("/vote", json=sent)).json()
            assert (await client.get(old["open"]["left"])).status_code == 404
            shown += 1
        assert shown == len(turns) == 22


async def test_results_wait_until_all_raters_are_done(tmp_path):
    plan = written_plan(tmp_path, pairs=10, raters=2)
    with VoteLog.opened(tmp_path, plan) as log:
        room = VotingRoom(tmp_path, log, Door.of(tmp_path, list(log.raters)))
        for k, rater in enumerate(log.raters):
            async with client_of(room) as client:
                state = await entered(client, room, rater)
                while state["open"] is not None:
                    assert "found" not in state
                    sent = {"id": state["open"]["id"], "verdict": "equal"}
                    state = (await client.post("/vote", json=sent)).json()
                assert (state["found"] is None) is (k == 0) and state["others"] == 1 - k
                assert room.all_know is False or k == 1
        assert "people prefer the trained weights in 50 %" in state["found"][0]


async def test_one_rater_cannot_vote_or_look_for_another(tmp_path):
    plan = written_plan(tmp_path, pairs=10, raters=2)
    with VoteLog.opened(tmp_path, plan) as log:
        room = VotingRoom(tmp_path, log, Door.of(tmp_path, list(log.raters)))
        async with client_of(room) as one, client_of(room) as two:
            first, second = await entered(one, room, "rater-1"), await entered(two, room, "rater-2")
            sent = {"id": first["open"]["id"], "verdict": "left"}
            assert (await two.post("/vote", json=sent)).status_code == 409
            assert (await two.get(first["open"]["left"])).status_code == 404
            assert first["open"]["left"] != second["open"]["left"]


HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "\u202eevil\u2066 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "x" * 10_000,
    "'; DROP TABLE votes; -- {{ 7 * 7 }} ${7*7}",
    "line\nbreak\x00 null \u2028 \U0001f600 \ud800",
)


async def test_hostile_prompts_are_data(tmp_path):
    plan = written_plan(tmp_path, pairs=10, texts=HOSTILE)
    with VoteLog.opened(tmp_path, plan) as log:
        room = VotingRoom(tmp_path, log, Door.of(tmp_path, list(log.raters)))
        async with client_of(room) as client:
            state, seen = await entered(client, room), set()
            while state["open"] is not None:
                seen.add(state["open"]["prompt"])
                sent = {"id": state["open"]["id"], "verdict": "right"}
                answer = await client.post("/vote", json=sent)
                assert answer.headers["content-type"] == "application/json"
                state = answer.json()
    assert seen == {text.replace("\ud800", "?") for text in HOSTILE}
    assert write_results(tmp_path, log).pairs == 10
    assert {row["prompt"] for row in rows_of(tmp_path / "votes.jsonl")[0]} == seen


BODIES = (
    b"", b"null", b"[]", b"{}", b"{", b"\xff\xfe", b'{"id": 1, "verdict": "left"}',
    b'{"id": "0000000000", "verdict": "up"}', b'{"id": "../../etc", "verdict": "left"}',
    b'{"id": "00000000", "verdict": "left", "seconds": NaN}',
    b'{"id": "00000000", "verdict": "left", "seconds": 1e999}',
    b'{"id": "00000000", "verdict": "left", "more": 1}', b"[" * 1500,
    b'{"id": "00000000", "verdict": "left", "seconds": "1"}',
)  # fmt: skip


async def test_damaged_bodies_change_nothing(room, tmp_path):
    rng = np.random.default_rng(0)
    async with client_of(room) as client:
        state = await entered(client, room)
        good = json.dumps({"id": state["open"]["id"], "verdict": "left", "seconds": 1}).encode()
        damaged = list(BODIES)
        for _ in range(300):
            body = bytearray(good)
            for at in rng.integers(0, len(body), rng.integers(1, 6)):
                body[at] = rng.integers(0, 256)
            try:
                if json.loads(bytes(body)) == json.loads(good):
                    continue
                if {**json.loads(bytes(body)), "seconds": 1} == json.loads(good):
                    continue  # another number of seconds is a vote
            except (ValueError, TypeError):
                pass
            damaged.append(bytes(body))
        before = (tmp_path / "events.jsonl").read_bytes()
        for body in damaged:
            for path in ("/vote", "/undo"):
                kind = {"content-type": "application/json"}
                answer = await client.post(path, content=body, headers=kind)
                assert answer.status_code in (409, 422), (body, answer.status_code, answer.text)
        assert (tmp_path / "events.jsonl").read_bytes() == before
        assert (await client.post("/vote", content=good, headers=kind)).status_code == 200


async def test_a_vote_from_two_tabs_and_an_undo_sent_twice_count_once(room, tmp_path):
    async with client_of(room) as client:
        state = await entered(client, room)
        other = (await client.get("/now")).json()
        assert other == state
        sent = {"id": state["open"]["id"], "verdict": "left", "seconds": 1}
        late = {**sent, "verdict": "right"}
        answers = [await client.post("/vote", json=each) for each in (sent, sent, late)]
        assert [each.json()["done"] for each in answers] == [1, 1, 1]
        undone = [await client.post("/undo", json={"id": sent["id"]}) for _ in range(2)]
        assert [each.json()["done"] for each in undone] == [0, 0]
        assert (await client.post("/vote", json=sent)).status_code == 409
    kinds = [each["event"] for each in log_lines(tmp_path)]
    assert kinds.count("vote") == 1 and kinds.count("undo") == 1


@pytest.mark.slow
async def test_the_disk_is_full_and_the_page_is_told(room, monkeypatch):
    async with client_of(room) as client:
        state = await entered(client, room)

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.pwrite", full)
        sent = {"id": state["open"]["id"], "verdict": "left"}
        answer = await client.post("/vote", json=sent)
        assert answer.status_code == 507 and "no space left" in answer.json()["detail"]
        monkeypatch.undo()
        assert (await client.post("/vote", json=sent)).json()["done"] == 1
