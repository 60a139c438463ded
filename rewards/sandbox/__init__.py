"""Run untrusted code, and accept only plain data from it.

`run` starts the processes, `external` starts them behind a command of the user's, and `templates`
asks one for chat templates. All other files run as scripts in separate processes and import nothing
from here: `confine` and `syscalls` drop the privileges that such a process does not need, `program`
runs the code, and `judge` calls its functions from the tests' own process.
"""
