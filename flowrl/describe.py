"""What an iteration does and costs, told before any weights are loaded."""

from pathlib import Path

from flowrl.settings import Run
from samplers import picture


def describe(run: Run, iteration: int, svg: Path | None) -> str:
    """A table of the plans with network evaluations, samples and trained rows of one iteration."""
    algorithm = run.algorithm()
    even = [1 - k / algorithm.steps for k in range(algorithm.steps + 1)]  # the model has its own
    plans = algorithm.plan(even, iteration, run.train.seed)
    if svg is not None:
        svg.write_text(picture.draw(plans))
    lines = [
        f"recipe {run.recipe.name}, iteration {iteration}",  # type: ignore[attr-defined]
        picture.describe(plans),
        f"draws an iteration: {run.prompts.per_iteration} (multiply the figures above, which are "
        "for one draw)",
        f"optimizer steps an iteration: {run.train.updates}",
    ]
    return "\n".join(lines)
