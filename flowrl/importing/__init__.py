"""Runs of other libraries, written as run files: `flowrl import`. Nothing of them is executed."""
