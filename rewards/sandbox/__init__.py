"""Run untrusted code, and take from its results only plain data.

`run` starts the processes. All other files are run as scripts in processes of their own, with
nothing imported from here: `confine` and `syscalls` take away what such a process does not need,
`program` runs the code, and `judge` calls its functions from the tests' own process.
"""
