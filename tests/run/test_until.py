"""Runs that end before their last iteration: by samples, by a held-out score, by hours."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flowrl.errors import UserError
from flowrl.run.start import folder_state, resume, start
from flowrl.run.watch.until import early_end, note_goal
from flowrl.session.progress import Progress
from flowrl.settings.read import override, run_from, run_of
from tests.support import text_runs, tiny_lm


def run_with(tmp_path, *options):
    model = tiny_lm.write(tmp_path / "lm")
    return override(
        run_from(text_runs.tree(model, tmp_path, text_runs.GRPO, iterations=4), "test"), options
    )


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_run_ends_by_samples_stays_ended_and_goes_on_with_a_farther_end(tmp_path):
    run = run_with(tmp_path, "--train.until.samples", "1")
    folder = tmp_path / "run"
    result = start(run, "run", folder)
    assert result.done and lines(folder)[-1]["iteration"] == 1 and lines(folder)[-1]["ended"] == 1
    assert folder_state(run, folder) == "finished"
    again = resume(run_of(folder), folder)
    assert again.done and lines(folder)[-1]["iteration"] == 1
    farther = override(run, ("--train.until", "null", "--train.iterations", "2"))
    assert folder_state(farther, folder) == "begun"
    assert resume(farther, folder).done
    assert [line["iteration"] for line in lines(folder)][-2:] == [1, 2]
    assert "ended" not in lines(folder)[-1] and folder_state(farther, folder) == "finished"


def asked(**until):
    goal = until.pop("held_out", None)
    limits = {"hours": None, "samples": None, **until, "held_out": goal}
    return SimpleNamespace(
        train=SimpleNamespace(until=SimpleNamespace(**limits)),
        checkpoint=SimpleNamespace(best="judge"),
        judges=[SimpleNamespace(label="judge")],
    )


def goal(at_least=0.9, evaluations=2, name=None):
    return SimpleNamespace(name=name, at_least=at_least, evaluations=evaluations)


def test_hours_and_samples_end_a_run_when_they_are_reached():
    assert early_end(asked(hours=2.0), Progress(seconds=7199)) == ""
    assert "hours" in early_end(asked(hours=2.0), Progress(seconds=7200))
    assert early_end(asked(samples=10), Progress(samples=9)) == ""
    assert "samples" in early_end(asked(samples=10), Progress(samples=10))


def test_a_score_must_be_reached_in_evaluations_in_a_row():
    run, progress = asked(held_out=goal()), Progress()
    for score, ends in ((0.95, False), (0.8, False), (0.9, False), (0.91, True)):
        note_goal(run, progress, {"held_out/judge": score})
        assert bool(early_end(run, progress)) == ends
    note_goal(run, progress, {})  # the reward applied to no sample
    assert early_end(run, progress)


def test_another_goal_counts_from_its_first_evaluation():
    progress = Progress()
    for _ in range(2):
        note_goal(asked(held_out=goal()), progress, {"held_out/judge": 1.0})
    other = asked(held_out=goal(at_least=0.95))
    assert early_end(other, progress) == ""
    note_goal(other, progress, {"held_out/judge": 1.0})
    assert early_end(other, progress) == ""
    note_goal(asked(), progress, {"held_out/judge": 1.0})
    assert progress == replace(Progress(), goal=None, reached=0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--train.until", "{}"), "give one of held_out, hours and samples"),
        (("--train.until.hours", "0"), "greater than 0"),
        (("--train.until.held-out", "{name: none, at_least: 1}"), "not a held-out reward"),
    ],
)
def test_an_end_that_cannot_come_is_refused(tmp_path, options, sentence):
    with pytest.raises(UserError, match=sentence):
        run_with(tmp_path, *options)
