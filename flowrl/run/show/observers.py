"""The observers that a run's settings ask for."""

from collections.abc import Sequence

from flowrl.iteration.records import Iteration
from flowrl.run.evaluate.evaluate import Evaluated
from flowrl.run.show.lines import TerminalObserver
from flowrl.run.show.observer import Observer
from flowrl.run.show.page_records import (
    record_alarms,
    record_evaluation,
    record_start,
    record_tree,
    renew_page,
)
from flowrl.run.show.sample_pages import HeldOutPages, TrainingPages
from flowrl.run.show.track import show_histograms, shows_histograms
from flowrl.session.notices import Notices
from flowrl.session.progress import Progress
from flowrl.session.session import Session


def open_observers(session: Session, progress: Progress) -> list[Observer]:
    """Create the observers in the order in which they are called."""
    observers: list[Observer] = []
    if session.parallel.main and session.run.track.training:
        observers.append(TrainingPages(session))
    if session.parallel.main and session.run.track.images:
        observers.append(HeldOutPages(session, progress))
    observers.append(RunPage(session, progress))
    if shows_histograms(session.run):
        observers.append(Histograms(session))
    if session.notices is not None:
        observers.append(AlarmNotices(session.notices))
    return [*observers, TerminalObserver(session, progress)]


class RunPage(Observer):
    """The run's page and its records."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self.session, self.progress = session, progress

    def on_start(self, resumed: bool) -> None:
        record_start(self.session, self.progress.iteration, resumed)

    def on_iteration(self, iteration: Iteration) -> None:
        """Record the tree of one draw, in the first iteration and at evaluations."""
        run = self.session.run
        ends = (1, run.train.iterations)
        if iteration.number in ends or iteration.number % run.evaluate.every == 0:
            record_tree(self.session, iteration)

    def on_evaluation(self, evaluation: Evaluated) -> None:
        record_evaluation(self.session, evaluation.result, evaluation.key, self.progress)

    def on_alarms(self, texts: Sequence[str]) -> None:
        record_alarms(self.session, self.progress.iteration, texts)

    def on_record(self) -> None:
        renew_page(self.session)


class AlarmNotices(Observer):
    """Alarms as notices to the user. Ends are sent where they are known: `flowrl.run.start`."""

    def __init__(self, notices: Notices) -> None:
        self.notices = notices

    def on_alarms(self, texts: Sequence[str]) -> None:
        self.notices.send("alarm", " ".join(texts))


class Histograms(Observer):
    """Histograms of advantages and ratios, for trackers that show them."""

    reads_values = True

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_iteration(self, iteration: Iteration) -> None:
        values = iteration.updated.values
        assert values is not None, "`reads_values` makes the update keep them"
        histograms = values.histograms(self.session.parallel.every)
        show_histograms(self.session.accelerator, histograms, iteration.number)
