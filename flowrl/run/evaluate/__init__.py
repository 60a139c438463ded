"""Evaluation of a policy on held-out prompts."""
