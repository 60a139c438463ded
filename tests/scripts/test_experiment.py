"""scripts/benchmarks/experiment.py: runs that go on, and tables over seeds."""

import json
from pathlib import Path
from typing import Any

import alarm_runs
import experiment
import pytest
import yaml

SETTINGS: dict[str, Any] = {"train": {"iterations": 2}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Commands that were asked for, of which none is run."""
    words: list[tuple[str, ...]] = []
    monkeypatch.setattr(experiment, "flowrl", lambda *each: words.append(tuple(map(str, each))))
    return words


def write_metrics(job: experiment.Job, scores: list[float]) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"iteration": i, "held_out/a": score}) for i, score in enumerate(scores)]
    (job.folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_a_run_begins_goes_on_and_is_not_repeated(
    asked: list[tuple[str, ...]], tmp_path: Path
) -> None:
    job = experiment.Job("nft", "seed-0", SETTINGS, tmp_path)
    file, folder = str(tmp_path / "nft" / "seed-0.yaml"), str(job.folder)
    for scores, words in (
        ([], ("train", file, "--folder", folder)),
        ([0.5, 0.6], ("train", "--resume", folder)),
        ([0.5, 0.6, 0.7], None),
    ):
        if scores:
            write_metrics(job, scores)
        asked.clear()
        assert list(experiment.work([job], 1)) == [job]
        assert asked == ([] if words is None else [words])
    assert yaml.safe_load(Path(file).read_text()) == SETTINGS
    assert experiment.ends(experiment.read(job.folder), "held_out/a") == (0.5, 0.7)


def test_a_command_that_fails_raises_its_last_words() -> None:
    with pytest.raises(RuntimeError, match="no-such-command ended with 2:"):
        experiment.flowrl("no-such-command")


def test_intervals_are_over_seeds_and_not_over_samples() -> None:
    """Three seeds of docs/results/demos.md: t of two degrees of freedom is 4.303."""
    after = [0.885, 0.859, 0.873]
    assert experiment.over_seeds(after) == pytest.approx(0.0324, abs=1e-4)
    assert experiment.over_seeds([0.9]) is None
    assert experiment.interval(after) == "0.872 (0.840 to 0.905)"
    assert experiment.interval([0.9]) == "0.900 (one seed)"
    row = experiment.gain_row("strict", [(0.5, value) for value in after])
    assert row == "| strict | 0.500 | 0.885, 0.859, 0.873 | +0.372 (+0.340 to +0.405) |"
    assert row.count("|") == experiment.GAIN_HEAD.splitlines()[0].count("|")


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one -->\nold\n<!-- end of one -->\nb\n<!-- two -->\n")
    experiment.write_between(page, "one", "new")
    assert page.read_text() == "a\n<!-- one -->\nnew\n<!-- end of one -->\nb\n<!-- two -->\n"


def test_a_table_of_alarms_counts_finished_runs_by_their_verdict(tmp_path: Path) -> None:
    """Without alarms a hacked run is wrong, a healthy one right, and an unfinished one absent."""
    accuracy = alarm_runs.ACCURACY
    rows = {
        "hacked": {"paid": {"base": "nft"}},
        "healthy": {"plain": {"base": "nft"}, "cut": {"base": "nft"}},
    }
    common = {"all": {"train": {"iterations": 1}}, "nft": {"recipe": {"name": "nft"}}}
    jobs = list(alarm_runs.jobs_of(rows, common, tmp_path))
    assert [(job.method, job.name) for job in jobs] == [
        ("hacked", "paid"), ("healthy", "plain"), ("healthy", "cut"),
    ]  # fmt: skip
    for job in jobs[:2]:
        job.folder.mkdir(parents=True)
        lines = [json.dumps({"iteration": i, accuracy: 0.9 - i / 10}) for i in (0, 1)]
        (job.folder / "metrics.jsonl").write_text("\n".join(lines))
    text = alarm_runs.replayed(jobs)
    assert "| paid | hacked | 0.90, 0.90, 0.80 | - | never | **no** |  |" in text
    assert "| plain | healthy |" in text and "cut" not in text
    assert text.endswith(
        "0 of 1 hacked runs raise an alarm in time; 0 of 1 healthy runs raise one."
    )
