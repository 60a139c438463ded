"""Sizes of a run's prompts, for estimates: the share of prompts that has each."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from flowrl.errors import UserError
from flowrl.models.description import describe
from flowrl.paths import find
from flowrl.prompts.row_sizes import RowSize, row_sizes
from flowrl.settings import ModelSettings, PipelineSettings, PromptFiles, RunSettings
from flowrl.settings.sections.data import PromptPlace

Shares = tuple[tuple[float, RowSize], ...]


def size_shares(run: RunSettings, place: PromptPlace = "train") -> Shares:
    """The share of prompts with each size of their own, which the pipeline takes. One without sizes
    for prompts that are not on this machine, or cannot be read."""
    described = describe(run.model) if isinstance(run.model, PipelineSettings) else None
    if described is None or getattr(run.prompts, place) is None or not run.prompts.on_disk(place):
        return ((1.0, RowSize()),)
    files = [find(data_set.source) for data_set in getattr(run.prompts, place)]
    stamps = tuple(file.stat().st_mtime_ns for file in files)
    counts = Counter[RowSize]()
    for size, count in _counts(run.prompts.model_dump_json(), place, stamps).items():
        sides = {name: value for name, value in size.given.items() if described.takes(name)}
        counts[RowSize(**sides)] += count
    return tuple((count / counts.total(), size) for size, count in counts.items())


@lru_cache(maxsize=4)
def _counts(prompts: str, place: PromptPlace, stamps: tuple[int, ...]) -> Mapping[RowSize, int]:
    """Numbers of prompts by size. `stamps`: times of the files, which may change."""
    del stamps
    try:
        rows = PromptFiles.model_validate_json(prompts).read(place).meta
        return Counter(row_sizes(rows)) or {RowSize(): 1}
    except UserError:  # the checks of prompts name it
        return {RowSize(): 1}


def at_size(m: ModelSettings, size: Mapping[str, int]) -> ModelSettings:
    """A model's settings; a pipeline's at another height, width or number of frames."""
    if not isinstance(m, PipelineSettings):
        return m
    sides: dict[str, Any] = {name: size[name] for name in ("height", "width") if name in size}
    call = {name: value for name, value in m.call.items() if name not in sides}
    call |= {name: value for name, value in size.items() if name not in sides}
    return m.model_copy(update={**sides, "call": call})


def described_sizes(run: RunSettings) -> Iterator[str]:
    """A line about the sizes of training prompts, if any has its own."""
    shares = size_shares(run)
    if any(size.given for _, size in shares):
        described = (f"{str(size) or 'as the run'} ({share:.0%})" for share, size in shares)
        yield (
            f"sizes of the prompts' samples: {'; '.join(described)}. Memory is that of the "
            "largest, time that of all"
        )
