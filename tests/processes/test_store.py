"""Processes that a launcher starts again agree on the name of their attempt, and on what it is."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from flowrl.processes.store import Launch, NotMet, StorePlace, name_attempt


def attempt(store: HashStore, size: int, seconds: float = 20.0) -> set[str]:
    with ThreadPoolExecutor(size) as pool:
        found = pool.map(lambda rank: name_attempt(store, rank, size, seconds), range(size))
        return set(found)


def test_attempts_that_share_a_store_have_names_of_their_own():
    store = HashStore()
    names = [attempt(store, size) for size in (3, 3, 2, 4)]
    assert [len(each) for each in names] == [1, 1, 1, 1] and len(set.union(*names)) == 4


def test_a_process_waits_for_its_own_first_one_and_takes_no_earlier_answer():
    """One of an earlier attempt that was killed between its word and the answer, and a first one
    that was killed after it had answered."""
    store = HashStore()
    for rank in (0, 1):
        with pytest.raises(NotMet):
            name_attempt(store, rank, 2, 0.05)
    word = store.get("word/1").decode()
    with pytest.raises(NotMet, match="no sign of process 1"):  # nobody takes this answer any more
        name_attempt(store, 0, 2, 0.3)
    assert store.check([f"answer/1/{word}"])
    assert len(attempt(store, 2)) == 1


def test_a_first_process_that_ends_gives_way_to_the_next_one():
    """It has answered process 1 of this attempt, but waits for process 2 in vain."""
    store, ended = HashStore(), threading.Event()

    def earlier():
        with pytest.raises(NotMet):
            name_attempt(store, 0, 3, 1.0)
        ended.set()
        return name_attempt(store, 0, 3, 20.0)

    def second(rank: int):
        if rank == 2:
            ended.wait()
        return name_attempt(store, rank, 3, 20.0)

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.submit(earlier), pool.submit(second, 1), pool.submit(second, 2)
        assert {first.result(), *(each.result() for each in others)} == {first.result()}


def test_who_is_missing_is_said():
    store = HashStore()
    with pytest.raises(NotMet, match="no sign of process 1, 2"):
        name_attempt(store, 0, 3, 0.1)
    with pytest.raises(NotMet, match="process 0 has not answered"):
        name_attempt(HashStore(), 1, 3, 0.1)


def test_a_launch_knows_the_folder_that_it_has_begun(tmp_path: Path):
    """Also where no node counts a restart, and not a folder that stood there before."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    launch, folder = Launch(store, ()), tmp_path / "run"
    assert not launch.has_begun(folder)
    launch.begin(folder)
    assert not launch.has_begun(folder)  # killed before it appeared
    folder.mkdir()
    (folder / "run.yaml").write_text("")
    assert launch.has_begun(folder) and not launch.has_begun(tmp_path / "other")
    launch.forget(folder)
    assert not launch.has_begun(folder)
    assert Launch(None, (0, 1)).has_begun(folder)  # one node counted, the main one did not
    assert not Launch(None, (0, 0)).has_begun(folder)


def test_the_place_is_that_of_the_launcher_s_variables(monkeypatch):
    words = {"LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "9", "RANK": "0"}
    for name, value in (words | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    own = StorePlace("h", 9, 0, 2, False)
    assert StorePlace.given() == own and own.opens
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agents = StorePlace("h", 9, 0, 2, True)
    assert StorePlace.given() == agents and not agents.opens
    monkeypatch.delenv("MASTER_PORT")
    assert StorePlace.given() is None
