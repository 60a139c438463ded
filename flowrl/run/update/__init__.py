"""Optimizer steps on the samples of an iteration."""
