"""A folder of votes whose plan, log, table or images were damaged: no vote is written over, and
each command says what is lost and what can still be read."""

import json
import re
import threading
from pathlib import Path

import pytest
import torch

from flowrl.errors import UserError
from flowrl.evaluation.preferences import ReadOptions, load_preferences
from flowrl.prompts.files import EVENTS
from flowrl.votes import server
from flowrl.votes.answer import answer_of, export_votes, write_results
from flowrl.votes.collect import VoteQuestion, plan_again
from flowrl.votes.fit import FitReward, fit_reward_to
from flowrl.votes.log import GivenVerdict, VoteLog, forget_rater
from flowrl.votes.plan import VotePlan
from flowrl.votes.serve import PageAddress, serve_votes
from flowrl.votes.simulated import SimulatedPerson
from rewards.fitted.heads import LinearHead, VotedPairs
from tests.support.voting import written_media, written_plan

CLIP = "{name: clip, model: flowrl/demo/shapes-clip}"
NAMES_THE_TABLE = r"bring it back from a copy, or name \S*votes\.jsonl itself to read its votes"


def voted(
    folder: Path, kind: str = "image", verdicts: tuple[GivenVerdict, ...] = ("right", "left")
) -> Path:
    """A folder in which one rater has voted on all pairs, with its table."""
    plan = (
        written_plan(folder, pairs=16, prompts=1)
        if kind == "image"
        else written_media(folder, kind)
    )
    with VoteLog.opened(folder, plan) as log:
        while (showing := log.show("rater-1")) is not None:
            log.vote("rater-1", showing, verdicts[len(log.raters["rater-1"].given) % 2], 1.0)
        write_results(folder, log)
    return folder


def fitted(votes: Path, out: Path, **settings):
    return fit_reward_to(FitReward(votes=votes, features=(CLIP,), out=out, robust=0, **settings))


def log_of(folder: Path) -> VoteLog:
    return VoteLog.read(folder, VotePlan.read(folder))


READERS = {
    "results": lambda folder: write_results(folder, log_of(folder)),
    "export": lambda folder: export_votes(folder, "chosen"),
    "fit": lambda folder: fitted(folder, folder / "taste"),
    "page": lambda folder: serve_votes(folder, PageAddress(port=0), person=lambda _: None),
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_a_log_that_has_lost_votes_never_replaces_the_table(kept, kind, read, tmp_path):
    folder = voted(tmp_path / "votes", kind)
    table = (folder / "votes.jsonl").read_bytes()
    lines = (folder / EVENTS).read_bytes().splitlines(keepends=True)
    (folder / EVENTS).write_bytes(b"".join(lines[: int(kept * len(lines))]))
    if not kept:
        (folder / EVENTS).unlink()
    lost = r"\d+" if kept else len(table.splitlines())
    with pytest.raises(UserError, match=rf"has lost {lost} votes that .*: {NAMES_THE_TABLE}"):
        READERS[read](folder)
    assert (folder / "votes.jsonl").read_bytes() == table


def test_votes_that_were_taken_back_or_forgotten_are_not_lost(tmp_path):
    folder = voted(tmp_path / "one")
    with VoteLog.opened(folder, VotePlan.read(folder)) as log:
        log.undo("rater-1", log.raters["rater-1"].given[-1].id)
        assert write_results(folder, log).early
    (folder / "votes.jsonl").write_bytes(b'{"cut off')
    assert write_results(folder, log_of(folder)).pairs == len(load_votes(folder))
    several = tmp_path / "several"
    plan = written_plan(several, pairs=10, raters=2)
    with VoteLog.opened(several, plan) as log:
        for rater in plan.turns:
            showing = log.show(rater)
            assert showing is not None
            log.vote(rater, showing, "left", 1.0)
        write_results(several, log)
    forget_rater(several, "rater-2")
    assert write_results(several, log_of(several)).pairs == 1


def load_votes(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "votes.jsonl").read_text().splitlines()]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_a_line(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3] + lines[4:]))


DAMAGES = {
    "plan.json is damaged": lambda folder: cut(folder / "plan.json"),
    "it has no plan.json": lambda folder: (folder / "plan.json").unlink(),
    "line 4: not an event of these votes": lambda folder: without_a_line(folder / EVENTS),
}


@pytest.mark.parametrize("says", DAMAGES)
def test_beside_a_damaged_plan_or_log_the_table_itself_is_read(says, tmp_path, capsys):
    folder = voted(tmp_path / "votes")
    votes = len(load_votes(folder))
    DAMAGES[says](folder)
    with pytest.raises(UserError, match=f"{re.escape(says)}.*: {NAMES_THE_TABLE}"):
        fitted(folder, tmp_path / "folder")
    reward = fitted(folder / "votes.jsonl", tmp_path / "table")
    assert reward.pairs == votes
    assert f"own consistency is unknown: {folder}" in capsys.readouterr().out
    (folder / "votes.jsonl").unlink()
    with pytest.raises(UserError) as error:
        fitted(folder, tmp_path / "nothing")
    assert "votes.jsonl" not in str(error.value)


def test_a_corrected_table_that_is_named_is_read_as_it_is(tmp_path, capsys):
    folder = voted(tmp_path / "votes")
    table = folder / "votes.jsonl"
    assert "own consistency is" in " ".join(fitted(table, tmp_path / "whole").sentences)
    assert "not what its log says" not in capsys.readouterr().out
    rows = table.read_text().splitlines(keepends=True)[:-4]
    table.write_text("".join(rows))
    reward = fitted(table, tmp_path / "corrected")
    assert reward.pairs == len(rows) and "consistency" not in " ".join(reward.sentences)
    assert f"read as it is: name {folder} to have it made" in capsys.readouterr().out
    assert table.read_text() == "".join(rows)
    assert fitted(folder, tmp_path / "of-the-log").pairs == len(rows) + 4


@pytest.mark.parametrize("missing", [1, None])
def test_images_that_are_gone_are_counted_in_one_sentence(missing, tmp_path, capsys):
    folder = voted(tmp_path / "votes")
    table = folder / "votes.jsonl"
    images = sorted((folder / "samples").iterdir())
    for image in images[:missing]:
        image.unlink()
    again = tmp_path / "again"
    again.mkdir()

    def vote_again():
        preferences = load_preferences(table, ReadOptions())
        plan_again(again, preferences, str(table), VoteQuestion("Which?"))

    for command, act in (("fit-reward", lambda: fitted(folder, tmp_path / "taste")),
                         ("vote", vote_again)):  # fmt: skip
        if missing is None:
            sentence = f"{command}: no sample can be read: .*no such file; paths begin at the fold"
            with pytest.raises(UserError, match=sentence):
                act()
        else:
            act()
            said = capsys.readouterr().out
            assert said.count("no such file") == 1
            assert f"{command}: 1 of 32 samples cannot be read: {images[0].parent.name}/" in said


def test_features_that_differ_by_rounding_are_refused(tmp_path):
    """A fit would scale the rounding up: its scores would depend on what is scored together."""
    folder = voted(tmp_path / "votes")
    rows = [{**row, "b": row["a"]} for row in load_votes(folder)]
    (folder / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="to the features clip the two samples of every pair are"):
        fitted(folder / "same.jsonl", tmp_path / "taste")
    assert not (tmp_path / "taste").exists()


def test_a_feature_of_rounding_beside_others_is_not_scaled_up():
    rounding = 1 + 1e-7 * torch.rand(20, generator=torch.Generator().manual_seed(0))
    features = torch.stack([torch.arange(20.0), rounding], 1).double().numpy()
    at = torch.arange(10).numpy()
    pairs = VotedPairs(features, at, at + 10, 0.0 * at, 0.0 * at, [f"p{i}" for i in at])
    head = LinearHead.fit(pairs, 1.0)
    assert head.scale[1] == 1.0 and abs(head.scale[0] - features[:, 0].std()) < 1e-9


def test_the_bound_of_a_reward_needs_repeats_that_tell_something(tmp_path):
    few = answer_of(log_of(voted(tmp_path / "few", verdicts=("equal", "equal"))))
    assert few.consistency.n == 1 and few.consistency.value == 1.0
    text = "1 repeat cannot tell how often a reward can agree with single votes: that needs more"
    assert any(line.startswith(text) for line in few.sentences)
    plan = written_plan(tmp_path / "many", pairs=120, prompts=40)
    with VoteLog.opened(tmp_path / "many", plan) as log:
        while (showing := log.show("rater-1")) is not None:
            log.vote("rater-1", showing, "equal", 1.0)
        many = answer_of(log)
    assert any("is at best about 100 %, by the raters'" in line for line in many.sentences)


def test_several_simulated_people_end_when_all_have_voted(tmp_path):
    written_plan(tmp_path, pairs=5, raters=2)
    person = SimulatedPerson(lambda image, _: float(image.mean()), 0.1)
    done: list[int] = []

    def collect() -> None:
        done.append(serve_votes(tmp_path, PageAddress(port=0), person=person).pairs)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(60)
    assert done and done[0] >= 5, "the page waits for somebody"


def test_the_terminal_says_whose_page_has_not_shown_the_answer(tmp_path, capsys, monkeypatch):
    import asyncio

    from flowrl.votes.door import Door

    monkeypatch.setattr(server, "LINGER", 0.0)
    plan = written_plan(tmp_path, pairs=4, raters=2)
    with VoteLog.opened(tmp_path, plan) as log:
        room = server.VotingRoom(tmp_path, log, Door.of(tmp_path, list(log.raters)))
        for rater in plan.turns:
            while (showing := log.show(rater)) is not None:
                log.vote(rater, showing, "left", 1.0)
            room.state(rater)  # rater-1 asks before rater-2 is done, and never again

        async def watched() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(server._farewell(room), 1.0)

        asyncio.run(watched())
        assert not room.ended.is_set()
    said = capsys.readouterr().out
    assert (
        said
        == "all votes are in; the pages of rater-1 have not shown what was found: Ctrl-C ends\n"
    )
