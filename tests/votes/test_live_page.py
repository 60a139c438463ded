"""The page of a run that asks, which turns from one folder of votes to the next while people
vote."""

import threading
import time

import pytest

from flowrl.votes.live_page import RATER, LivePage
from flowrl.votes.log import VoteLog
from flowrl.votes.serve import PageAddress
from flowrl.votes.simulated import SimulatedPerson
from tests.support.voting import written_plan

PAIRS = 4


def test_a_page_that_turns_while_somebody_votes_keeps_each_vote_in_its_log(tmp_path):
    """With `ask.wait: false` nobody waits for the votes on the pairs before."""
    plans = [written_plan(tmp_path / name, pairs=PAIRS, seed=1) for name in ("first", "second")]
    looks, looked, turned = [], threading.Event(), threading.Event()

    def taste(image, prompt):
        looks.append(prompt)
        if len(looks) == 5:  # at the third pair
            looked.set()
            turned.wait(30)
        return 0.0

    page = LivePage(tmp_path, PageAddress(port=0), SimulatedPerson(taste, 1.0))
    try:
        page.turn_to(tmp_path / "first", "0")
        assert looked.wait(30)
        page.turn_to(tmp_path / "second", "1")
        turned.set()
        deadline = time.monotonic() + 30
        while not VoteLog.read(tmp_path / "second", plans[1]).finished:
            page.check()
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        turned.set()
        page.close()
    first, second = (
        VoteLog.read(tmp_path / name, plan).raters[RATER]
        for name, plan in zip(("first", "second"), plans, strict=True)
    )
    assert (len(first.given), len(second.given)) == (2, PAIRS)
    assert not set(first.shown) & set(second.shown)


def test_a_closed_log_writes_into_no_other_file(tmp_path):
    """The number of a closed file is given to the next one that is opened."""
    plan = written_plan(tmp_path / "votes", pairs=2)
    with VoteLog.opened(tmp_path / "votes", plan) as log:
        showing = log.show(RATER)
    assert showing is not None
    other = tmp_path / "checkpoint"
    other.write_bytes(b"x" * 4096)
    with other.open("r+b"), pytest.raises(OSError, match="the log of votes is closed"):
        log.vote(RATER, showing, "left", 1.0)
    assert other.read_bytes() == b"x" * 4096
