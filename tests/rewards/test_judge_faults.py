"""A judge's server that stalls, talks nonsense, refuses, crashes: every request ends once."""

import asyncio
import json
import math
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from flowrl.errors import UserError
from flowrl.session.progress import Progress
from flowrl.session.session import open_accelerator, open_session
from flowrl.settings.read import run_from
from rewards import Samples, load
from rewards.judging.answers import verdict_in
from rewards.judging.chat import completion
from rewards.load import load_judge
from rewards.serving.answers import retry_seconds
from rewards.serving.client import Client
from rewards.serving.requests import Again, Ask, Failure, Patience, Refused
from rewards.types import reports
from tests.rewards.test_judge import compare, images
from tests.support import runs
from tests.support.iterations import iterate
from tests.support.servers import ChatServer, Faults

# few at once: on a busy machine many would be late, and be asked again, for ever
QUICK = Patience(timeout=1.2, tries=25, at_once=8, backoff=0.01)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("rewards.serving.client.LONGEST_WAIT", 0.2)


def echo(words: str, pictures: list[torch.Tensor]) -> str:
    return f"Score: {words.strip()}"


def asks(count: int) -> list[Ask]:
    content = [[{"type": "text", "text": str(i)}] for i in range(count)]
    bodies = [{"messages": [{"role": "user", "content": part}]} for part in content]
    return [Ask("/chat/completions", body, {"row": i}) for i, body in enumerate(bodies)]


def words(_: Ask, body: dict) -> str:
    return completion(body).text


@pytest.mark.slow
def test_every_request_is_answered_once_whatever_goes_wrong(tmp_path):
    """30 % of the tries stall, 20 % are nonsense; the wrong ones are known beforehand."""
    faults = Faults(timeout=0.3, malformed=0.2, seed=1)
    log = tmp_path / "logs" / "judge.jsonl"
    with ChatServer(echo, faults) as server:
        client = Client(server.url, patience=QUICK, log=str(log))
        found = client.ask(asks(30), words)
    assert found == [f"Score: {i}" for i in range(30)]
    counts = client.report()
    assert (counts["requests"], counts["failed"]) == (30, 0)
    wrong = Counter(
        faults.of(request, attempt)
        for request, tries in server.tries.items()
        for attempt in range(tries)
    )
    # a busy machine may be late beyond what was injected, never the other way round
    assert counts["timeout"] >= wrong["timeout"] > 5
    assert wrong["malformed"] >= counts["malformed"] > 2
    spoiled = sum(counts[why] for why in ("timeout", "malformed", "unreachable", "status"))
    assert counts["tries"] == 30 + spoiled
    assert (counts["tokens_in"], counts["tokens_out"]) == (300, 90), "of what arrived, once"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(line["row"] for line in lines) == list(range(30))
    assert len({line["id"] for line in lines}) == 30
    assert sum(line["tries"] for line in lines) == counts["tries"]
    assert sum(line["tokens_in"] for line in lines) == 300
    assert client.report()["requests"] == 0, "a report begins anew"


def test_what_never_comes_is_a_failure_with_its_reason():
    for faults, reason, timeout, tries in (
        (Faults(timeout=1.0), "timeout", 0.3, 2),
        (Faults(malformed=1.0), "malformed", 20.0, 2),
        (Faults(unparsable=1.0), "unparsable", 20.0, 1),
    ):
        with ChatServer(compare, faults) as server:
            client = Client(server.url, patience=Patience(timeout, tries=2, backoff=0.01))
            (found,) = client.ask(asks(1), words if reason != "unparsable" else _never)
        assert isinstance(found, Failure) and found.reason == reason
        counts = client.report()
        assert (counts["failed"], counts["tries"]) == (1, tries)
        assert counts[reason] == tries


def _never(_: Ask, body: dict) -> float:
    return verdict_in(completion(body))


def test_a_request_that_is_refused_fails_alone_and_all_of_them_say_why():
    with ChatServer(echo, Faults(refused=0.5, seed=3)) as server:
        client = Client(server.url, patience=QUICK)
        found = client.ask(asks(12), words)
        refused = [isinstance(f, Failure) for f in found]
        assert 0 < sum(refused) < 12
        assert client.report()["refused"] == sum(refused)
        assert max(server.tries.values()) == 1, "asking again would not help"
        for f in found:
            assert not isinstance(f, Failure) or f.reason == "refused"
    with ChatServer(echo, Faults(refused=1.0)) as server:
        with pytest.raises(ValueError, match=r"refuses every request: status 400.*too long"):
            Client(server.url, patience=QUICK).ask(asks(3), words)
        with pytest.raises(ValueError, match="nothing at this address"):
            Client(server.url.replace("/v1", "/v2"), patience=QUICK).get("/nowhere/404")


@pytest.mark.parametrize(
    ("statuses", "kind"),
    [
        ((408, 425, 429, 500, 502, 503, 504, 529), Again),
        ((301, 400, 409, 413, 415, 422), Refused),
        ((401, 403, 404), ValueError),  # of every request: the run cannot go on
    ],
)
def test_a_server_in_trouble_is_asked_again_and_a_refusal_is_not(statuses, kind):
    import httpx

    client = Client("http://127.0.0.1:1")
    for status in statuses:
        answer = httpx.Response(status, request=httpx.Request("POST", client.url), text="so")
        with pytest.raises((Again, Refused, ValueError)) as told:
            client._check(answer)
        assert type(told.value) is kind, status
    client._check(httpx.Response(200, request=httpx.Request("POST", client.url)))


def test_retry_after_is_waited_for():
    with ChatServer(echo, retry_after="1") as server:
        assert Client(server.url, patience=QUICK).ask(asks(3), words) == [
            f"Score: {i}" for i in range(3)
        ]
    for first, second in server.arrivals.values():
        assert 1 <= second - first < 30
    with (
        ChatServer(echo, retry_after="3600") as server,
        pytest.raises(ValueError, match="asks to wait 3600 s"),
    ):
        Client(server.url, patience=QUICK).ask(asks(1), words)


def test_retry_after_may_be_a_date():
    soon = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 20))
    assert 15 < retry_seconds(soon) <= 20
    assert retry_seconds("7") == 7 and retry_seconds(None) == retry_seconds("tomorrow") == 0
    assert retry_seconds("Fri, 01 Jan 1999 00:00:00 GMT") == 0


def test_waits_double_with_jitter_up_to_a_cap(monkeypatch):
    monkeypatch.setattr("rewards.serving.client.LONGEST_WAIT", 30.0)
    client = Client("http://127.0.0.1:1", patience=Patience(backoff=0.5))
    for attempt, mean in ((1, 0.5), (2, 1.0), (4, 4.0), (12, 30.0)):
        state = SimpleNamespace(attempt_number=attempt, outcome=None)
        drawn = [client._wait(state) for _ in range(200)]  # type: ignore[arg-type]
        assert 0.5 * mean <= min(drawn) < 0.7 * mean and 1.3 * mean < max(drawn) <= 1.5 * mean


def test_no_more_are_in_flight_than_allowed():
    with ChatServer(echo, latency=0.05) as server:
        Client(server.url, patience=Patience(at_once=5)).ask(asks(25), words)
    assert server.most == 5


def test_a_crash_is_outlived():
    """After 20 tries nobody listens; a second later somebody does again."""
    with ChatServer(echo, latency=0.01, crash_after=20) as server:

        def nurse() -> None:
            server.stopped.wait(30)
            time.sleep(1.0)
            server.crash_after = None
            server.start()

        thread = threading.Thread(target=nurse)
        thread.start()
        client = Client(
            server.url, patience=Patience(timeout=5.0, tries=12, at_once=8, backoff=0.05)
        )
        found = client.ask(asks(40), words)
        thread.join()
    assert found == [f"Score: {i}" for i in range(40)]
    counts = client.report()
    assert counts["unreachable"] > 0 and (counts["requests"], counts["failed"]) == (40, 0)


def test_a_slow_drip_is_a_timeout():
    """Bytes that trickle for ever reset the usual timeouts of sockets; ours is of the whole try."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def drip() -> None:
        while not stop.is_set():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n")
                for _ in range(600):
                    if stop.wait(0.05):
                        return
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        break  # hung up, as it should

    threading.Thread(target=drip, daemon=True).start()
    patience = Patience(timeout=0.3, tries=1)
    began = time.monotonic()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    (found,) = Client(url, patience=patience).ask(asks(1), words)
    stop.set()
    listener.close()
    assert isinstance(found, Failure) and found.reason == "timeout"
    assert time.monotonic() - began < 15, "the drip takes 30 s"


def test_verdicts_are_those_of_a_healthy_server_or_none():
    a, b = torch.triu_indices(4, 4, 1)
    batch = images(*torch.linspace(0, 1, 4).tolist())
    healthy = (a > b).double()
    for faults, lost in ((Faults(0.3, 0.2), False), (Faults(0.3, 0.2, unparsable=0.3), True)):
        with ChatServer(compare, faults) as server:
            judge = load_judge("judge", url=server.url, model="tiny")
            judge.panel.client.patience = QUICK  # type: ignore[attr-defined]
            p = judge(batch, a, b)
        known = ~p.isnan()
        assert torch.equal(p[known], healthy[known])
        assert (known.all() and not lost) or (0 < known.sum() < len(a) and lost)
        counts = reports({"j": judge})
        assert counts["calls/j/requests"] == len(server.tries) == 12, "each order of a pair once"
        silent = sum(faults.of(request, 0) == "unparsable" for request in server.tries)
        assert counts["calls/j/failed"] == counts["calls/j/unparsable"] == silent


TROUBLES = {
    "timeouts and nonsense": Faults(0.3, 0.2),
    "and verdicts that say nothing": Faults(0.3, 0.2, unparsable=0.2),
}


def trained(server: ChatServer, pipeline: Path, folder: Path, tries: int) -> list[dict]:
    """Metrics of three iterations with Pref-GRPO's reward."""
    tree = runs.tree(pipeline, folder, runs.NFT, on_failure="skip_group")
    judge = {"name": "judge", "url": server.url, "model": "tiny", "timeout": 1.2, "tries": tries}
    judge |= {"both_orders": False, "log": str(folder / "judge.jsonl")}
    tree["rewards"] = [{"name": "win_rate", "judge": judge}]
    tree["held_out_rewards"] = [{"name": "brightness"}]
    run = run_from(tree, "test")
    session = open_session(run, folder, open_accelerator(run, folder))
    client = session.rewards["win_rate"].judge.panel.client  # type: ignore[attr-defined]
    client.patience = Patience(1.2, tries, 12, backoff=0.02)
    progress, metrics = Progress(), []
    for _ in range(3):
        metrics.append(iterate(session, progress).metrics)
    assert all(torch.isfinite(p).all() for p in session.learner.policies.parameters.values())
    return metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble",
    [
        "and verdicts that say nothing",
        pytest.param("timeouts and nonsense", marks=pytest.mark.slow),
    ],
)
def test_a_training_run_ends_with_every_group_scored_or_dropped(pipeline, tmp_path, trouble):
    """Two groups of four an iteration: 12 pairs. What the log says is what the server saw."""
    with ChatServer(compare, TROUBLES[trouble]) as server:
        metrics = trained(server, pipeline, tmp_path, tries=3)
    lines = [json.loads(line) for line in (tmp_path / "judge.jsonl").read_text().splitlines()]
    assert len(lines) == len({line["id"] for line in lines}) == 3 * 12
    for i, m in enumerate(metrics):
        part = lines[12 * i : 12 * (i + 1)]
        failed = sum("failed" in line for line in part)
        assert (m["calls/win_rate/requests"], m["calls/win_rate/failed"]) == (12, failed)
        assert m["calls/win_rate/tries"] == sum(line["tries"] for line in part)
        assert math.isfinite(m["reward"]) and 0 <= m["reward"] <= 1
        # a sample is unscored if none of its three pairs has a verdict
        met = Counter(
            row for line in part if "failed" not in line for row in _rows(line["question"])
        )
        assert m["unscored"] == 8 - len(met)
    assert sum("failed" in line for line in lines) > 0 or trouble != list(TROUBLES)[-1]


def _rows(pair: int) -> tuple[int, int]:
    """The samples of the pair of this number, two groups of four, all pairs."""
    a, b = torch.triu_indices(4, 4, 1)
    return int(a[pair % 6]) + 4 * (pair // 6), int(b[pair % 6]) + 4 * (pair // 6)


@pytest.mark.slow
def test_a_training_run_outlives_a_crash_in_the_middle(pipeline, tmp_path):
    with ChatServer(compare, crash_after=18) as server:

        def nurse() -> None:
            server.stopped.wait(60)
            time.sleep(0.5)
            server.crash_after = None
            server.start()

        thread = threading.Thread(target=nurse)
        thread.start()
        metrics = trained(server, pipeline, tmp_path, tries=14)
        thread.join()
    assert [m["unscored"] for m in metrics] == [0, 0, 0]
    assert sum(m["calls/win_rate/unreachable"] for m in metrics) > 0
    assert sum(m["calls/win_rate/requests"] for m in metrics) == 36


@pytest.mark.slow
def test_a_server_that_is_gone_for_good_stops_the_run_with_a_sentence(pipeline, tmp_path):
    with (
        ChatServer(compare, crash_after=14) as server,
        pytest.raises(UserError, match=r"no group of this iteration has a score"),
    ):
        trained(server, pipeline, tmp_path, tries=2)
    lines = [json.loads(line) for line in (tmp_path / "judge.jsonl").read_text().splitlines()]
    assert {line.get("failed") for line in lines[-6:]} == {"unreachable"}


def test_a_judge_in_a_notebook():
    """A loop is running there already."""

    async def cell() -> list[float]:
        reward = load("judge", url=server.url, model="tiny")
        return reward(Samples(["4"], ["x"], torch.zeros(1, dtype=torch.long))).tolist()

    with ChatServer(lambda words, pictures: "Score: 3") as server:
        assert asyncio.run(cell()) == [0.5]
