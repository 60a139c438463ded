"""Rewards by name: every module here is a reward."""
