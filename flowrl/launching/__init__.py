"""Start a run elsewhere: what schedulers and launchers need to begin it, and to go on with it.

Every way starts `flowrl train FILE --folder RUN --resume auto` on each machine, so that a job which
is started again goes on from the newest checkpoint, and one that has finished does nothing.
"""
