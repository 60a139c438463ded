"""The kinds of models: which one a run's section `model` names, and the settings of each."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError, WrapValidator
from pydantic_core import InitErrorDetails

from flowrl.settings.model.language import LanguageSettings
from flowrl.settings.model.model import ModelSettings
from flowrl.settings.model.own_model import OwnSettings
from flowrl.settings.model.pipeline import PipelineSettings

MODEL_KINDS: tuple[type[ModelSettings], ...] = (PipelineSettings, LanguageSettings, OwnSettings)


def own_settings_of(kind: type[ModelSettings]) -> Iterator[str]:
    """Settings that not all kinds of models have, besides the one that names a model of this
    kind."""
    for name in kind.model_fields:
        if name not in (kind.KIND, *ModelSettings.model_fields):
            yield name


def of_its_kind(value: Any) -> ModelSettings:
    """Check the settings of a model as those of the kind that they name. ValueError, pydantic's
    too, for invalid settings and for those of another kind.

    Settings of other kinds may stand there with their defaults, as in files that list everything.
    """
    if isinstance(value, ModelSettings):
        return value
    if not isinstance(value, Mapping):
        return PipelineSettings.model_validate(value)  # which says what is expected
    values = {str(name): one for name, one in value.items()}
    names = {name for kind in MODEL_KINDS for name in kind.model_fields}
    unknown = [name for name in values if name not in names]
    named = [kind for kind in MODEL_KINDS if values.get(kind.KIND) is not None]
    if len(named) != 1:
        if unknown:
            raise _unknown(unknown, values)
        raise ValueError("set either pipeline (images, video), language (text) or own")
    (kind,) = named
    foreign = sorted(names & set(values) - set(kind.model_fields))
    for name in foreign if not unknown else ():
        other = next(kind for kind in MODEL_KINDS if name in kind.model_fields)
        if name != other.KIND and not _is_default(other, name, values[name]):
            raise ValueError(f"{name} is a setting of {other.KIND} models: leave it out")
    return kind.model_validate({k: v for k, v in values.items() if k not in foreign})


def _unknown(names: list[str], values: Mapping[str, Any]) -> ValidationError:
    errors = [InitErrorDetails(type="extra_forbidden", loc=(n,), input=values[n]) for n in names]
    return ValidationError.from_exception_data("model", errors)


def _is_default(kind: type[ModelSettings], name: str, value: Any) -> bool:
    default = kind.model_fields[name].get_default(call_default_factory=True, validated_data={})
    try:
        return _adapter(kind, name).validate_python(value) == default
    except ValidationError:
        return False


@cache
def _adapter(kind: type[ModelSettings], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(kind.model_fields[name].rebuild_annotation())


AnyModel = Annotated[
    PipelineSettings | LanguageSettings | OwnSettings,
    WrapValidator(lambda value, _: of_its_kind(value)),
]
