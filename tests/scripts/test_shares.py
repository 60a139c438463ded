"""Shares of an iteration's predicted seconds: what bounds a call decides what a kernel costs."""

import pytest

from scripts.benchmarks import shares
from scripts.benchmarks.roofline import BANDWIDTH, Seconds
from scripts.benchmarks.shares import (
    LAUNCH,
    ROUND_TRIP,
    SHARES,
    Kernels,
    Outside,
    outside_of,
    shared,
)


def test_a_call_is_bound_by_its_work_or_by_its_launches():
    outside = Outside(Kernels(10, 4.0), Kernels(3, 1.0), waits=0.5)
    busy = shared(Seconds(0.2, 0.1, 100), outside, 1000, calls=3)
    assert busy["products"] == pytest.approx(0.6) and busy["kernels"] == pytest.approx(0.3)
    assert busy["launches"] == 0 and busy["flowrl"] == pytest.approx(3 * 10 * 2e-6)
    assert busy["libraries"] == pytest.approx(3 * 3 * 2e-6)
    assert busy["waits"] == pytest.approx(3 * 0.5 * ROUND_TRIP)
    idle = shared(Seconds(1e-4, 1e-4, 1000), outside, 1000, calls=1)
    assert idle["launches"] == pytest.approx(1000 * LAUNCH - 2e-4)
    assert idle["flowrl"] == pytest.approx(10 * LAUNCH)
    many = shared(Seconds(0.2, 0.1, 100), outside, 1e9, calls=1)  # bytes outweigh launches
    assert many["flowrl"] == pytest.approx(4e9 / BANDWIDTH)
    assert many["libraries"] == pytest.approx(1e9 / BANDWIDTH)


def test_a_line_of_a_library_is_not_flowrl_s():
    lines = [
        {"phase": "sampling", "line": "samplers/tokens.py:1", "kernel": 2, "kernel_bytes": 80},
        {"phase": "sampling", "line": "flowrl/a.py:2 > samplers/host.py:3", "kernel": 2},
        {"phase": "sampling", "line": "flowrl/a.py:2 > transformers/b.py:3", "kernel": 6},
        {"phase": "training", "line": "flowrl/c.py:4", "kernel": 100, "kernel_bytes": 1000},
    ]
    found = {"by_line": lines, "calls": {"sampling": 2}, "syncs_per_call": {"sampling": 0.5}}
    assert outside_of(found, "sampling", numbers=10) == Outside(
        Kernels(2, 4), Kernels(3, 0), waits=0.5
    )


def test_a_row_of_the_table_has_shares_of_the_whole_iteration():
    half = dict.fromkeys(SHARES, 0.0) | {"products": 1.0}
    other = dict.fromkeys(SHARES, 0.0) | {"flowrl": 3.0}
    first, second = shares.rows_of_table("demo", {"sampling": half, "training": other})
    assert first == "| demo | sampling | 1 s | 25.0 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 |"
    assert second == "| demo | training | 3 s | 0.0 | 0.0 | 0.0 | 75.0 | 0.0 | 0.0 | 0.0 |"


def test_an_unknown_subject_is_refused(capsys):
    with pytest.raises(SystemExit):
        shares.main(["nothing"])
    assert "no subject is called nothing" in capsys.readouterr().err
