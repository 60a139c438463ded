"""The second entry of CI: every slow test belongs to a suite, and the record says what passed."""

import json
import re
from pathlib import Path

import pytest

from flowrl.paths import PROJECT
from scripts import long_suites
from scripts.long_suites import SUITES, Suite


def test_every_slow_test_belongs_to_a_suite() -> None:
    slow = re.compile(r"mark\.(slow|browser|quick_cases)\b")
    files = [f for f in (PROJECT / "tests").rglob("test_*.py") if slow.search(f.read_text())]
    words = {word for suite in SUITES for words in suite.commands for word in words}
    named = [PROJECT / word for word in words if word.startswith("tests/")]
    left = [f for f in files if not any(f == at or at in f.parents for at in named if at.exists())]
    assert not left, f"scripts/long_suites.py names no folder of {left}"


def test_every_command_names_a_file_that_is_there() -> None:
    words = [word for suite in SUITES for words in suite.commands for word in words]
    named = [word for word in words if word.startswith(("scripts/", "tests/"))]
    assert all((PROJECT / word).exists() for word in named)
    assert len({suite.name for suite in SUITES}) == len(SUITES)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of its own, on a clean tree."""
    file = tmp_path / "long.json"
    monkeypatch.setattr(long_suites, "RECORD", file)
    monkeypatch.setattr(long_suites, "is_clean", lambda commit: True)
    return file


def suite(name: str, code: str) -> Suite:
    return Suite(name, "a test", (("-c", code),))


def test_passes_and_failures_are_recorded(record: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good, bad = suite("good", "print('ran good')"), suite("bad", "raise SystemExit(3)")
    assert long_suites.main([], [good, bad]) == 1
    head = long_suites.git("rev-parse", "HEAD")
    kept = json.loads(record.read_text())
    assert kept["good"]["passed"]["commit"] == kept["bad"]["failed"]["commit"] == head
    assert "ran good" in (out := capfd.readouterr().out) and "1 failed: bad" in out
    # what passed on this commit is left out, and what passes now loses its failure
    assert long_suites.main(["--stale"], [good, suite("bad", "print('ran bad')")]) == 0
    out = capfd.readouterr().out
    assert "ran bad" in out and "ran good" not in out
    assert set(json.loads(record.read_text())["bad"]) == {"passed"}
    # a failure keeps the last pass
    assert long_suites.main(["bad"], [good, bad]) == 1
    assert set(json.loads(record.read_text())["bad"]) == {"passed", "failed"}
    assert long_suites.main(["--list"], [good, bad]) == 0
    assert re.search(r"bad +passed .* on .*; failed .*: a test", capfd.readouterr().out)


def test_a_changed_tree_is_not_recorded(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_suites, "is_clean", lambda commit: False)
    assert long_suites.main([], [suite("good", "")]) == 0 and not record.exists()


def test_none_begins_after_its_minutes_and_no_other_name(
    record: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert long_suites.main(["--minutes", "-1"], [suite("good", "print('ran')")]) == 0
    assert "ran\n" not in capfd.readouterr().out and not record.exists()
    with pytest.raises(SystemExit):
        long_suites.main(["gud"], [suite("good", "")])
    assert "no suite is called gud; choose from good" in capfd.readouterr().err
