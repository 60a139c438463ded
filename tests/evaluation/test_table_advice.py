"""Advice on tables of preferences, of samples and of outputs: each message is raised, and what it
asks for, a table, an option or a place, is taken."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import pyarrow
import pytest
from pyarrow import parquet

import flowrl
from flowrl.errors import UserError
from flowrl.evaluation.folders import Where, find_items
from flowrl.evaluation.outputs import check_output_file, make_output_folder
from flowrl.evaluation.preferences import Preferences, ReadOptions, load_preferences
from flowrl.evaluation.reward_evaluation import column_names
from flowrl.evaluation.sources import Source, read_media
from flowrl.evaluation.suites import load_suite
from flowrl.session.given_file import GivenFile
from flowrl.settings.read import run_from
from flowrl.votes.asking import earlier_votes
from rewards.fitted.scoring import FittedScores
from tests.api.test_call_advice import CallAdvice
from tests.evaluation.test_preferences import picture
from tests.support import media_forms, runs
from tests.support.advice import advice

PAIRS = "configs/preferences/pairs.jsonl"
Row = dict[str, Any]
HPD = {"prompt": "p", "file_path": ["a0.png", "b0.png"], "human_preference": [1, 0]}
VOTES = {
    "prompt": "p",
    "image1": "a0.png",
    "image2": "b0.png",
    "weighted_results_image1_preference": 2.0,
    "weighted_results_image2_preference": 1.0,
    "elo": 1000,
}
ANSWERS = {"prompt": "p", "chosen": "a good one", "rejected": "a bad one"}
NAMED = {"prompt": "p", "chosen": "a0.png", "rejected": "b0.png"}
PLAIN = {"prompt": "p", "a": "a0.png", "b": "b0.png", "label": "a"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, level in (("a0.png", 10), ("b0.png", 200)):
        (tmp_path / name).write_bytes(picture(level))
    return tmp_path


def read(folder: Path, *rows: Row, **options: Any) -> Preferences:
    table = folder / "t.jsonl"
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return load_preferences(table, ReadOptions(**options))


def test_an_output_has_a_name_of_its_own(folder: Path) -> None:
    (folder / "run.yaml").write_text("recipe: {name: nft}\n")
    advice(
        "{}: {} exists, and is nothing that this command writes; choose another name",
        lambda: check_output_file(folder / "run.yaml", begins=b"{"),
        lambda: check_output_file(folder / "scores.jsonl", begins=b"{"),
    )


def test_an_output_has_a_place_that_is_there(folder: Path) -> None:
    (folder / "link").symlink_to("nowhere/at/all")
    advice(
        "{}: {} is a link to nothing, or no folder: choose another place",
        lambda: make_output_folder(folder / "link"),
        lambda: make_output_folder(folder / "other"),
    )
    assert (folder / "other").is_dir()


def test_votes_for_the_first_image_have_a_column(folder: Path) -> None:
    pairs = advice(
        "does not count votes for the first image: use a column such as "
        "weighted_results_image1_preference",
        lambda: read(folder, VOTES, dimension="elo"),
        lambda: read(folder, VOTES, dimension="weighted_results_image1_preference"),
    )
    assert pairs.label.tolist() == pytest.approx([2 / 3])


FITTING: dict[str, Callable[[Path], Preferences]] = {
    "corrected": lambda folder: read(folder, HPD, HPD),
    "removed": lambda folder: read(folder, HPD),
    "another layout": lambda folder: read(
        folder, HPD | PLAIN, HPD | PLAIN | {"human_preference": None}, layout="plain"
    ),
}


@pytest.mark.parametrize("way", FITTING)
def test_cells_are_of_their_layout(folder: Path, way: str) -> None:
    broken = HPD | PLAIN | {"human_preference": None}
    advice(
        "its cells are not of layout {} ({}): correct or remove the row, or choose another "
        "--layout",
        lambda: read(folder, HPD | PLAIN, broken),
        lambda: FITTING[way](folder),
    )


def test_a_layout_is_a_known_one(folder: Path) -> None:
    pairs = advice(
        "--layout: {} is not known; use one of {}",
        lambda: read(folder, NAMED, layout="choosen"),
        lambda: read(folder, NAMED, layout="chosen"),
    )
    assert pairs.layout == "chosen"


@pytest.mark.parametrize("left", [("--rewards", "brightness"), ("--judges", "brightness")])
def test_a_reward_is_no_judge_beside_itself(folder: Path, left: tuple[str, str]) -> None:
    words = ("evaluate-rewards", PAIRS, "--robust", "0", "--resamples", "20", "--prompts", "4")
    both = ("--rewards", "brightness", "--judges", "brightness")
    advice(
        "--judges: {} is also among the rewards; leave one out",
        lambda: runs.ended(*words, *both, "--out", folder / "out"),
        lambda: runs.ended(*words, *left, "--out", folder / "out"),
    )


def test_a_suite_with_its_own_prompts_takes_no_file() -> None:
    suite = advice(
        "the suite {} has its own prompts; leave the file out",
        lambda: load_suite("shapes:prompts.jsonl"),
        lambda: load_suite("shapes"),
    )
    assert suite.rows


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_a_table_is_of_a_known_form(folder: Path, suffix: str) -> None:
    """Each of the forms that the message lists."""
    (folder / "t.txt").write_text("a ball\n")
    table = folder / f"pairs.{suffix}"
    separator = {"csv": ",", "tsv": "\t"}.get(suffix)
    if suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist([PLAIN]), table)
    elif separator:
        table.write_text(f"{separator.join(PLAIN)}\n{separator.join(PLAIN.values())}\n")
    else:
        table.write_text(json.dumps([PLAIN] if suffix == "json" else PLAIN))
    pairs = advice(
        "{}: cannot read {}; use one of {}",
        lambda: load_preferences(folder / "t.txt", ReadOptions()),
        lambda: load_preferences(table, ReadOptions()),
    )
    assert pairs.label.tolist() == [1.0]


KINDS: dict[str, Callable[[Path], object]] = {
    "a table of each kind": lambda folder: (read(folder, ANSWERS), read(folder, NAMED)),
    "words": lambda folder: read(folder, ANSWERS, ANSWERS | {"rejected": "b0.png"}, layout="texts"),
}


@pytest.mark.parametrize("way", KINDS)
def test_files_and_answers_are_compared_apart(folder: Path, way: str) -> None:
    advice(
        "{}, {}: {} is the file {}, and other cells are texts: make a table of each kind, or "
        "choose --layout texts to compare the words",
        lambda: read(folder, ANSWERS, ANSWERS | {"rejected": "b0.png"}),
        lambda: KINDS[way](folder),
    )


PATHS: dict[str, Callable[[Path], Preferences]] = {
    "beside the table": lambda folder: read(folder, PLAIN, PLAIN),
    "in a folder of images": lambda folder: read(
        folder / "table", PLAIN, PLAIN, images=folder / "table" / ".."
    ),
    "left out": lambda folder: read(folder, PLAIN),
}


@pytest.mark.parametrize("way", PATHS)
def test_a_sample_is_a_path_or_bytes(folder: Path, way: str) -> None:
    (folder / "table").mkdir()
    advice(
        "{}: {} is neither a path nor the bytes of a file: give a path relative to the table (or "
        "to --images), or leave the row out",
        lambda: read(folder, PLAIN, PLAIN | {"a": None}),
        lambda: PATHS[way](folder),
    )


DATES: dict[str, dict[str, Any]] = {
    "left out": {},
    "as texts": {"more": ["+2739877-01-01", "1970-01-02"]},
}


@pytest.mark.parametrize("way", DATES)
def test_a_column_of_dates_that_python_lacks_is_left_out_or_texts(folder: Path, way: str) -> None:
    def table(**more: Any) -> Preferences:
        images = {side: [picture(1), picture(2)] for side in "ab"}
        columns = {"prompt": ["p", "q"], **images, "label": [1, 0], **more}
        parquet.write_table(pyarrow.table(columns), folder / "t.parquet")
        return load_preferences(folder / "t.parquet", ReadOptions())

    advice(
        "a column has dates or durations that Python cannot hold ({}): leave it out, or write "
        "them as texts",
        lambda: table(more=pyarrow.array([10**9, 1], pyarrow.date32())),
        lambda: table(**DATES[way]),
    )


BAD_TABLES: dict[str, list[Row]] = {
    "columns of no layout": [{"caption": "p", "best": "a0.png", "other": "b0.png"}],
    "cells of another kind": [HPD, HPD | {"human_preference": None}],
    "files among answers": [ANSWERS, ANSWERS | {"rejected": "b0.png"}],
    "no path": [PLAIN | {"a": None}],
}


def of_a_run(table: Path, **given: Any) -> GivenFile:
    tree = {
        "recipe": {"name": "dpo", "steps": 4},
        "model": {"pipeline": "flowrl/demo/shapes-sd3"},
        "prompts": {"per_iteration": 4},
        "rewards": ["brightness"],
        "given": {"file": str(table), "kind": "pairs", **given},
    }
    return GivenFile.read(run_from(tree, "run.yaml"))


# the doors of the reader of preferences that lack its options
DOORS: dict[str, Callable[[Path], object]] = {
    "given.file": of_a_run,
    "flowrl vote": lambda table: runs.ended("vote", table, "--out", table.parent / "votes"),
    # the table is read before its run's reward is asked for features
    "ask.earlier": lambda table: earlier_votes(table, cast(FittedScores, None)),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", BAD_TABLES)
def test_no_door_names_an_option_that_it_lacks(folder: Path, case: str, door: str) -> None:
    table = folder / "t.jsonl"
    table.write_text("".join(f"{json.dumps(row)}\n" for row in BAD_TABLES[case]))
    with pytest.raises(UserError) as refused:
        DOORS[door](table)
    said = str(refused.value)
    assert "t.jsonl" in said and "--" not in said, said


class RunTable(NamedTuple):
    """What a run's message says, the row and the settings of `given` that raise it, and those that
    follow it."""

    says: str
    row: Row
    given: dict[str, Any]
    follow: Row
    follow_given: dict[str, Any]


CAPTIONED = {"caption": "p", "best": "a0.png", "other": "b0.png"}
OF_TWO_LAYOUTS = HPD | PLAIN | {"human_preference": None}
RUN_TABLES = [
    RunTable(
        "given.columns, such as {prompt: caption",
        CAPTIONED,
        {},
        CAPTIONED,
        {"columns": {"prompt": "caption", "chosen": "best", "rejected": "other"}},
    ),
    RunTable(
        "choose another given.layout", OF_TWO_LAYOUTS, {}, OF_TWO_LAYOUTS, {"layout": "plain"}
    ),
    RunTable(
        "given.label: elo does not count votes",
        VOTES,
        {"label": "elo"},
        VOTES,
        {"label": "weighted_results_image1_preference"},
    ),
    RunTable("relative to the table (or to given.folder)", PLAIN | {"a": None}, {}, PLAIN, {}),
    RunTable("'text' (given.columns)", PLAIN, {"columns": {"prompt": "text"}}, PLAIN, {}),
]


@pytest.mark.parametrize("case", RUN_TABLES, ids=[case.says for case in RUN_TABLES])
def test_a_run_is_told_its_settings(folder: Path, case: RunTable) -> None:
    """And a run with them reads the table."""

    def pairs(row: Row, given: dict[str, Any]) -> GivenFile:
        (folder / "t.jsonl").write_text(json.dumps(row) + "\n")
        return of_a_run(folder / "t.jsonl", **given)

    with pytest.raises(UserError, match=re.escape(case.says)):
        pairs(case.row, case.given)
    assert pairs(case.follow, case.follow_given).rows


def table_of(folder: Path, *rows: Row) -> Path:
    table = folder / "t.jsonl"
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return table


def items(folder: Path, where: Where, table: Path | None = None) -> object:
    return find_items(folder, table, where)


def unnamed(folder: Path, name: bytes) -> object:
    """Items of a folder with a file of this name alone."""
    inside = folder / "inside"
    inside.mkdir()
    Path(os.fsdecode(os.fsencode(inside) + b"/" + name)).write_bytes(picture(1))
    return items(inside, "auto")


def with_bytes(folder: Path) -> Preferences:
    table = pyarrow.Table.from_pylist([PLAIN | {"a": picture(1), "b": picture(2)}])
    parquet.write_table(table, folder / "t.parquet")
    return load_preferences(folder / "t.parquet", ReadOptions())


def two_tables(folder: Path) -> Path:
    for name in ("first.jsonl", "second.jsonl"):
        (folder / name).write_text(json.dumps(PLAIN) + "\n")
    return folder


def whole(name: str, folder: Path) -> None:
    """Read a video, or a part of one."""
    pytest.importorskip("av")
    (folder / "a0.mp4").write_bytes(media_forms.video(media_forms.video_pictures(3)))
    source = Source.of(name, folder, "t.jsonl, line 1")
    if broken := read_media([source]).broken:
        raise UserError(next(iter(broken.values())))


def redness(samples: Any) -> Any:
    return samples.media[:, 0].mean((1, 2))


CLASH, LIGHT = {"name": redness, "label": "brightness"}, {"name": "brightness"}
FEW = {"options": {"robust": 0, "resamples": 20, "prompts": 4}}
PLACED = {"prompt": "p", "a_text": "it is", "b_text": "it was", "label_id": 1}
STUDIO = {"data": {"prompt": "p", "a": "a0.png", "b": "b0.png"}, "annotations": []}
JUDGED = [{"result": [{"type": "pairwise", "value": {"selected": "left"}}]}]
ROWS = [
    CallAdvice(
        "{} has no prompts.jsonl; give a table with --prompts FILE",
        lambda folder: items(folder, "table"),
        lambda folder: items(
            folder, "table", table_of(folder, {"file": "a0.png", "prompt": "a ball"})
        ),
    ),
    CallAdvice(
        "{} has no prompt in its metadata; try --prompts-from names",
        lambda folder: items(folder, "metadata"),
        lambda folder: items(folder, "names"),
    ),
    CallAdvice(
        "{}: the name of this file is not UTF-8: rename it",
        lambda folder: unnamed(folder, b"a\xff.png"),
        lambda folder: unnamed(folder, b"a.png"),
    ),
    CallAdvice(
        "{}: there is no {}: name the prompt `prompt` and the two samples `a` and `b`",
        lambda folder: read(folder, STUDIO | {"data": {"text": "p", "a": "a0.png"}}),
        lambda folder: read(folder, STUDIO | {"annotations": JUDGED}),
    ),
    CallAdvice(
        "{}: {} is a folder; give a file in it",
        lambda folder: check_output_file(folder),
        lambda folder: check_output_file(folder / "scores.jsonl"),
    ),
    CallAdvice(
        "{}: {} is a file; give a folder instead",
        lambda folder: make_output_folder(folder / "a0.png"),
        lambda folder: make_output_folder(folder / "out"),
    ),
    CallAdvice(
        "match no known layout ({}); name them with --columns, such as "
        "prompt=caption,chosen=best,rejected=other",
        lambda folder: read(folder, CAPTIONED),
        lambda folder: read(
            folder,
            CAPTIONED,
            columns=column_names(("prompt=caption", "chosen=best", "rejected=other")),
        ),
    ),
    CallAdvice(
        "but must be a, b, tie or a number in 0..1: correct or remove the row",
        lambda folder: read(folder, PLAIN, PLAIN | {"label": "left-ish"}),
        lambda folder: [
            read(folder, PLAIN, PLAIN | {"label": label}) for label in ("a", "b", "tie", 0.7)
        ],
    ),
    CallAdvice(
        "{}: {} is no text, and no message of the assistant: correct or remove the row",
        lambda folder: read(folder, ANSWERS, ANSWERS | {"chosen": 3}),
        lambda folder: [
            read(folder, ANSWERS),
            read(folder, ANSWERS, ANSWERS | {"chosen": {"role": "assistant", "content": "x"}}),
        ],
    ),
    CallAdvice(
        "which counts the votes for the second image: add that column",
        lambda folder: read(
            folder, {key: value for key, value in VOTES.items() if "image2_pref" not in key}
        ),
        lambda folder: read(folder, VOTES),
    ),
    CallAdvice(
        "counts sides from 0, so it must be 0 or 1, not {}: correct or remove the row",
        lambda folder: read(
            folder, PLACED, PLACED | {"label_id": 2}, columns={"label": "label_id"}
        ),
        lambda folder: [
            read(folder, PLACED, columns={"label": "label_id"}),
            read(folder, PLACED, PLACED | {"label_id": 0}, columns={"label": "label_id"}),
        ],
    ),
    CallAdvice(
        "evaluate-rewards: no rewards; name some with --rewards, such as shapes,brightness",
        lambda folder: runs.ended("evaluate-rewards", PAIRS, "--out", folder / "out"),
        lambda folder: runs.ended(
            *("evaluate-rewards", PAIRS, "--rewards", "shapes,brightness", "--robust", "0"),
            *("--resamples", "20", "--prompts", "4", "--out", folder / "out"),
        ),
    ),
    CallAdvice(
        "rewards: {} is also the label of an object; change one",
        lambda folder: flowrl.evaluate_rewards(PAIRS, [CLASH, "brightness"], **FEW),
        lambda folder: flowrl.evaluate_rewards(
            PAIRS, [CLASH, {"name": "brightness", "label": "light"}], out=folder / "o", **FEW
        ),
    ),
    CallAdvice(
        "rewards: {} is also the label of an object; change one",
        lambda folder: flowrl.score(folder, [CLASH, "brightness"], sheet=0),
        lambda folder: flowrl.score(
            folder, [CLASH, {"name": "brightness", "label": "light"}], sheet=0
        ),
    ),
    CallAdvice(
        "an object and a named reward have the label {}; {}",
        lambda folder: flowrl.score(folder, [CLASH, LIGHT | {"label": "brightness"}], sheet=0),
        lambda folder: flowrl.score(
            folder, [CLASH | {"label": "another"}, LIGHT | {"label": "brightness"}], sheet=0
        ),
    ),
    CallAdvice(
        "--columns: {} is given twice; keep one",
        lambda folder: column_names(("a=first", "a=second")),
        lambda folder: column_names(("a=first",)),
    ),
    CallAdvice(
        "score: no rewards; name some with",
        lambda folder: flowrl.score(folder, [], sheet=0),
        lambda folder: flowrl.score(folder, ["shapes", "brightness"], sheet=0),
    ),
    CallAdvice(
        "{}: the path {} contains half a surrogate pair: correct it",
        lambda folder: read(folder, PLAIN | {"a": "\ud800.png"}),
        lambda folder: read(folder, PLAIN),
    ),
    CallAdvice(
        "a part of a video cannot be read: name the whole file",
        lambda folder: whole("a0.mp4#xywh=0,0,4,4", folder),
        lambda folder: whole("a0.mp4", folder),
    ),
    CallAdvice(
        "which a table of text cannot hold: save the table as parquet, or give a path",
        lambda folder: read(folder, PLAIN | {"a": {"bytes": "aGk=", "path": None}}),
        lambda folder: [with_bytes(folder), read(folder, PLAIN)],
    ),
    CallAdvice(
        "{}: several tables ({}): name one, such as {}",
        lambda folder: load_preferences(two_tables(folder / "tables"), ReadOptions()),
        lambda folder: load_preferences(
            two_tables(folder / "tables") / "first.jsonl", ReadOptions()
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", ROWS, ids=[case.says[:40] for case in ROWS])
def test_following_the_advice_on_a_table(
    case: CallAdvice, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (folder / "tables").mkdir()
    other = tmp_path_factory.mktemp("follow") / "of"
    shutil.copytree(folder, other)
    advice(case.says, lambda: case.call(folder), lambda: case.follow(other))
