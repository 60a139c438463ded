"""What a run shows of itself: evaluations, pictures, alarms, and the proof at its start."""

from flowrl import checkpoint, pictures
from flowrl.checkpoint import Progress
from flowrl.errors import UserError
from flowrl.evaluate import Evaluation, evaluate
from flowrl.session import Session
from flowrl.statistics import Alarms


def guard(session: Session, progress: Progress, metrics: dict[str, float], alarms: Alarms) -> None:
    """Stop after three updates without a finite gradient; tell the signs of a collapse."""
    every = metrics["skipped"] >= session.run.train.updates
    progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if every else 0
    if progress.skipped_in_a_row >= 3:
        raise UserError(
            "no finite gradient in three iterations; lower train.lr or use model.dtype: float32. "
            f"The last good weights are in {session.folder / 'best'}"
        )
    if session.run.train.alarms == "off":
        return
    statistics = {
        name.removeprefix("image/"): value
        for name, value in metrics.items()
        if name.startswith("image/")
    }
    signs = alarms.watch(metrics["reward"], metrics["reward_std"], statistics)
    metrics["alarms"] = float(len(signs))
    if signs:
        text = (
            f"the run may be collapsing: {'; '.join(signs)}. Lower train.lr "
            f"(now {session.run.train.lr:g}; try a third), take fewer train.updates, or add KL to "
            f"the start (recipe.kl). The best weights are untouched in {session.folder / 'best'}"
        )
        session.terminal.warn(text)
        if session.run.train.alarms == "stop":
            checkpoint.save(session, progress, alarms)
            raise UserError(f"stopped by train.alarms: stop; {text}")


def look(
    session: Session, progress: Progress, alarms: Alarms, name: str | None
) -> dict[str, float]:
    """Evaluate, keep the best, paint the grid. Gives `held_out/...` metrics."""
    result = evaluate(session)
    if result is None:
        return {}
    key = session.run.checkpoint.best or session.run.judges[0].label
    progress.first = progress.first or result.metrics
    progress.last = result.metrics
    checkpoint.keep_best(session, progress, result.metrics[key])
    said = ", ".join(f"{n} {result.metrics[n]:.3f}" for n in result.scores.names)
    session.terminal.say(f"held-out after {progress.iteration}: {said}")
    if session.accelerator.is_main_process:
        show(session, result, key, progress.iteration, name or f"{progress.iteration:06d}")
    return {f"held_out/{name}": value for name, value in result.metrics.items()}


def show(session: Session, result: Evaluation, key: str, iteration: int, name: str) -> None:
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
    page = pictures.grid(
        result.samples.media[pick], [result.samples.prompts[i] for i in pick], scores, title
    )
    folder = session.folder / "samples"
    pictures.save(page, folder / f"{name}.png")
    if name == "after" and (folder / "before.png").is_file():
        pictures.save(pictures.beside(folder / "before.png", page), folder / "before_after.png")


def prove(session: Session) -> None:
    """The replay proof: what we drive is what the pipeline does, with these very arguments."""
    guidance = session.run.model.guidance
    for scale in sorted({guidance.sample, guidance.train}):
        replay = session.policy.prove(
            session.prompts.texts[:2], steps=session.algorithm.steps, guidance=scale
        )
        session.terminal.say(str(replay))
