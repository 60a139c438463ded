"""A benchmark that is cut off loses nothing: what it keeps, and with what it goes on."""

import json

import pytest
import torch

from scripts.benchmarks import benchmark
from scripts.benchmarks.benchmark_results import NOT_ENDED, Case, Results

FOUND = {
    "seconds": 2.0, "ratio": 1.25, "row_frozen": 0.01, "row_graded": 0.03,
    "peak_bytes": 3 * 2**30, "estimated_bytes": 2**30,
}  # fmt: skip


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "out")


def arguments(folder, **more):
    given = {"models": ("sd35m",), "recipes": ("mix_grpo",), "tiny": True, "out": folder}
    return benchmark.Arguments(**given | more)


@pytest.mark.slow
def test_a_second_call_goes_on_where_the_first_was_killed(results, monkeypatch, capsys):
    done = []

    def measured(tree, folder, iterations):
        way = "checkpointing" if tree["train"].get("gradient_checkpointing") else "plain"
        done.append(way)
        if len(done) == 1:
            raise KeyboardInterrupt
        if len(done) == 3:
            raise torch.OutOfMemoryError("no room\nand more")
        return dict(FOUND)

    monkeypatch.setattr(benchmark, "measured", measured)
    monkeypatch.setattr(benchmark, "write", lambda subject, folder, dtype: folder.mkdir() or folder)
    given = arguments(results.folder, ways=("plain", "checkpointing", "compile"))
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(given)
    assert benchmark.main(given) == 0
    assert done == ["plain", "checkpointing", "plain"]  # the killed one is not tried again
    said = capsys.readouterr().out
    assert f"| sd35m | mix_grpo | plain | {NOT_ENDED} |" in said
    assert "| sd35m | mix_grpo | checkpointing | 2.00 | 1.25 | 0.010, 0.030 | 3.0 (1.0) |" in said
    assert "| sd35m | mix_grpo | compile | no room |" in said and "all are done" in said
    assert benchmark.main(given) == 0 and len(done) == 3


def test_no_case_begins_that_would_not_end(results, monkeypatch, capsys):
    case = Case("wan13b", "mix_grpo", "plain")
    assert not results.fits(case, 300, 540) and results.fits(case, 400, 540)
    results.save(Case("wan13b", "flow_grpo", "plain"), FOUND | {"wall": 290.0})
    assert results.fits(case, 300, 540) and not results.fits(case, 280, 540)
    assert not results.fits(Case("sd35m", "mix_grpo", "plain"), 300, 540)  # of another model

    monkeypatch.setattr(benchmark, "measured", lambda *_: dict(FOUND))
    monkeypatch.setattr(benchmark, "write", lambda subject, folder, dtype: folder.mkdir() or folder)
    given = arguments(results.folder, ways=("plain", "compile"), seconds=0)
    assert benchmark.main(given) == 1  # one at least
    assert "1 cases are left" in capsys.readouterr().out
    files = sorted(file.name for file in results.folder.iterdir())
    assert files == ["sd35m-mix_grpo-plain.json", "wan13b-flow_grpo-plain.json"]
    assert json.loads((results.folder / files[0]).read_text())["ratio"] == 1.25
