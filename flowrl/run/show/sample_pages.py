"""Pages of a run's samples: from evaluations in `samples`, from training in `samples/training`."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.bounded_files import bounded_lines
from flowrl.iteration.records import Iteration
from flowrl.json_text import json_text
from flowrl.media import pictures
from flowrl.media.pictures import ABSTAINS, ShownScore
from flowrl.pages.sample_files import Page
from flowrl.run.evaluate.evaluate import Evaluated, HeldOutResult
from flowrl.run.show.first_tree import FirstSamples
from flowrl.run.show.observer import Observer
from flowrl.run.show.track import ShownSamples, show_samples, shows_samples
from flowrl.session.progress import Progress
from flowrl.session.record import iteration_of
from flowrl.session.session import Session
from flowrl.whole_file import write_whole
from rewards import Samples, Scores

_MOST_TABLE = 2**26  # bytes of a table of samples
KEPT_ITERATIONS = 100  # the newest: older pages and lines are removed
TABLE = "table.jsonl"


class TrainingPages(Observer):
    """Writes pages of training samples (`track.training`), on the main process."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_iteration(self, iteration: Iteration) -> None:
        save_training_samples(self.session, iteration)


class HeldOutPages(Observer):
    """Writes pages of evaluation samples (`track.images`), on the main process."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self.session, self.progress = session, progress

    def on_evaluation(self, evaluation: Evaluated) -> None:
        number = self.progress.iteration
        ends = {0: "before", self.session.run.train.iterations: "after"}
        save_samples(self.session, evaluation, number, ends.get(number, f"{number:06d}"))


def spread_over(samples: int, most: int) -> list[int]:
    """Indices of at most `most` samples, spread over prompts so that several prompts are shown."""
    count = min(most, samples)
    return [i * samples // count for i in range(count)]


def save_samples(session: Session, evaluation: Evaluated, iteration: int, name: str) -> None:
    """Write `track.images` held-out samples of this process to a page of that name."""
    result, key = evaluation.result, evaluation.key
    pick = spread_over(len(result.samples.prompts), session.run.track.images)
    if not pick:
        return
    column = result.scores.names.index(key)
    scores: list[ShownScore] = [_shown(result.scores, i, column) for i in pick]
    mean = f"{result.metrics[key]:.3f}" if key in result.metrics else "applies to no sample"
    title = f"{session.folder.name}, iteration {iteration}: {key} {mean}"
    samples, folder = session.shown(result.samples.take(pick)), session.folder / "samples"
    page = Page(samples, scores, title)
    rows = [_shown_row(result, i) for i in pick]
    columns = ("prompt", *(f"held_out/{label}" for label in result.scores.names))

    def save() -> Path:
        path = page.save(folder, name)
        if name == "after":
            page.save_beside(folder, "before", "before_after")
        return path

    save_page(session, save, PageRows("samples/held_out", samples, columns, rows), iteration)


def _shown(scores: Scores, sample: int, reward: int) -> ShownScore:
    """A score of a page."""
    if scores.scored[sample, reward]:
        return float(scores.values[sample, reward])
    return None if scores.applies[sample, reward] else ABSTAINS


def _shown_row(result: HeldOutResult, sample: int) -> list[str | float | None]:
    pairs = zip(result.scores.values[sample], result.scores.scored[sample], strict=True)
    scores = [float(value) if scored else None for value, scored in pairs]
    return [str(result.samples.prompts[sample]), *scores]


def save_training_samples(session: Session, iteration: Iteration) -> None:
    """Write `track.training` samples of this process: a page `000012`, and lines of the table.

    Trackers receive them at the first iteration and at evaluations.
    """
    if not iteration.scores.samples:  # all were given
        return
    number, all_samples = iteration.number, iteration.scores.samples[0]
    pick = spread_over(len(all_samples.prompts), session.run.track.training)
    if not pick:
        return
    picked = all_samples.take(pick)
    lines = list(_lines(session, iteration, pick, picked))
    folder = session.folder / "samples" / "training"
    samples = session.shown(picked)
    title = f"{session.folder.name}, training, iteration {number}"
    outside = iteration.scores.plans[0].own.outside.tolist()
    rewards: list[ShownScore] = [
        ABSTAINS if outside[i] else line["reward"] for i, line in zip(pick, lines, strict=True)
    ]
    page = Page(samples, rewards, title)

    def save() -> Path:
        path = page.save(folder, f"{number:06d}")
        _rewrite(folder, lines, number)
        for old in folder.iterdir():
            if old.stem.isdecimal() and int(old.stem) <= number - KEPT_ITERATIONS:
                old.unlink()
        return path

    names, table = list(lines[0]["rewards"]), None
    if number == 1 or number % session.run.evaluate.every == 0:
        rows = [_row(line, names) for line in lines]
        reward_columns = [f"reward/{name}" for name in names]
        columns = ("iteration", "prompt", "reward", *reward_columns, "advantage")
        table = PageRows("samples/training", samples, columns, rows)
    save_page(session, save, table, number)


@dataclass(frozen=True)
class PageRows:
    """Samples of a page, with a row of `columns` each."""

    name: str
    samples: Samples
    columns: tuple[str, ...]
    rows: list[list[Any]]

    def shown(self, page: Path) -> ShownSamples:
        """Samples and their page for trackers; texts become a table column."""
        if self.samples.kind == "text":
            pairs = zip(self.rows, self.samples.media, strict=True)
            rows = [[*row, text] for row, text in pairs]
            return ShownSamples(self.name, (*self.columns, "text"), rows, (), page)
        images = []
        if self.samples.kind == "image":
            images = [pictures.enlarged(pictures.to_image(image)) for image in self.samples.media]
        return ShownSamples(self.name, self.columns, self.rows, images, page)


def save_page(
    session: Session, save: Callable[[], Path], rows: PageRows | None, iteration: int
) -> None:
    """Call `save`, which draws a page and returns its path, in the session's writer thread, or at
    once if a tracker shows the page."""
    if rows is None or not shows_samples(session.accelerator):
        session.writer.write(save)
        return
    session.writer.wait()  # pages are written in their order
    show_samples(session.accelerator, rows.shown(save()), iteration)


def _lines(
    session: Session, iteration: Iteration, pick: list[int], picked: Samples
) -> Iterator[dict[str, Any]]:
    number, scores = iteration.number, iteration.scores.plans[0].own
    weighted, advantages = scores.totals(session.weights(number - 1)).tolist(), None
    first = FirstSamples.of(session, iteration)
    if first is not None:
        advantages = _mean_advantages(*first.credit).tolist()
    for index, i in enumerate(pick):
        triples = zip(
            scores.names, scores.values[i].tolist(), scores.scored[i].tolist(), strict=True
        )
        yield {
            "iteration": number,
            "prompt": str(picked.prompts[index]),
            "reward": _number(weighted[i]),
            "rewards": {name: value if scored else None for name, value, scored in triples},
            "advantage": None if advantages is None else _number(advantages[i]),
            "page": f"{number:06d}",
            "place": index,
        } | ({"text": picked.media[index]} if picked.kind == "text" else {})


def _mean_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Average the advantages [n k] of each sample over its decision points in the loss [n]."""
    return torch.where(mask, advantages, torch.nan).nanmean(1)


def _row(line: dict[str, Any], names: list[str]) -> list[Any]:
    scores = [line["rewards"][name] for name in names]
    return [line["iteration"], line["prompt"], line["reward"], *scores, line["advantage"]]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rewrite(folder: Path, lines: list[dict[str, Any]], iteration: int) -> None:
    """Add lines. They replace a killed run's lines of this and later iterations."""
    path, earlier = folder / TABLE, []
    if path.exists():
        earlier = [
            line.decode()
            for line in bounded_lines(path, _MOST_TABLE)
            if (done := iteration_of(line)) is not None
            and iteration - KEPT_ITERATIONS < done < iteration
        ]
    new = [json_text(line, ensure_ascii=False) for line in lines]
    write_whole(path, "".join(f"{line}\n" for line in [*earlier, *new]), synced=True)
