"""Samples of training as pages and a table, in `samples/training` of a run's folder."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.media import pictures
from flowrl.media.pages import Page
from flowrl.run.experience.collect import Experience
from flowrl.run.experience.round import totals
from flowrl.run.show.track import ShownSamples, show_samples, shows_samples
from flowrl.run.state.session import Session
from flowrl.run.watch.record import iteration_of, replace
from rewards import Samples

KEPT_ITERATIONS = 100  # the newest: older pages and lines are removed
TABLE = "table.jsonl"


def save_training_samples(session: Session, experience: Experience, iteration: int) -> None:
    """Write `track.training` samples of this process: a page `000012`, and lines of the table.

    Trackers receive them at the iterations of evaluations and at the first one. Does nothing on
    other processes than the main one.
    """
    count = min(session.run.track.training, len(experience.samples.prompts))
    if count == 0 or not session.accelerator.is_main_process:
        return
    # a spread over the prompts shows more than the samples of the first one
    pick = [i * len(experience.samples.prompts) // count for i in range(count)]
    lines = list(_lines(session, experience, iteration, pick))
    folder, samples = session.folder / "samples" / "training", experience.samples.take(pick)
    title = f"{session.folder.name}, training, iteration {iteration}"
    page = Page(samples, [line["reward"] for line in lines], title)

    def save() -> Path:
        written = page.save(folder, f"{iteration:06d}")
        _rewrite(folder, lines, iteration)
        for old in folder.iterdir():
            if old.stem.isdecimal() and int(old.stem) <= iteration - KEPT_ITERATIONS:
                old.unlink()
        return written

    names, shown = list(lines[0]["rewards"]), None
    if iteration == 1 or iteration % session.run.evaluate.every == 0:
        rows = [_row(line, names) for line in lines]
        own = [f"reward/{name}" for name in names]
        columns = ("iteration", "prompt", "reward", *own, "advantage")
        shown = PageRows("samples/training", samples, columns, rows)
    save_page(session, save, shown, iteration)


@dataclass(frozen=True)
class PageRows:
    """Samples of a page, with a row of `columns` each."""

    name: str
    samples: Samples
    columns: tuple[str, ...]
    rows: list[list[Any]]

    def shown(self, page: Path) -> ShownSamples:
        """Samples and their page for trackers; texts become a column of the table."""
        if self.samples.kind == "text":
            pairs = zip(self.rows, self.samples.media, strict=True)
            rows = [[*row, text] for row, text in pairs]
            return ShownSamples(self.name, (*self.columns, "text"), rows, (), page)
        images = []
        if self.samples.kind == "image":
            images = [pictures.enlarged(pictures.to_image(each)) for each in self.samples.media]
        return ShownSamples(self.name, self.columns, self.rows, images, page)


def save_page(
    session: Session, save: Callable[[], Path], rows: PageRows | None, iteration: int
) -> None:
    """Call `save`, which draws a page and returns its path: by the session's writer, or at once
    where a tracker shows the page."""
    if rows is None or not shows_samples(session.accelerator):
        session.writer.write(save)
        return
    session.writer.wait()  # pages are written in their order
    show_samples(session.accelerator, rows.shown(save()), iteration)


def _lines(
    session: Session, experience: Experience, iteration: int, pick: list[int]
) -> Iterator[dict[str, Any]]:
    samples, scores = experience.samples, experience.scores
    weighted, advantages = totals(scores, session.weights(iteration - 1)).tolist(), None
    if experience.advantages is not None:
        advantages = experience.advantages.tolist()
    for place, i in enumerate(pick):
        each = zip(scores.names, scores.values[i].tolist(), scores.scored[i].tolist(), strict=True)
        yield {
            "iteration": iteration,
            "prompt": str(samples.prompts[i]),
            "reward": _number(weighted[i]),
            "rewards": {name: value if there else None for name, value, there in each},
            "advantage": None if advantages is None else _number(advantages[i]),
            "page": f"{iteration:06d}",
            "place": place,
        } | ({"text": samples.media[i]} if samples.kind == "text" else {})


def _row(line: dict[str, Any], names: list[str]) -> list[Any]:
    scores = [line["rewards"][name] for name in names]
    return [line["iteration"], line["prompt"], line["reward"], *scores, line["advantage"]]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rewrite(folder: Path, lines: list[dict[str, Any]], iteration: int) -> None:
    """Add lines. Those of this iteration and later ones, of a run that was killed, are replaced."""
    path, kept = folder / TABLE, []
    if path.exists():
        kept = [
            line.decode()
            for line in path.read_bytes().splitlines()
            if (done := iteration_of(line)) is not None
            and iteration - KEPT_ITERATIONS < done < iteration
        ]
    new = [json.dumps(line, ensure_ascii=False) for line in lines]
    replace(path, "".join(f"{line}\n" for line in [*kept, *new]))
