"""Features of a run: additions to the plain stages, a file each.

A feature of a unit of draws has `wrap_unit`, one of whole iterations has `wrap`. Neither the stages
nor a plain run import these files: `flowrl.iteration.open` does, where a run's settings or parts
ask for them.
"""
