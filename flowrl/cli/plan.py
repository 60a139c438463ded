"""What an iteration does and costs, told before any weights are loaded."""

from collections.abc import Sequence
from pathlib import Path

from flowrl.errors import UserError
from flowrl.settings import Run
from samplers import Plan, evaluations, picture
from samplers.completions import TextPlan
from samplers.completions import describe_text_plan as describe_texts


def describe_run(run: Run, iteration: int, svg: Path | None) -> str:
    """A table of the plans with what one iteration of them evaluates, samples and trains on."""
    algorithm = run.algorithm()
    even = [1 - k / algorithm.steps for k in range(algorithm.steps + 1)]  # the model has its own
    plans = algorithm.plan(even, iteration, run.train.seed)
    texts = [plan for plan in plans if isinstance(plan, TextPlan)]
    body = _texts(run, texts, svg) if texts else _pictures(run, plans, svg)  # type: ignore[arg-type]
    name = run.recipe.name  # type: ignore[attr-defined]
    updates = f"optimizer steps an iteration: {run.train.updates}"
    return "\n".join([f"recipe {name}, iteration {iteration}{body}", updates])


def _texts(run: Run, plans: Sequence[TextPlan], svg: Path | None) -> str:
    if svg is not None:
        raise UserError("--svg draws noise levels, and text has none: leave it out")
    draws = run.prompts.per_iteration
    samples, tokens = (draws * sum(getattr(p, of) for p in plans) for of in ("group", "tokens"))
    environment = run.model.environment
    between = "" if environment is None else f"\n{environment.description(plans[0].length)}"
    return (
        f"\n{describe_texts(plans)}{between}\nan iteration: {draws} draws, {samples} completions "
        f"to score, at most {tokens} tokens generated and trained on"
    )


def _pictures(run: Run, plans: Sequence[Plan], svg: Path | None) -> str:
    if svg is not None:
        svg.write_text(picture.tree_svg(plans))
    draws = run.prompts.per_iteration
    samples = draws * sum(plan.group for plan in plans)
    trained = sum(
        n for plan in plans for n, s in zip(plan.nodes, plan.steps, strict=True) if s.train
    )
    rows = f"{draws * trained} trained rows" if trained else "rows at levels of the loss's own"
    return "\n".join(
        [
            " (levels evenly spaced here; the model has its own)",
            picture.describe_plan(plans),
            f"an iteration: {draws} draws, {draws * evaluations(plans)} network evaluations in "
            f"sampling, {samples} samples to decode and score, {rows}",
        ]
    )
