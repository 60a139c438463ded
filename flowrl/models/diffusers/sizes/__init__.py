"""Rows with sizes of their own: a loop, a schedule and a proof for each size."""
