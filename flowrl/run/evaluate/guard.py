"""Warnings about signs of trouble in a run, from its alarms."""

from collections.abc import Sequence
from typing import NamedTuple

from flowrl.iteration.units import LAG
from flowrl.run.watch.alarms import Alarms, Unclear
from flowrl.run.watch.judges import CANNOT_TELL, judges
from flowrl.session.session import Session

UNSCORED = (
    "Check why the reward leaves them unscored, and fix it, its server or its settings: the run "
    "learns only from the other samples"
)

OUTSIDE = (
    "Nothing is learned from them: leave their prompts out, or add a reward that returns a score "
    "for them, not None"
)


class Raised(NamedTuple):
    """Warnings from raised alarms. `signs` end a run with `train.alarms: stop`; `notes` never
    do."""

    notes: list[str]
    signs: list[str]

    @property
    def texts(self) -> list[str]:
        return [*self.notes, *self.signs]


def raised_by_training(
    session: Session, alarms: Alarms, metrics: dict[str, float], iteration: int
) -> Raised:
    """Signs from an iteration of training; also sets its metric `alarms` to their number."""
    if session.run.train.alarms == "off":
        return Raised([], [])
    lost, outside = alarms.unscored(metrics), alarms.outside(metrics)
    signs = alarms.watch(metrics, iteration)
    constant = alarms.constant(metrics)
    metrics["alarms"] = float(len(lost) + len(outside) + len(signs) + len(constant))
    notes = [
        f"the reward {name} gave every sample of {alarms.at.window} iterations the same score, "
        f"{metrics[f'reward/{name}']:.3f}, so nothing is learned from it. Check the samples and "
        "the reward, or leave the reward out"
        for name in constant
    ]
    notes += [f"{clause} of iteration {iteration}. {OUTSIDE}" for clause in outside]
    texts = [f"{'; '.join(lost)}. {UNSCORED}"] if lost else []
    late = metrics.get(LAG, 0.0)
    aged = f" (samples at lag {late:.0f})" if late else ""
    return Raised(notes, texts + _collapse(session, signs, aged) if signs else texts)


def raised_by_evaluation(
    session: Session, alarms: Alarms, metrics: dict[str, float], iteration: int
) -> Raised:
    """Signs from an evaluation. `metrics` are from its iteration's record."""
    if session.run.train.alarms == "off":
        return Raised([], [])
    found = alarms.compare(metrics, iteration, judges(session.run))
    signs = [text for text in found if not isinstance(text, Unclear)]
    metrics["alarms"] = metrics.get("alarms", 0.0) + len(signs)
    unclear = "; ".join(text for text in found if isinstance(text, Unclear))
    notes = [f"{unclear}: {CANNOT_TELL}"] if unclear else []
    return Raised(notes, _collapse(session, signs) if signs else [])


def _collapse(session: Session, signs: Sequence[str], aged: str = "") -> list[str]:
    """The alarm of some signs; `aged` says of which weights they are, if not of today's."""
    lag = ", a smaller workers.lag" if aged else ""
    return [
        f"the run may be collapsing: {'; '.join(signs)}{aged}. Look at the samples. Lower train.lr "
        f"(now {session.run.train.lr:g}; try a third){lag}, reduce train.updates, add a KL penalty "
        "to the initial policy (recipe.kl), or add a reward for the quality that the samples lose. "
        "The best weights are "
        f"untouched in {session.folder / 'best'}"
    ]
