"""Save a whole pipeline."""

from pathlib import Path
from typing import Any

from diffusers.configuration_utils import ConfigMixin

from flowrl.bounded_files import bounded_json

MOST_INDEX = 2**24  # bytes
INDEX = "model_index.json"  # of a classic form; a modular one saves all that it has


def save_pipeline(pipe: Any, folder: Path) -> None:
    """Save a pipeline with every component that its index names.

    diffusers leaves out what a constructor adds by itself (LongCat-Audio's scheduler), though its
    index names it.
    """
    pipe.save_pretrained(folder)
    index = folder / INDEX
    names = bounded_json(index, MOST_INDEX) if index.is_file() else {}
    for name in names:
        part = vars(pipe).get(name)
        if isinstance(part, ConfigMixin) and not (folder / name).exists():
            part.save_pretrained(folder / name)  # type: ignore[attr-defined]
