"""The plan, the log and the answer of votes."""

import json
import math
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from flowrl.errors import UserError
from flowrl.evaluation.measure import Gallery
from flowrl.evaluation.preferences import ReadOptions, load_preferences
from flowrl.evaluation.reward_report import headline
from flowrl.evaluation.sources import Source, read_media
from flowrl.media.animated_png import video_bytes
from flowrl.prompts.files import EVENTS
from flowrl.votes.answer import (
    PairVote,
    alpha_of,
    answer_of,
    export_votes,
    krippendorff,
    pair_votes,
    table_rows,
    write_results,
)
from flowrl.votes.collect import SampleCopies, VoteQuestion, plan_again, plan_pairs
from flowrl.votes.log import NotShown, VoteLog, forget_rater
from flowrl.votes.plan import LEAST_GAP, VotePlan, orders, pairs_within
from tests.support.advice import advice
from tests.support.voting import COLOURS, log_lines, written_media, written_plan


@pytest.mark.parametrize("pairs", [1, 9, 15, 16, 20, 60, 200])
@pytest.mark.parametrize("seed", [0, 1])
def test_one_pair_in_ten_is_asked_again_with_sides_changed_and_late(pairs, seed):
    (turns,) = orders(pairs, 1, seed).values()
    first = {t.pair: (i, t) for i, t in enumerate(turns) if not t.again}
    again = [(i, t) for i, t in enumerate(turns) if t.again]
    assert sorted(first) == list(range(pairs))
    assert len(again) == len({t.pair for _, t in again}) == min(pairs // 10, max(0, pairs - 14))
    for place, turn in again:
        before, shown = first[turn.pair]
        assert place - before >= LEAST_GAP and turn.a_left != shown.a_left
    assert orders(pairs, 1, seed) == orders(pairs, 1, seed)


def test_sides_are_drawn_evenly_and_by_the_seed():
    left = [t.a_left for seed in range(30) for t in orders(50, 1, seed)["rater-1"] if not t.again]
    assert abs(np.mean(left) - 0.5) < 4 * 0.5 / len(left) ** 0.5
    assert orders(50, 1, 0) != orders(50, 1, 1)


def test_several_raters_share_a_fifth_and_divide_the_rest():
    found = {rater: {t.pair for t in turns} for rater, turns in orders(100, 3, 0).items()}
    shared = set.intersection(*found.values())
    assert len(shared) == 20 and set.union(*found.values()) == set(range(100))
    assert sum(len(own - shared) for own in found.values()) == 80


def test_pairs_of_a_folder_take_one_of_each_prompt_before_a_second():
    groups = [0, 0, 0, 1, 1, 2]
    pairs = pairs_within(groups, None, seed=0)
    assert sorted(pairs) == [(0, 1), (0, 2), (1, 2), (3, 4)]
    assert {groups[a] for a, _ in pairs_within(groups, 2, seed=0)} == {0, 1}


def test_a_plan_is_read_as_it_was_written_and_damage_is_a_sentence(tmp_path):
    plan = written_plan(tmp_path)
    assert VotePlan.read(tmp_path) == plan
    path = tmp_path / "plan.json"
    whole = path.read_text()
    for damage in (whole[:100], "[]", "{}", whole.replace('"pairs"', '"peers"'), "null"):
        path.write_text(damage)
        with pytest.raises(UserError, match=r"plan\.json is damaged"):
            VotePlan.read(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"no folder of votes"):
        VotePlan.read(tmp_path)


def voted(log: VoteLog, rater: str = "rater-1", choose=lambda turn, k: "left") -> None:
    """Let a rater vote on all that is left."""
    turns = log.plan.turns[rater]
    while (showing := log.show(rater)) is not None:
        k = len(log.raters[rater].given)
        log.vote(rater, showing, choose(turns[k], k), 1.0)


def test_a_vote_that_arrives_twice_counts_once_and_an_old_one_is_refused(tmp_path):
    plan = written_plan(tmp_path)
    with VoteLog.opened(tmp_path, plan) as log:
        first = log.show("rater-1")
        assert log.show("rater-1") == first, "a reload shows the same id"
        assert log.vote("rater-1", first, "left", 1.0)
        assert not log.vote("rater-1", first, "right", 1.0)
        with pytest.raises(NotShown):
            log.vote("rater-1", "0" * 24, "left", 1.0)
        second = log.show("rater-1")
        assert log.vote("rater-1", second, None, 1.0)
        assert log.undo("rater-1", second) and not log.undo("rater-1", second)
        with pytest.raises(NotShown):
            log.vote("rater-1", second, "left", 1.0)  # sent late, after the undo
        third = log.show("rater-1")
        assert third != second and log.raters["rater-1"].shown[third] == 1
        with pytest.raises(NotShown):
            log.undo("rater-1", third)
    read = VoteLog.read(tmp_path, plan)
    assert [(g.id, g.verdict) for g in read.raters["rater-1"].given] == [(first, "left")]
    assert read.raters["rater-1"].open == third


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_that_a_kill_cut_off_is_removed_and_the_rest_stays(tmp_path, cut):
    plan = written_plan(tmp_path)
    with VoteLog.opened(tmp_path, plan) as log:
        log.vote("rater-1", log.show("rater-1"), "right", 1.0)
        log.show("rater-1")
    path = tmp_path / EVENTS
    path.write_bytes(path.read_bytes()[:-cut])
    with VoteLog.opened(tmp_path, plan) as log:
        assert len(log.raters["rater-1"].given) == 1
        log.vote("rater-1", log.show("rater-1"), "left", 1.0)
    assert len(VoteLog.read(tmp_path, plan).raters["rater-1"].given) == 2
    assert [each["event"] for each in log_lines(tmp_path)].count("vote") == 2


def test_a_damaged_line_inside_the_log_is_named_and_nothing_is_removed(tmp_path):
    plan = written_plan(tmp_path)
    with VoteLog.opened(tmp_path, plan) as log:
        for _ in range(3):
            log.vote("rater-1", log.show("rater-1"), "right", 1.0)
    path = tmp_path / EVENTS
    lines = path.read_text().splitlines(keepends=True)
    for damage in ("\n", "{}\n", "[1]\n", lines[1].replace("right", "up"), lines[1] + lines[1]):
        path.write_text("".join([lines[0], damage, *lines[2:]]))
        before = path.read_bytes()
        opened = VoteLog.opened(tmp_path, plan)
        with pytest.raises(UserError, match=r"events\.jsonl, line [23]: not an event"), opened:
            pass
        assert path.read_bytes() == before


def test_a_second_process_is_refused(tmp_path):
    plan = written_plan(tmp_path)

    def opened():
        with VoteLog.opened(tmp_path, plan) as log:
            return log.show("rater-1")

    with ExitStack() as first:
        log = first.enter_context(VoteLog.opened(tmp_path, plan))
        advice(
            "is open in another `flowrl vote`: use its page, or stop it first",
            opened,
            lambda: log.vote("rater-1", log.show("rater-1"), "left", 1.0),
        )
        advice("use its page, or stop it first", opened, lambda: (first.close(), opened()))


def test_on_a_full_disk_the_vote_is_refused_and_the_log_stays_whole(tmp_path, monkeypatch):
    plan = written_plan(tmp_path)
    with VoteLog.opened(tmp_path, plan) as log:
        showing = log.show("rater-1")
        whole, write = (tmp_path / EVENTS).read_bytes(), os.pwrite

        def full(file, data, at):
            if len(data) < 10:
                raise OSError(28, "No space left on device")
            return write(file, data[:-5], at)  # a part fits

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            log.vote("rater-1", showing, "left", 1.0)
        monkeypatch.undo()
        assert (tmp_path / EVENTS).read_bytes() == whole and not log.raters["rater-1"].given
        assert log.vote("rater-1", showing, "left", 1.0)
    assert len(VoteLog.read(tmp_path, plan).raters["rater-1"].given) == 1


def prefers_first(turn, _k):
    return "left" if turn.a_left else "right"


def test_the_answer_says_what_people_prefer_with_interval_and_consistency(tmp_path):
    plan = written_plan(tmp_path, pairs=40, prompts=10)
    with VoteLog.opened(tmp_path, plan) as log:
        voted(log, choose=prefers_first)
        found = write_results(tmp_path, log)
    assert found.preferred.value == 1.0 and 0.5 < found.preferred.low < 1.0
    assert (found.pairs, found.prompts, found.consistency.n, found.consistency.value) == (
        40, 10, 4, 1.0,
    )  # fmt: skip
    text = found.sentences[0]
    assert text.startswith("people prefer the trained weights in 100 % of 40 pairs of 10 prompts (")
    assert "prompts resampled; ties half; own consistency 1.00, 4 repeats" in text
    assert "looked at early" not in text
    assert any(
        "size prefers trained in 100 % of them and agrees with people on 100 %" in line
        for line in found.sentences
    )
    assert json.loads((tmp_path / "answer.json").read_text())["pairs"] == 40


def test_always_the_left_side_is_no_preference_and_no_consistency(tmp_path):
    plan = written_plan(tmp_path, pairs=200, prompts=50)
    with VoteLog.opened(tmp_path, plan) as log:
        voted(log)
        found = answer_of(log)
    assert found.consistency.value == 0.0 and found.consistency.n == 20
    assert found.preferred.low < 0.5 < found.preferred.high


def test_read_before_the_end_it_says_so(tmp_path):
    plan = written_plan(tmp_path, pairs=20)
    with VoteLog.opened(tmp_path, plan) as log:
        assert "no vote so far" in answer_of(log).sentences[0]
        log.vote("rater-1", log.show("rater-1"), "left", 1.0)
        assert "looked at early" in answer_of(log).sentences[0]


def test_ties_skips_and_repeats_count_as_they_should(tmp_path):
    plan = written_plan(tmp_path, pairs=20, prompts=4)
    verdicts = ["equal", "both_bad", None]

    def choose(turn, _k):
        if turn.again:
            return "left"
        return verdicts[turn.pair] if turn.pair < 3 else prefers_first(turn, 0)

    with VoteLog.opened(tmp_path, plan) as log:
        voted(log, choose=choose)
        rows, found = table_rows(tmp_path, log), write_results(tmp_path, log)
    by_pair = {vote.pair: vote for vote in pair_votes(log)}
    repeated = {t.pair for t in plan.turns["rater-1"] if t.again}
    assert (2 in by_pair) == (2 in repeated), "a pair that was only skipped is left out"
    assert len(rows) == len(by_pair)
    labels = [by_pair[k].label for k in sorted(by_pair)]
    assert by_pair[0].label == by_pair[1].label == 0.5
    assert [by_pair[0].both_bad, by_pair[1].both_bad] == [False, True]
    assert found.preferred.value == pytest.approx(np.mean(labels)) and found.ties >= 2
    read = load_preferences(tmp_path / "votes.jsonl", ReadOptions())
    assert read.layout == "plain" and sorted(read.label) == sorted(labels)
    assert {row["side"] for row in read.rows} == {"left", "right"}


def test_alpha_is_krippendorffs_own_example():
    """Krippendorff 2011, Computing Krippendorff's Alpha-Reliability, section D: interval data,
    alpha 0.849."""
    nan = math.nan
    table = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, nan, nan, nan],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, nan, 3],
        [nan, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, nan],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, nan],
    ]
    assert krippendorff(np.array(table).T) == pytest.approx(0.849, abs=5e-4)


def test_alpha_of_raters_does_not_depend_on_which_sample_is_a(tmp_path):
    plan = written_plan(tmp_path, pairs=40, prompts=10, raters=2)
    rng = np.random.default_rng(0)

    def votes(flip):
        drawn = np.random.default_rng(1).choice([0.0, 0.5, 1.0], (40, 2))
        found = []
        for pair, row in enumerate(drawn):
            for rater, label in enumerate(row):
                value = 1 - label if flip[pair] else label
                found.append(PairVote(f"rater-{rater}", pair, value, False, 1.0, True, None))
        return found

    plain = alpha_of(votes(np.zeros(40, bool)), plan)
    flipped = alpha_of(votes(rng.random(40) < 0.5), plan)
    assert plain is not None and flipped is not None and plain[1] == 40
    assert plain[0].value == pytest.approx(flipped[0].value, abs=1e-12)
    assert plain[0].low < plain[0].value < plain[0].high
    same = [v._replace(label=1.0 if v.pair % 2 else 0.0) for v in votes(np.zeros(40, bool))]
    agreed = alpha_of(same, plan)
    assert agreed is not None and agreed[0].value == pytest.approx(1.0)


def test_a_rater_is_forgotten_with_all_votes_and_the_rest_stays(tmp_path):
    plan = written_plan(tmp_path, pairs=20, raters=3)
    with VoteLog.opened(tmp_path, plan) as log:
        for rater in plan.turns:
            voted(log, rater)
        kept = [vote for vote in pair_votes(log) if vote.rater != "rater-2"]
    left = forget_rater(tmp_path, "rater-2")
    assert list(left.turns) == ["rater-1", "rater-3"] and left == VotePlan.read(tmp_path)
    log = VoteLog.read(tmp_path, left)
    assert pair_votes(log) == kept and log.finished
    assert "rater-2" not in (tmp_path / EVENTS).read_text() + (tmp_path / "plan.json").read_text()
    with pytest.raises(UserError, match="there is no 'rater-2'; the raters are rater-1, rater-3"):
        forget_rater(tmp_path, "rater-2")
    forget_rater(tmp_path, "rater-1")
    advice(
        "vote: {} is the only rater: remove {} instead",
        lambda: forget_rater(tmp_path, "rater-3"),
        lambda: shutil.rmtree(tmp_path),
    )
    assert written_plan(tmp_path).turns, "the folder's name is free for other votes"


@pytest.mark.parametrize("kind", ["video", "text", "edit"])
def test_votes_on_other_media_are_read_back_as_they_were_shown(kind, tmp_path):
    plan = written_media(tmp_path, kind)
    with VoteLog.opened(tmp_path, plan) as log:
        for verdict in ("left", "equal", "both_bad", "right"):
            log.vote("rater-1", log.show("rater-1"), verdict, 1.0)
        write_results(tmp_path, log)
    found = load_preferences(tmp_path / "votes.jsonl", ReadOptions())
    assert len(found.a) == 4 and found.label.tolist().count(0.5) == 2
    media = Gallery(found.items).samples(range(len(found.items))).media
    if kind == "text":
        assert found.texts and found.layout == "plain_texts" and "<script>" in media[0]
    if kind == "video":
        assert sorted({len(video) for video in media}) == [4, 5], "frames stay as they are"
        first = media[[item.source.name for item in found.items].index("samples/00000.apng")]
        rows = torch.arange(4)[:, None, None, None] * 0.02
        wanted = torch.tensor(COLOURS[0])[:, None, None] / 255 * 0.9 + rows
        assert (first - wanted.expand(4, 3, 8, 8)).abs().max() < 0.5 / 255 + 1e-6
    if kind == "edit":
        sources = {Path(row["source"]).name for row in found.rows}
        assert len(sources) == 4 and all((tmp_path / "samples" / name).exists() for name in sources)
    again = plan_again(folder_of(tmp_path / "again"), found, "votes", VoteQuestion("Which?"))
    assert {each.kind for each in again.samples} == {plan.samples[0].kind}
    assert all(bool(each.source) == (kind == "edit") for each in again.samples)


def folder_of(path):
    path.mkdir()
    return path


def test_a_still_video_keeps_its_frames(tmp_path):
    file = tmp_path / "still.apng"
    file.write_bytes(video_bytes(torch.full((5, 3, 4, 6), 0.4), 1.0))
    (video,) = read_media([Source("still", file)]).media
    assert video.shape == (5, 3, 4, 6) and (video - 0.4).abs().max() < 0.5 / 255 + 1e-6


KINDS = ("image", "video", "sound", "text", "edit")
TOOLS = ("argilla", "label-studio", "chosen")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_written_for_labelling_tools_is_read_back(tool, kind, tmp_path):
    """Each kind of sample as it was, edits with their source, and ties by the rule of votes."""
    is_plain = kind == "image"
    plan = written_plan(tmp_path, pairs=4) if is_plain else written_media(tmp_path, kind)
    with VoteLog.opened(tmp_path, plan) as log:
        for verdict in ("left", "equal", "both_bad", "right"):
            log.vote("rater-1", log.show("rater-1"), verdict, 1.0)
        write_results(tmp_path, log)
    votes = load_preferences(tmp_path / "votes.jsonl", ReadOptions())
    exported = export_votes(tmp_path, tool)
    found = load_preferences(exported.file, ReadOptions())
    assert verdicts_of(found) == {
        pair: label
        for pair, label in verdicts_of(votes).items()
        if tool != "chosen" or label != 0.5
    }
    assert left_of(found).items() <= left_of(votes).items() and left_of(found)
    assert {item.source.kind for item in found.items} == {item.source.kind for item in votes.items}
    assert sources_of(found).items() <= sources_of(votes).items()
    assert len(sources_of(found)) == (len(found.items) if kind == "edit" else 0)
    assert tool == "chosen" or headline(found, None) == headline(votes, None) == "half"
    assert bool(exported.interface) == (tool == "label-studio")


TAGS = {"image": "Image", "video": "Image", "sound": "Audio", "text": "Text", "edit": "Image"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_interface_of_label_studio_has_the_tags_of_the_samples(kind, tmp_path):
    is_plain = kind == "image"
    plan = written_plan(tmp_path, pairs=4) if is_plain else written_media(tmp_path, kind)
    with VoteLog.opened(tmp_path, plan) as log:
        log.vote("rater-1", log.show("rater-1"), "left", 1.0)
    exported = export_votes(tmp_path, "label-studio")
    interface = ElementTree.fromstring(exported.interface)
    samples = {tag.get("name"): tag for tag in interface if tag.get("value", "").startswith("$")}
    assert samples["a"].tag == samples["b"].tag == TAGS[kind]
    (task,) = json.loads(exported.file.read_text())
    for tag in samples.values():
        assert task["data"][tag.get("value")[1:]], "the interface shows what the tasks have"
    assert ("source" in samples) == (kind == "edit")


def test_a_folder_without_a_vote_is_not_exported(tmp_path):
    written_plan(tmp_path, pairs=4)
    with pytest.raises(UserError, match="no vote so far"):
        export_votes(tmp_path, "argilla")


def test_the_exports_of_a_forgotten_rater_are_gone(tmp_path):
    plan = written_plan(tmp_path, pairs=10, raters=2)
    with VoteLog.opened(tmp_path, plan) as log:
        for rater in plan.turns:
            log.vote(rater, log.show(rater), "left", 1.0)
    exported = [export_votes(tmp_path, tool).file for tool in TOOLS]
    assert any("rater-2" in file.read_text() for file in exported)
    forget_rater(tmp_path, "rater-2")
    assert not any(file.exists() for file in exported)


def test_the_source_of_votes_is_no_image_that_was_edited(tmp_path):
    """Its column `source` says what was voted on, which may be an image's file too."""
    first = tmp_path / "first"
    copies = SampleCopies(folder_of(first))
    for i in range(4):
        copies.add(torch.full((3, 8, 8), i / 8), "a cat", f"file {i}")
    source = first / "samples" / "00000.png"
    plan_pairs(copies, "folder", str(source), [(0, 1), (2, 3)], VoteQuestion("Which?"))
    plan = VotePlan.read(first)
    with VoteLog.opened(first, plan) as log:
        for _ in range(2):
            log.vote("rater-1", log.show("rater-1"), "left", 1.0)
        write_results(first, log)
    found = load_preferences(first / "votes.jsonl", ReadOptions())
    again = plan_again(folder_of(tmp_path / "again"), found, "votes", VoteQuestion("Which?"))
    assert not any(sample.source for sample in again.samples)


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_nobody_is_asked_about_edits_of_an_image_that_cannot_be_read(how, tmp_path, capsys):
    plan = written_media(tmp_path, "edit")
    with VoteLog.opened(tmp_path, plan) as log:
        for _ in range(4):
            log.vote("rater-1", log.show("rater-1"), "left", 1.0)
        write_results(tmp_path, log)
    found = load_preferences(tmp_path / "votes.jsonl", ReadOptions())
    lost = tmp_path / plan.samples[0].source
    lost.write_bytes(b"no image") if how == "damaged" else lost.unlink()
    again = plan_again(folder_of(tmp_path / "again"), found, "votes", VoteQuestion("Which?"))
    assert len(again.pairs) == 3 and all(sample.source for sample in again.samples)
    said = capsys.readouterr().out
    assert "1 of 4 images that were edited cannot be read" in said and lost.name in said


def verdicts_of(given):
    """P(the first is preferred) of each pair of samples, in the order of their names or texts."""
    found = {}
    for a, b, label in zip(given.a, given.b, given.label, strict=True):
        names = [given.items[row].source.text or given.items[row].source.name for row in (a, b)]
        found[tuple(sorted(names))] = label if names[0] < names[1] else 1 - label
    return found


def left_of(preferences):
    """The sample that was shown on the left of each pair."""
    shown = {}
    for a, b, row in zip(preferences.a, preferences.b, preferences.rows, strict=True):
        left, right = (a, b) if row["side"] == "left" else (b, a)
        items = [preferences.items[each].source for each in (left, right)]
        names = [item.text or item.name for item in items]
        shown[tuple(sorted(names))] = names[0]
    return shown


def sources_of(preferences):
    """The image that each edit is of, by the edit's name."""
    return {
        preferences.items[row].source.name: Path(preferences.items[row].meta["source"]).name
        for row in preferences.edited
    }
