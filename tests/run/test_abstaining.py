"""Runs whose rewards apply to some prompts only, as in TRL's page on several tasks."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.iteration.features.reward_gradient import GradedRows
from flowrl.iteration.records import PlanScores, Scored
from flowrl.run.evaluate.evaluate import evaluate_held_out
from flowrl.session import start_record
from flowrl.session.progress import Progress
from flowrl.settings.read import run_from
from rewards import Scores
from tests.support import text_runs, tiny_lm
from tests.support.advice import advice
from tests.support.iterations import collect, iterate
from tests.support.runs import flowrl, lines, opened, write

TASKS = """
def a_words(prompts, completions, task, **kwargs):
    return [c.count("a") / max(len(c), 1) if t == "a" else None for c, t in zip(completions, task)]


def b_words(prompts, completions, task, **kwargs):
    return [c.count("b") / max(len(c), 1) if t == "b" else None for c, t in zip(completions, task)]


def shorter(samples):
    return [1 / (1 + len(text)) for text in samples.media]


def never(samples):
    return [None] * len(samples.media)
"""


PAGE = """
def right(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        rewards.append((1.0 if "abba" in completion else -1.0) if t == "a" else None)
    return rewards


def works(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        rewards.append((1.0 if "e" in completion else -1.0) if t == "bb" else None)
    return rewards
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_lm.write(tmp_path_factory.mktemp("lm"))


def tree(model: Path, folder: Path, tasks: str, rewards: str, **train: Any) -> dict[str, Any]:
    """A run with a prompt for each letter of `tasks`, all of them drawn in every iteration."""
    settings = text_runs.tree(model, folder, text_runs.GRPO, **train)
    texts = ("a:", "cab :", "bead :", "dab :")
    rows = [{"prompt": text, "task": task} for text, task in zip(texts, tasks, strict=False)]
    Path(settings["prompts"]["train"]).write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "tasks.py").write_text(TASKS)
    settings["rewards"] = [f"{folder / 'tasks.py'}:{name}" for name in rewards.split()]
    settings["prompts"]["per_iteration"] = len(tasks)
    return settings


@pytest.mark.slow
def test_a_run_of_two_tasks_learns_both(model, tmp_path):
    settings = tree(model, tmp_path, "abab", "a_words b_words", lr=3e-2)
    settings["train"]["iterations"] = 12
    settings["evaluate"]["every"] = 12
    assert flowrl("train", write(settings, tmp_path), "--folder", tmp_path / "run") == 0
    trained = [line for line in lines(tmp_path / "run") if line["iteration"] > 0]
    for line in trained:
        assert line["applies/a_words"] == line["applies/b_words"] == 0.5
        assert line["unscored"] == line["abstained"] == 0
        both = line["reward/a_words"], line["reward/b_words"]
        assert line["reward"] == pytest.approx(sum(both) / 2), "each of half of the samples"
    for name in ("reward", "reward/a_words", "reward/b_words"):
        column = [line[name] for line in trained]
        assert statistics.fmean(column[-4:]) > statistics.fmean(column[:4]) + 0.05


@pytest.mark.slow
def test_iterations_and_evaluations_without_a_reward_go_on_also_after_a_resume(
    model, tmp_path, capsys
):
    """One prompt for each iteration: of task a, of b, or of c, which has no reward."""
    settings = tree(model, tmp_path, "abc", "a_words b_words", alarms="warn")
    settings["prompts"]["per_iteration"] = 1
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "dab :", "task": "b"}\n')
    settings["prompts"]["held_out"] = str(held_out)
    settings["train"]["iterations"] = 4
    run = tmp_path / "run"
    assert flowrl("train", write(settings, tmp_path), "--folder", run) == 0
    begun = run_from(settings, "test")
    prompts, seed = begun.prompts.read("train"), begun.train.seed
    tasks = ["abc"[prompts.draw(iteration, 1, seed).rows[0]] for iteration in range(6)]
    first, said = 1 + tasks.index("c"), "".join(capsys.readouterr())
    sentence = f"warning: no reward applies to 100 % of the samples of iteration {first}"
    assert said.count(sentence) == 1
    assert flowrl("train", "--resume", run, "--train.iterations", "6") == 0
    whole = [line for line in lines(run) if line["iteration"] > 0]
    for line, task in zip(whole, tasks, strict=True):
        names = {name for name in ("a_words", "b_words") if f"reward/{name}" in line}
        assert names == ({f"{task}_words"} if task in "ab" else set())
        assert ("reward" in line) == (task in "ab")
        assert line["abstained_share"] == line["unscored_share"] == float(task == "c")
    evaluated = [line for line in lines(run) if "held_out/b_words" in line]
    assert evaluated and not any("held_out/a_words" in line for line in evaluated)
    best = max(evaluated, key=lambda line: (line["held_out/b_words"], -line["iteration"]))
    (folder,) = (run / "best").iterdir()
    assert int(folder.name) == best["iteration"], "decided by the reward that applies"
    assert (run / "report.html").is_file()


def test_the_logged_reward_is_over_all_samples_to_which_some_reward_applies(model, tmp_path):
    kept = opened(tree(model, tmp_path, "abab", "shorter a_words"), tmp_path)
    made = collect(kept, 0)
    tasks = [row["task"] for row in made.samples.meta]
    wanted = [
        1 / (1 + len(text)) + (text.count("a") / max(len(text), 1) if task == "a" else 0.0)
        for text, task in zip(made.samples.media, tasks, strict=True)
    ]
    assert made.metrics["reward"] == pytest.approx(statistics.fmean(wanted))
    assert made.metrics["reward_std"] == pytest.approx(statistics.pstdev(wanted))
    assert made.metrics["unscored"] == 0 and "abstained" in made.metrics
    group = text_runs.GRPO["group"]
    for start in range(0, len(wanted), group):
        own = wanted[start : start + group]
        mean, std = statistics.fmean(own), statistics.stdev(own)  # divides by n - 1
        for i, value in enumerate(own, start):
            advantage = made.first.credit[0][i, 0].item()
            assert advantage == pytest.approx((value - mean) / (std + 1e-4) if std else 0, abs=1e-3)


def test_a_reward_that_never_applies_changes_nothing(model, tmp_path):
    def weights(names: str) -> list[torch.Tensor]:
        folder = tmp_path / names.replace(" ", "_")
        folder.mkdir()
        kept = opened(tree(model, folder, "abab", names, self_test="off"), folder)
        progress = Progress()
        for _ in range(2):
            metrics = iterate(kept, progress).metrics
        assert "reward/never" not in metrics
        return [p.detach().clone() for p in kept.learner.policies.parameters.values()]

    pairs = zip(weights("shorter"), weights("shorter never"), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_a_run_without_any_reward_that_applies_stands_still(model, tmp_path):
    settings = tree(model, tmp_path, "abab", "never", self_test="off", weight_decay=0.0)
    kept = opened(settings, tmp_path)
    before = [p.detach().clone() for p in kept.learner.policies.parameters.values()]
    metrics = iterate(kept, Progress()).metrics
    assert metrics["abstained"] == metrics["unscored"] == 24 and "reward" not in metrics
    assert metrics["skipped"] == 0
    after = kept.learner.policies.parameters.values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    result = evaluate_held_out(kept.learner, kept.held_out, kept.judges)
    assert "never" not in result.metrics and result.columns["never"].isnan().all()


def test_a_page_s_two_functions_run_though_one_asks_for_a_task_that_no_row_has(
    model, tmp_path, capsys
):
    """In TRL's page the rows say `code` and the function asks for `coding`; scores are 1 and -1."""
    settings = tree(model, tmp_path, "abab", "", alarms="warn")
    (tmp_path / "page.py").write_text(PAGE)
    settings["rewards"] = [f"{tmp_path / 'page.py'}:{name}" for name in ("right", "works")]
    settings["train"]["iterations"] = 1
    assert flowrl("train", write(settings, tmp_path), "--folder", tmp_path / "run") == 0
    said = "".join(capsys.readouterr())
    assert "reward works: it applies to none of 4 prompts" in said
    assert "no reward applies to 50 % of the samples of iteration 1" in said
    assert "50% of the samples have no reward that applies" in said
    assert "have no score" not in said, "nothing failed"
    (line,) = [line for line in lines(tmp_path / "run") if line["iteration"] == 1]
    assert line["applies/right"] == 0.5 and line["applies/works"] == 0
    assert line["reward"] == line["reward/right"] and line["abstained"] == 12


def test_an_older_run_resumes_with_a_line_on_what_none_means(model, tmp_path):
    own = run_from(tree(model, tmp_path, "abab", "a_words b_words"), "test")
    plain = run_from(text_runs.tree(model, tmp_path, text_runs.GRPO) | {"rewards": ["length"]}, "t")
    for run, told in ((own, True), (plain, False)):
        record = start_record.StartRecord.of(run, 1)
        assert not any("None" in line for line in start_record._moved(record, run))
        older = replace(record, abstaining=False)
        found = [line for line in start_record._moved(older, run) if "does not apply" in line]
        assert bool(found) == told


@pytest.mark.parametrize("follow", [[0.5, 0.7], [0.5]], ids=["a score", "without the prompt"])
def test_gradients_of_a_reward_that_abstains_are_refused(follow):
    def scored(values: list[float | None]) -> None:
        table = [[0.0 if value is None else value] for value in values]
        abstained = torch.tensor([[value is None] for value in values])
        made = Scores(torch.tensor(table), ~abstained, ("bright",), abstained=abstained)
        plan = PlanScores(made, made, torch.zeros(len(values)))
        GradedRows._check_applies(Scored((plan,), ()))

    advice(
        "reward {} does not apply to {} of {} samples (None), but this recipe follows the gradient "
        "of every reward in every sample: let it return a score, or leave these prompts out",
        lambda: scored([0.5, None]),
        lambda: scored(follow),
    )
