"""Folders of votes as data: commands that read preferences read their votes, or name the table; and
a reward is not tested on prompts that it was fitted to votes on."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rewards
from flowrl.api.scoring import evaluate_rewards
from flowrl.cli import vote
from flowrl.errors import UserError
from flowrl.evaluation.folders import find_items
from flowrl.evaluation.reward_evaluation import EvaluateRewards
from flowrl.paths import CONFIGS_FOLDER
from flowrl.prompts import PromptSet
from flowrl.prompts.files import VOTES_TABLE
from flowrl.prompts.source import DataSource
from flowrl.session import given_file
from flowrl.settings.sections.given import GivenSettings
from flowrl.votes.answer import write_results
from flowrl.votes.collect import VoteQuestion, plan_folder
from flowrl.votes.fit import FitReward, fit_reward_to
from flowrl.votes.log import VoteLog
from flowrl.votes.voted_table import report_rewards_on_votes, voted_table
from rewards.fitted.scoring import KnowsPrompts
from rewards.perception.files import open_image_cell
from rewards.perception.media import to_pil, to_tensor
from tests.support.advice import advice
from tests.support.voting import written_plan

CLIP = "{name: clip, model: flowrl/demo/shapes-clip}"


@pytest.fixture
def voted(tmp_path: Path) -> Path:
    """A folder of votes, all for the first of two samples, with a repeat."""
    folder = tmp_path / "my_votes"
    plan = written_plan(folder, pairs=16, prompts=8)
    with VoteLog.opened(folder, plan) as log:
        while (showing := log.show("rater-1")) is not None:
            turn = plan.turns["rater-1"][len(log.raters["rater-1"].given)]
            log.vote("rater-1", showing, "left" if turn.a_left else "right", 1.0)
        write_results(folder, log)
    return folder


def evaluated(folder: Path) -> int:
    out = folder.parent / "evaluation"
    found = evaluate_rewards(folder, ["brightness"], out=out, robust=0, resamples=10)
    said = found.results["sentences"]
    assert any("own consistency is 1.00 (1 repeat, 95 % interval 0.03" in line for line in said)
    assert any(line.startswith("size, as the run recorded it, agrees with") for line in said)
    return found.results["dataset"]["pairs"]


READ = {
    "evaluate-rewards": evaluated,
    "fit-reward": lambda folder: (
        fit_reward_to(
            FitReward(votes=folder, features=(CLIP,), out=folder.parent / "taste", robust=0)
        ).pairs
    ),
    "ask.earlier": lambda folder: len(
        voted_table(folder, "ask.earlier").path.read_text().splitlines()
    ),
}


@pytest.mark.parametrize(
    ("command", "table"),
    [
        pytest.param(
            command, table, marks=[pytest.mark.slow] * (command == "fit-reward" and table != "cut")
        )
        for command in READ
        for table in ("whole", "cut", "missing")
    ],
)
def test_a_folder_of_votes_is_read_by_its_log(command, table, voted):
    if table == "missing":
        (voted / VOTES_TABLE).unlink()
    if table == "cut":
        lines = (voted / VOTES_TABLE).read_text().splitlines(keepends=True)
        (voted / VOTES_TABLE).write_text("".join(lines[:5]))
    assert READ[command](voted) == 16


def test_a_table_that_is_named_is_read_as_it_is(voted):
    """Also as the votes before a run that asks, where it was made of the log again."""
    lines = (voted / VOTES_TABLE).read_text().splitlines(keepends=True)
    (voted / VOTES_TABLE).write_text("".join(lines[:5]))
    table = voted_table(voted / VOTES_TABLE, "ask.earlier").path
    assert table == voted / VOTES_TABLE and len(table.read_text().splitlines()) == 5


NAMES_THE_TABLE = {
    "given.file of pairs": lambda folder: given_file._pairs(
        GivenSettings(file=str(folder), kind="pairs")
    ),
    "given.file of texts": lambda folder: given_file._texts(
        GivenSettings(file=str(folder), kind="texts")
    ),
    "given.file of images": lambda folder: given_file._media(
        GivenSettings(file=str(folder), kind="images")
    ),
    "prompts.file": lambda folder: PromptSet.of(DataSource(str(folder)), "prompts.file"),
}


@pytest.mark.parametrize("reader", NAMES_THE_TABLE)
def test_a_reader_that_does_not_know_the_log_names_the_table(reader, voted):
    sentence = f"{reader.split()[0]}: {voted} is a folder of votes: "
    with pytest.raises(UserError) as error:
        NAMES_THE_TABLE[reader](voted)
    assert str(error.value) == f"{sentence}name its table, {voted / VOTES_TABLE}"
    (voted / VOTES_TABLE).unlink()
    with pytest.raises(UserError) as error:
        NAMES_THE_TABLE[reader](voted)
    assert str(error.value) == (
        f"{sentence}`flowrl vote {voted} --results` makes its table, votes.jsonl"
    )


def test_the_files_of_a_folder_of_votes_are_not_scored_under_their_names(voted):
    sentence = f"`flowrl evaluate-rewards {voted}` scores its samples"
    with pytest.raises(UserError, match=sentence):
        find_items(voted, None, "auto")


def fit(folder: Path) -> int:
    out = folder.parent / "new"
    return fit_reward_to(FitReward(votes=folder, features=(CLIP,), out=out, robust=0)).pairs


ABOVE_VOTES = {
    "evaluate-rewards": lambda folder: report_rewards_on_votes(
        EvaluateRewards(dataset=folder, rewards=("brightness",), out=folder.parent / "evaluation")
    ),
    "fit-reward": fit,
    "ask.earlier": lambda folder: voted_table(folder, "ask.earlier"),
}


@pytest.mark.parametrize("command", ABOVE_VOTES)
def test_a_folder_above_votes_is_told_from_one(command, voted):
    """A run that was voted on, a run that was not, and a folder of several votes: their other files
    are no table of votes."""
    run, several = voted.parent / "run", voted.parent / "several"
    (run / "votes").mkdir(parents=True)
    (run / "run.yaml").write_text("")
    (run / "metrics.jsonl").write_text('{"iteration": 1}\n')
    with pytest.raises(UserError) as error:
        ABOVE_VOTES[command](run)
    assert str(error.value) == (
        f"{command}: {run} is a run without votes: `flowrl vote {run}` collects them"
    )
    several.mkdir()
    copied = [shutil.copytree(voted, place) for place in (run / "votes/vote-0001", several / "b")]
    for folder, inside, of in (
        (run, copied[0], "a run, with votes"),
        (run / "votes", copied[0], "no folder of votes, but has some"),
        (several, copied[1], "no folder of votes, but has some"),
    ):
        with pytest.raises(UserError) as error:
            ABOVE_VOTES[command](folder)
        assert str(error.value) == f"{command}: {folder} is {of}: name one, such as {inside}"


def test_of_several_folders_of_votes_one_is_named(voted):
    several = voted.parent / "several"
    named = shutil.copytree(voted, several / "b")
    assert advice(
        "{}: {} is {}: name one, such as {}",
        lambda: voted_table(several, "ask.earlier"),
        lambda: voted_table(named, "ask.earlier"),
    )


def test_copies_of_voted_samples_are_no_samples(voted):
    """Below a folder of images they would be scored again, under the names that blind them."""
    with pytest.raises(UserError, match="is part of a folder of votes, and its files"):
        find_items(voted / "samples", None, "auto")
    with pytest.raises(UserError) as error:
        find_items(voted.parent, None, "auto")
    assert str(error.value).endswith(f"of votes: `flowrl evaluate-rewards {voted}` scores them")
    ABOVE_VOTES["evaluate-rewards"](voted)
    shutil.copy(voted / "samples" / "00000.png", voted.parent / "a_red_circle.png")
    (item,) = find_items(voted.parent, None, "auto").items
    assert item.prompt == "a red circle"


def test_prompts_from_elsewhere_than_their_table_are_refused(tmp_path):
    file = tmp_path / "a_red_circle.png"
    to_pil(torch.zeros(3, 8, 8)).save(file)
    table = tmp_path / "table.jsonl"
    table.write_text(json.dumps({"file": file.name, "prompt": "a dot"}) + "\n")
    found = advice(
        "--prompts names the table {}, and --prompts-from {} reads none: leave one of them out",
        lambda: find_items(tmp_path, table, "names"),
        lambda: (find_items(tmp_path, table, "auto"), find_items(tmp_path, None, "names")),
    )
    assert [each.items[0].prompt for each in found] == ["a dot", "a red circle"]


def test_edits_of_a_folder_are_shown_with_their_source(tmp_path):
    """Its table names the image that was edited, inside the folder that brought the table along."""
    folder, outside = tmp_path / "edits", tmp_path / "outside.png"
    (folder / "originals").mkdir(parents=True)
    for name, level in (("0", 0.1), ("1", 0.2), ("originals/x", 0.9)):
        to_pil(torch.full((3, 8, 8), level)).save(folder / f"{name}.png")
    to_pil(torch.zeros(3, 8, 8)).save(outside)
    table = folder / "prompts.jsonl"

    def written(original: object) -> None:
        rows = [{"file": f"{i}.png", "prompt": "p", "source_image": original} for i in range(2)]
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))

    written("originals/x.png")
    found = find_items(folder, None, "auto")
    assert found.origin == f"prompts from {table}", "the originals are no samples that are left out"
    (tmp_path / "votes").mkdir()
    plan = plan_folder(tmp_path / "votes", found.items, str(folder), VoteQuestion("Which?"))
    assert {sample.source for sample in plan.samples} == {"samples/source-00000.png"}
    copy = to_tensor(open_image_cell(tmp_path / "votes" / "samples" / "source-00000.png"))
    assert copy.mean().item() == pytest.approx(0.9, abs=0.01)
    written("../outside.png")
    with pytest.raises(UserError, match="outside the folder that brought the table along"):
        find_items(folder, None, "auto")
    assert len(find_items(folder, table, "auto").items) == 2, "named by the user, it is theirs"
    written(["a"])
    with pytest.raises(UserError, match="source_image must name a file of the folder"):
        find_items(folder, None, "auto")


@pytest.mark.slow
def test_features_are_taken_again_from_a_fit_alone(voted):
    fit = FitReward(votes=voted, features=(CLIP,), robust=0)
    taken = replace(fit, out=voted.parent / "second", reuse=voted)
    advice(
        "--reuse: {} has no {}, which fit-reward writes: name the folder of an earlier fit, or "
        "leave --reuse out",
        lambda: fit_reward_to(taken),
        lambda: fit_reward_to(replace(fit, out=voted.parent / "first")),
    )
    stored = voted.parent / "first" / "features.safetensors"
    stored.write_bytes(b"damaged")
    advice(
        "--reuse: {} is damaged, or no file of fit-reward: leave --reuse out, and the features are "
        "computed again",
        lambda: fit_reward_to(replace(taken, reuse=stored.parent)),
        lambda: fit_reward_to(replace(taken, reuse=None)),
    )
    card = (voted.parent / "second" / "README.md").read_text()
    assert "size, as the run recorded it, agrees with people on 100 % of the votes" in card


def test_of_several_tables_one_is_named(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "p"}) + "\n")
    with pytest.raises(UserError) as error:
        evaluate_rewards(tmp_path, ["brightness"], out=tmp_path / "out")
    assert f"several tables (a.jsonl, b.jsonl): name one, such as {tmp_path / 'a.jsonl'}" in str(
        error.value
    )


@pytest.mark.parametrize("seen", [0, 2, 4])
def test_people_test_a_fitted_reward_on_other_prompts_alone(seen):
    reward = rewards.load("fitted", path="flowrl/demo/shapes-taste")
    assert isinstance(reward, KnowsPrompts)
    files = [CONFIGS_FOLDER / "prompts" / f"shapes_{name}.jsonl" for name in ("train", "held_out")]
    voted, others = (PromptSet.of(DataSource(str(file)), "prompts").texts for file in files)
    voted = [prompt for prompt in voted if reward.has_seen(prompt)]
    prompts = [*voted[:seen], *others[: 4 - seen]]
    scores, sentence = vote.testing_scores("taste", reward, prompts, [1.0, 2.0, 3.0, 4.0])
    if not seen:
        assert (scores, sentence) == ([1.0, 2.0, 3.0, 4.0], "")
    if seen == 2:
        assert scores == [None, None, 3.0, 4.0] and "the prompts of 2 of 4 samples" in sentence
    if seen == 4:
        assert scores is None and "the prompts of all samples: its scores" in sentence
    plain, silent = vote.testing_scores(
        "brightness", rewards.load("brightness"), prompts, [0.5] * 4
    )
    assert plain == [0.5] * 4 and not silent
