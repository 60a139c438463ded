"""Verdicts of a sweep over diffusers' modular pipelines, by version of diffusers.

`scripts/benchmarks/modular_pipelines.py` writes it; docs/pipelines.md, `flowrl plan` and a start
read it.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import diffusers

from flowrl.errors import UserError

MODULAR_VERDICTS_FILE = Path(__file__).with_suffix(".json")


@cache
def modular_verdicts(version: str = diffusers.__version__) -> Mapping[str, Mapping[str, str]]:
    """Notes by class, by verdict (exact, refused, untried); empty for a version that no sweep has
    seen."""
    return json.loads(MODULAR_VERDICTS_FILE.read_text(encoding="utf-8")).get(version, {})


def modular_classes() -> list[str]:
    """Names of the modular pipelines that diffusers exports, without their base class."""
    end = "ModularPipeline"
    return sorted(name for name in dir(diffusers) if name.endswith(end) and name != end)


def refuse_known_modular(name: str) -> None:
    """UserError for a modular class whose pipelines are known to be refused with this version."""
    if (reason := modular_verdicts().get("refused", {}).get(name)) is not None:
        raise UserError(
            f"{name}: {reason} (found with diffusers {diffusers.__version__}; docs/pipelines.md "
            "lists the pipelines that can be trained)"
        )
