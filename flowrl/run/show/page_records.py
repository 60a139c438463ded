"""The records of a run for its page, in `report/`, and the page itself:

`report.html`. No failure here ends a run: each causes one warning that names the reason.
"""

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.iteration.records import Iteration
from flowrl.iteration.units import StoredSamples
from flowrl.media.sounds import small_sound
from flowrl.media.thumbnails import small_copy
from flowrl.models.diffusers.batch import Driven
from flowrl.pages.records import (
    MOST_TEXT,
    UNLIKE,
    AlarmRecord,
    EvaluationRecord,
    GivenImage,
    LaunchRecord,
    LevelRecord,
    SampleRecord,
    TreeRecord,
    append_record,
    cut_back_records,
    shortened,
    thin_out,
    write_record,
)
from flowrl.pages.run_page import write_report
from flowrl.processes.parallel import Parallel
from flowrl.prompts.prompt_set import IMAGE_COLUMNS
from flowrl.run.evaluate.evaluate import HeldOutResult, Trial
from flowrl.run.show.first_tree import tree_of
from flowrl.session.atomic import reason
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from flowrl.settings.checks.unlike import unlike_training
from rewards import Samples, Scores
from rewards.perception.files import open_image_cell
from rewards.perception.media import to_tensor
from samplers.completions import TextPlan
from samplers.picture import describe_plan, describe_text_plan

SAME, EXTREMES, LEAVES = 12, 6, 32  # most samples of a record: the same each time, best, worst
MOST_GIVEN = 2  # images of a prompt's row beside its sample
SIDE, VIDEO_SIDE, LEAF_SIDE = 224, 144, 96  # pixels of a copy's longer side
PACKAGES_SHOWN = ("flowrl", "torch", "diffusers", "transformers", "accelerate", "peft", "numpy")


@contextmanager
def _harmless(session: Session) -> Iterator[None]:
    """Turn any error inside into a warning, since a page must not end hours of training."""
    try:
        yield
    except Exception as error:
        ours = isinstance(error, OSError | UserError)
        text = reason(error) if ours else f"{type(error).__name__}: {reason(error)}"
        session.terminal.warn(f"the run's page was not updated: {text}")


def renew_page(session: Session) -> None:
    """Write `report.html` from the folder's current contents, on the main process."""
    if session.accelerator.is_main_process:
        with _harmless(session):
            write_report(session.folder)


def record_start(session: Session, iteration: int, resumed: bool) -> None:
    """Remove records of iterations that will be repeated, and add this start with its machine and
    plan."""
    if not session.accelerator.is_main_process:
        return
    with _harmless(session):
        cut_back_records(session.folder, iteration if resumed else -1)
        facts = dict(_facts(session))
        append_record(
            session.folder, LaunchRecord(iteration, facts, _plan_text(session, iteration))
        )


def _facts(session: Session) -> Iterator[tuple[str, str]]:
    yield "processes", str(session.parallel)
    yield "model", str(session.learner)
    if session.held_out is not None and (differs := unlike_training(session.run)):
        yield UNLIKE, differs
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "threads", str(torch.get_num_threads())
    yield "Python", platform.python_version()
    for name in PACKAGES_SHOWN:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
    if torch.cuda.is_available():
        yield "CUDA", str(torch.version.cuda)


def _plan_text(session: Session, iteration: int) -> str:
    """The plan of the next iteration, on the model's own noise levels."""
    algorithm, levels = session.algorithm, [1.0, 0.0]
    if isinstance(session.learner.policy, Driven):
        levels = session.learner.policy.schedule(algorithm.steps).sigmas
    plans = algorithm.planned(levels, iteration, session.run.train.seed)
    texts = [plan for plan in plans if isinstance(plan, TextPlan)]
    return describe_text_plan(texts) if texts else describe_plan(plans)  # type: ignore[arg-type]


def record_alarms(session: Session, iteration: int, texts: Sequence[str]) -> None:
    """Record the alarms of an iteration with their numbers."""
    if texts and session.accelerator.is_main_process:
        with _harmless(session):
            for text in texts:
                append_record(session.folder, AlarmRecord(iteration, text))


@dataclass(frozen=True)
class ShownPlaces:
    """Indices, among the samples of all processes, of the samples that an evaluation's record
    shows."""

    same: list[int]
    best: list[int]
    worst: list[int]

    @classmethod
    def of(cls, scores: Tensor, per_prompt: int, most: int) -> "ShownPlaces":
        """Places chosen by scores [n], NaN for unscored samples; no places if `most` is 0."""
        count, order = min(SAME, most, len(scores)), scores.argsort(stable=True).tolist()
        most_extremes = EXTREMES if count else 0
        scored = [i for i in order if not math.isnan(scores[i])]
        return cls(
            [i * len(scores) // count for i in range(count)],
            _of_different_prompts(scored[::-1], per_prompt)[:most_extremes],
            _of_different_prompts(scored, per_prompt)[:most_extremes],
        )

    @property
    def every(self) -> set[int]:
        return {*self.same, *self.best, *self.worst}


def record_evaluation(
    session: Session, result: HeldOutResult, key: str, progress: Progress
) -> None:
    """Record an evaluation's scores, and copies of some samples unless `track.images` is 0. All
    processes call this: each copies its own samples, and the main process writes."""
    assert session.held_out is not None
    e, run = session.run.evaluate, session.run
    trial = Trial.of(session.held_out, e.samples, e.per_prompt, run.evaluation_steps, e.seed)
    places = ShownPlaces.of(result.columns[key], trial.group, run.track.images)
    of_process: dict[int, SampleRecord] = {}
    with _harmless(session):
        of_process = own_samples(session.parallel, result, trial, places.every, session.shown)
    copies = {
        place: copy for part in session.parallel.every(of_process) for place, copy in part.items()
    }
    if not session.accelerator.is_main_process:
        return
    with _harmless(session):
        texts = [str(text) for text in session.held_out.take(trial.rows)[0]]
        names = (*result.scores.names, *result.attempts)
        record = EvaluationRecord(
            iteration=progress.iteration,
            kind=_kind(result.samples),
            key=key,
            seed=e.seed,
            prompts=[shortened(text, MOST_TEXT // 10) for text in texts],
            digests=[sha256(text.encode()).hexdigest()[:16] for text in texts],
            scores={name: _numbers(result.columns[name]) for name in names},
            same=[copies[place] for place in places.same if place in copies],
            best=[copies[place] for place in places.best if place in copies],
            worst=[copies[place] for place in places.worst if place in copies],
        )
        write_record(session.folder, record)
        thin_out(session.folder, session.run.evaluate.every, progress.best_iteration)


def own_samples(
    parallel: Parallel,
    result: HeldOutResult,
    trial: Trial,
    places: Set[int],
    draw: Callable[[Samples], Samples] = lambda samples: samples,
) -> dict[int, SampleRecord]:
    """Copies of this process's samples at these indices, with the images of their rows."""
    mine, counts = parallel.share(len(trial.rows))
    first, side = mine.start * trial.group, _side(result.samples)
    indices = [i for i in range(len(result.samples.prompts)) if counts and first + i in places]
    copies = _samples(draw, result.samples, result.scores, indices, side)
    rows = result.samples.meta
    return {
        first + i: replace(
            copy, place=first + i, given=images_of_row(rows[i], side) if rows else []
        )
        for i, copy in zip(indices, copies, strict=True)
    }


def _of_different_prompts(places: Sequence[int], per_prompt: int) -> list[int]:
    """The places in order, with the first place of each prompt before all others."""
    first = {i // per_prompt: i for i in reversed(places)}
    return sorted(places, key=lambda i: first[i // per_prompt] != i)


def record_tree(session: Session, iteration: Iteration) -> None:
    """Record the tree of one draw, if credit compared this process's own samples."""
    if not session.accelerator.is_main_process:
        return
    with _harmless(session):
        number, tree = iteration.number, tree_of(session, iteration)
        if tree is None:
            return
        group, samples, scores = (
            len(tree.node),
            iteration.scores.samples[0],
            iteration.scores.plans[0].own,
        )
        leaf_count = min(group, LEAVES if session.run.track.images else 0)
        leaves = range(tree.start, tree.start + leaf_count)
        weighted, levels = (
            scores.totals(session.weights(number - 1)),
            list[LevelRecord](),
        )
        for k in range(tree.node.shape[1]):
            leaves_of = _first_leaves(tree.node[:, k])
            levels.append(
                LevelRecord(
                    sigma=None if tree.sigmas is None else tree.sigmas[k],
                    noisy=tree.noisy[k],
                    trained=tree.trained[k],
                    node=tree.node[:, k].tolist(),
                    values=_numbers(tree.values[leaves_of, k]),
                    advantages=_numbers(tree.advantages[leaves_of, k]),
                    texts=[shortened(tree.texts[i], MOST_TEXT // 10) for i in leaves_of]
                    if tree.texts and not k
                    else [],
                )
            )
        record = TreeRecord(
            iteration=number,
            kind=_kind(samples),
            prompt=shortened(str(samples.prompts[tree.start]), MOST_TEXT // 10),
            plans=tree.plans,
            roots=tree.roots,
            levels=levels,
            leaves=_samples(session.shown, samples, scores, leaves, LEAF_SIDE),
            totals=_numbers(weighted[tree.start : tree.start + group]),
        )
        write_record(session.folder, record)


def _first_leaves(node: Tensor) -> list[int]:
    places = node.tolist()
    return [places.index(number) for number in range(max(places) + 1)]


def _samples(
    draw: Callable[[Samples], Samples],
    samples: Samples | StoredSamples,
    scores: Scores,
    places: Sequence[int],
    side: int,
) -> list[SampleRecord]:
    records, drawn_samples = [], draw(samples.take(places))
    for i, media in zip(places, drawn_samples.media, strict=True):
        values = {
            name: _number(value) if scored else None
            for name, value, scored, applies in zip(
                scores.names,
                scores.values[i].tolist(),
                scores.scored[i].tolist(),
                scores.applies[i].tolist(),
                strict=True,
            )
            if applies
        }
        prompt = shortened(str(samples.prompts[i]), MOST_TEXT // 10)
        records.append(SampleRecord(i, prompt, values, **_media(media, side)))
    sounds = drawn_samples.sounds
    if not sounds:
        return records
    copies = [small_sound(sound.waveform[0], sound.rate) for sound in sounds]
    return [replace(r, **copy._asdict()) for r, copy in zip(records, copies, strict=True)]


def images_of_row(row: Mapping[str, Any], side: int) -> list[GivenImage]:
    """Copies of the images, but not videos, in a prompt's row."""
    images: list[GivenImage] = []
    for name, value in row.items():
        if not IMAGE_COLUMNS.fullmatch(name) or "video" in name:
            continue
        for cell in value if isinstance(value, list) else [value]:
            with suppress(ValueError):  # no image, or one that cannot be read
                copy = small_copy(to_tensor(open_image_cell(cell)), side)
                images.append(GivenImage(name, copy.url, copy.width, copy.height))
    return images[:MOST_GIVEN]


def _media(media: Any, side: int) -> Mapping[str, Any]:
    if isinstance(media, str):
        return {"media": shortened(media)}
    small = small_copy(media, side)
    return {
        "media": small.url, "width": small.width, "height": small.height, "frames": small.frames
    }  # fmt: skip


def _kind(samples: Samples | StoredSamples) -> Any:
    """The kind of the samples as a page shows them: tensors and sounds are drawn as images."""
    return "image" if samples.kind in ("tensor", "sound") else samples.kind


def _side(samples: Samples | StoredSamples) -> int:
    return VIDEO_SIDE if samples.kind == "video" else SIDE


def _numbers(column: Tensor) -> list[float | None]:
    return [_number(value) for value in column.double().tolist()]


def _number(value: float) -> float | None:
    """A number for a page, with six digits; None for NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
