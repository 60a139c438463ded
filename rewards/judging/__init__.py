"""Judging by models: prompts, readers of answers, votes, and pairs."""
