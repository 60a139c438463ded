"""Run code that nobody has read, and say of its results only what it cannot make up itself.

`run` is the side that asks. The others are run as scripts in processes of their own, with nothing
imported from here: `confine` takes away what such a process does not need, `calls` lets tests in
one process call functions in another.
"""
