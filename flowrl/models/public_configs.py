"""Public configurations of the models in `configs/`, for estimates without their files.

They are in public_configs.json: denoisers, decoders and language models with the arguments of their
classes, as in the repositories' `config.json` files. For Wan, SD3.5, FLUX.2, LTX-2.3, LTX-2.5 and
Anima they come from diffusers' conversion scripts, its tests and the authors' code; the others are
the published sizes, which are the defaults of diffusers' classes except for CogVideoX-5b. The
counts are the numbers of weights of text encoders and decoders, computed from the public
configurations of their classes on torch's meta device; null: no public source has the
configuration. Training reads nothing from here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class PublicModel(NamedTuple):
    """A model in the table. `pipeline` is its class, a modular one for a model without a classic
    form; None for a language model, whose configuration is `model`."""

    pipeline: str | None
    configs: Mapping[str, Mapping[str, Any]]
    counts: Mapping[str, int | None]


def _read() -> dict[str, PublicModel]:
    """Read the file's models; a name refers to a configuration or count that several models
    share."""
    file = Path(__file__).with_suffix(".json")
    table = json.loads(file.read_text(encoding="utf-8"))
    shared, counts = table["configs"], table["counts"]
    return {
        name: PublicModel(
            model["pipeline"],
            {k: shared[c] if isinstance(c, str) else c for k, c in model["configs"].items()},
            {
                part: None if count is None else counts[count]
                for part, count in model["counts"].items()
            },
        )
        for name, model in table["models"].items()
    }


PUBLIC_MODELS = _read()
