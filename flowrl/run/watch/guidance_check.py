"""A matching loss trains the velocity itself: a guided velocity is refused, before weights load
where the model's configuration says what its scale does, and by the proof otherwise."""

from flowrl.errors import UserError
from flowrl.estimate.sizes import rows_per_state
from flowrl.likelihoods.matching import Matching
from flowrl.models.description import describe
from flowrl.settings import PipelineSettings, RunSettings
from flowrl.settings.checks.guidance import scale_word


def check_guidance(run: RunSettings) -> None:
    """UserError for a matching recipe that would train a guided velocity. A model whose
    configuration is not on this machine is judged by its proof, once it is loaded."""
    if not isinstance(run.model, PipelineSettings) or not isinstance(
        run.algorithm().likelihood, Matching
    ):
        return
    scale = run.training_guidance
    described = None if scale == "none" else describe(run.model)
    if described is not None and rows_per_state(described, scale) > 1:
        raise UserError(guided_target(run))


def guided_target(run: RunSettings) -> str:
    """Why a guided velocity is no target of a matching loss, and the fix."""
    name = run.recipe.name  # type: ignore[attr-defined]
    return (
        f"model.guidance.train: {name} regresses the model's own velocity, and at scale "
        f"{scale_word(run.training_guidance)} the velocity is guided, which is a biased target at "
        "twice the cost; leave guidance.train out, or set it to none (guidance.sample may stay "
        "guided)"
    )
