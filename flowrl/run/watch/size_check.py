"""Checks of the sizes and images in prompt rows before any weights load."""

from flowrl.errors import UserError
from flowrl.estimate.sizes import SizeLimits
from flowrl.models.description import describe
from flowrl.models.image_check import check_images
from flowrl.prompts import PromptSet
from flowrl.prompts.prompt_set import PromptRow
from flowrl.prompts.row_sizes import RowSize, row_sizes
from flowrl.run.watch.text_facts import pipeline_call
from flowrl.settings import PipelineSettings, RunSettings
from flowrl.settings.sections.data import PromptPlace
from flowrl.settings.sections.run import asks_intermediate


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
    sizes = row_sizes(prompts.meta) if isinstance(run.model, PipelineSettings) else []
    if not any(size.given for size in sizes) or (described := describe(run.model)) is None:
        return
    limits, checked = SizeLimits.of(described), set[RowSize]()
    for size, row in zip(sizes, prompts.meta, strict=True):
        if size in checked:
            continue
        checked.add(size)
        row_size = {name: value for name, value in size.given.items() if described.takes(name)}
        if (reason := limits.refusal(row_size)) is not None:
            place = row.place if isinstance(row, PromptRow) else "a prompt's row"
            raise UserError(f"{place}: {reason}; correct it, or leave the column out with `keep`")


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
