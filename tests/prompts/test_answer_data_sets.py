"""Every data set of answers and programs that the pages name, in its own form and read as a run
file reads it: what is right wins, what is wrong does not, and no row is called unwinnable."""

import pytest

from flowrl.session import given_file
from flowrl.settings.sections.given import GivenSettings
from tests.data_sets import answers, programs
from tests.data_sets.scored import Form, Verdicts, rows_won, scored, written
from tests.rewards.test_rewards_code import ISOLATED


def check(name: str, form: Form, found: Verdicts) -> None:
    wrong = [
        (row, i, score)
        for row, each in enumerate(found)
        for i, (score, win) in enumerate(each)
        if score != float(win)
    ]
    said = [
        (form.rows[row][0].get("answer"), (*form.rows[row][1], *form.rows[row][2])[i], score)
        for row, i, score in wrong
    ]
    assert rows_won(found) == len(found), f"{name}: {rows_won(found)} of {len(found)} rows: {said}"


@pytest.mark.parametrize("name", answers.FORMS)
def test_the_right_answer_wins_and_the_wrong_one_does_not(name, tmp_path):
    form = answers.FORMS[name]
    check(name, form, scored(form, tmp_path))


def test_calls_are_given_texts(tmp_path):
    form = answers.FORMS["xLAM"]
    file = written(tmp_path, [row for row, _, _ in form.rows], form.suffix)
    given = GivenSettings(file=str(file), kind="texts", column="query", media="answers")
    read = given_file._texts(given)
    assert [item.sample for item in read.items] == [row["answers"] for row, _, _ in form.rows]


@pytest.mark.quick_cases("APPS", "MBPP")
@pytest.mark.skipif(not ISOLATED, reason="programs cannot be isolated here")
@pytest.mark.parametrize("name", programs.FORMS)
def test_the_right_program_wins_and_the_wrong_one_does_not(name, tmp_path):
    form = programs.FORMS[name]
    check(name, form, scored(form, tmp_path))
