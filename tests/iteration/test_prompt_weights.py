"""Credit weighted by a column of the prompt file, which reaches it as a column of a feature."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowrl.credit.advantages import Estimator, Standardize
from flowrl.credit.prompt_weights import PROMPT_ROWS, PromptWeight
from flowrl.credit.trackers import NoTracker
from flowrl.credit.values import Context
from flowrl.errors import UserError
from flowrl.recipes import RECIPES
from flowrl.table import Table
from rewards import Scores
from samplers import Columns
from tests.support import runs
from tests.support.iterations import collect

ROWS = ({"price": 2.0}, {"price": 1}, {"price": 0.0})


def credited(part: PromptWeight, draws: list[int], rows=ROWS) -> torch.Tensor:
    """Advantages of two draws of two samples each."""
    values = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)[:, None]
    columns = Columns((2,), (True,), (1.0,), (1.0,))
    table = Table({PROMPT_ROWS: rows})
    context = Context(columns, torch.ones(1), prompts=torch.tensor(draws), table=table)
    scores = Scores(values, torch.ones(4, 1, dtype=torch.bool), ("r",))
    return Estimator((Standardize(None), part))(scores, context)[0][:, 0]


def test_a_prompt_s_advantages_carry_its_number() -> None:
    got = credited(PromptWeight("price", mean=False), [0, 2])
    assert got.tolist() == [1.0, -1.0, 0.0, 0.0]
    got = credited(PromptWeight("price"), [1, 0])  # over the draws' mean of 1.5
    assert got.tolist() == pytest.approx([0.5 / 1.5, -0.5 / 1.5, -1.0 / 1.5, 1.0 / 1.5])


@pytest.mark.parametrize("value", [None, "2", -1.0, float("nan"), True])
def test_what_is_no_number_is_named_with_its_row(value) -> None:
    rows = ({"price": 1.0}, {"price": value})
    with pytest.raises(UserError, match=r"row 2 of prompts\.train has .* in the column price"):
        credited(PromptWeight("price"), [0, 1], rows)


def test_without_the_feature_the_column_is_missed_by_name() -> None:
    with pytest.raises(UserError, match="PromptWeight needs rows of the prompt file"):
        context = Context(Columns((1,), (True,), (1.0,), (1.0,)), torch.ones(1))
        scores = Scores(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), ("r",))
        Estimator((PromptWeight("price"),))(scores, context)


def run_tree(pipeline: Path, folder: Path, prices: list[object]) -> dict:
    tree = runs.tree(pipeline, folder, {**runs.FLOW_GRPO, "advantage": ADVANTAGE})
    file = Path(tree["prompts"]["train"])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, price in zip(rows, prices, strict=True):
        row["price"] = price
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tree


ADVANTAGE = [{"name": "standardize"}, {"name": "prompt_weight", "column": "price", "mean": False}]


def test_what_a_tracker_reads_is_opened_too() -> None:
    class Priced(NoTracker):
        reads = (PROMPT_ROWS,)

    plain = RECIPES["flow_grpo"]()
    assert PROMPT_ROWS in replace(plain, tracker=Priced).reads and PROMPT_ROWS not in plain.reads


@pytest.mark.slow
def test_a_run_weighs_its_rows(pipeline: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "priced")]
    made = []
    for folder, prices in zip(folders, ([1, 1, 1, 1], [3, 0, 3, 0]), strict=True):
        folder.mkdir()
        made.append(collect(runs.opened(run_tree(pipeline, folder, prices), folder), 0))
    plain, priced = made
    order = [plain.prompts[int(p)] for p in plain.rows[0].prompt]
    each = torch.tensor([3.0 if row % 2 == 0 else 0.0 for row in order])
    for a, b in zip(plain.rows, priced.rows, strict=True):
        torch.testing.assert_close(a.advantage[:, 0] * each, b.advantage[:, 0])


def test_a_file_without_the_column_is_refused_before_weights_load(
    pipeline: Path, tmp_path: Path, capsys
) -> None:
    tree = run_tree(pipeline, tmp_path, [1, 1, 1, None])
    code = runs.flowrl("train", runs.write(tree, tmp_path), "--folder", tmp_path / "run")
    said = capsys.readouterr()
    assert code == 2 and "row 4 of prompts.train has None in the column price" in said.err
    assert not (tmp_path / "run").exists(), "a mistake in a file leaves no folder"
