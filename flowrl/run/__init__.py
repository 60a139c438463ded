"""A run from start to end: the loop, its checkpoints, and its monitoring."""
