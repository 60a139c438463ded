"""Scores of folders, of reward models and of suites: what looks at media that already exist."""
