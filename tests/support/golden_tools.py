"""The stored arrays, and short ways to put them into the product's types."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flowrl.likelihoods.rows import Evaluation, Rows, TransitionRows
from flowrl.likelihoods.transition import Likelihood
from rewards import Scores
from samplers import Columns, FlowSDE

GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def arrays(name: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: torch.as_tensor(file[key]) for key in file}


@cache
def cases(name: str) -> dict[str, dict]:
    """The settings of an array file's cases, by name."""
    listed = json.loads((GOLDEN / "cases.json").read_text())[name]
    return {case["case"]: case for case in listed}


def of_case(name: str, case: str) -> dict[str, Tensor]:
    return {k[len(case) + 1 :]: a for k, a in arrays(name).items() if k.startswith(f"{case}_")}


def close(got: Tensor, want: Tensor, atol: float = 1e-6, rtol: float = 0.0) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=atol, rtol=rtol)


def transition_rows(x: Tensor, x_next: Tensor, levels: Tensor, eta: float) -> TransitionRows:
    n = len(x)
    sigma, sigma_next = (level.expand(n) for level in levels)
    return TransitionRows(
        torch.zeros(n, dtype=torch.long), torch.zeros(n, 1), torch.ones(n, 1, dtype=torch.bool),
        None, x, x_next, sigma, sigma_next, FlowSDE(eta),
    )  # fmt: skip


def says(likelihood: Likelihood, v: Tensor, rows: Rows) -> Evaluation:
    return likelihood.evaluate(lambda *_: v, rows)


def columns(nodes: tuple[int, ...]) -> Columns:
    ones = (1.0,) * len(nodes)
    return Columns(nodes, (True,) * len(nodes), ones, ones)


def scores(*rewards: Tensor) -> Scores:
    values = torch.stack(rewards, 1)
    return Scores(
        values, torch.ones_like(values, dtype=torch.bool), tuple(map(str, range(len(rewards))))
    )
