"""Tests of a reward before a run: of its scores, and of its gradient."""
