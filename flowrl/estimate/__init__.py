"""Estimates of memory and time before weights load."""
