"""The death of Ray's head is a sentence."""

import socket
import time

import pytest

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


@pytest.mark.parametrize("head_lives", [True, False])
def test_a_process_that_ends_with_the_head_has_last_words(capfd, head_lives):
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = head.LastWords("127.0.0.1", server.getsockname()[1], "the head has ended")
        if not head_lives:
            server.close()
        assert words._process.stdin is not None
        words._process.stdin.close()  # as the end of this process would
        assert words._process.wait(20) == 0
    assert capfd.readouterr().err == ("" if head_lives else "the head has ended\n")


def test_a_process_that_goes_on_without_ray_has_none(capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = head.LastWords("127.0.0.1", server.getsockname()[1], "the head has ended")
    words.close()
    assert words._process.returncode == 0 and capfd.readouterr().err == ""
