"""A description of one iteration and its costs, without loading weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.algorithm import Algorithm
from flowrl.cli.recipe_text import in_yaml
from flowrl.errors import UserError, write_fault
from flowrl.estimate import fit
from flowrl.estimate import time as time_estimate
from flowrl.estimate.by_size import described_sizes
from flowrl.estimate.devices import parse_devices
from flowrl.estimate.workers import workers_report
from flowrl.evaluation.outputs import check_output_file
from flowrl.likelihoods.pathwise import Pathwise
from flowrl.losses.reward import RewardGradient
from flowrl.models.model_index import fetch_unknown
from flowrl.prompts import PromptSet
from flowrl.run.watch.start_check import check_model_of, refusals, unchecked
from flowrl.run.watch.text_facts import text_length
from flowrl.session.given_check import described_given
from flowrl.settings import RunSettings
from flowrl.settings.command_line.arguments import PlanArguments
from flowrl.settings.parts.own_parts import parts_written
from flowrl.settings.read import check_plan
from rewards import Reward
from samplers import Plan, evaluations, picture
from samplers.completions import TextPlan
from samplers.picture import describe_text_plan


@dataclass(frozen=True)
class RunPlan:
    """An iteration's work and costs, and whether the run could start here.

    text       the description, with estimates of memory and, for given devices, of time
    refusals   why `train` would refuse the run on this machine, one sentence each
    unchecked  what only a start can check
    fits       whether it fits in the memory, as far as that is known
    """

    text: str
    refusals: tuple[str, ...]
    unchecked: tuple[str, ...]
    fits: bool

    @property
    def accepted(self) -> bool:
        """Whether nothing is refused, and the run fits."""
        return not self.refusals and self.fits

    def __str__(self) -> str:
        refused = [f"refused: {refusal}" for refusal in self.refusals]
        return "\n  ".join(["\n".join([self.text, *refused, "not checked here:"]), *self.unchecked])

    __repr__ = __str__


def planned(
    run: RunSettings, arguments: PlanArguments, objects: Mapping[str, Reward] = {}
) -> RunPlan:
    """The plan of a run. `objects`: rewards that are Python objects, by label. UserError for a
    recipe that does not fit its settings, or a model that cannot be driven."""
    check_plan(run)
    devices = None if arguments.devices is None else parse_devices(arguments.devices)
    unknown = fetch_unknown(run.model)
    check_model_of(run)  # else nothing is known of what it would cost
    lines = [describe_run(run, arguments.iteration, arguments.svg)]
    limit = fit.limit(arguments.memory, devices)
    lines.append(fit.memory_report(run, limit, arguments.iteration))
    if unknown:
        lines.append(unknown)
    if devices is not None:
        lines.append(
            time_estimate.time_report(run, devices, arguments.utilisation, arguments.iteration)
        )
    lines += workers_report(run, devices, arguments.utilisation, arguments.iteration)
    fits = fit.fits(run, limit, arguments.iteration)
    refused = tuple(refusals(run, objects))
    return RunPlan("\n".join(lines), refused, tuple(unchecked(run)), fits)


def describe_run(run: RunSettings, iteration: int, svg: Path | None) -> str:
    """Describe a run: a table of its plans, and the evaluations, samples and training rows of an
    iteration."""
    algorithm = run.algorithm()
    plans = algorithm.planned(run.levels(algorithm.steps), iteration, run.train.seed)
    texts = [plan for plan in plans if isinstance(plan, TextPlan)]
    if run.drawn == 0:
        body = ": all samples are given, training generates none"
    else:
        body = _describe_texts(run, texts, svg) if texts else _describe_images(run, plans, svg)  # type: ignore[arg-type]
    if run.prompt_writer is not None:  # the texts first: an image's draw is a rewriting
        body = f"{_rewriter(run.prompt_writer, iteration)}\nimages of the rewritings{body}"
    name = run.recipe.name  # type: ignore[attr-defined]
    updates = f"optimizer steps per iteration: {run.train.optimizer_steps}"
    notes = (
        *_parts(algorithm),
        *described_given(run),
        *_engine(run),
        *described_sizes(run),
        *_near_zero(run, algorithm, iteration),
        updates,
        *text_length(run, _training_prompts(run)),
    )
    return "\n".join([f"recipe {name}, iteration {iteration}{body}", *notes])


def _parts(algorithm: Algorithm) -> Iterator[str]:
    """A line for each choice of the algorithm but its plan: the parts as a run file writes them, so
    that one of the user's is seen to be used, and the policy that samples."""
    for name, part in parts_written(algorithm).items():
        if name != "plan":
            yield f"{name}: {in_yaml(part)}"
    average = "" if algorithm.behaviour == "current" else ", an average"
    yield f"policy that samples: {algorithm.behaviour}{average}"


def _engine(run: RunSettings) -> Iterator[str]:
    if run.engine is not None:
        yield (
            f"samples are drawn by {run.engine.place} (model.engine), and scored and learned from "
            "here"
        )


def _rewriter(before: RunSettings, iteration: int) -> str:
    """The plan of the language model that writes the prompts."""
    algorithm = before.algorithm()
    plans: Any = algorithm.planned(before.levels(algorithm.steps), iteration, before.train.seed)
    name = before.recipe.name  # type: ignore[attr-defined]
    return f"\nrewritings, {name}{_describe_texts(before, plans, None)}".replace(
        "completions to score", "rewritings to draw"
    )


def _near_zero(run: RunSettings, algorithm: Algorithm, iteration: int) -> Iterator[str]:
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


def _describe_texts(run: RunSettings, plans: Sequence[TextPlan], svg: Path | None) -> str:
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


def _describe_images(run: RunSettings, plans: Sequence[Plan], svg: Path | None) -> str:
    if svg is not None:
        try:
            svg.parent.mkdir(parents=True, exist_ok=True)
            check_output_file(svg, "--svg", begins=b"<svg")
            svg.write_text(picture.tree_svg(plans), encoding="utf-8")
        except UserError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a name with NUL
            raise UserError(f"--svg: cannot write {svg}: {write_fault(error)}") from error
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


def _through(run: RunSettings, plans: Sequence[Plan], likelihood: Pathwise) -> str:
    """The work of a gradient method."""
    draws, loss = run.prompts.per_iteration * run.rewritings, run.algorithm().loss
    roles = len(loss.roles)
    graded = sum(likelihood.graded(plan, roles) for plan in plans)
    rows = sum(likelihood.decoded(plan) for plan in plans)
    words = 2 if isinstance(loss, RewardGradient) and loss.words else 1
    scores = f"{draws * rows * words} scores" if words > 1 else f"{draws * rows} scores"
    counted = (
        f"{draws * graded} network evaluations, {draws * rows} decodes and {scores} with gradients"
    )
    frozen = draws * sum(likelihood.frozen(plan, roles) for plan in plans)
    return (
        (f"{counted}, {frozen} network evaluations without gradients for the anchors")
        if frozen
        else counted
    )


def _training_prompts(run: RunSettings) -> PromptSet | None:
    """The training prompts, if they are on this machine and can be read."""
    if run.prompts.on_hub("train"):
        return None
    try:
        return run.prompts.read("train")
    except UserError:  # reported by `refusals`
        return None
