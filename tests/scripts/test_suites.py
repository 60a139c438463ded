"""The benchmark suites: what they fit and write, and that they run at the tiniest sizes."""

import json

import pytest
import torch

from scripts.benchmarks import suites
from scripts.benchmarks.suite_runs import Floor, Opened, power_law
from tests.support import runs

KEPT = {"suite": "floor", "repeats": 2, "machine": "one core", "table": [["case"], ["demo"]]}


def test_a_power_law_and_where_it_bends():
    slope, steps = power_law([1, 2, 4], [3.0, 12.0, 48.0])
    assert slope == pytest.approx(2.0) and steps == pytest.approx([2.0, 2.0])
    slope, steps = power_law([1, 2, 4], [1.0, 1.0, 4.0])
    assert slope == pytest.approx(1.0) and steps == pytest.approx([0.0, 2.0])


def test_the_page_is_written_from_the_files_and_can_be_written_again(tmp_path):
    page = f"before\n{suites.BEGIN}\nold\n{suites.END}\nafter\n"
    with pytest.raises(ValueError, match="no files of suites"):
        suites.write_page(page, tmp_path)
    (tmp_path / "floor.json").write_text(json.dumps(KEPT))
    new = suites.write_page(page, tmp_path)
    assert new.startswith("before\n") and new.endswith("after\n") and "old" not in new
    assert "| case |\n|---|\n| demo |" in new and "one core" in new
    assert suites.write_page(new, tmp_path) == new


def test_without_trl_its_suite_is_a_sentence(monkeypatch):
    monkeypatch.setattr(suites, "find_spec", lambda _: None)
    assert "TRL is not installed" in suites.trl(1, True)[1][0]


def test_the_floor_makes_the_calls_of_an_iteration(pipeline, tmp_path):
    """As many rows, with gradients and without, as the next iteration's networks see."""
    recipe = runs.FLOW_GRPO | {"group": 2}
    tree = runs.tree(pipeline, tmp_path, recipe, alarms="off", rows_per_call=2)
    kept = Opened.of(tree, tmp_path / "run")
    floor, seen = Floor.of(kept), {True: 0, False: 0}

    def count(module: torch.nn.Module, args: tuple, named: dict) -> None:
        seen[torch.is_grad_enabled()] += len(named["hidden_states"])

    (denoiser,) = kept.session.learner.policy.roots().values()
    hook = denoiser.register_forward_pre_hook(count, with_kwargs=True)
    floor.turn()
    again = dict(seen)
    kept.turn()
    hook.remove()
    assert seen[True] == 2 * again[True] > 0 and seen[False] == 2 * again[False] > 0
    assert {call.module for call in floor.calls} > {denoiser}, "encoders and the decoder too"
    assert len(floor.scored) == 1
    assert floor.rows["graded"] == again[True]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["floor", "sharing", "growth", "trl", "start", "servers"])
def test_a_suite_runs_at_the_tiniest_sizes(tmp_path, capsys, name):
    given = suites.Arguments(out=tmp_path, suites=(name,), repeats=1, tiny=True)
    assert suites.main(given) == 0
    kept = json.loads((tmp_path / f"{name}.json").read_text())
    first, *rest = kept["table"]
    assert rest and all(len(row) == len(first) for row in rest)
    assert f"| {first[0]} |" in capsys.readouterr().out
