"""`flowrl fit-reward` on votes that say little: a reward, or a sentence that says why not."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import rewards
from flowrl.errors import UserError
from flowrl.votes.answer import write_results
from flowrl.votes.fit import FitReward, FittedReward, fit_reward_to
from flowrl.votes.log import VoteLog
from rewards.fitted.scoring import GradedFittedScores
from rewards.perception.media import to_pil
from tests.support.advice import advice
from tests.support.voting import written_plan

CLIP = "{name: clip, model: flowrl/demo/shapes-clip}"


def table_of(folder: Path, votes: list[tuple[str, float]]) -> Path:
    """A table of votes, each a prompt and a label, on pairs of images of noise."""
    draws, rows = torch.Generator().manual_seed(0), []
    for i, (prompt, label) in enumerate(votes):
        names = [f"{i}-{side}.png" for side in "ab"]
        for name in names:
            to_pil(torch.rand(3, 32, 32, generator=draws)).save(folder / name)
        rows.append({"prompt": prompt, "a": names[0], "b": names[1], "label": label})
    file = folder / "votes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def fitted(votes: Path, out: Path, features: str = CLIP) -> FittedReward:
    return fit_reward_to(FitReward(votes=votes, features=(features,), out=out, robust=0))


@pytest.mark.parametrize(
    ("votes", "size"),
    [
        ([("a red circle", 1.0)], "1 vote on pairs of 1 prompt, 0 of them ties"),
        ([("a red circle", i % 2) for i in range(6)], "6 votes on pairs of 1 prompt, 0 of"),
        ([("a red circle", i / 2) for i in range(3)], "3 votes on pairs of 1 prompt, 1 of"),
    ],
)
def test_votes_on_one_prompt_make_a_reward_that_nobody_can_judge(votes, size, tmp_path):
    reward = fitted(table_of(tmp_path, votes), tmp_path / "taste")
    assert reward.accuracy is None and not reward.curve
    assert reward.sentences[0].startswith(f"fitted to {size}")
    assert "1 prompt, too few to hold any out" in reward.sentences[1]
    loaded = rewards.load("fitted", path=str(reward.folder))
    assert isinstance(loaded, GradedFittedScores) and loaded.has_seen("a red circle")
    head = loaded.plain.fitted.head
    assert np.isfinite(head.model.weight).all() and head.model.weight.any()


def test_one_vote_each_on_two_prompts_tells_nothing_of_others(tmp_path):
    votes = [("a red circle", 1.0), ("a blue square", 0.0)]
    reward = fitted(table_of(tmp_path, votes), tmp_path / "taste")
    assert reward.accuracy is not None and reward.accuracy.low < 0.5 < reward.accuracy.high
    assert any("cannot be distinguished from guessing" in line for line in reward.sentences)
    assert "whether more votes would help cannot be seen" in reward.sentences[-1]


def test_only_ties_are_refused_before_anything_loads(tmp_path):
    file = table_of(tmp_path, [(f"prompt {i}", 0.5) for i in range(4)])
    with pytest.raises(UserError, match="every vote is a tie, so nothing says which sample is"):
        fit_reward_to(FitReward(votes=file, features=("pickscore",), out=tmp_path / "taste"))
    assert not (tmp_path / "taste").exists()


def texts_of(folder: Path) -> Path:
    """A table of votes on pairs of texts."""
    rows = [
        {"prompt": f"{i} + 1 =", "a_text": f"{i + 1}", "b_text": "none", "label": i % 2}
        for i in range(4)
    ]
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


LAST_HIDDEN = "{name: last_hidden, model: flowrl/demo/sums-lm}"


@pytest.mark.parametrize(
    ("kind", "wrong", "right"),
    [
        pytest.param("texts", CLIP, LAST_HIDDEN, marks=pytest.mark.slow),
        ("images", LAST_HIDDEN, CLIP),
    ],
    ids=["texts", "images"],
)
def test_features_of_the_kind_of_the_votes_are_fitted(
    kind: str, wrong: str, right: str, tmp_path: Path
) -> None:
    images = [("a red circle", i % 2) for i in range(4)]
    file = texts_of(tmp_path) if kind == "texts" else table_of(tmp_path, images)
    with pytest.raises(UserError, match=f"^fit-reward: {file} has {kind}"):
        fitted(file, tmp_path / "taste", wrong)
    reward = advice(
        "fit-reward: {} has {}, and these features are of {}: use --features '{}'",
        lambda: fitted(file, tmp_path / "taste", wrong),
        lambda: fitted(file, tmp_path / "taste", right),
    )
    assert reward.pairs == 4


def test_pairs_that_differ_are_fitted(tmp_path: Path) -> None:
    file = table_of(tmp_path, [("a red circle", i % 2) for i in range(4)])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    alike = tmp_path / "alike.jsonl"
    alike.write_text("".join(json.dumps(row | {"b": row["a"]}) + "\n" for row in rows))
    advice(
        "fit-reward: to the features {} the two samples of every pair are alike, so they explain "
        "no vote: choose other --features, or vote on pairs that differ",
        lambda: fitted(alike, tmp_path / "taste"),
        lambda: fitted(file, tmp_path / "taste"),
    )


@pytest.mark.parametrize("verdict", [None, "both_bad"])
def test_a_folder_of_skips_or_of_ties_is_a_sentence(verdict, tmp_path):
    plan = written_plan(tmp_path / "votes", pairs=6)
    with VoteLog.opened(tmp_path / "votes", plan) as log:
        while (showing := log.show("rater-1")) is not None:
            log.vote("rater-1", showing, verdict, 1.0)
        write_results(tmp_path / "votes", log)
    sentence = "every vote is a tie" if verdict else "no vote so far: 6 pairs skipped"
    with pytest.raises(UserError, match=sentence):
        fitted(tmp_path / "votes", tmp_path / "taste")
    assert not (tmp_path / "taste").exists()
