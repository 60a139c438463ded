"""What a user can mend."""


class UserError(ValueError):
    """A mistake in settings, files or arguments: one sentence that names the place and the way out.

    The command line prints it without a trace and exits with code 2.
    """


class Stopped(UserError):
    """A run had to end before its time; its last checkpoint is whole. Exit code 3."""
