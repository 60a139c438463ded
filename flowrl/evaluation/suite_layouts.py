"""Official prompt files of GenEval 2 and VBench, as rows of a suite."""

from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.evaluation.tables import rows_of

VBENCH_DIMENSIONS = (
    *("subject_consistency", "background_consistency"),
    *("temporal_flickering", "motion_smoothness", "dynamic_degree"),
)


def geneval2_rows(path: Path) -> list[dict[str, Any]]:
    """geneval2_data.jsonl: prompt, atom_count, vqa_list, skills; by number of atoms."""
    rows = _with_columns(path, "prompt", "atom_count", "vqa_list")
    return [{**row, "category": f"{row['atom_count']} atoms"} for row in rows]


def vbench_rows(path: Path) -> list[dict[str, Any]]:
    """VBench_full_info.json: prompt_en and a list of dimensions.

    Kept are prompts of the dimensions that need no heavy weights; a category is the dimensions
    that share its prompts, such as "dynamic_degree, motion_smoothness, subject_consistency".
    """
    return [
        {"prompt": row["prompt_en"], "category": ", ".join(own)}
        for row in _with_columns(path, "prompt_en", "dimension")
        if (own := sorted(set(row["dimension"]) & set(VBENCH_DIMENSIONS)))
    ]


def _with_columns(path: Path, *needed: str) -> list[dict[str, Any]]:
    rows, _ = rows_of(path)
    for number, row in enumerate(rows, 1):
        if lacking := [column for column in needed if column not in row]:
            raise UserError(f"{path}: row {number} lacks {', '.join(lacking)}")
    return rows
