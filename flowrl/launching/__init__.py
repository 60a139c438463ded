"""Start a run on other machines: scripts and files for schedulers and launchers.

Every way starts `flowrl train FILE --folder RUN --resume auto` on each machine, so that a job which
is started again goes on from the newest checkpoint, and one that has finished does nothing.
"""
