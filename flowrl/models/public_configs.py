"""Public configurations of the models of `configs/`, for estimates where their files are not here.

They are in public_configs.json: denoisers, decoders and language models with the arguments of their
classes, as the repositories' `config.json` files list them. Wan's, SD3.5's and FLUX.2's are as
diffusers' conversion scripts, its tests and the authors' code have them; the others are the
published sizes, which are the defaults of diffusers' classes but for CogVideoX-5b. The counts are
of text encoders' and decoders' weights, made from the public configurations of their classes on
torch's meta device. Nothing here is read by training.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class PublicModel(NamedTuple):
    """A model of the table. `pipeline` is its class; None for a language model, whose
    configuration is `model`."""

    pipeline: str | None
    configs: Mapping[str, Mapping[str, Any]]
    counts: Mapping[str, int]


def _read() -> dict[str, PublicModel]:
    """The models of the file; a name stands for a configuration or a count that several share."""
    file = Path(__file__).with_suffix(".json")
    found = json.loads(file.read_text(encoding="utf-8"))
    shared, counts = found["configs"], found["counts"]
    return {
        name: PublicModel(
            model["pipeline"],
            {k: shared[c] if isinstance(c, str) else c for k, c in model["configs"].items()},
            {part: counts[count] for part, count in model["counts"].items()},
        )
        for name, model in found["models"].items()
    }


PUBLIC_MODELS = _read()
