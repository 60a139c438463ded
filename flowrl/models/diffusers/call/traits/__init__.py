"""Traits of a pipeline: checks before it runs, and discovery by trial calls."""
