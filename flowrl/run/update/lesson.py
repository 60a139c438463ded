"""The samples that one model of a run learns from in an iteration, with the checks of an update."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flowrl.models.call_sizes import bounded_call
from flowrl.run.experience.collect import Experience
from flowrl.run.state.finite import check_iteration
from flowrl.run.state.learner import Learner
from flowrl.run.state.progress import Progress
from flowrl.run.state.session import Session
from flowrl.run.state.smaller_calls import with_smaller_calls
from flowrl.run.update import ratio_check
from flowrl.run.update.update import Updated, update


@dataclass(frozen=True)
class Lesson:
    """The samples that one model of the run learns from in an iteration."""

    session: Session
    learner: Learner
    experience: Experience

    def checked(self) -> "Lesson":
        """The same lesson after measuring the first ratio, which may switch off compilation."""
        checked = with_smaller_calls(self.learner, self.session.terminal, self._check_ratio)
        return replace(self, experience=checked)

    def _check_ratio(self) -> Experience:
        learner, experience, terminal = self.learner, self.experience, self.session.terminal
        with self.session.parallel.together(), bounded_call("training"):
            experience = ratio_check.uncompiled_above(learner, experience, terminal)
            ratio_check.check_ratio(learner, experience, terminal)
        return experience

    def updated(self, progress: Progress, keep_values: bool) -> Updated:
        """Take the optimizer steps."""
        learner = self.learner

        def take_steps() -> Updated:  # again while the first step is not taken
            learner.policies.forget_gradients()
            return update(learner, self.experience, progress, keep_values)

        return with_smaller_calls(learner, self.session.terminal, take_steps)

    def followed(self, updated: Updated, progress: Progress) -> None:
        """Update the averages, and check that everything is finite."""
        policies, metrics = self.learner.policies, self.experience.metrics | updated.metrics
        due = self._refreshed(updated.metrics, progress) if policies.averages else ()
        policies.follow(progress.optimizer_steps, due)
        check_iteration(self.experience.rows, policies.named(), metrics, progress.iteration)

    def _refreshed(self, metrics: Mapping[str, float], progress: Progress) -> set[str]:
        """Averages that become the current weights; the same on all processes, as the metrics
        are."""
        found = set[str]()
        for average in self.learner.policies.averages:
            name = self.learner.named(average.name)
            passed = progress.iteration - progress.refreshed.get(name, 0)
            kl = metrics.get(f"kl_{average.name}", 0.0)
            if average.refresh is not None and average.refresh.due(passed, kl):
                found.add(average.name)
                progress.refreshed = {**progress.refreshed, name: progress.iteration}
        return found
