"""Checks of given samples before any weights load."""

from collections.abc import Iterator

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.estimate.sizes import known_size
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.token import Token
from flowrl.models.description import describe
from flowrl.models.image_check import check_images
from flowrl.session.given_file import GivenFile, check_samples_of
from flowrl.settings import PipelineSettings, RunSettings
from flowrl.settings.sections.budget import BudgetSettings
from flowrl.settings.sections.given import GivenSettings


def check_given(run: RunSettings) -> None:
    """UserError for given samples that cannot be read or trained on."""
    if run.given is None:
        return
    check_choices(run, run.given)
    file = GivenFile.read(run)
    if run.given.kind != "images":  # whose own columns hold the samples
        check_images(run.model, file.prompts)
    if isinstance(run.model, PipelineSettings):
        check_samples_of(file, run.given, size_of_samples(run.model))


def size_of_samples(m: PipelineSettings) -> tuple[int | None, int | None]:
    """Height and width that the run's samples will have; None where only its first call tells."""
    described = describe(m)
    return (m.height, m.width) if described is None else known_size(described, m)


def unknown_size(run: RunSettings) -> bool:
    """Whether given samples may have another size than the run's, which its files do not tell."""
    if run.given is None or run.given.fit != "exact" or not isinstance(run.model, PipelineSettings):
        return False
    return None in size_of_samples(run.model)


def described_given(run: RunSettings) -> Iterator[str]:
    """A line about the given samples, if their file can be read."""
    if run.given is not None:
        try:
            yield GivenFile.read(run).described(run.given, run.prompts.per_iteration)
        except UserError:  # `check_given` names it
            return


def check_choices(run: RunSettings, settings: GivenSettings) -> None:
    """UserError for a kind of given samples that does not fit the recipe or the model."""
    algorithm, name = run.algorithm(), run.recipe.name  # type: ignore[attr-defined]
    _check_recipe(algorithm, settings, name)
    wrong = {"texts": "pipeline", "images": "language"}.get(settings.kind)
    if wrong is not None and wrong == run.model.KIND:
        raise UserError(f"given.kind: model.{wrong} does not generate {settings.kind}")
    if algorithm.by_turn:  # it needs model.environment or model.steps, and these cannot be given
        recipe = "text_dpo" if settings.kind == "pairs" else "{name: text, loss: reinforce}"
        raise UserError(
            f"given: completions have one turn and one step, and {name} compares several: leave "
            f"model.environment and model.steps out, and set recipe: {recipe}"
        )
    if run.environment is not None:
        raise UserError("given: completions have only one turn; leave model.environment out")
    if settings.share == 1 and (run.budget != BudgetSettings() or run.steer is not None):
        place = "steer" if run.steer is not None else "budget"
        raise UserError(
            f"given: all samples are given, so {place} has nothing to select from: leave {place} "
            "out, or lower given.share"
        )
    unused = ("layout", "label") if settings.kind != "pairs" else ("media",)
    for setting in (*unused, *(("layout", "label", "folder") if algorithm.text else ())):
        if getattr(settings, setting) is not None:
            raise UserError(
                f"given.{setting} does not apply to {settings.kind} of this model: leave it out"
            )


def _check_recipe(algorithm: Algorithm, settings: GivenSettings, name: str) -> None:
    likelihood = algorithm.likelihood
    pairs, text = settings.kind == "pairs", algorithm.text
    paired = isinstance(likelihood, Matching | Token) and likelihood.paired
    if pairs and not paired:
        raise UserError(
            f"given.kind: pairs need a pairwise loss, which {name} does not have: set recipe: "
            f"{('text_dpo' if text else 'dpo')}"
        )
    if not pairs and (not isinstance(likelihood, Matching | Token) or likelihood.unit > 1):
        raise UserError(
            f"given.kind: {settings.kind} have no density and no group for {name} to compare: set "
            "recipe: {name: text, loss: reinforce}"
            if text
            else f"given.kind: {settings.kind} need a loss on single clean samples, which {name} "
            "does not have: set recipe: {name: rwr, anchor: 0}, or awm or nft"
        )
