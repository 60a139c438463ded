"""Prompts: their files, and the order in which they are drawn."""

from flowrl.prompts.chat import Chat, has_images, text_of
from flowrl.prompts.files import on_hub
from flowrl.prompts.prompt_set import (
    DATA_SET,
    IMAGE_COLUMNS,
    Draws,
    PromptSet,
    uncertainty,
    weighted_draw,
)
from flowrl.prompts.source import DataSource, Selection

__all__ = [
    "DATA_SET",
    "IMAGE_COLUMNS",
    "Chat",
    "DataSource",
    "Draws",
    "PromptSet",
    "Selection",
    "has_images",
    "on_hub",
    "text_of",
    "uncertainty",
    "weighted_draw",
]
