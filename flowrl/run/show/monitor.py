"""Evaluations, sample pages and alarms of a run, and the checks at its start."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from accelerate.utils import gather_object

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.media.pages import Page
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.language.advice import learning_rate_warning
from flowrl.models.policy import Policy
from flowrl.run.evaluate.evaluate import HeldOutResult, evaluate_held_out
from flowrl.run.experience.reward_gradient import prove_gradients
from flowrl.run.model_proof import StartProof
from flowrl.run.save import checkpoint
from flowrl.run.save.checkpoint import Progress
from flowrl.run.show.page_records import record_alarms, record_evaluation, renew_page
from flowrl.run.show.training_samples import PageRows, save_page
from flowrl.run.state.session import Session, prove_rewards
from flowrl.run.state.smaller_calls import with_smaller_calls
from flowrl.run.state.start_record import source_digests
from flowrl.run.watch.alarms import Alarms
from flowrl.run.watch.panel import HeldOutScore, PanelFacts
from flowrl.run.watch.text_facts import text_length
from flowrl.run.watch.unscored import Evidence
from flowrl.settings import Run
from rewards.types import Kind
from samplers import Plan, evaluations

UNSCORED = (
    "Read what the reward says of them, and fix it, its server or its settings: the run learns "
    "from the other samples alone"
)


def guard(
    session: Session,
    progress: Progress,
    metrics: dict[str, float],
    alarms: Alarms,
    unscored: Evidence | None = None,
) -> None:
    """Warn about signs of trouble in an iteration of training, or stop (`train.alarms: stop`)."""
    if session.run.train.alarms == "off":
        return
    lost = alarms.unscored(metrics, unscored or {})
    signs = alarms.watch(metrics, progress.iteration)
    constant = alarms.constant(metrics)
    metrics["alarms"] = float(len(lost) + len(signs) + len(constant))
    silent = [
        f"the reward {name} scored every sample of {alarms.at.window} iterations the same, "
        f"{metrics[f'reward/{name}']:.3f}, so nothing is learned from it. Check the samples "
        "and the reward, or leave it out"
        for name in constant
    ]
    for text in silent:
        session.terminal.warn(text)
    record_alarms(session, progress.iteration, silent)
    texts = [f"{'; '.join(lost)}. {UNSCORED}"] if lost else []
    _warn_or_stop(session, progress, metrics, alarms, [*texts, *_collapse(session, signs)])


def guard_held_out(
    session: Session, progress: Progress, metrics: dict[str, float], alarms: Alarms
) -> None:
    """Warn about signs of trouble in an evaluation, or stop before the next iteration."""
    if session.run.train.alarms == "off":
        return
    signs = alarms.compare(metrics, progress.iteration)
    metrics["alarms"] = metrics.get("alarms", 0.0) + len(signs)
    _warn_or_stop(session, progress, metrics, alarms, _collapse(session, signs))


def _collapse(session: Session, signs: Sequence[str]) -> list[str]:
    if not signs:
        return []
    return [
        f"the run may be collapsing: {'; '.join(signs)}. Look at the samples. Lower train.lr "
        f"(now {session.run.train.lr:g}; try a third), take fewer train.updates, add KL to the "
        "start (recipe.kl), or add a reward for what the samples lose. The best weights are "
        f"untouched in {session.folder / 'best'}"
    ]


def _warn_or_stop(
    session: Session,
    progress: Progress,
    metrics: dict[str, float],
    alarms: Alarms,
    texts: Sequence[str],
) -> None:
    for text in texts:
        session.terminal.warn(text)
    record_alarms(session, progress.iteration, texts)
    ended = progress.iteration == session.run.train.iterations
    if texts and session.run.train.alarms == "stop" and not ended:
        session.accelerator.log(metrics, step=progress.iteration)
        checkpoint.save_checkpoint(session, progress, alarms)
        renew_page(session)
        raise UserError(f"stopped by train.alarms: stop; {' '.join(texts)}")


def evaluate_and_keep(session: Session, progress: Progress, name: str | None) -> dict[str, float]:
    """Evaluate, keep the best weights, save some samples. Returns `held_out/...` metrics.

    `name` of the page of samples; by default the iteration.
    """
    if session.held_out is None:
        return {}
    learner, judged = session.learner, (session.held_out, session.judges)
    evaluate = partial(evaluate_held_out, learner, *judged)
    result = with_smaller_calls(learner, session.terminal, evaluate, learner.evaluator)
    key = session.run.checkpoint.best or session.run.judges[0].label
    if progress.base_scores is None:
        progress.base_scores = {n: result.columns[n].tolist() for n in result.scores.names}
    base = progress.first
    progress.first = base or result.metrics
    progress.last = result.metrics
    with session.parallel.together():
        session.writer.wait()  # a checkpoint removes best weights that it does not know
    checkpoint.keep_best(session.learner, session.folder, progress, result.metrics[key])
    scores = ", ".join(
        f"{n} {result.metrics[n]:.3f}"
        + (f" ({result.metrics[n] - base[n]:+.3f})" if base and n in base else "")
        for n in result.scores.names
    )
    than = " (against the base)" if base else ""
    session.terminal.say(f"held-out after {progress.iteration}{than}: {scores}")
    session.terminal.held_out(held_out_scores(session, progress))
    record_evaluation(session, result, key, progress)
    if session.accelerator.is_main_process:
        save_samples(session, result, key, progress.iteration, name or f"{progress.iteration:06d}")
    means = {f"held_out/{name}": value for name, value in result.metrics.items()}
    for label, scores in result.by_data_set().items():
        means |= {f"data_set/{label}/{n}": v for n, v in scores.items() if not math.isnan(v)}
    return means | result.spreads(progress.base_scores or {})


def save_samples(
    session: Session, result: HeldOutResult, key: str, iteration: int, name: str
) -> None:
    count = min(session.run.track.images, len(result.samples.prompts))
    if count == 0:
        return
    # a spread over the prompts shows more than the samples of the first one
    pick = [i * len(result.samples.prompts) // count for i in range(count)]
    column = result.scores.names.index(key)
    scores = [
        float(result.scores.values[i, column]) if result.scores.scored[i, column] else None
        for i in pick
    ]
    title = f"{session.folder.name}, iteration {iteration}: {key} {result.metrics[key]:.3f}"
    samples, folder = result.samples.take(pick), session.folder / "samples"
    page = Page(samples, scores, title)
    rows = [_shown_row(result, i) for i in pick]
    columns = ("prompt", *(f"held_out/{each}" for each in result.scores.names))

    def save() -> Path:
        written = page.save(folder, name)
        if name == "after":
            page.save_beside(folder, "before", "before_after")
        return written

    save_page(session, save, PageRows("samples/held_out", samples, columns, rows), iteration)


def _shown_row(result: HeldOutResult, sample: int) -> list[str | float | None]:
    each = zip(result.scores.values[sample], result.scores.scored[sample], strict=True)
    scores = [float(value) if there else None for value, there in each]
    return [str(result.samples.prompts[sample]), *scores]


def panel_facts(session: Session, progress: Progress) -> PanelFacts:
    """The panel of a run that starts, or goes on."""
    return PanelFacts(
        name=session.folder.name,
        recipe=session.run.recipe.name,  # type: ignore[attr-defined]
        iterations=session.run.train.iterations,
        done=progress.iteration,
        held_out=held_out_scores(session, progress),
        on_policy=on_policy(session.run, session.algorithm),
        elapsed=progress.seconds,
    )


def on_policy(run: Run, algorithm: Algorithm) -> bool:
    """Whether each row is trained on once, by the very policy that sampled it."""
    own = algorithm.behaviour == "current" and run.model.server is None
    return own and run.train.updates == 1 and not run.budget.replay


def held_out_scores(session: Session, progress: Progress) -> tuple[HeldOutScore, ...]:
    """The last evaluation's scores for the panel. The reward that decides has its best one."""
    if progress.first is None or progress.last is None:
        return ()
    labels = [spec.label for spec in session.run.judges]
    key = session.run.checkpoint.best or labels[0]
    base = progress.first if progress.last is not progress.first else {}
    scores = {
        name: HeldOutScore(name, progress.last[name], base.get(name))
        for name in labels
        if name in progress.last
    }
    if key in scores:
        best = {"best": progress.best, "best_iteration": progress.best_iteration}
        scores[key] = replace(scores[key], **best)
    return tuple(scores.values())


def check_levels(session: Session) -> None:
    """Raise a UserError if the plan does not fit the pipeline's own noise levels.

    The settings are checked on evenly spaced levels. A scheduler whose list ends on a level near 0
    has one step less that may be noisy."""
    if not isinstance(session.learner.policy, PipelinePolicy):
        return
    steps = session.algorithm.steps
    sigmas = session.learner.policy.schedule(steps).sigmas
    try:
        session.algorithm.plan(sigmas, 0, session.run.train.seed)
    except ValueError as problem:
        levels = ", ".join(f"{sigma:.3f}" for sigma in sigmas[-4:])
        raise UserError(
            f"recipe: the plan does not fit the pipeline's {steps} steps, whose levels end on "
            f"{levels}: {problem}; take more steps or a smaller window"
        ) from problem


def check_same_sources(run: Run) -> None:
    """Raise a UserError if processes have different source files of the run's own parts."""
    every = gather_object([source_digests(run)])
    differ = {
        name for each in every for name, digest in each.items() if every[0].get(name) != digest
    }
    if differ:
        raise UserError(
            f"{', '.join(sorted(differ))}: the processes have different files of this name; copy "
            "one version to every machine"
        )


def made_kind(policy: Policy) -> Kind:
    """The kind of sample that a proven policy makes."""
    if not isinstance(policy, PipelinePolicy):
        return "text"
    return "video" if any(each.video for each in policy.known_proofs.values()) else "image"


def counts_on_levels(session: Session) -> Iterator[str]:
    """A sentence if the model's own noise levels change the work that `flowrl plan` has counted on
    evenly spaced ones: a level near 0 ends the noise a step earlier."""
    run, policy, algorithm = session.run, session.learner.policy, session.algorithm
    if not isinstance(policy, PipelinePolicy) or run.model.sigmas is not None:
        return
    levels = (policy.schedule(algorithm.steps).sigmas, run.levels(algorithm.steps))
    counts = []
    for sigmas in levels:
        plans = [p for p in algorithm.plan(sigmas, 0, run.train.seed) if isinstance(p, Plan)]
        way, rows = (sum(getattr(p, of) for p in plans) for of in ("looked", "trained_nodes"))
        counts.append((evaluations(plans), way, rows))
    own, even = counts
    if own != even:
        words = ("network evaluations", "scored on the way", "trained rows")
        each = [
            f"{n} instead of {m} {word}"
            for word, n, m in zip(words, own, even, strict=True)
            if n != m
        ]
        yield (
            f"on the model's own noise levels a draw has {', '.join(each)}, which `flowrl plan` "
            "counts on evenly spaced ones"
        )


def prove_pipeline(session: Session, proof: StartProof) -> None:
    """Check the model, the processes and the rewards with this run's settings and prompts."""
    check_same_sources(session.run)
    proof.prove()
    for sentence in text_length(session.run, session.prompts):
        session.terminal.say(sentence)
    check_levels(session)
    for sentence in counts_on_levels(session):
        session.terminal.say(sentence)
    weights = sum(p.numel() for p in session.learner.policies.parameters.values())
    if (warning := learning_rate_warning(session.run, weights)) is not None:
        session.terminal.warn(warning)
    for sentence in session.parallel.proofs():
        session.terminal.say(sentence)
    if session.given is not None:
        for sentence in session.given.proofs():
            session.terminal.say(sentence)
    kind = made_kind(session.learner.policy)
    for sentence in prove_rewards(session.rewards, session.run, session.prompts, kind):
        session.terminal.say(sentence)
    if session.run.way_rewards:
        for sentence in prove_rewards(session.way_rewards, session.run, session.prompts, kind):
            session.terminal.say(sentence)
    for sentence in prove_gradients(session, kind):
        session.terminal.say(sentence)
    if session.run.held_out_rewards and session.held_out is not None:
        for sentence in prove_rewards(session.judges, session.run, session.held_out, kind):
            session.terminal.say(sentence)
