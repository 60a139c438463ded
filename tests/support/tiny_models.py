"""Tiny models of diffusers, by the names of their classes."""

from typing import Any

import diffusers

from tests.support.zoo.models import MODELS


def model(name: str, **more: Any) -> Any:
    """Small by the tables of settings, and by `more`."""
    return getattr(diffusers, name)(**{**MODELS[name], **more})
