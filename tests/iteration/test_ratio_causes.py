"""A difference between sampling and update is told by its cause, with advice that fits it."""

from pathlib import Path
from typing import Any

import pytest

from examples.own.points import Points
from flowrl.errors import UserError
from flowrl.iteration import ratio_check
from tests.run.test_own_runs import tree
from tests.support import frozen, runs
from tests.support.iterations import collect

GRPO = {"name": "flow_grpo", "steps": 4, "group": 4, "clip": 1e-3}


def opened(folder: Path, model: type[Points] = Points, **train: Any) -> Any:
    settings = tree(folder, GRPO, self_test="off", **train)
    if model is not Points:
        settings["model"]["own"] = f"{frozen.__file__}:{model.__name__}"
    return runs.opened(settings, folder)


def shifted(kept: Any, by: float) -> Any:
    """Rows as if sampling had evaluated something else."""
    made = collect(kept, 0)
    for rows in made.rows:
        assert rows.old is not None
        rows.old.logp.add_(by)
    return made


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_random_forward_is_named_and_recomputing_is_not_advised(
    tmp_path: Path, recomputed: bool
) -> None:
    """Densities that are recomputed would be of other noise than the samples'."""
    kept = opened(tmp_path, frozen.Random, recompute_old=recomputed)
    with pytest.raises(UserError, match="the model's forward is random") as told:
        ratio_check.check_ratio(kept.learner, collect(kept, 0), kept.terminal)
    assert "set train.recompute_old" not in str(told.value)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_difference_that_is_no_rounding_is_not_repaired_in_silence(
    tmp_path: Path, recomputed: bool
) -> None:
    kept = opened(tmp_path, recompute_old=recomputed)
    with pytest.raises(UserError, match="the update evaluates something else") as told:
        ratio_check.check_ratio(kept.learner, shifted(kept, 0.5), kept.terminal)
    assert "set train.recompute_old" not in str(told.value)


def test_rounding_is_repaired_by_recomputing(tmp_path: Path, capsys: Any) -> None:
    kept = opened(tmp_path)
    with pytest.raises(UserError, match=r"rounds otherwise.*set train\.recompute_old: true"):
        ratio_check.check_ratio(kept.learner, shifted(kept, 0.02), kept.terminal)
    again = opened(tmp_path, recompute_old=True)  # what the message advises
    ratio_check.check_ratio(again.learner, shifted(again, 0.02), again.terminal)
    assert "the first ratio is 1" in capsys.readouterr().out
