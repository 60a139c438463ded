"""Optimizer steps on what an iteration learned from."""
