"""Checks of a whole run before any weights are read."""
