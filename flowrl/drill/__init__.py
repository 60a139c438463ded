"""A drill for a run: it is killed, hung, filled and cut off on purpose, and its end compared.

`faults` has the faults, each a function that takes a copy of the run to its end; `training` starts
and signals processes, `same_end` compares two ends, and `proxy` is the network that is cut.
"""
