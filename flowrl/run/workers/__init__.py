"""Sampling and scoring in other processes than the training process, on Ray."""
