"""Rewards behind HTTP: the format, the server, the client, through real sockets."""

import asyncio
import json
import re
import socket
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httpx")
pytest.importorskip("fastapi")

import httpx

from flowrl.cli import main
from flowrl.cli import serve as serving_command
from rewards import Samples, Scores, check_reward, load, score_all
from rewards.catalogue.brightness import Brightness
from rewards.catalogue.remote import few_samples, whole_groups
from rewards.catalogue.win_rate import Tournament
from rewards.checks.self_test import self_test
from rewards.judging.pairs import PairBudget
from rewards.judging.panel import PanelSettings
from rewards.load import load_judge
from rewards.serving import codec, wire
from rewards.serving.batching import Batcher, Job, ServerLimits, scoring
from rewards.serving.server import Served, _answer, _Flight, _Full
from rewards.types import reports
from tests.support.servers import pictures, serving


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(1, 6))
def test_groups_are_sent_whole(sizes, most):
    group = [g for g, size in enumerate(sizes) for _ in range(size)]
    parts = list(whole_groups(group, most))
    assert [row for part in parts for row in part] == list(range(len(group)))
    for part in parts:
        assert len(part) <= most or len({group[row] for row in part}) == 1
    for part, after in pairwise(parts):  # the next group would not have fitted
        assert len(part) + group.count(group[after[0]]) > most
    for g in set(group):
        assert len({i for i, part in enumerate(parts) for row in part if group[row] == g}) == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20), st.integers(1, 6))
def test_pairs_are_sent_in_parts_of_few_samples(pairs, most):
    parts = list(few_samples(pairs, most))
    assert [i for part in parts for i in part] == list(range(len(pairs)))
    for part in parts:
        assert len(part) == 1 or len({row for i in part for row in pairs[i]}) <= most


def test_a_remote_reward_is_the_reward(tmp_path):
    sent = pictures(11, group=3)
    with serving(Served.of("brightness", {"kind": "dark"}, Brightness(-1))) as url:
        log = str(tmp_path / "log.jsonl")
        remote = load("remote", url=url, batch=4, pictures="webp", log=log)
        torch.testing.assert_close(remote(sent), Brightness(-1)(sent).double())
        assert reports({"r": remote})["calls/r/requests"] == 4, "whole groups of 3, at most 4"
        judge = load_judge("remote", url=url, batch=4)
        a, b = torch.triu_indices(11, 11, 1)
        dark = Brightness(-1)(sent)
        assert torch.equal(judge(sent, a, b), (dark[a] > dark[b]).double())
        health = httpx.get(f"{url}/health").json()
        assert health["reward"] == "brightness" and health["settings"] == {"kind": "dark"}
        assert health["version"] and health["scores"] and health["judges"]
        assert health["served"]["samples"] >= 11
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4


def test_unscored_samples_stay_unscored_and_abstentions_abstentions():
    def reward(samples: Samples) -> list[float | None]:
        return [None if "1" in p else float("nan") if "2" in p else 7.0 for p in samples.prompts]

    with serving(Served.of("fussy", {}, reward)) as url:
        scores = score_all({"remote": load("remote", url=url)}, pictures(4))
    assert isinstance(scores, Scores) and scores.unscored == {"remote": 1}
    assert scores.applies.flatten().tolist() == [True, False, True, True]
    assert scores.values.flatten().tolist() == [7, 0, 0, 7]


def test_a_groupwise_reward_is_served_by_whole_groups():
    """Two clients use the same group ids at once: their groups must not meet."""
    tournament = Tournament(Served.of("b", {}, Brightness()).judge, PairBudget())
    sent = [pictures(6, group=3, seed=s) for s in range(4)]
    wanted = [tournament(part) for part in sent]
    slow = threading.Event()

    def reward(samples: Samples) -> torch.Tensor:
        slow.wait(0.2)  # requests gather meanwhile
        return tournament(samples)

    limits = ServerLimits(wait=0.2)
    with serving(Served.of("win_rate", {}, reward), limits) as url, ThreadPoolExecutor(4) as pool:
        remote = load("remote", url=url, batch=6)
        got = list(pool.map(remote, sent))
        served = httpx.get(f"{url}/health").json()["served"]
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert served["requests"] == 4 and served["batches"] < 4 and served["largest"] >= 12


def run_batcher(limits: ServerLimits, sizes: list[int], gone: set[int] = frozenset()) -> tuple:
    """Jobs of these numbers of samples that wait together; their outcomes and the calls' sizes."""
    calls: list[int] = []

    def reward(samples: Samples) -> torch.Tensor:
        calls.append(len(samples.prompts))
        if any("bad" in p for p in samples.prompts):
            raise ValueError("bad")
        return torch.arange(len(samples.prompts)).float()

    async def run() -> list:
        batcher = Batcher(scoring("tried", reward), limits, ThreadPoolExecutor(1))
        jobs = []
        for i, size in enumerate(sizes):
            prompts = ["bad" if size < 0 else "x"] * abs(size)
            samples = wire.WireSamples(
                kind="text", media=["t"] * abs(size), prompts=prompts, group=[0] * abs(size)
            )
            jobs.append(Job(samples, 0, [], [], _gone(i in gone), asyncio.Future()))
            batcher.jobs.put_nowait(jobs[-1])
        task = asyncio.create_task(batcher.work())
        outcomes = await asyncio.wait_for(asyncio.gather(*(j.outcome for j in jobs)), 10)
        task.cancel()
        return outcomes

    return asyncio.run(run()), calls


def _gone(answer: bool) -> object:
    async def gone() -> bool:
        return answer

    return gone


def test_requests_that_wait_together_are_one_call():
    outcomes, calls = run_batcher(ServerLimits(batch=8, wait=0.01), [3, 4, 2, 9, 1])
    assert calls == [7, 2, 9, 1], "never more than 8, but for one request that has more"
    assert [each.values.tolist() for each in outcomes[:3]] == [[0, 1, 2], [3, 4, 5, 6], [0, 1]]


def test_a_bad_request_fails_alone():
    outcomes, calls = run_batcher(ServerLimits(batch=8), [2, -1, 3])
    assert calls == [6, 2, 1, 3]
    assert outcomes[0].values.tolist() == [0, 1] and outcomes[2].values.tolist() == [0, 1, 2]
    assert isinstance(outcomes[1], ValueError)


def test_who_has_hung_up_is_not_scored():
    outcomes, calls = run_batcher(ServerLimits(batch=8), [2, 5, 1], gone={1})
    assert calls == [3] and isinstance(outcomes[1], ConnectionError)
    assert outcomes[2].values.tolist() == [2]


def test_errors_of_the_reward_are_told_or_tried_again():
    calls: list[int] = []

    def reward(samples: Samples) -> torch.Tensor:
        calls.append(1)
        if samples.prompts[0] == "kind":
            raise ValueError("it scores videos")
        if len(calls) < 3:
            raise RuntimeError("out of memory")
        return torch.ones(len(samples.prompts))

    with serving(Served.of("moody", {}, reward)) as url:
        remote = load("remote", url=url)
        remote.client.patience = type(remote.client.patience)(backoff=0.01)
        assert remote(pictures(2)).tolist() == [1, 1]
        assert reports({"r": remote})["calls/r/status"] == 2
        one = Samples(pictures(1).media, ["kind"], torch.zeros(1, dtype=torch.long))
        with pytest.raises(ValueError, match=r"refuses every request.*it scores videos"):
            remote(one)


def leaves(samples: Samples, *pairs: torch.Tensor) -> torch.Tensor:
    raise SystemExit("bye")


def interrupts(samples: Samples, *pairs: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


def writes(samples: Samples, *pairs: torch.Tensor) -> torch.Tensor:
    samples.media.zero_()
    return torch.zeros(2)


@pytest.mark.parametrize(
    ("call", "status", "what"),
    [
        (leaves, 500, r"{} 'rude' tried to end the process by SystemExit\('bye'\)"),
        (interrupts, 500, "{} 'rude' tried to end the process by KeyboardInterrupt"),
        (writes, 422, "{} 'rude' wrote into the media"),
        (lambda *_: torch.ones(5), 422, r"{} 'rude' returned shape \[5\]; expected 2 finite"),
    ],
    ids=["exit", "interrupt", "write", "shape"],
)
def test_a_server_outlives_its_reward_and_its_judge(call, status, what):
    body = wire.encode_samples(pictures(2))
    pairs = body | {"a": [0, 1], "b": [1, 0]}
    with serving(Served("rude", {}, call, call)) as url:
        for path, sent, kind in (("/score", body, "reward"), ("/judge", pairs, "judge")):
            answer = httpx.post(url + path, json=sent)
            assert answer.status_code == status
            assert re.search(what.format(kind), answer.json()["detail"])
        assert httpx.get(f"{url}/health").status_code == 200
    with serving(Served.of("rude", {}, call)) as url:  # the judge made of the reward names it
        detail = httpx.post(f"{url}/judge", json=pairs).json()["detail"]
        assert re.search(what.format("reward"), detail)


def test_a_server_outlives_the_examples_of_its_reward():
    class Rude:
        def __call__(self, samples: Samples) -> torch.Tensor:
            return torch.ones(len(samples.prompts))

        def examples(self) -> Samples:
            raise SystemExit

    with serving(Served.of("rude", {}, Rude())) as url:
        assert httpx.get(f"{url}/examples").status_code == 500
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_token_is_required_where_one_is_set(monkeypatch):
    monkeypatch.setenv("RIGHT", "s3cret")
    monkeypatch.setenv("WRONG", "s3cre")
    with serving(Served.of("brightness", {}, Brightness(), token="s3cret")) as url:
        assert load("remote", url=url, key="RIGHT")(pictures(2)).shape == (2,)
        words = r"does not accept the token; set key to the environment variable that has it$"
        for key in (None, "WRONG"):
            with pytest.raises(ValueError, match=words):
                load("remote", url=url, key=key)
            with pytest.raises(ValueError, match=words):
                PanelSettings(url=url, model="x", key=key).open()
        for path in ("/health", "/score", "/docs", "/openapi.json"):
            assert httpx.get(url + path).status_code == 401
        remote = load("remote", url=url, key="RIGHT")
        monkeypatch.setenv("RIGHT", "changed")
        with pytest.raises(ValueError, match="does not accept the token"):
            remote(pictures(2))


def test_values_of_a_body_are_bounded_before_they_are_made():
    """Commas of texts do not count; a text that is not closed costs no more than another."""
    many = {"meta": [{"x": [[]] * 600_000}]}
    with serving(Served.of("brightness", {}, Brightness())) as url:
        began = time.process_time()
        answer = httpx.post(f"{url}/score", content=json.dumps(many).encode(), timeout=30)
        assert answer.status_code == 422 and "more than 500000 JSON values" in answer.text
        assert httpx.post(f"{url}/score", content=b'"' + b'\\",' * 10**6).status_code == 400
        assert time.process_time() - began < 2
        body = wire.encode_samples(pictures(2))
        body["prompts"] = ["a, " * 200_000, "b" + "[" * 400_000]
        assert httpx.post(f"{url}/score", json=body, timeout=30).status_code == 200


def test_a_body_has_a_limit_with_and_without_a_length():
    with serving(Served.of("brightness", {}, Brightness()), ServerLimits(body=1000)) as url:

        def chunks(size: int) -> object:
            for _ in range(size // 100):
                yield b" " * 100

        for content in (b" " * 1100, chunks(1100)):
            answer = httpx.post(f"{url}/score", content=content)
            assert answer.status_code == 413 and "at most 1000 bytes" in answer.text
        assert httpx.post(f"{url}/score", content=chunks(900)).status_code == 400
        assert load("remote", url=url, batch=1)(pictures(1)).isfinite().all()
        with pytest.raises(ValueError, match="send fewer samples"):
            load("remote", url=url)(pictures(16, group=16))


def test_the_pixels_of_a_request_are_bounded_before_any_is_decoded(monkeypatch):
    decoded: list[object] = []
    real = codec.to_tensor
    monkeypatch.setattr(codec, "to_tensor", lambda image: (decoded.append(image), real(image))[1])
    limits = ServerLimits(pixels=100)
    with serving(Served.of("brightness", {}, Brightness()), limits) as url:
        body = wire.encode_samples(pictures(6))  # 6 of 4 x 5 pixels
        answer = httpx.post(f"{url}/score", json=body)
        assert answer.status_code == 422 and "more than 100 pixels in total" in answer.text
        assert not decoded
        clip = {"frames": [body["media"][0]] * 6}
        answer = httpx.post(f"{url}/score", json=body | {"kind": "video", "media": [clip] * 6})
        assert answer.status_code == 422 and "media[5]" not in answer.text and not decoded
        assert httpx.post(f"{url}/score", json=wire.encode_samples(pictures(5))).status_code == 200
        assert len(decoded) == 5


def test_decoding_does_not_block_the_server(monkeypatch):
    real, begun, go_on = codec.to_tensor, threading.Event(), threading.Event()

    def decode(image):
        begun.set()
        assert go_on.wait(60)
        return real(image)

    monkeypatch.setattr(codec, "to_tensor", decode)
    with serving(Served.of("brightness", {}, Brightness())) as url, ThreadPoolExecutor(1) as pool:
        body = wire.encode_samples(pictures(2))
        post = pool.submit(httpx.post, f"{url}/score", json=body, timeout=90)
        assert begun.wait(60)
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        go_on.set()
        assert post.result().status_code == 200


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('{"group": [NaN, 0]', 400),
        ('{"group": [Infinity, 0]', 400),
        ('{"group": [1e400, 0]', 422),
        ('{"group": [100000000000000000000, 0]', 422),
        ('{"group": [0, 0], "meta": [{"a": NaN}, {}]', 400),
        ('{"group": [0, 0], "meta": [{"a": ' + "[" * 10**5 + "]" * 10**5 + "}, {}]", 400),
        ('{"group": [0, 0], "a\\ud800": 1', 422),
        ('{"group": [0, 0], "media": ["\\ud800", "x"]', 200),
    ],
    ids=["NaN", "Infinity", "overflow", "huge", "NaN in meta", "nested", "surrogate", "odd text"],
)
def test_numbers_that_json_does_not_have_are_the_clients_error(text, status):
    fields = ', "kind": "text", "prompts": ["a", "b"]}'
    media = "" if '"media"' in text else ', "media": ["x", "y"]'
    with serving(Served.of("one", {}, lambda s: torch.ones(len(s.prompts)))) as url:
        answer = httpx.post(f"{url}/score", content=text + media + fields)
        assert answer.status_code == status


def lines_of(url: str, *sent: bytes, pause: float = 0.0) -> bytes:
    """The start of what a server answers to raw bytes; empty where it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        for part in sent:
            client.sendall(part)
            time.sleep(pause)
        return client.recv(2**12)


def test_slow_requests_and_too_many_connections_are_closed():
    limits = ServerLimits(header_seconds=0.3, body_seconds=0.5, connections=2)
    with serving(Served.of("brightness", {}, Brightness()), limits) as url:
        began = time.monotonic()
        assert lines_of(url, b"GET /health HT") == b""
        assert lines_of(url, b"") == b""
        head = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        assert b" 408 " in lines_of(url, head)
        assert time.monotonic() - began < 30
        with ExitStack() as stack:
            for _ in range(2):
                address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
                stack.enter_context(socket.create_connection(address))
            time.sleep(0.05)
            assert lines_of(url, b"") == b""
        until_healthy(url)


def until_healthy(url: str) -> None:
    """Connections that were closed free their places soon, but not at once."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.1)
    pytest.fail("the server takes no connection again")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "extra"),
        ({"format": 2}, "format"),
        ({"prompts": ["x"]}, "2 media|1 prompts"),
        ({"media": ["AA==", "AA=="]}, "media"),
        ({"kind": "audio"}, "kind"),
    ],
)
def test_a_request_of_another_form_is_told_what_is_wrong(change, message):
    with serving(Served.of("brightness", {}, Brightness())) as url:
        answer = httpx.post(f"{url}/score", json=wire.encode_samples(pictures(2)) | change)
        assert answer.status_code == 422 and re.search(message, answer.text)
        pairs = wire.encode_samples(pictures(2)) | {"a": [0], "b": [2]}
        answer = httpx.post(f"{url}/judge", json=pairs)
        assert answer.status_code == 422 and "outside the 2" in answer.text


def test_a_full_queue_asks_to_come_back():
    hold = threading.Event()

    def reward(samples: Samples) -> torch.Tensor:
        hold.wait(60)
        return torch.ones(len(samples.prompts))

    limits = ServerLimits(batch=1, wait=0.0, queue=1)
    with serving(Served.of("slow", {}, reward), limits) as url, ThreadPoolExecutor(8) as pool:
        post = lambda: httpx.post(f"{url}/score", json=wire.encode_samples(pictures(1)), timeout=90)
        asked = [pool.submit(post) for _ in range(6)]
        end = time.monotonic() + 60
        while not any(a.done() for a in asked) and time.monotonic() < end:
            time.sleep(0.01)
        hold.set()
        answers = [a.result() for a in asked]
    codes = {answer.status_code for answer in answers}
    assert codes == {200, 503}
    assert all(a.headers["Retry-After"] == "1" for a in answers if a.status_code == 503)


def test_requests_that_arrive_together_do_not_pass_the_limit_together():
    bodies = asyncio.Barrier(6)  # each is admitted before any is read

    class Sent:
        async def stream(self):
            await bodies.wait()
            yield json.dumps(wire.encode_samples(pictures(1))).encode()

        async def is_disconnected(self) -> bool:
            return False

    async def run() -> tuple[int, list[int]]:
        limits = ServerLimits(batch=1, wait=0.0, queue=2)
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(scoring("brightness", Brightness()), limits, pool)
            asked = [
                asyncio.create_task(_answer(batcher, wire.WireSamples, pool, Sent()))
                for _ in range(bodies.parties)
            ]
            done, left = await asyncio.wait(asked, timeout=30, return_when=FIRST_EXCEPTION)
            while len(done) < bodies.parties - limits.queue:
                more, left = await asyncio.wait(left, timeout=30, return_when=FIRST_EXCEPTION)
                assert more, f"{batcher.jobs.qsize()} requests wait for {limits.queue} places"
                done |= more
            for task in left:
                task.cancel()
        return len(left), [task.exception().status_code for task in done]

    assert asyncio.run(run()) == (2, [503] * 4)


def test_bytes_in_flight_stay_within_the_budget():
    async def run() -> tuple[int, list[int]]:
        flight, seen, order = _Flight(100), [0], list[int]()

        async def one(number: int, size: int) -> None:
            async with flight.held(size, 30):
                seen.append(100 - flight.free)
                order.append(number)
                await asyncio.sleep(0.001 * (number % 3))

        tasks = [
            asyncio.create_task(one(i, size)) for i, size in enumerate([60, 50, 30, 100, 1] * 9)
        ]
        await asyncio.sleep(0.002)
        for task in tasks[5:30:4]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert flight.free == 100 and not flight.waiting
        assert order == sorted(order)
        with pytest.raises(_Full):
            async with flight.held(80, 1), flight.held(30, 0.01):
                pass
        assert flight.free == 100 and not flight.waiting
        return max(seen), order

    most, order = asyncio.run(run())
    assert most <= 100 and len(order) >= 38


def test_a_request_waits_for_the_bytes_of_others_and_is_then_told_to_come_back():
    hold, body = threading.Event(), wire.encode_samples(pictures(1))

    def reward(samples: Samples) -> torch.Tensor:
        hold.wait(60)
        return torch.ones(len(samples.prompts))

    size = len(json.dumps(body)) + 100
    limits = ServerLimits(batch=1, wait=0.0, body=size, flight=size, body_seconds=1.0)
    with serving(Served.of("slow", {}, reward), limits) as url, ThreadPoolExecutor(2) as pool:
        post = lambda: httpx.post(f"{url}/score", json=body, timeout=90)
        asked = [pool.submit(post) for _ in range(2)]
        end = time.monotonic() + 60
        while not any(a.done() for a in asked) and time.monotonic() < end:
            time.sleep(0.01)
        assert httpx.get(f"{url}/health").status_code == 200, "which has no body"
        hold.set()
        answers = [a.result() for a in asked]
        assert sorted(a.status_code for a in answers) == [200, 503]
        assert post().status_code == 200, "the bytes were given back"


def test_the_self_test_uses_the_served_rewards_examples():
    class Known:
        def __call__(self, samples: Samples) -> torch.Tensor:
            return torch.tensor([float(len(text)) for text in samples.media])

        def examples(self) -> Samples:
            return Samples(["long", "s"], ["x", "x"], torch.arange(2))

    with serving(Served.of("length", {}, Known())) as url:
        assert "4 for the better of its examples" in self_test("r", load("remote", url=url))
        spec = {"name": "remote", "url": url}
        assert "1 for the better" in self_test("w", load("win_rate", judge=spec))
    with serving(Served.of("mean", {}, lambda s: s.media.flatten(1).square().mean(1))) as url:
        assert "different samples" in self_test("r", load("remote", url=url))


def test_slips_of_a_client_are_told(monkeypatch):
    with serving(Served("only_a_judge", {}, None, lambda s, a, b: torch.zeros(len(a)))) as url:
        assert load_judge("remote", url=url)(pictures(2), *torch.tensor([[0], [1]])).tolist() == [0]
        for changed, message in (
            ({}, "only_a_judge at .* has no scores"),
            ({"pictures": "gif"}, "pictures: expected 'png' or 'webp', not 'gif'"),
            ({"batch": 0}, "batch: expected a number greater than or equal to 1"),
            ({"url": url + "/docs#"}, "is not JSON|nothing at this address"),
        ):
            with pytest.raises(ValueError, match=message):
                load("remote", **({"url": url} | changed))
    monkeypatch.setattr("rewards.serving.client.SECONDS_TO_CLOSE", 0.1)
    with pytest.raises(ValueError, match=r"no answer from .*; start one with `flowrl serve-reward"):
        load("remote", url=url)
    with pytest.raises(ValueError, match="no setting 'ur'; did you mean 'url'"):
        check_reward("remote", {"ur": url})


def test_the_command_serves_what_it_is_told(monkeypatch, capsys):
    started: list[dict] = []
    monkeypatch.setattr("uvicorn.run", lambda app, **how: started.append(how | {"app": app}))
    monkeypatch.setenv("TOKEN", "s3cret")
    words = ["serve-reward", "{name: shapes, kind: strict}", "--port", "8123", "--token", "TOKEN"]
    words += ["--values", "7"]
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 0 and (started[0]["port"], started[0]["host"]) == (8123, "127.0.0.1")
    assert started[0]["app"].user_middleware[0].kwargs["limits"].values == 7000
    said = capsys.readouterr()
    assert "{name: remote, url: 'http://127.0.0.1:8123'}" in said.out and not said.err
    serving_command.run_reward_server(serving_command.Serve("brightness", host="0.0.0.0"))
    assert "--token NAME" in capsys.readouterr().err
    for words, message in (
        (["shaps"], "did you mean 'shapes'"),
        (["shapes", "--token", "NO_SUCH_TOKEN"], "NO_SUCH_TOKEN is empty"),
        (["{kind: strict}"], "expected a name"),
        (["shapes", "--batch", "0"], "greater than or equal to 1"),
    ):
        with pytest.raises(SystemExit) as done:
            main(["serve-reward", *words])
        assert done.value.code == 2 and message in capsys.readouterr().err
