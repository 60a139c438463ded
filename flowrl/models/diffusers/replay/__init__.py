"""Proof by replay: velocities of a driven pipeline against its own call."""
