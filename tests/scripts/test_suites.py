"""The benchmark suites: what they fit and write, and that they run at the tiniest sizes."""

import json

import pytest

from scripts.benchmarks import suites
from scripts.benchmarks.suite_runs import power_law

KEPT = {"suite": "texts", "repeats": 2, "machine": "one core", "table": [["case"], ["demo"]]}


def test_a_power_law_and_where_it_bends():
    slope, steps = power_law([1, 2, 4], [3.0, 12.0, 48.0])
    assert slope == pytest.approx(2.0) and steps == pytest.approx([2.0, 2.0])
    slope, steps = power_law([1, 2, 4], [1.0, 1.0, 4.0])
    assert slope == pytest.approx(1.0) and steps == pytest.approx([0.0, 2.0])


def test_the_page_is_written_from_the_files_and_can_be_written_again(tmp_path):
    page = f"before\n{suites.BEGIN}\nold\n{suites.END}\nafter\n"
    with pytest.raises(ValueError, match="no files of suites"):
        suites.write_page(page, tmp_path)
    (tmp_path / "texts.json").write_text(json.dumps(KEPT))
    new = suites.write_page(page, tmp_path)
    assert new.startswith("before\n") and new.endswith("after\n") and "old" not in new
    assert "| case |\n|---|\n| demo |" in new and "one core" in new
    assert suites.write_page(new, tmp_path) == new


def test_without_trl_its_suite_is_a_sentence(monkeypatch):
    monkeypatch.setattr(suites, "find_spec", lambda _: None)
    assert "TRL is not installed" in suites.trl(1, True)[1][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["floor", "texts", "growth", "trl"])
def test_a_suite_runs_at_the_tiniest_sizes(tmp_path, capsys, name):
    given = suites.Arguments(out=tmp_path, suites=(name,), repeats=1, tiny=True)
    assert suites.main(given) == 0
    kept = json.loads((tmp_path / f"{name}.json").read_text())
    first, *rest = kept["table"]
    assert rest and all(len(row) == len(first) for row in rest)
    assert f"| {first[0]} |" in capsys.readouterr().out
