"""Read the official prompt files of GenEval 2, VBench, UniGenBench and DPG-Bench as suite rows."""

import json
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.evaluation.tables import rows_of, table_of
from flowrl.prompts.source import Row

VBENCH_DIMENSIONS = (
    "subject_consistency",
    "background_consistency",
    "temporal_flickering",
    "motion_smoothness",
    "dynamic_degree",
)

UNIGENBENCH_KEYS = {  # of the prompt files, by language: theme, test points, descriptions
    "en": ("Primary Categories", "Testpoints", "Testpoint Description"),
    "zh": ("一级垂类", "考点", "考点对应描述"),
}


def geneval2_rows(path: Path) -> list[dict[str, Any]]:
    """Read geneval2_data.jsonl (prompt, atom_count, vqa_list, skills), with the number of atoms as
    category."""
    rows = _with_columns(path, "prompt", "atom_count", "vqa_list").values()
    return [{**row, "category": f"{row['atom_count']} atoms"} for row in rows]


def vbench_rows(path: Path) -> list[dict[str, Any]]:
    """Read VBench_full_info.json: prompt_en and a list of dimensions.

    Only prompts of the dimensions that need no heavy weights are kept; a category is the list of
    dimensions that share a prompt, such as "dynamic_degree, motion_smoothness,
    subject_consistency".
    """
    return [
        {"prompt": row["prompt_en"], "category": ", ".join(categories)}
        for row in _with_columns(path, "prompt_en", "dimension").values()
        if (categories := sorted(set(row["dimension"]) & set(VBENCH_DIMENSIONS)))
    ]


def unigenbench_rows(path: Path) -> list[dict[str, Any]]:
    """Read test_prompts_en.csv and the like: index, prompt_en, sub_dims_en; _zh in Chinese.

    The third column is JSON with the test points and descriptions for the reward unigenbench.
    """
    rows, _ = rows_of(path)
    language = next((key for key in UNIGENBENCH_KEYS if f"prompt_{key}" in rows[0]), "en")
    theme, points, descriptions = UNIGENBENCH_KEYS[language]
    text, dimensions = f"prompt_{language}", f"sub_dims_{language}"
    suite_rows = []
    for at, row in _with_columns(path, text, dimensions).items():
        try:
            about = json.loads(row[dimensions])
            lists = {"testpoints": about[points], "testpoint_descriptions": about[descriptions]}
            suite_rows.append({"prompt": row[text], "category": str(about[theme]), **lists})
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}, {at}: {dimensions} is not JSON with {theme}, {points} and "
                f"{descriptions} ({error})"
            ) from error
        if len(about[points]) != len(about[descriptions]):
            raise UserError(f"{path}, {at}: {points} and {descriptions} differ in length")
    return suite_rows


def dpg_rows(path: Path) -> list[dict[str, Any]]:
    """Read dpg_bench.csv: one row per question; rows with the same item_id belong to one prompt."""
    columns = ("item_id", "text", "proposition_id", "dependency", "tuple")
    prompts: dict[str, dict[str, Any]] = {}
    for at, row in _with_columns(path, *columns, "question_natural_language").items():
        prompt = {"prompt": row["text"], "category": "all", "item_id": row["item_id"]}
        suite_row = prompts.setdefault(row["item_id"], prompt | {"dpg_questions": []})
        try:
            question_id = int(row["proposition_id"])
            parents = [int(parent) for parent in row["dependency"].split(",")]
        except (ValueError, AttributeError, TypeError) as error:
            raise UserError(
                f"{path}, {at}: proposition_id and dependency must be numbers: {error}"
            ) from error
        question = {"question": row["question_natural_language"], "tuple": row["tuple"]}
        suite_row["dpg_questions"].append({"id": question_id, "parents": parents, **question})
    return list(prompts.values())


def _with_columns(path: Path, *needed: str) -> dict[str, Row]:
    """The rows by their places, all with these columns."""
    table, _ = table_of(path)
    rows = dict(zip(table.places, table.rows, strict=True))
    for at, row in rows.items():
        if lacking := [column for column in needed if column not in row]:
            raise UserError(f"{path}, {at} lacks {', '.join(lacking)}")
    return rows
