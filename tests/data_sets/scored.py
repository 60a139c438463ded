"""Rows of a data set, read and scored as a run does."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.session.row_answers import KeptAnswers, RowAnswers, askers_of
from flowrl.session.session import load_rewards
from flowrl.settings import RewardSpec
from flowrl.settings.sections.data import PromptFiles
from rewards import Reward, Samples
from rewards.catalogue import math_answer
from rewards.combine import scored as reward_scores
from tests.data_sets.answers import AnswerForm
from tests.data_sets.programs import ProgramForm

Form = AnswerForm | ProgramForm
Verdicts = list[list[tuple[float, bool]]]  # of each row's completions: score, should it win


def scored(form: Form, folder: Path) -> Verdicts:
    """The verdicts of a form, written into a folder."""
    if isinstance(form, AnswerForm):
        return verdicts(folder, form, form.reward, str)
    reward = {"name": "code_tests", "kind": "strict", "seconds": 20, **form.reward}
    return verdicts(folder, form, reward, "```python\n{}```".format)


def rows_won(found: Verdicts) -> int:
    """The number of rows in which every right completion wins and no wrong one does."""
    return sum(all(score == float(win) for score, win in each) for each in found)


_workers = functools.cache(math_answer.Workers)


@functools.cache
def loaded(reward: str) -> Mapping[str, Reward]:
    """A reward. All rewards for mathematics share one process, which takes a second to start."""
    spec = RewardSpec.model_validate(json.loads(reward))
    more = {"processes": 1} if spec.name == "math_answer" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_answer, "Workers", _workers)
        return load_rewards([spec.model_copy(update={"settings": spec.settings | more})])


def written(folder: Path, rows: Iterable[Mapping[str, Any]], suffix: str) -> Path:
    file = folder / f"rows.{suffix}"
    if suffix == "parquet":
        from datasets import Dataset

        Dataset.from_list([dict(row) for row in rows]).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def verdicts(folder: Path, form: Form, reward: Any, shown: Callable[[str], str]) -> Verdicts:
    """Of each row's completions the score, and whether it should win. `shown`: a completion as a
    model writes it."""
    file = written(folder, [row for row, _, _ in form.rows], form.suffix)
    prompts = PromptFiles(train={"source": str(file), **form.read}).read("train")  # type: ignore[arg-type]
    assert len(prompts) == len(form.rows) and all(text.strip() for text in prompts.texts)
    rewards = loaded(json.dumps(reward))
    told = RowAnswers(prompts, askers_of(rewards), KeptAnswers([])).every(range(len(prompts)))
    assert {row: one.why for row, one in told.items() if one.answer == "no"} == {}
    texts, rows, wins = [], [], []
    for number, (_, right, wrong) in enumerate(form.rows):
        for completion in (*right, *wrong):
            texts.append(shown(completion))
            rows.append(number)
            wins.append(completion in right)
    asked, meta = prompts.take(rows)
    ((label, scorer),) = rewards.items()
    samples = Samples(texts, asked, torch.tensor(rows), meta)
    scores = reward_scores(label, scorer, samples).tolist()
    found: Verdicts = [[] for _ in form.rows]
    for row, score, win in zip(rows, scores, wins, strict=True):
        found[row].append((score, win))
    return found
