"""The records of a run for its page, in `report/`, and the page itself: `report.html`

No failure of these ends a run: each is one warning that names the reason.
"""

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.media.thumbnails import small_copy
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.pages.records import (
    MOST_TEXT,
    AlarmRecord,
    EvaluationRecord,
    GivenImage,
    LevelRecord,
    SampleRecord,
    StartRecord,
    TreeRecord,
    append_record,
    cut_back_records,
    shortened,
    thin_out,
    write_record,
)
from flowrl.pages.run_page import write_report
from flowrl.prompts.prompt_set import IMAGE_COLUMNS
from flowrl.run.atomic import reason
from flowrl.run.checkpoint import Progress
from flowrl.run.collect import Experience
from flowrl.run.evaluate import HeldOutResult, Trial
from flowrl.run.round import totals
from flowrl.run.session import Session
from rewards import Samples, Scores
from rewards.perception.files import read_images
from samplers.completions import TextPlan
from samplers.picture import describe_plan, describe_text_plan

SAME, EXTREMES, LEAVES = 12, 6, 32  # most samples of a record: the same each time, best, worst
MOST_GIVEN = 2  # images of a prompt's row beside its sample
SIDE, VIDEO_SIDE, LEAF_SIDE = 224, 144, 96  # pixels of a copy's longer side
PACKAGES_SHOWN = ("flowrl", "torch", "diffusers", "transformers", "accelerate", "peft", "numpy")


@contextmanager
def _harmless(session: Session) -> Iterator[None]:
    """Warn of whatever goes wrong inside: a page is no reason to end hours of training."""
    try:
        yield
    except Exception as error:
        ours = isinstance(error, OSError | UserError)
        text = reason(error) if ours else f"{type(error).__name__}: {reason(error)}"
        session.terminal.warn(f"the run's page was not renewed: {text}")


def renew_page(session: Session) -> None:
    """Write `report.html` from what the folder holds now, on the main process."""
    if session.accelerator.is_main_process:
        with _harmless(session):
            write_report(session.folder)


def record_start(session: Session, iteration: int, resumed: bool) -> None:
    """Remove the records of iterations that are done again, and add this start: the machine and
    the plan."""
    if not session.accelerator.is_main_process:
        return
    with _harmless(session):
        cut_back_records(session.folder, iteration if resumed else -1)
        facts = dict(_facts(session))
        append_record(session.folder, StartRecord(iteration, facts, _plan_text(session, iteration)))


def _facts(session: Session) -> Iterator[tuple[str, str]]:
    yield "processes", str(session.parallel)
    yield "model", str(session.learner)
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
    if isinstance(session.learner.policy, PipelinePolicy):
        levels = session.learner.policy.schedule(algorithm.steps).sigmas
    plans = algorithm.plan(levels, iteration, session.run.train.seed)
    texts = [plan for plan in plans if isinstance(plan, TextPlan)]
    return describe_text_plan(texts) if texts else describe_plan(plans)  # type: ignore[arg-type]


def record_alarms(session: Session, iteration: int, texts: Sequence[str]) -> None:
    """Add the sentences of the alarms of an iteration, with their numbers."""
    if texts and session.accelerator.is_main_process:
        with _harmless(session):
            for text in texts:
                append_record(session.folder, AlarmRecord(iteration, text))


def record_evaluation(
    session: Session, result: HeldOutResult, key: str, progress: Progress
) -> None:
    """Write an evaluation's scores, and copies of some samples unless `track.images` is 0."""
    if not session.accelerator.is_main_process:
        return
    with _harmless(session):
        write_record(session.folder, _evaluation(session, result, key, progress.iteration))
        thin_out(session.folder, session.run.evaluate.every, progress.best_iteration)


def _evaluation(
    session: Session, result: HeldOutResult, key: str, iteration: int
) -> EvaluationRecord:
    assert session.held_out is not None
    e, run = session.run.evaluate, session.run
    trial = Trial.of(session.held_out, e.samples, e.per_prompt, run.evaluation_steps, e.seed)
    texts = [str(text) for text in session.held_out.take(trial.rows)[0]]
    names = (*result.scores.names, *result.attempts)
    own = len(result.samples.prompts)  # of this process
    count = min(SAME, run.track.images, own)
    some, side = EXTREMES if count else 0, _side(result.samples)
    column = result.scores.names.index(key)
    value, scored = result.scores.values[:, column], result.scores.scored[:, column]
    order = value.double().argsort(stable=True).tolist()
    known, group = [i for i in order if scored[i]], result.samples.group.tolist()

    def records(places: Sequence[int]) -> list[SampleRecord]:
        found = _samples(result.samples, result.scores, places, side)
        rows = result.samples.meta
        if not rows:
            return found
        return [replace(each, given=images_of_row(rows[each.place], side)) for each in found]

    return EvaluationRecord(
        iteration,
        _kind(result.samples),
        key,
        e.seed,
        [shortened(text, MOST_TEXT // 10) for text in texts],
        [sha256(text.encode()).hexdigest()[:16] for text in texts],
        {name: _numbers(result.columns[name]) for name in names},
        records([i * own // count for i in range(count)]),
        records(_of_different_prompts(known[::-1], group)[:some]),
        records(_of_different_prompts(known, group)[:some]),
    )


def _of_different_prompts(places: Sequence[int], group: Sequence[int]) -> list[int]:
    """The places in order, the first of each prompt before all others."""
    first = {group[i]: i for i in reversed(places)}
    return sorted(places, key=lambda i: first[group[i]] != i)


def record_tree(session: Session, experience: Experience, iteration: int) -> None:
    """Write the tree of one draw, at the first iteration and at those of evaluations."""
    every, last = session.run.evaluate.every, session.run.train.iterations
    tree, main = experience.tree, session.accelerator.is_main_process
    if not main or tree is None or (iteration not in (1, last) and iteration % every):
        return
    with _harmless(session):
        group, samples = len(tree.node), experience.samples
        shown = min(group, LEAVES if session.run.track.images else 0)
        leaves = range(tree.start, tree.start + shown)
        weighted, levels = (
            totals(experience.scores, session.weights(iteration - 1)),
            list[LevelRecord](),
        )
        for k in range(tree.node.shape[1]):
            first = _first_leaves(tree.node[:, k])
            levels.append(
                LevelRecord(
                    None if tree.sigmas is None else tree.sigmas[k],
                    tree.noisy[k],
                    tree.trained[k],
                    tree.node[:, k].tolist(),
                    _numbers(tree.values[first, k]),
                    _numbers(tree.advantages[first, k]),
                )
            )
        record = TreeRecord(
            iteration,
            _kind(samples),
            shortened(str(samples.prompts[tree.start]), MOST_TEXT // 10),
            tree.plans,
            tree.roots,
            levels,
            _samples(samples, experience.scores, leaves, LEAF_SIDE),
            _numbers(weighted[tree.start : tree.start + group]),
        )
        write_record(session.folder, record)


def _first_leaves(node: Tensor) -> list[int]:
    places = node.tolist()
    return [places.index(each) for each in range(max(places) + 1)]


def _samples(
    samples: Samples, scores: Scores, places: Sequence[int], side: int
) -> list[SampleRecord]:
    found = []
    for i in places:
        each = zip(scores.names, scores.values[i].tolist(), scores.scored[i].tolist(), strict=True)
        known = {name: _number(value) if there else None for name, value, there in each}
        prompt = shortened(str(samples.prompts[i]), MOST_TEXT // 10)
        found.append(SampleRecord(i, prompt, known, **_media(samples.media[i], side)))
    return found


def images_of_row(row: Mapping[str, Any], side: int) -> list[GivenImage]:
    """Copies of the images that a prompt's row names, without its videos."""
    found: list[GivenImage] = []
    for name, value in row.items():
        paths = [value] if isinstance(value, str) else value
        if not isinstance(paths, list) or not IMAGE_COLUMNS.fullmatch(name) or "video" in name:
            continue
        images = read_images([path for path in paths if isinstance(path, str)]).media
        copies = [small_copy(image, side) for image in images if image is not None]
        found += [GivenImage(name, copy.url, copy.width, copy.height) for copy in copies]
    return found[:MOST_GIVEN]


def _media(media: Any, side: int) -> Mapping[str, Any]:
    if isinstance(media, str):
        return {"media": shortened(media)}
    small = small_copy(media, side)
    return {
        "media": small.url, "width": small.width, "height": small.height, "frames": small.frames
    }  # fmt: skip


def _kind(samples: Samples) -> Any:
    return samples.kind


def _side(samples: Samples) -> int:
    return VIDEO_SIDE if samples.kind == "video" else SIDE


def _numbers(column: Tensor) -> list[float | None]:
    return [_number(value) for value in column.double().tolist()]


def _number(value: float) -> float | None:
    """Six digits are more than a page shows; NaN is no score."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
