"""All checks of a run before it starts."""

from flowrl.settings import Run
from flowrl.settings.read import check_run


def check_start(run: Run) -> None:
    """UserError for a run that cannot work on this machine. Reads no weights."""
    if run.given is not None:  # first: its file may hold the prompts too
        from flowrl.session.given_check import check_given  # slow to import

        check_given(run)
    check_run(run)
    if run.model.own is None:
        from flowrl.run.watch.guidance_check import check_guidance  # slow to import
        from flowrl.run.watch.size_check import check_rows

        check_guidance(run)
        check_rows(run)
