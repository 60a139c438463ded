"""Proof by whole samples, and its cache."""
