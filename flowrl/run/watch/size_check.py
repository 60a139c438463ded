"""Checks of the sizes and images in prompt rows before any weights load."""

from collections.abc import Mapping

from flowrl.errors import UserError
from flowrl.estimate.sizes import SizeLimits
from flowrl.models.description import Description, describe
from flowrl.models.image_check import check_images
from flowrl.models.own_size_checks import OwnSizeChecks
from flowrl.prompts import PromptSet
from flowrl.prompts.prompt_set import PromptRow
from flowrl.prompts.row_sizes import RowSize, check_seconds, row_sizes
from flowrl.run.watch.text_facts import pipeline_call
from flowrl.settings import PipelineSettings, RunSettings
from flowrl.settings.sections.data import PromptPlace
from flowrl.settings.sections.run import SIZES, asks_intermediate


def check_rows_of(run: RunSettings, place: PromptPlace, prompts: PromptSet) -> None:
    """UserError for sizes or images in the prompt rows of one place that a run cannot generate or
    train on. Given samples ignore the sizes in their rows."""
    if place == "held_out" or run.drawn:
        check_sizes(run, prompts)
        if isinstance(run.model, PipelineSettings):
            _check_mixed(run, place, prompts)


def check_sizes(run: RunSettings, prompts: PromptSet) -> None:
    """UserError, naming the file and row, for an image that the model cannot read, or a size that
    it cannot generate."""
    check_images(run.model, prompts)
    if not isinstance(run.model, PipelineSettings):
        return
    sizes, described = row_sizes(prompts.meta), describe(run.model)
    if described is None:
        return
    check_seconds(prompts.meta, described.takes)
    if not any(size.given for size in sizes):
        return
    checked = set[RowSize]()
    limits, own_checks = SizeLimits.of(described), OwnSizeChecks(described, run.model.call)
    for size, row in zip(sizes, prompts.meta, strict=True):
        if size in checked:
            continue
        checked.add(size)
        row_size = {name: value for name, value in size.given.items() if described.takes(name)}
        reason = limits.refusal(row_size) or own_checks.refusal(_taken(described, run, row_size))
        if reason is not None:
            place = row.place if isinstance(row, PromptRow) else "a prompt's row"
            raise UserError(f"{place}: {reason}; correct it, or leave the column out with `keep`")


def check_own_sizes(run: RunSettings) -> None:
    """UserError for a size of the run's own samples, or of its evaluations, that the model cannot
    generate: by the pipeline's own checks, or by what its configuration says. A size that a
    pipeline rounds is taken, as its own call takes it."""
    if not isinstance(run.model, PipelineSettings) or (described := describe(run.model)) is None:
        return
    limits, own_checks = SizeLimits.of(described), OwnSizeChecks(described, run.model.call)
    in_call = {name: run.evaluate.call[name] for name in SIZES if name in run.evaluate.call}
    for place, sizes in (("model", {}), ("evaluate", {**run.evaluation_size, **in_call})):
        if place == "evaluate" and not sizes:
            continue
        taken = _taken(described, run, sizes)
        reason = own_checks.refusal(taken) or limits.impossible(taken)
        if reason is not None:
            raise UserError(f"{place}: {reason}; choose another size")


def unknown_sizes(run: RunSettings) -> str | None:
    """A sentence on what no file of the model says of the sizes that it can generate; None if all
    is known."""
    if not isinstance(run.model, PipelineSettings) or (described := describe(run.model)) is None:
        return None
    unknown = list[str]()
    if not OwnSizeChecks(described, run.model.call).answers:
        unknown.append("of what height and width are multiples")
    if described.takes("num_frames") and SizeLimits.of(described).frames == 1:
        unknown.append("which numbers of frames it rounds")
    if not unknown:
        return None
    return f"sizes: no file of {described.pipeline} says {' and '.join(unknown)}; its loop does"


def _taken(
    described: Description, run: RunSettings, replaced: Mapping[str, int]
) -> dict[str, int | None]:
    """The run's sizes that the pipeline's call takes, with `replaced` in their place."""
    return {n: v for n, v in {**run.trained_size, **replaced}.items() if described.takes(n)}


def _check_mixed(run: RunSettings, place: PromptPlace, prompts: PromptSet) -> None:
    """UserError if prompts have several sizes and the run needs them to have one."""
    _, parameters = pipeline_call(run)
    run_size = {n: v for n, v in run.trained_size.items() if n in parameters or not parameters}
    sizes = set[tuple[int | None, ...]]()
    for size in set(row_sizes(prompts.meta)):
        sizes.add(tuple(size.given.get(name, value) for name, value in run_size.items()))
    alone = {"the recipe joint": run.prompt_writer is not None and len(sizes) > 1}
    if place == "train":
        scores = asks_intermediate(run.algorithm())
        alone |= {
            "given, of samples at the run's size,": run.given is not None
            and not sizes <= {tuple(run_size.values())},
            "budget.replay": run.budget.replay > 0 and len(sizes) > 1,
            "budget.flat: resample": run.budget.flat == "resample" and len(sizes) > 1,
            "scoring intermediate samples (this recipe, or steer)": scores and len(sizes) > 1,
        }
    for name, applies in alone.items():
        if applies:
            raise UserError(
                f"prompts.{place}: {name} needs prompts of one size, but these rows have "
                f"{len(sizes)}: choose rows with `where`, or leave their sizes out with `keep`"
            )
