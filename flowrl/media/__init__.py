"""Samples as viewable files, and statistics of samples."""
