"""The algorithms by name. `RECIPES` is the table: name to function."""

from flowrl.recipes.table import IMAGE_RECIPES, RECIPES, TEXT_RECIPES

__all__ = ["IMAGE_RECIPES", "RECIPES", "TEXT_RECIPES"]
