"""Tests of a reward before a run: its scores, and its gradient."""
