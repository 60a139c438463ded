"""Healthy ranges: the page and the code have the same, an alarm tells each that is left, once."""

import re

import pytest

from flowrl.paths import PROJECT
from flowrl.run.watch.alarms import Alarms
from flowrl.run.watch.ranges import RANGES, mismatch_range, ranges_of

PAGE = (PROJECT / "docs" / "metrics.md").read_text()
CELLS = {
    name: row[-2]
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for row in [re.split(r"(?<!\\)\|", line)]
    for name in re.findall(r"`([^`]+)`", row[1])
}
EVERY = ranges_of(exact=True, compares=True)
NUMBER = re.compile(r"\b(?:below|above) [\d.]+|[\d.]+ to [\d.]+")
# ranges that other alarms watch, relative to a run's own start or base
ELSEWHERE = {
    "unscored_share", "image/diversity", "sound/diversity", "text/stopped", "text/distinct",
    "signal", "held_out/NAME", "reward_std", "text/met", "margin", "mismatch_max",
    "held_out_gain_error/NAME", "reward_std/NAME", "behind",
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_the_page_prints_the_range_of_the_code(name: str) -> None:
    assert EVERY[name].words in CELLS[name].replace("is healthy", "")
    if name == "mismatch":
        assert mismatch_range(exact=False).words in CELLS[name]


def test_every_range_of_the_page_is_watched() -> None:
    named = {name for name, cell in CELLS.items() if NUMBER.search(cell)}
    assert named - EVERY.keys() <= ELSEWHERE
    assert EVERY.keys() <= CELLS.keys()


def outside(name: str) -> float:
    low, high, *_ = EVERY[name]
    return high + 0.1 if high < float("inf") else low - 0.1


@pytest.mark.parametrize("name", EVERY)
def test_an_alarm_tells_a_metric_outside_of_its_range_once(name: str) -> None:
    alarms, healthy = Alarms(), EVERY[name]
    inside = healthy.low if healthy.low > -float("inf") else healthy.high
    for _ in range(20):
        assert not alarms.ranges({name: inside}, EVERY, [""])
    for _ in range(healthy.patience - 1):
        assert not alarms.ranges({name: outside(name)}, EVERY, [""])
    assert not alarms.ranges({name: inside}, EVERY, [""]), "one good iteration counts anew"
    told = [alarms.ranges({name: outside(name)}, EVERY, [""]) for _ in range(30)]
    assert [len(each) for each in told] == [int(k == healthy.patience - 1) for k in range(30)]
    (text,) = told[healthy.patience - 1]
    assert name in text and healthy.words in text and healthy.remedy in text


def test_both_models_of_a_joint_run_are_watched() -> None:
    alarms, models = Alarms(), ["rewriter", ""]
    for _ in range(RANGES["ratio"].patience - 1):
        assert not alarms.ranges({"ratio": 1.0, "rewriter/ratio": 2.0}, EVERY, models)
    (text,) = alarms.ranges({"ratio": 1.0, "rewriter/ratio": 2.0}, EVERY, models)
    assert text.startswith("rewriter/ratio is 2, healthy is 0.9 to 1.1")


def test_silent_data_is_told_after_ten_iterations_and_again_after_ten_more() -> None:
    alarms = Alarms()
    silent = {"signal": 0.0, "grad_norm": 0.3}  # a KL penalty has a gradient all the same
    told = [alarms.silent(silent, [""]) for _ in range(20)]
    assert [len(each) for each in told] == [int(k in (9, 19)) for k in range(20)]
    assert not alarms.silent({"signal": 0.1, "grad_norm": 0.0}, [""])
    told = [alarms.silent({"grad_norm": 0.0}, [""]) for _ in range(10)]  # of a reward's gradient
    assert [len(each) for each in told] == [0] * 9 + [1]


def test_unread_verdicts_of_one_winner_are_told() -> None:
    alarms = Alarms()
    judge = "calls/judge/unread"
    assert not alarms.unread({f"{judge}_first": 6.0, f"{judge}_second": 6.0})
    assert not alarms.unread({f"{judge}_first": 3.0}), "too few"
    (text,) = alarms.unread({f"{judge}_second": 9.0})
    assert text == "9 of 9 unread verdicts of judge are for the sample that is shown second"
    assert not alarms.unread({f"{judge}_second": 9.0})


@pytest.mark.parametrize(("samples", "surely"), [(64, 0.212), (800, 0.06), (100_000, 0.06)])
def test_the_smallest_fall_that_is_told(samples: int, surely: float) -> None:
    """3 standard errors of the independent difference, at least 0.15 spreads."""
    alarms = Alarms(base={"held_out/strict": 0.7, "held_out_std/strict": 0.4})
    least, most = alarms.smallest_fall("strict", samples)
    assert least == pytest.approx(0.06) and most == pytest.approx(surely, abs=1e-3)
    now = {"held_out_std/strict": 0.4, "held_out_gain_error/strict": 0.4 * (2 / samples) ** 0.5}
    for fall, rings in ((1.01 * most, 1), (0.99 * most, 0)):
        again = Alarms(base=dict(alarms.base), last={"iteration": 0.0, **alarms.base})
        assert len(again.compare({**now, "held_out/strict": 0.7 - fall}, 20)) == rings
