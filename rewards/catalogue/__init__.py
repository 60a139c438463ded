"""Rewards by name: every module here is one."""
