"""Checkpoints, and failures of saving."""
