"""What an iteration does and costs, told before any weights are loaded."""

from pathlib import Path

from flowrl.settings import Run
from samplers import evaluations, picture


def describe(run: Run, iteration: int, svg: Path | None) -> str:
    """A table of the plans with network evaluations, samples and trained rows of one iteration."""
    algorithm = run.algorithm()
    even = [1 - k / algorithm.steps for k in range(algorithm.steps + 1)]  # the model has its own
    plans = algorithm.plan(even, iteration, run.train.seed)
    if svg is not None:
        svg.write_text(picture.draw(plans))
    draws = run.prompts.per_iteration
    samples = draws * sum(plan.group for plan in plans)
    trained = sum(
        n for plan in plans for n, s in zip(plan.nodes, plan.steps, strict=True) if s.train
    )
    rows = f"{draws * trained} trained rows" if trained else "rows at levels of the loss's own"
    return "\n".join(
        [
            f"recipe {run.recipe.name}, iteration {iteration}"  # type: ignore[attr-defined]
            " (levels evenly spaced here; the model has its own)",
            picture.describe(plans),
            f"an iteration: {draws} draws, {draws * evaluations(plans)} network evaluations in "
            f"sampling, {samples} samples to decode and score, {rows}",
            f"optimizer steps an iteration: {run.train.updates}",
        ]
    )
