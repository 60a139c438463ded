"""Run untrusted code, and accept only plain data from it.

`run` starts the processes. All other files are run as scripts in processes of their own, with
nothing imported from here: `confine` and `syscalls` drop the rights that such a process does not
need, `program` runs the code, and `judge` calls its functions from the tests' own process.
"""
