"""Samples as files to look at, and statistics of samples."""
