"""Trackers of accelerate: the run's name and location there, and the samples and histograms shown.

`metrics.jsonl` is the record; trackers mirror it. TensorBoard, W&B, trackio and MLflow also receive
settings, samples and histograms, MLflow gets histograms as an image and a file; other trackers get
only numbers.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from PIL import Image

from flowrl.bounded_files import bounded_json
from flowrl.errors import UserError
from flowrl.iteration.histograms import Histogram, histogram_image
from flowrl.json_text import json_text
from flowrl.run.show.mirror import DEADLINE, HURRIED, Mirror, MirroredTracker, one_line
from flowrl.session.record import Terminal
from flowrl.settings import RunSettings
from flowrl.settings.read import dump
from flowrl.whole_file import write_whole
from rewards.rights import LOCAL_TRACKERS, Right, need

MOST_IDS = 2**16  # bytes
_NEW_RUNS = "move it away, and the services get new runs"
IDS = (
    "trackers.json"  # in the run's folder: ids of its runs in trackers, so that a resume finds them
)
SHOW_HISTOGRAMS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass(frozen=True)
class ShownSamples:
    """Samples as trackers show them, with a row of `columns` each: prompt, scores, text."""

    name: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    images: Sequence[Image.Image]  # none of videos and texts
    page: Path  # a PNG of images, a GIF of videos, an HTML page of texts

    @property
    def captions(self) -> list[str]:
        pairs = [list(zip(self.columns, row, strict=True)) for row in self.rows]
        return [", ".join(f"{name}: {_short(value)}" for name, value in row) for row in pairs]

    @property
    def markdown(self) -> str:
        """The rows as a Markdown table, each cell on one line."""
        head = [self.columns, ["---"] * len(self.columns)]
        cells = [[_short(value) for value in row] for row in self.rows]
        escaped = [[" ".join(c.replace("|", "\\|").split()) for c in row] for row in cells]
        return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *escaped])


def _known_ids(path: Path) -> dict[str, str]:
    """The services' ids of a run that is resumed. UserError for a damaged file."""
    if not path.exists():
        return {}
    try:
        ids = bounded_json(path, MOST_IDS)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}): {_NEW_RUNS}") from error
    if not isinstance(ids, dict) or not all(isinstance(name, str) for name in ids.values()):
        raise UserError(f"{path} does not hold the ids of runs: {_NEW_RUNS}")
    return ids


def open_trackers(run: RunSettings, folder: Path, accelerator: Accelerator, first: int) -> None:
    """Start the trackers of `track.with`, or resume their runs; `first` is the next iteration.

    Runs on the main process. UserError for a tracker that does not start.
    """
    path, track, mirror = folder / IDS, run.track, Mirror(Terminal(True).warn)
    for name in set(track.trackers) - {*LOCAL_TRACKERS}:
        need(Right.ACCOUNTS, name, f"the tracker {name}")
    before = _known_ids(path)
    fresh_id = secrets.token_hex(4)

    def begin() -> dict[str, str]:
        starts = _starts(run, folder, before, fresh_id, first)
        accelerator.init_trackers(track.project, init_kwargs=starts)
        services = [tracker for tracker in accelerator.trackers if tracker.name != "jsonl"]
        for tracker in services:
            _store_settings(tracker, run, new=tracker.name not in before, step=first)
        return {tracker.name: _id(tracker) for tracker in services}

    try:
        ids = mirror.start(begin)
    except (Exception, SystemExit) as error:  # a service's own code, which may raise anything
        mirror.end((), DEADLINE)
        raise UserError(
            f"track.with: {', '.join(track.trackers)} did not start ({one_line(error)}); log in "
            "to the service, use it offline (WANDB_MODE=offline), or leave it out"
        ) from error
    accelerator.trackers = [
        tracker if tracker.name == "jsonl" else MirroredTracker(tracker, mirror)  # type: ignore[list-item]
        for tracker in accelerator.trackers
    ]
    if not any(_mirrored(accelerator)):
        mirror.end((), DEADLINE)
    if before | ids:
        write_whole(path, json_text(before | ids), synced=True)


@contextmanager
def finishing(accelerator: Accelerator) -> Iterator[None]:
    """End the trackers' runs on exit; after an error, W&B marks the run as failed."""
    try:
        yield
    except BaseException as error:
        _end(accelerator, True, DEADLINE if isinstance(error, Exception) else HURRIED)
        raise
    _end(accelerator, False, DEADLINE)


def _end(accelerator: Accelerator, failed: bool, seconds: float) -> None:
    mirrored = list(_mirrored(accelerator))
    accelerator.trackers = []
    if mirrored:
        last = [(tracker.name, partial(_finish, tracker.inner, failed)) for tracker in mirrored]
        mirrored[0].mirror.end(last, seconds)


def _finish(tracker: Any, failed: bool) -> None:
    tracker.run.finish(1) if failed and tracker.name == "wandb" else tracker.finish()


def _mirrored(accelerator: Accelerator) -> Iterator[MirroredTracker]:
    return (tracker for tracker in accelerator.trackers if isinstance(tracker, MirroredTracker))


def shows_samples(accelerator: Accelerator) -> bool:
    """Whether a tracker of this process shows samples."""
    return any(tracker.name in _SAMPLES for tracker in accelerator.trackers)


def show_samples(accelerator: Accelerator, samples: ShownSamples, step: int) -> None:
    """Pass samples to the trackers that show them. Main process only."""
    for tracker in _mirrored(accelerator):
        if tracker.name in _SAMPLES:
            tracker.pass_on(partial(_SAMPLES[tracker.name], samples=samples, step=step))


def shows_histograms(run: RunSettings) -> bool:
    """Whether one of the run's trackers shows histograms."""
    return bool({*run.track.trackers} & {*SHOW_HISTOGRAMS})


def show_histograms(
    accelerator: Accelerator, histograms: Mapping[str, Histogram], step: int
) -> None:
    """Pass histograms to the trackers that show them. Main process only."""
    for tracker in _mirrored(accelerator):
        if tracker.name in SHOW_HISTOGRAMS:
            tracker.pass_on(partial(_histograms, histograms=histograms, step=step))


def _histograms(tracker: Any, histograms: Mapping[str, Histogram], step: int) -> None:
    if tracker.name == "tensorboard":
        for name, histogram in histograms.items():
            _tensorboard_histogram(tracker, name, histogram, step)
    elif tracker.name == "mlflow":
        _mlflow_histograms(histograms, step)
    else:
        kind = import_module(tracker.name).Histogram
        plots = {n: kind(np_histogram=(h.counts, h.edges)) for n, h in histograms.items()}
        tracker.log(plots, step=step)


def _starts(
    run: RunSettings, folder: Path, before: Mapping[str, str], fresh_id: str, first: int
) -> dict[str, dict[str, Any]]:
    """The arguments with which each tracker starts."""
    track, config = run.track, dump(run)
    name = track.name or folder.resolve().name
    wandb = {
        "name": name,
        "tags": list(track.tags),
        "dir": str(folder),
        "config": config,
        "id": before.get("wandb", fresh_id),
        "resume": "allow",
    }
    # trackio has one database for all projects of a machine, and no tags
    going_on = "allow" if "trackio" in before else "never"
    trackio = {"name": name, "resume": going_on, "config": config | {"tags": list(track.tags)}}
    mlflow = {"run_name": name, "tags": {f"flowrl.{tag}": "true" for tag in track.tags}}
    mlflow["logging_dir"] = (folder.resolve() / "mlflow").as_uri()
    mlflow["run_id"] = before.get("mlflow")
    if "mlflow" in track.trackers and "MLFLOW_TRACKING_URI" not in os.environ:
        where = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        import_module("mlflow").set_tracking_uri(where)
    # TensorBoard hides what a killed run wrote of iterations that are done again
    board = {"purge_step": first}
    return {"wandb": wandb, "trackio": trackio, "mlflow": mlflow, "tensorboard": board}


def _store_settings(tracker: Any, run: RunSettings, new: bool, step: int) -> None:
    flat = _flat(dump(run)) | {"tags": ", ".join(run.track.tags)}
    if tracker.name == "tensorboard":
        text = yaml.safe_dump(dump(run), sort_keys=False)
        tracker.writer.add_text("settings", f"```yaml\n{text}```", global_step=step)
        if new:
            tracker.writer.add_hparams(flat, {}, run_name=".")  # beside the metrics, not below
        tracker.writer.flush()
    elif tracker.name not in ("wandb", "trackio") and new:  # those two have them from their start
        tracker.store_init_configuration(flat)


def _id(tracker: Any) -> str:
    if tracker.name == "wandb":
        return str(tracker.run.id)
    return str(tracker.active_run.info.run_id) if tracker.name == "mlflow" else ""


def _tensorboard_samples(tracker: Any, samples: ShownSamples, step: int) -> None:
    tracker.writer.add_text(f"{samples.name}_table", samples.markdown, global_step=step)
    if samples.page.suffix != ".html":
        package = "tensorboard.compat.proto" if find_spec("tensorboard") else "tensorboardX.proto"
        summary = import_module(f"{package}.summary_pb2").Summary
        with Image.open(samples.page) as page:
            width, height = page.size
        # the file as it is: TensorBoard plays a GIF
        image = summary.Image(
            height=height, width=width, encoded_image_string=samples.page.read_bytes()
        )
        value = summary.Value(tag=samples.name, image=image)
        tracker.writer.file_writer.add_summary(summary(value=[value]), step)
    tracker.writer.flush()


def _wandb_samples(tracker: Any, samples: ShownSamples, step: int) -> None:
    wandb = import_module("wandb")
    table = wandb.Table(columns=list(samples.columns), data=[list(row) for row in samples.rows])
    logged: dict[str, Any] = {f"{samples.name}_table": table}
    if samples.images:
        pairs = zip(samples.images, samples.captions, strict=True)
        logged[samples.name] = [wandb.Image(image, caption=caption) for image, caption in pairs]
    elif samples.page.suffix == ".gif":
        logged[samples.name] = wandb.Video(str(samples.page), format="gif")
    tracker.log(logged, step=step)


def _trackio_samples(tracker: Any, samples: ShownSamples, step: int) -> None:
    trackio = import_module("trackio")
    rows = [list(row) for row in samples.rows]
    logged: dict[str, Any] = {
        f"{samples.name}_table": trackio.Table(columns=list(samples.columns), data=rows)
    }
    if samples.page.suffix == ".gif":
        logged[samples.name] = trackio.Video(str(samples.page), format="gif")
    elif samples.images:
        logged[samples.name] = trackio.Image(str(samples.page))
    tracker.log(logged, step=step)


def _mlflow_samples(tracker: Any, samples: ShownSamples, step: int) -> None:
    folder = f"{samples.name}/{step:06d}"
    tracker.log_artifact(str(samples.page), folder)
    rows = [dict(zip(samples.columns, row, strict=True)) for row in samples.rows]
    import_module("mlflow").log_dict({"samples": rows}, f"{folder}/scores.json")


def _tensorboard_histogram(tracker: Any, name: str, histogram: Histogram, step: int) -> None:
    tracker.writer.add_histogram_raw(
        name,
        min=histogram.edges[0],
        max=histogram.edges[-1],
        num=histogram.number,
        sum=histogram.total,
        sum_squares=histogram.squares,
        bucket_limits=histogram.edges[1:].tolist(),
        bucket_counts=histogram.counts.tolist(),
        global_step=step,
    )


def _mlflow_histograms(histograms: Mapping[str, Histogram], step: int) -> None:
    """Log histograms to MLflow, which has none: as an image with a slider over the steps, and the
    counts as a file."""
    mlflow = import_module("mlflow")
    mlflow.log_image(histogram_image(histograms), key="histograms", step=step)
    plain = {
        name: {"edges": histogram.edges.tolist(), "counts": histogram.counts.tolist()}
        for name, histogram in histograms.items()
    }
    mlflow.log_dict(plain, f"histograms/{step:06d}.json")


_SAMPLES: Mapping[str, Callable[..., None]] = {
    "tensorboard": _tensorboard_samples,
    "wandb": _wandb_samples,
    "trackio": _trackio_samples,
    "mlflow": _mlflow_samples,
}


def _short(value: Any) -> str:
    if value is None:
        return "unscored"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _flat(tree: Mapping[str, Any], at: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{at}.{key}" if at else key
        flat |= _flat(value, name) if isinstance(value, dict) else {name: str(value)}
    return flat
