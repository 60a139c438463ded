"""A plan that does not fit the pipeline's own noise levels is refused before any sampling."""

from pathlib import Path

import pytest

from flowrl.cli.plan import describe_run
from flowrl.errors import UserError
from flowrl.paths import PROJECT
from flowrl.run import start, train
from flowrl.settings.read import override, read_run

pytestmark = pytest.mark.long  # `make quick` leaves out what drives models

OWN = ("--model.sigmas", "null")  # the scheduler's levels, which end on 0.001


@pytest.mark.slow
def test_a_window_that_the_schedulers_levels_leave_no_room_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps of the demo end on the levels 0.2, 0.001, 0: three may be noisy, not four."""
    arguments = ["--recipe.name", "mix_grpo", "--recipe.steps", "6", "--recipe.group", "4", *OWN]
    run = override(read_run(PROJECT / "configs" / "demo.yaml"), arguments)

    def evaluated(*_: object) -> None:
        pytest.fail("the base was evaluated first")

    monkeypatch.setattr(train, "evaluate_and_keep", evaluated)
    with pytest.raises(
        UserError, match=r"6 steps, whose levels end at .*0\.001, 0\.000.*a window of 4"
    ):
        start.start(run, "demo", tmp_path / "run")


@pytest.mark.parametrize(("steps", "refused"), [("6", True), ("7", False)])
def test_plan_names_what_a_list_that_ends_near_zero_would_refuse(steps: str, refused: bool) -> None:
    arguments = ["--recipe.name", "mix_grpo", "--recipe.steps", steps, "--recipe.group", "4", *OWN]
    text = describe_run(override(read_run(PROJECT / "configs" / "demo.yaml"), arguments), 0, None)
    assert ("`flowrl train` would refuse this plan (a window of 4" in text) == refused
