"""Votes of people on pairs of samples: plan, log, page, door, answer, and a fitted reward."""
