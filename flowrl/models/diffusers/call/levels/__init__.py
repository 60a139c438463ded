"""Noise levels that a pipeline's call visits: the scheduler's own, or the user's."""
