"""What a user can mend."""


class UserError(ValueError):
    """A mistake in settings, files or arguments: one sentence that names the place and the way out.

    The command line prints it without a trace and exits with code 2.
    """
