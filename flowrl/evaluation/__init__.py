"""Evaluations of media that already exist: folders, data sets of preferences, prompt suites."""
