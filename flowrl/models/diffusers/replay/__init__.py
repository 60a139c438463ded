"""Proof by replay: velocities of a driven pipeline compared with its own call."""
