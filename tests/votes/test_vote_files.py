"""Files of a folder of votes that anybody may have made: only its own samples are ever shown."""

import copy
import json
import math
import os

import pytest

from flowrl.errors import UserError
from flowrl.votes.answer import table_rows, write_results
from flowrl.votes.asking import USED, _recorded
from flowrl.votes.door import Door
from flowrl.votes.log import VoteLog
from flowrl.votes.plan import (
    MOST_SAMPLE,
    MOST_SHOWN_TEXT,
    PLAN,
    VotePlan,
    check_sample_files,
    sample_bytes,
)
from flowrl.votes.server import VotingRoom
from tests.support.advice import advice
from tests.support.voting import written_media, written_plan

OUTSIDE = ("/etc/x{}", "../x{}", "samples/../x{}", "samples/../../x{}", "x{}", "samples/a/x{}",
           "samples/x{}\n", "file:///etc/x{}", "~/x{}", "samples//x{}", "samples/.x{}")  # fmt: skip
FIELDS = {
    "file": (".png", ".apng", ".wav", ".txt"),
    "source": (".png",),
    "sound": (".wav",),
    "drawing": (".png",),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_plan_that_names_files_elsewhere_is_damaged(field, tmp_path):
    written_plan(tmp_path, pairs=1)
    whole = json.loads((tmp_path / "plan.json").read_text())
    for suffix in FIELDS[field]:
        for name in (pattern.format(suffix) for pattern in OUTSIDE):
            whole["samples"][0] |= {"file": "samples/00000.png", field: name}
            (tmp_path / "plan.json").write_text(json.dumps(whole))
            with pytest.raises(UserError, match=r"plan\.json is damaged.*outside its folder"):
                VotePlan.read(tmp_path)
        whole["samples"][0] |= {"file": "samples/00000.png", field: f"samples/x{suffix}"}
        (tmp_path / "plan.json").write_text(json.dumps(whole))
        VotePlan.read(tmp_path)
        del whole["samples"][0][field]


@pytest.mark.parametrize("kind", ["image", "video", "sound", "text", "edit"])
@pytest.mark.parametrize("how", ["absent", "link", "folder", "pipe", "large", "linked folder"])
def test_a_file_that_is_no_plain_one_is_named_before_anybody_votes(how, kind, tmp_path):
    folder, secret = tmp_path / "votes", tmp_path / "secret"
    plan = written_plan(folder, pairs=1) if kind == "image" else written_media(folder, kind, 1)
    check_sample_files(folder, plan)
    secret.write_text("secret")
    names = [name for sample in plan.samples for name in sample.files]
    for name in dict.fromkeys(names):
        path, kept = folder / name, tmp_path / "kept"
        path.rename(kept)
        if how == "link":
            path.symlink_to(secret)
        elif how == "folder":
            path.mkdir()
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "large":  # has no blocks on disk
            path.touch()
            os.truncate(path, 1 + (MOST_SHOWN_TEXT if kind == "text" else MOST_SAMPLE))
        elif how == "linked folder":
            kept.rename(path)
            path.parent.rename(tmp_path / "elsewhere")
            path.parent.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UserError, match=f"{path.name} cannot be read"):
            check_sample_files(folder, plan)
        with pytest.raises(UserError, match=f"{path.name} cannot be read"):
            sample_bytes(folder, name)
        if how == "linked folder":
            return
        path.rmdir() if how == "folder" else path.unlink(missing_ok=True)
        kept.rename(path)


def test_a_text_that_is_not_utf_8_is_named(tmp_path):
    plan = written_media(tmp_path, "text", 1)
    with VoteLog.opened(tmp_path, plan) as log:
        log.vote("rater-1", log.show("rater-1") or "", "left", 1.0)
    (tmp_path / plan.samples[0].file).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"00000\.txt cannot be read.*utf-8"):
        table_rows(tmp_path, VoteLog.read(tmp_path, plan))


WRONG = (None, 5, -1, 1.5, "x", "", [], [1], {"a": 1}, 10**30, math.nan, "\ud800")


def places(tree, place=()):
    """Every value of a tree, by the keys that lead to it; of a list, the first two."""
    yield place
    parts = tree.items() if isinstance(tree, dict) else ()
    if isinstance(tree, list):
        parts = enumerate(tree[:2])
    for key, value in parts:
        yield from places(value, (*place, key))


def changed(tree, place, value):
    if not place:
        return value
    tree = copy.deepcopy(tree)
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return tree


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("image", (None, [])),
        pytest.param("image", WRONG, marks=pytest.mark.slow),
        pytest.param("video", WRONG, marks=pytest.mark.slow),
    ],
)
def test_a_plan_with_another_value_at_any_place_is_used_or_ends_in_a_sentence(
    kind, values, tmp_path
):
    """A folder of votes may be anybody's: no value of it ends in a trace."""
    if kind == "image":
        plan = written_plan(tmp_path, pairs=2, raters=2)
    else:
        plan = written_media(tmp_path, kind, pairs=1)
    with VoteLog.opened(tmp_path, plan) as log:
        log.vote("rater-1", log.show("rater-1"), "left", 1.0)
        write_results(tmp_path, log)
    tree = json.loads((tmp_path / PLAN).read_text())
    files = {name: (tmp_path / name).read_bytes() for name in ("events.jsonl", "votes.jsonl")}
    refused, all_places = 0, list(places(tree))
    for place in all_places:
        for value in values:
            (tmp_path / PLAN).write_text(json.dumps(changed(tree, place, value)))
            try:
                shown_and_counted(tmp_path)
            except UserError:
                refused += 1
            for name, content in files.items():
                (tmp_path / name).write_bytes(content)
    assert refused > 0.4 * len(all_places) * len(values)


def shown_and_counted(folder):
    plan = VotePlan.read(folder)
    with VoteLog.opened(folder, plan) as log:
        check_sample_files(folder, plan)
        room = VotingRoom(folder, log, Door.of(folder, list(log.raters)))
        for rater in log.raters:
            shown = room.state(rater)["open"]
            if shown is not None:
                name = shown["left"].removeprefix("/media/")
                room.media_part(rater, name, "" if shown["kind"] == "image" else "9")
        write_results(folder, log)


def test_recorded_votes_with_another_value_at_any_place_are_damaged(tmp_path):
    asked = {"rows": [[0, 1], [2, 3]], "at_random": [True, False], "prompts": ["a", "b"]}
    line = {"iteration": 3, "votes": [[3, 0, 1.0, -1.0], [3, 1, 0.5, 1.0]], "asked": asked}
    file = tmp_path / USED
    file.write_text(json.dumps(line) + "\n")
    (found,) = _recorded(tmp_path).values()
    assert (found.votes[1].pair, found.votes[1].label, found.asked.rows[1]) == (1, 0.5, (2, 3))
    refused = 0
    for place in places(line):
        for value in WRONG:
            file.write_text(json.dumps(changed(line, place, value)) + "\n")
            try:
                _recorded(tmp_path)
            except UserError as error:
                assert str(error).startswith(f"{file} is damaged (")
                refused += 1
    assert refused > 100


def test_recorded_votes_are_brought_back_from_a_copy(tmp_path):
    file, copy = tmp_path / USED, tmp_path / "copy"
    file.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(
        json.dumps({"iteration": 3, "votes": [[3, 0, 1.0, -1.0]], "asked": None}) + "\n"
    )
    file.write_bytes(copy.read_bytes()[:-20])
    (found,) = advice(
        "{} is damaged ({}): bring it back from a copy",
        lambda: _recorded(tmp_path),
        lambda: (file.write_bytes(copy.read_bytes()), _recorded(tmp_path))[1].values(),
    )
    assert found.asked is None
