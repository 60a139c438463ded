"""Errors that a user can fix."""


class UserError(ValueError):
    """An error in settings, files or arguments: one sentence with the place and the fix.

    The command line prints it without a traceback and exits with code 2.
    """


class FolderInUse(UserError):
    """A run's folder that another process begins or trains at this moment."""


class Stopped(UserError):
    """A run that ended early; its last checkpoint is complete. Exit code 3."""


class NotFiniteError(UserError):
    """NaN or infinity from which a run cannot recover. A run turns it into `Stopped`, exit
    code 3."""
