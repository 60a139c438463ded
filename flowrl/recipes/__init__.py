"""The algorithms by name. `RECIPES` is the table: name to function."""

from flowrl.recipes.table import FLOW, RECIPES, TEXT

__all__ = ["FLOW", "RECIPES", "TEXT"]
