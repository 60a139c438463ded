"""Every data set of answers and programs that the pages name, in its own form and read as a run
file reads it: what is right wins, what is wrong does not, and no row is called unwinnable."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.session.row_answers import KeptAnswers, RowAnswers, askers_of
from flowrl.session.session import load_rewards
from flowrl.settings import RewardSpec
from flowrl.settings.sections.data import PromptFiles
from rewards import Samples
from tests.data_sets import answers, programs
from tests.rewards.test_rewards_code import ISOLATED


def written(folder: Path, rows: Iterable[Mapping[str, Any]], suffix: str) -> Path:
    file = folder / f"rows.{suffix}"
    if suffix == "parquet":
        from datasets import Dataset

        Dataset.from_list([dict(row) for row in rows]).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def verdicts(folder: Path, form: Any, reward: Any, shown: Any) -> list[list[tuple[float, bool]]]:
    """Of each row's completions the score, and whether it should win. `shown`: a completion as a
    model writes it."""
    file = written(folder, [row for row, _, _ in form.rows], form.suffix)
    prompts = PromptFiles(train={"source": str(file), **form.read}).read("train")  # type: ignore[arg-type]
    assert len(prompts) == len(form.rows) and all(text.strip() for text in prompts.texts)
    rewards = load_rewards([RewardSpec.model_validate(reward)])
    told = RowAnswers(prompts, askers_of(rewards), KeptAnswers([])).every(range(len(prompts)))
    assert {row: one.why for row, one in told.items() if one.answer == "no"} == {}
    texts, rows, wins = [], [], []
    for number, (_, right, wrong) in enumerate(form.rows):
        for completion in (*right, *wrong):
            texts.append(shown(completion))
            rows.append(number)
            wins.append(completion in right)
    asked, meta = prompts.take(rows)
    (scorer,) = rewards.values()
    scores = scorer(Samples(texts, asked, torch.tensor(rows), meta)).tolist()
    found: list[list[tuple[float, bool]]] = [[] for _ in form.rows]
    for row, score, win in zip(rows, scores, wins, strict=True):
        found[row].append((score, win))
    return found


def check(name: str, form: Any, found: list[list[tuple[float, bool]]]) -> None:
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
    won = sum(all(score == 1 for score, win in each if win) for each in found)
    assert not wrong, f"{name}: the right answer wins in {won} of {len(found)} rows: {said}"


@pytest.mark.parametrize("name", answers.FORMS)
def test_the_right_answer_wins_and_the_wrong_one_does_not(name, tmp_path):
    form = answers.FORMS[name]
    check(name, form, verdicts(tmp_path, form, form.reward, str))


@pytest.mark.skipif(not ISOLATED, reason="programs cannot be isolated here")
@pytest.mark.parametrize("name", programs.FORMS)
def test_the_right_program_wins_and_the_wrong_one_does_not(name, tmp_path):
    form = programs.FORMS[name]
    reward = {"name": "code_tests", "kind": "strict", "seconds": 20, **form.reward}
    found = verdicts(tmp_path, form, reward, "```python\n{}```".format)
    check(name, form, found)
