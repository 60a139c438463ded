"""Folders and files of weights that a run, or a tool, has saved: adapters, whole models, teachers.

A loader asks here first, and reads them inside of `reading`, so that a damaged file is one sentence
with its name and the way on, for whatever error the library that reads it raises.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowrl.bounded_files import parsed_json
from flowrl.errors import UserError
from flowrl.models.out_of_memory import out_of_memory
from flowrl.settings.checks.machine import hub_repository, reading_source
from flowrl.settings.checks.model_files import ANOTHER, check_saved
from rewards.perception.hub import check_cached
from rewards.perception.torch_files import TORCH_ERRORS

_LIBRARIES = (SafetensorError, *TORCH_ERRORS, ImportError, NotImplementedError)
T = TypeVar("T")


@contextmanager
def reading(place: Path | str, setting: str) -> Iterator[None]:
    """Turn what libraries raise for weights that they cannot read, or that do not fit the model,
    into a UserError that begins with `setting`."""
    try:
        with reading_source(setting, str(place)):
            yield
    except Exception as error:
        expected = isinstance(error, _LIBRARIES)
        if isinstance(error, UserError) or out_of_memory(error) or not expected:
            raise
        words = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{setting}: {place} does not fit this model, or is damaged ({words}): {ANOTHER}"
        ) from error


def load_saved(saved: Path, setting: str, load: Callable[[], T]) -> T:
    """The result of `load` for a file or folder that `check_saved` takes. UserErrors begin with
    `setting`."""
    check_saved(saved, setting)
    with reading(saved, setting):
        if (repository := hub_repository(str(saved))) is not None:
            check_cached(setting, repository, UserError)
        return load()


def tensors_and_settings(
    file: Path, name: str, setting: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file, and the JSON object in its metadata under `name`; empty
    without it. UserErrors begin with `setting`."""
    check_saved(file, setting)
    with reading(file, setting), safe_open(file, framework="pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        settings = parsed_json((opened.metadata() or {}).get(name, "{}").encode())
        if not isinstance(settings, dict):
            raise ValueError(f"its metadata {name} is no object")
    return tensors, settings
