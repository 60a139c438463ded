"""Preferences between edits of an image, and HPDv3: readers of published layouts.

hpdv3             prompt, path1, path2: the first is preferred; HPDv3, arXiv:2508.03789
editscore_bench   instruction, input_image, output_images, dimension: the first of the two outputs
                  is preferred; EditScore/EditReward-Bench, arXiv:2509.23909
editreward_bench  instruction, source_image, candidate_1, candidate_2, ranking: `A>B`, `C>A`, `A=B`;
                  TIGER-Lab/EditReward-Bench on the hub, arXiv:2509.26346
editreward_files  prompt, path_src, paths_generated, human_vote: its JSON files of 2, 3 and 4 edits,
                  with `C>A>B` or `A=B=Good` as the vote's `ranking`
editreward_data   prompt, path_src, path1, path2: the first is preferred unless `tie_case` says that
                  both have the same overall score; its training set, TIGER-Lab/EditReward-Data

The layouts were read in code: HPDv3's in a loader that names the hub's data set and its columns
(preferred: path1), EditScore's in its evaluation.py at 35ddc1a9, TIGER's in evaluate/eval_bench.py
and inference_3pair_hf.py at 84602889, and its training set's in EditReward/TRAIN_README.md at
5cfbcfb7. That EditScore's first output is the preferred one follows from its evaluation, which
stores two scores and no label. None of these files has been read with this code.
"""

import atexit
import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.evaluation.preference_rows import JudgedRow, PreferenceLayout, PreferenceRow
from flowrl.evaluation.sources import Source

LETTERS = "ABCD"


def _hpdv3(row: PreferenceRow, _dimension: str, _place: str) -> JudgedRow:
    return JudgedRow(row["prompt"], (row["path1"], row["path2"]), 1.0)


def _editscore(row: PreferenceRow, _dimension: str, place: str) -> JudgedRow:
    outputs = row["output_images"]
    if not isinstance(outputs, list) or len(outputs) != 2:
        raise UserError(f"{place}: output_images must hold two images")
    more = {"source": row["input_image"], "category": row["dimension"]}
    return JudgedRow(row["instruction"], outputs, 1.0, more=more)


def _editreward(row: PreferenceRow, _dimension: str, place: str) -> JudgedRow:
    """Every two of three or four edits are a row; letters refer to all edits, and candidate_1 has
    the earlier letter."""
    ranks = ranks_in(row["ranking"], place)
    if len(ranks) != 2:
        raise UserError(
            f"{place}: the ranking is {row['ranking']!r}, but must rank two edits, as in A>B"
        )
    first, second = (ranks[letter] for letter in sorted(ranks))
    label = 0.5 if first == second else float(first < second)
    more = {"source": row["source_image"], "category": row.get("dataset")}
    return JudgedRow(row["instruction"], (row["candidate_1"], row["candidate_2"]), label, more=more)


def _editreward_files(row: PreferenceRow, _dimension: str, place: str) -> JudgedRow | None:
    vote, paths = row["human_vote"], row["paths_generated"]
    ranking = vote.get("ranking") if isinstance(vote, Mapping) else None
    if ranking is None or not row["path_src"] or not all(paths):  # as theirs, which leaves it out
        return None
    ranks = ranks_in(ranking, place)
    if sorted(ranks) != list(LETTERS[: len(paths)]):
        raise UserError(f"{place}: the ranking {ranking!r} does not match the {len(paths)} edits")
    more = {"source": row["path_src"]}
    return JudgedRow(row["prompt"], paths, ranks=[ranks[x] for x in sorted(ranks)], more=more)


def _editreward_data(row: PreferenceRow, _dimension: str, place: str) -> JudgedRow:
    """Their validation set has the same columns without `tie_case`."""
    tie = row.get("tie_case")
    if tie not in (None, True, False):
        raise UserError(f"{place}: tie_case is {tie!r}, but must be true or false")
    label = 0.5 if tie else 1.0
    more = {"source": row["path_src"]}
    return JudgedRow(row["prompt"], (row["path1"], row["path2"]), label, more=more)


def ranks_in(ranking: Any, place: str) -> dict[str, float]:
    """Ranks (1 is best) of the letters in a ranking such as `C>A>B`, `A<B` or `A=B=Good`."""
    text = str(ranking).replace(" ", "")
    text = text.removesuffix("=Good").removesuffix("=Bad")
    letters, signs = text[::2], text[1::2]
    well_formed = len(letters) == len(signs) + 1 and len(set(letters)) == len(letters) > 1
    if (
        not well_formed
        or set(letters) - set(LETTERS)
        or set(signs) - set("<>=")
        or {"<", ">"} <= {*signs}
    ):
        raise UserError(
            f"{place}: the ranking is {ranking!r}, but must look like A>B, B>A>C or A=B"
        )
    ranks, rank = {letters[0]: 1.0}, 1.0
    for letter, sign in zip(letters[1:], signs, strict=True):
        rank += {"=": 0.0, ">": 1.0, "<": -1.0}[sign]
        ranks[letter] = rank
    return ranks


EDIT_LAYOUTS = {
    # before hpdv3, whose columns it has too
    "editreward_data": PreferenceLayout(("prompt", "path_src", "path1", "path2"), _editreward_data),
    "hpdv3": PreferenceLayout(("prompt", "path1", "path2"), _hpdv3),
    "editscore_bench": PreferenceLayout(
        ("instruction", "input_image", "output_images", "dimension"), _editscore
    ),
    "editreward_bench": PreferenceLayout(
        ("instruction", "source_image", "candidate_1", "candidate_2", "ranking"), _editreward
    ),
    "editreward_files": PreferenceLayout(
        ("prompt", "path_src", "paths_generated", "human_vote"), _editreward_files
    ),
}


def with_more(row: PreferenceRow, judged: JudgedRow, folder: Path, place: str) -> PreferenceRow:
    """The row without its images, plus the columns that its layout adds.

    `source` becomes a path, as edit rewards expect: an image inside the table is written to a
    folder that is removed with the process.
    """
    if not judged.more:
        return row
    columns = {name: value for name, value in row.items() if not _is_image(value)} | dict(
        judged.more
    )
    if "source" in judged.more:
        source = Source.of(judged.more["source"], folder, f"{place}, the source")
        columns["source"] = str(source.path if source.data is None else _written(source.data))
    return columns


def _is_image(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_image, value))
    return isinstance(value, bytes) or (isinstance(value, Mapping) and "bytes" in value)


def _written(content: bytes) -> Path:
    file = _folder() / hashlib.sha256(content).hexdigest()
    if not file.is_file():
        file.write_bytes(content)
    return file


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="flowrl-sources-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
