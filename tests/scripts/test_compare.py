"""scripts/benchmarks/compare.py: its sums, its choice, and a short comparison from nothing."""

import json
import subprocess
import sys
from pathlib import Path

import compare
import compare_report
import pytest
import yaml

from flowrl.recipes.table import IMAGE_RECIPES
from flowrl.settings.read import check_plan, run_from
from tests.support.runs import environment


def line(iteration: int, sampling: float, accuracy: float | None, diversity: float = 0.4) -> dict:
    found = {"iteration": iteration, "count/sampling": sampling, "seconds/cpu": 1.0}
    if accuracy is None:
        return found
    return found | {"held_out/shapes.strict": accuracy, "held_out/image/diversity": diversity}


ACCURACY = "held_out/shapes.strict"
LOOKS = compare_report.Looks(ACCURACY, "held_out/image/diversity", 0.85, "flow_grpo")
CURVE = [line(0, 0, 0.7), line(1, 10, None), line(2, 10, 0.8), line(3, 10, None), line(4, 10, 0.9)]


def test_what_was_spent_is_summed_up_to_each_evaluation():
    found = compare_report.points(CURVE, ("count/sampling",), ACCURACY)
    assert found == [(0, 0.7), (20, 0.8), (40, 0.9)]
    both = compare_report.points(CURVE, ("count/sampling", "seconds/cpu"), ACCURACY)
    assert both[1] == (23, 0.8)


@pytest.mark.parametrize(
    ("goal", "spent"), [(0.85, 30.0), (0.75, 10.0), (0.6, 0.0), (0.95, None), (0.9, 40.0)]
)
def test_the_goal_is_reached_between_evaluations(goal, spent):
    known = compare_report.points(CURVE, ("count/sampling",), ACCURACY)
    reached = compare_report.reach(known, goal)
    assert reached == (None if spent is None else pytest.approx(spent))


def test_the_spread_tells_how_many_seeds_came_there():
    assert compare_report.spread([1.0, 3.0], "{:.0f}".format) == "2 (1 to 3)"
    assert compare_report.spread([1.0, None, 3.0], "{:.0f}".format) == "2 (1 to 3), 2 of 3 seeds"
    assert compare_report.spread([None], "{:.0f}".format) == "not reached"


def test_watched_scores_are_read_where_the_goal_is_crossed():
    looks = LOOKS._replace(watch=("held_out/stricter",))
    curve = [{"held_out/stricter": 0.5 + 0.1 * i, **each} for i, each in enumerate(CURVE)]
    assert compare_report.where(curve, looks, "held_out/stricter") == pytest.approx(0.8)
    assert compare_report.where(curve, looks._replace(goal=0.95), "held_out/stricter") is None
    curve[-1]["held_out/image/diversity"] = 0.4
    text = compare_report.row("nft", {"chosen": 0, "curves": [curve] * 4}, looks)
    assert "0.900 | 0.000 | +0.200 +- 0.000 |" in text and "0.500 -> 0.900 | 0.800 |" in text
    heads = compare_report.table({"nft": {"chosen": 0, "curves": [curve]}}, looks).splitlines()
    assert len({line.count("|") for line in heads}) == 1


def test_intervals_are_over_seeds_and_not_over_samples():
    ends = [[*CURVE[:-1], {**CURVE[-1], ACCURACY: end}] for end in (0.85, 0.9, 0.98)]
    assert compare_report.gain(ends, ACCURACY) == "+0.210 +- 0.163"
    single = compare_report.row("nft", {"chosen": 0, "curves": [CURVE]}, LOOKS._replace(keep=None))
    assert "0.900 | one seed |" in single


def written(root: Path, ends: list[tuple[float, float]]) -> list[compare.Job]:
    """Finished trials of one iteration with (accuracy, diversity) at their ends."""
    jobs = []
    for i, (accuracy, diversity) in enumerate(ends):
        job = compare.Job("nft", f"trial-{i}", {"train": {"iterations": 1}}, root)
        job.folder.mkdir(parents=True)
        lines = [line(0, 0, 0.7), line(1, 10, accuracy, diversity)]
        (job.folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        jobs.append(job)
    return jobs


@pytest.mark.parametrize(
    ("ends", "place"),
    [
        ([(0.8, 0.4), (0.9, 0.39), (0.95, 0.2)], 1),  # the best of those that keep their diversity
        ([(0.8, 0.3), (0.9, 0.1)], 0),  # none does: the one that keeps most
    ],
)
def test_a_trial_is_chosen_by_accuracy_among_the_diverse(tmp_path, ends, place):
    assert compare.chosen(written(tmp_path, ends), LOOKS) == place


def test_without_a_diversity_to_keep_the_most_accurate_trial_is_chosen(tmp_path):
    jobs = written(tmp_path, [(0.8, 0.4), (0.9, 0.1)])
    assert compare.chosen(jobs, LOOKS._replace(keep=None)) == 1


def test_nothing_is_chosen_while_a_trial_is_missing(tmp_path):
    jobs = written(tmp_path, [(0.8, 0.4), (0.9, 0.4)])
    (jobs[1].folder / "metrics.jsonl").unlink()
    assert compare.chosen(jobs, LOOKS) is None


def test_every_recipe_of_images_is_compared_with_as_many_trials():
    tables = [
        yaml.safe_load(Path(f"configs/compare/{name}.yaml").read_text())
        for name in ("demo", "feedback", "gradients")
    ]
    rows = [(name, row) for table in tables for name, row in table["methods"].items()]
    assert {len(row["trials"]) for _, row in rows} == {2}
    assert {row.get("recipe", name) for name, row in rows} == set(IMAGE_RECIPES)


@pytest.mark.parametrize("name", ["demo", "feedback", "gradients", "lag", "lag_text", "stale"])
def test_every_run_of_a_comparison_has_a_plan(name):
    table = yaml.safe_load(Path(f"configs/compare/{name}.yaml").read_text())
    for method in table["methods"]:
        tried = compare.trials(table, method, Path())
        assert bool(tried) == (len(table["methods"][method]["trials"]) > 1)
        for job in tried or compare.final_runs(table, method, Path()):
            check_plan(run_from(job.settings, method))


@pytest.mark.slow
def test_a_short_comparison_runs_reports_and_is_not_made_again(tmp_path):
    table = yaml.safe_load(Path("configs/compare/demo.yaml").read_text())
    table["seeds"] = [0]
    table["common"]["evaluate"] |= {"samples": 16, "steps": 4}
    table["common"]["prompts"]["per_iteration"] = 2
    table["methods"] = {name: table["methods"][name] for name in ("flow_grpo",)}
    for row in table["methods"].values():
        row |= {"trials": row["trials"][:1], "iterations": 8, "trial_iterations": 1}
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(table))
    words = ["--table", str(tmp_path / "table.yaml"), "--folder", str(tmp_path / "out")]
    command = [sys.executable, "scripts/benchmarks/compare.py", *words]
    first = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    assert "flow_grpo seed-0" in first.stdout
    written = (tmp_path / "out" / "table.md").read_text()
    assert written.count("\n") == 3
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(found["last"]) == {"flow_grpo"}
    again = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    assert written in again.stdout
    assert (tmp_path / "out" / "table.md").read_text() == written
