"""Sampling and scoring by other processes than the one that trains, on Ray."""
