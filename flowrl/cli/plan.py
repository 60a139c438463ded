"""A description of one iteration and its costs, without loading weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.estimate.by_size import described_sizes
from flowrl.likelihoods.pathwise import Pathwise
from flowrl.losses.reward import RewardGradient
from flowrl.prompts import PromptSet
from flowrl.run.watch.text_facts import text_length
from flowrl.session.given_check import described_given
from flowrl.settings import Run
from samplers import Plan, evaluations, picture
from samplers.completions import TextPlan
from samplers.picture import describe_text_plan


def describe_run(run: Run, iteration: int, svg: Path | None) -> str:
    """Describe a run: a table of its plans, and the evaluations, samples and training rows of an
    iteration."""
    algorithm = run.algorithm()
    plans = algorithm.planned(run.levels(algorithm.steps), iteration, run.train.seed)
    texts = [plan for plan in plans if isinstance(plan, TextPlan)]
    if run.drawn == 0:
        body = ": all samples are given, training generates none"
    else:
        body = _describe_texts(run, texts, svg) if texts else _describe_images(run, plans, svg)  # type: ignore[arg-type]
    if run.before is not None:  # the texts first: an image's draw is a rewriting
        body = f"{_rewriter(run.before, iteration)}\nimages of the rewritings{body}"
    name = run.recipe.name  # type: ignore[attr-defined]
    updates = f"optimizer steps per iteration: {run.train.optimizer_steps}"
    notes = (
        *described_given(run),
        *_engine(run),
        *described_sizes(run),
        *_near_zero(run, algorithm, iteration),
        updates,
        *text_length(run, _training_prompts(run)),
    )
    return "\n".join([f"recipe {name}, iteration {iteration}{body}", *notes])


def _engine(run: Run) -> Iterator[str]:
    if run.engine is not None:
        yield (
            f"samples are drawn by {run.engine.place} (model.engine), and scored and learned from "
            "here"
        )


def _rewriter(before: Run, iteration: int) -> str:
    """The plan of the language model that writes the prompts."""
    algorithm = before.algorithm()
    plans: Any = algorithm.planned(before.levels(algorithm.steps), iteration, before.train.seed)
    name = before.recipe.name  # type: ignore[attr-defined]
    return f"\nrewritings, {name}{_describe_texts(before, plans, None)}".replace(
        "completions to score", "rewritings to draw"
    )


def _near_zero(run: Run, algorithm: Algorithm, iteration: int) -> Iterator[str]:
    """A line if the plan depends on whether the model's levels end near 0, which only its own call,
    with its weights, shows."""
    falling = [1 - k / (algorithm.steps - 1) for k in range(algorithm.steps - 1)]
    if algorithm.text or run.sigmas is not None:
        return
    try:
        algorithm.planned([*falling, 0.001, 0.0], iteration, run.train.seed)
    except ValueError as problem:
        yield (
            "levels: a scheduler whose list ends at a level near 0 leaves one noisy step less, "
            f"and `flowrl train` would refuse this plan ({problem}); use more steps or a smaller "
            "window"
        )


def _describe_texts(run: Run, plans: Sequence[TextPlan], svg: Path | None) -> str:
    if svg is not None:
        raise UserError("--svg draws noise levels, which texts do not have: leave it out")
    draws = run.drawn
    samples, tokens = (draws * sum(getattr(p, of) for p in plans) for of in ("group", "tokens"))
    environment = run.environment
    between = "" if environment is None else f"\n{environment.description(plans[0].length)}"
    if run.text_steps is not None:
        between = f"\n{run.text_steps.description()}"
    return (
        f"\n{describe_text_plan(plans)}{between}\nan iteration: {draws} draws, {samples} "
        f"completions to score, at most {tokens} tokens generated and trained on"
    )


def _describe_images(run: Run, plans: Sequence[Plan], svg: Path | None) -> str:
    if svg is not None:
        try:
            svg.parent.mkdir(parents=True, exist_ok=True)
            svg.write_text(picture.tree_svg(plans), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--svg: cannot write {svg}: {error.strerror}") from error
    draws = run.drawn * run.rewritings
    samples = draws * sum(plan.group for plan in plans)
    trained, states = (
        draws * sum(getattr(plan, of) for plan in plans)
        for of in ("trained_nodes", "trained_states")
    )
    looked = draws * sum(plan.predicted for plan in plans)
    way = f" and {looked} intermediate samples" if looked else ""
    rows = f"{trained} trained rows" if trained else "rows at noise levels of the loss"
    if states < trained:
        rows += f", scored by {states} network evaluations"
    likelihood = run.algorithm().likelihood
    if isinstance(likelihood, Pathwise):
        rows = _through(run, plans, likelihood)
    if run.teachers is not None:
        many = len(run.teachers.folders)
        rows += f", {states} evaluations by {'the teacher' if many == 1 else f'{many} teachers'}"
    return "\n".join(
        [
            " (levels of model.sigmas)"
            if run.sigmas is not None
            else " (assuming evenly spaced levels; `flowrl train` checks the plan on the model's "
            "own)",
            picture.describe_plan(plans),
            f"an iteration: {draws} draws, {draws * evaluations(plans)} network evaluations in "
            f"sampling, {samples} samples{way} to decode and score, {rows}",
        ]
    )


def _through(run: Run, plans: Sequence[Plan], likelihood: Pathwise) -> str:
    """The work of a gradient method."""
    draws, loss = run.prompts.per_iteration * run.rewritings, run.algorithm().loss
    others = len(loss.roles)
    graded = sum(likelihood.graded(plan, others) for plan in plans)
    rows = sum(likelihood.decoded(plan) for plan in plans)
    words = 2 if isinstance(loss, RewardGradient) and loss.words else 1
    scores = f"{draws * rows * words} scores" if words > 1 else f"{draws * rows} scores"
    found = (
        f"{draws * graded} network evaluations, {draws * rows} decodes and {scores} with gradients"
    )
    frozen = draws * sum(likelihood.frozen(plan, others) for plan in plans)
    return (
        (f"{found}, {frozen} network evaluations without gradients for the anchors")
        if frozen
        else found
    )


def _training_prompts(run: Run) -> PromptSet | None:
    """The training prompts, if they are on this machine and can be read."""
    if run.prompts.on_hub("train"):
        return None
    try:
        return run.prompts.read("train")
    except UserError:  # reported by `refusals`
        return None
