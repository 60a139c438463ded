"""Prompts: their files, and the order in which they are drawn."""

from flowrl.prompts.files import on_hub
from flowrl.prompts.prompt_set import IMAGE_COLUMNS, Draws, PromptSet, uncertainty, weighted_draw

__all__ = ["IMAGE_COLUMNS", "Draws", "PromptSet", "on_hub", "uncertainty", "weighted_draw"]
