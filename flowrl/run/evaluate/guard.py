"""Warnings about signs of trouble in a run, from its alarms."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from flowrl.iteration.credit import failed_share
from flowrl.iteration.learning_check import compares_samples
from flowrl.iteration.units import LAG
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.run.watch.alarms import Alarms, Unclear
from flowrl.run.watch.judges import CANNOT_TELL, judges
from flowrl.run.watch.ranges import ENGINE_REMEDY, Range, below, ranges_of
from flowrl.session.session import ASKING, Session
from flowrl.settings import RunSettings
from flowrl.settings.words.scores import is_trained

UNSCORED = (
    "Check why the reward leaves them unscored, and fix it, its server or its settings: the run "
    "learns only from the other samples"
)

OUTSIDE = (
    "Nothing is learned from them: leave their prompts out, or add a reward that returns a score "
    "for them, not None"
)


ONE_WINNER = (
    "its answers fail to be read for one winner alone, which biases the scores; set the "
    "judge's `log`, look at such an answer, and adjust its template or how the answer is read"
)
SILENT_CAUSES = {
    "flat_groups": "of the groups scored all samples the same",
    "unscored_share": "of the samples had no score",
    "abstained_share": "of the samples had no reward that applies",
}
"""Metrics that say why an iteration's data is silent."""


class Raised(NamedTuple):
    """Warnings from raised alarms. `signs` end a run with `train.alarms: stop`; `notes` never
    do."""

    notes: list[str]
    signs: list[str]

    @property
    def texts(self) -> list[str]:
        return [*self.notes, *self.signs]


def audible_falls(
    run: RunSettings, alarms: Alarms, scores: Mapping[str, Sequence[float]]
) -> Iterator[str]:
    """A line per held-out reward on the smallest fall that raises an alarm. `scores`: of the base's
    samples."""
    for name, of_base in scores.items():
        judged = f"held_out_std/{name}" in alarms.base and not is_trained(name)
        if run.train.alarms == "off" or not judged:
            continue
        least, surely = alarms.smallest_fall(name, len(of_base))
        if surely == 0:
            continue
        more = "" if surely == least else f"; evaluate.samples: {enough(alarms)} shows {least:.2g}"
        yield (
            f"alarms: a fall of {name} by {surely:.2g} from {alarms.base[f'held_out/{name}']:.3g} "
            f"raises an alarm whatever its noise, with {len(of_base)} samples{more}"
        )


def enough(alarms: Alarms) -> int:
    """Samples of an evaluation with which noise hides no fall that is large enough to matter."""
    return math.ceil(2 * (alarms.at.errors / alarms.at.fall) ** 2)


def raised_by_training(
    session: Session, alarms: Alarms, metrics: dict[str, float], iteration: int
) -> Raised:
    """Signs from an iteration of training; also sets its metric `alarms` to their number."""
    if session.run.train.alarms == "off":
        return Raised([], [])
    lost, outside = alarms.unscored(metrics), alarms.unapplied(metrics)
    signs = alarms.watch(metrics, iteration)
    constant = alarms.constant(metrics)
    models = [learner.name for learner in session.learner.chain if learner.learns]
    watched = ranges_of(exact(session.run), compares_samples(session.algorithm.loss))
    if session.run.engine is not None:
        watched["mismatch"] = engine_range(session)
    ranges, silent = alarms.ranges(metrics, watched, models), alarms.silent(metrics, models)
    unread = alarms.unread(metrics)
    turned_away = session.table[ASKING].alarm() if ASKING in session.table else ""
    groups = (
        lost,
        outside,
        signs,
        constant,
        ranges,
        silent,
        unread,
        [turned_away] if turned_away else [],
    )
    metrics["alarms"] = float(sum(map(len, groups)))
    notes = [
        *ranges,
        *(f"{text}: {ONE_WINNER}" for text in unread),
        *(_silent(alarms, metrics, model) for model in silent),
    ]
    notes += [
        f"the reward {name} gave every sample of {alarms.at.window} iterations the same score, "
        f"{metrics[f'reward/{name}']:.3f}, so nothing is learned from it. Check the samples and "
        "the reward, or leave the reward out"
        for name in constant
    ]
    notes += [f"{clause} of iteration {iteration}. {OUTSIDE}" for clause in outside]
    texts = [f"{'; '.join(lost)}. {UNSCORED}"] if lost else []
    late = metrics.get(LAG, 0.0)
    aged = f" (samples at lag {late:.0f})" if late else ""
    texts += [turned_away] if turned_away else []
    return Raised(notes, texts + _collapse(session, signs, aged) if signs else texts)


def exact(run: RunSettings) -> bool:
    """Whether log-probabilities of sampling and training are of one engine, in float32."""
    m = run.model
    elsewhere = run.server is not None or run.engine is not None
    return not elsewhere and m.dtype in ("float32", "float64") and not m.tf32


def engine_range(session: Session) -> Range:
    """The range of `mismatch` with an engine: the noise that the start measured."""
    from flowrl.models.engine.rolls import EngineRolls

    policy = session.learner.policy
    assert isinstance(policy, PipelinePolicy)
    rolls = policy.use.rolls
    assert isinstance(rolls, EngineRolls), "a training run asks its engine"
    return below(rolls.bound, ENGINE_REMEDY)


def _silent(alarms: Alarms, metrics: Mapping[str, float], model: str) -> str:
    """The alarm of data that has taught nothing for many iterations."""
    prefix = f"{model}/" if model else ""
    rows = alarms.outside[f"{prefix}silent"]
    shares = {name: metrics.get(f"{prefix}{name}", 0.0) for name in SILENT_CAUSES}
    shares["unscored_share"] = failed_share(shares)
    causes = [
        f"{shares[name]:.0%} {cause}" for name, cause in SILENT_CAUSES.items() if shares[name]
    ]
    reasons = f"; in the last of them {', '.join(causes)}" if causes else ""
    speaker = f"{model}: " if model else ""
    return (
        f"{speaker}the data of {rows} iterations in a row taught nothing{reasons}. Look at the "
        "samples and their scores; choose prompts on which samples differ, a larger recipe.group, "
        "or budget.flat: resample"
    )


def raised_by_evaluation(
    session: Session, alarms: Alarms, metrics: dict[str, float], iteration: int
) -> Raised:
    """Signs from an evaluation. `metrics` are from its iteration's record."""
    if session.run.train.alarms == "off":
        return Raised([], [])
    texts = alarms.compare(metrics, iteration, judges(session.run))
    signs = [text for text in texts if not isinstance(text, Unclear)]
    metrics["alarms"] = metrics.get("alarms", 0.0) + len(signs)
    unclear = "; ".join(text for text in texts if isinstance(text, Unclear))
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
