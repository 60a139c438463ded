"""A run from start to end: the loop, its checkpoints, and what watches over it."""
