"""Facts about a run's texts before it starts: tokens per prompt or per completion, and the kind of
the samples. They need the model's configuration but no weights."""

import inspect
from collections.abc import Iterator, Mapping

from flowrl.likelihoods.token import Token
from flowrl.models.description import local_folder
from flowrl.models.diffusers.call.results.made import made_kind
from flowrl.models.open import modular_source
from flowrl.prompts import PromptSet
from flowrl.settings import LanguageSettings, PipelineSettings, RunSettings
from flowrl.settings.checks.model_files import pipeline_index
from rewards.types import MediaForm

PADDED = "max_sequence_length"  # diffusers' name


def text_length(run: RunSettings, prompts: PromptSet | None) -> Iterator[str]:
    """A line about text tokens: the length to which every prompt is padded or cut, if the pipeline
    is on this machine; for a language model, the maximum length of a completion and what happens at
    that length.

    `prompts`: the training prompts, if they can be read.
    """
    if isinstance(run.model, LanguageSettings):
        yield _completions(run) if run.writes_texts else _codes(run)
        return
    _, parameters = pipeline_call(run)
    if PADDED in parameters and isinstance(run.model, PipelineSettings):
        length = run.model.call.get(PADDED, parameters[PADDED].default)
        source = "as set" if PADDED in run.model.call else "the pipeline's default"
        longest = "" if prompts is None else _longest(prompts)
        yield (
            f"text: {length} tokens per prompt (model.call.{PADDED}, {source}), whatever its length"
            f"{longest}"
        )


def _longest(prompts: PromptSet) -> str:
    return f"; the longest training prompt has {max(len(t.split()) for t in prompts.texts)} words"


def _completions(run: RunSettings) -> str:
    algorithm = run.algorithm()
    counted = "completion" if run.environment is None else "completion, all turns and replies"
    end = "scored unchanged"
    if isinstance(algorithm.likelihood, Token):
        trained = {"train": "and trained on", "mask": "and left out of the loss (cut: mask)"}
        end = f"{end}, {trained[algorithm.likelihood.cut]}"
    return (
        f"text: at most {algorithm.steps} tokens per {counted} (recipe.length); a longer one is "
        f"cut off there, {end}"
    )


def _codes(run: RunSettings) -> str:
    assert run.image_tokens is not None
    scale = run.image_tokens.guidance
    guidance = "the model's own guidance" if scale is None else f"guidance {scale:g}"
    return (
        f"image: {run.algorithm().steps} tokens per image (recipe.length), {guidance}; above 1 "
        "each token takes two rows of the model"
    )


def pipeline_kind(run: RunSettings) -> type | None:
    """The class of a run's pipeline; None if it is not on this machine, or not in diffusers."""
    import diffusers

    m = run.model
    folder = local_folder(m.pipeline) if isinstance(m, PipelineSettings) else None
    if folder is None or not (folder / run.model.configuration).is_file():
        return None
    if (source := modular_source(run.model)) is not None:
        return type(source.skeleton())
    return getattr(diffusers, pipeline_index(folder)["_class_name"], None)


def pipeline_call(run: RunSettings) -> tuple[str, Mapping[str, inspect.Parameter]]:
    """Class and parameters of the pipeline's own call; none if it is not on this machine."""
    kind = pipeline_kind(run)
    if kind is None:
        return "", {}
    return kind.__name__, inspect.signature(kind.__call__).parameters


def likely_form(run: RunSettings) -> MediaForm:
    """The form of a model's samples: by the class of a pipeline, or text for a language model."""
    if isinstance(run.model, LanguageSettings):
        return MediaForm("text" if run.writes_texts else "image")
    kind = pipeline_kind(run)
    return MediaForm("image" if kind is None else made_kind(kind))
