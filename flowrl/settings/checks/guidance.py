"""Checks of a run's guidance scales that need its recipe alone."""

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.likelihoods.transition import Transition
from flowrl.settings.model.pipeline import GuidanceScale, PipelineSettings
from flowrl.settings.sections.run import RunSettings

MEASURED = ("none", None)  # their numbers are known once the model is loaded


def scale_word(scale: GuidanceScale) -> str:
    """A guidance scale as it is written in a run's file."""
    return "null" if scale is None else scale if isinstance(scale, str) else f"{scale:g}"


def compares_densities(algorithm: Algorithm) -> bool:
    """Whether the loss has ratios to the densities of the steps that were sampled."""
    return isinstance(algorithm.likelihood, Transition) and "old" in algorithm.loss.roles


def check_ratio_guidance(run: RunSettings, algorithm: Algorithm) -> None:
    """UserError for a recipe with a ratio whose update has another guidance scale than its
    samples. Scales that only the loaded model knows are compared by `check_measured_guidance`."""
    sample, train = run.guidance.sample, run.training_guidance
    if (
        not isinstance(run.model, PipelineSettings)
        or not compares_densities(algorithm)
        or sample == train
    ):
        return
    if sample not in MEASURED and train not in MEASURED:
        raise UserError(two_policies(scale_word(sample), scale_word(train)))


def check_measured_guidance(
    run: RunSettings, algorithm: Algorithm, sample: float | None, train: float | None
) -> None:
    """The same for the scales of a loaded pipeline; None is its own."""
    pipeline = isinstance(run.model, PipelineSettings)
    if pipeline and compares_densities(algorithm) and sample != train:
        scales = run.guidance.sample, run.training_guidance
        raise UserError(two_policies(*map(scale_word, scales)))


def two_policies(sample: str, train: str) -> str:
    return (
        f"model.guidance: samples are drawn at scale {sample} and their densities are evaluated at "
        f"{train}, so the ratio would compare two policies; leave guidance.train out (it then "
        "follows guidance.sample), or give both the same scale"
    )
