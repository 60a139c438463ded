"""The death of Ray's head is a sentence."""

import socket
import time

from flowrl.run.workers import head


def test_a_head_that_has_gone_ends_the_process_with_a_sentence(monkeypatch):
    monkeypatch.setattr(head, "PULSE", 0.02)
    monkeypatch.setattr(head, "LIMIT", 0.3)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        watched = head.RayHead(address, said.append)
        time.sleep(0.6)
        assert not said
    watched._thread.join(20)
    assert len(said) == 1 and f"head of Ray at {address} has ended" in said[0]
    watched.close()


def test_a_run_that_ends_first_says_nothing():
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        watched = head.RayHead(f"127.0.0.1:{server.getsockname()[1]}", said.append)
        watched.close()
    assert not said
