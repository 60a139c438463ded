"""Sentences on the errors of a user's reward or judge, wherever they leave a command or a call."""

from collections.abc import Iterator
from contextlib import contextmanager

from flowrl.errors import UserError


@contextmanager
def blamed_in_words() -> Iterator[None]:
    """Turn an exception of a reward or judge into a UserError, a sentence with its name and the
    last line of the user's code. All other errors pass."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not getattr(error, "__notes__", ()):  # only then is torch imported
            raise
        from rewards.combine import blamed

        if (blame := blamed(error)) is None:
            raise
        raise UserError(blame) from error
