"""The records in `report/` of a run's folder, from which its page is made:

small and bounded. A run writes them at its evaluations; docs/following.md describes each.
"""

import re
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from flowrl.bounded_files import check_values
from flowrl.json_text import json_text
from flowrl.pages.plain_files import plain_bytes, plain_lines
from flowrl.whole_file import write_whole

RECORDS_FOLDER = "report"
_MOST_END_BYTES = 2**20  # its text is cut to far less
STARTS, ALARMS, END = "starts.jsonl", "alarms.jsonl", "end.json"
MOST_EVALUATIONS = 48  # records of evaluations and of trees that stay; see `thin_out`
MOST_RECORDS = 4 * MOST_EVALUATIONS  # of a kind that are read: the newest
MOST_RECORD_BYTES = 2**25  # of a file
_MOST_LINES = 10_000  # of starts or alarms that are read: the newest
MOST_TEXT = 4000  # letters of a text, and a tenth of that of a prompt
_NUMBERED = re.compile(r"(evaluation|tree)-(\d{6,})\.json")
MediaKind = Literal["image", "video", "sound", "text"]


@dataclass(frozen=True)
class GivenImage:
    """An image from a prompt's row, such as the source of an edit: its column and a data URL."""

    name: str
    media: str
    width: int
    height: int


@dataclass(frozen=True)
class SampleRecord:
    """A sample small enough for a page. `media` is a data URL, or the text itself; `scores` are of
    the rewards that apply to it, None where one failed."""

    place: int  # among the samples of its evaluation or draw
    prompt: str
    scores: dict[str, float | None]
    media: str
    width: int = 0  # of an image or of one frame, in pixels
    height: int = 0
    frames: int = 1  # side by side in `media`
    given: list[GivenImage] = field(default_factory=list[GivenImage])
    sound: str = ""  # a data URL of its sound, and of its spectrogram
    spectrum: str = ""


@dataclass(frozen=True)
class EvaluationRecord:
    """Scores of all samples of an evaluation, and some of its samples.

    key       the reward that decides which weights are the best
    prompts   one per group of samples, cut off; `digests` of the full texts identify equal ones
    scores    by reward, of all samples, contiguous per prompt
    same      samples of the same prompts and noise at each evaluation
    """

    iteration: int
    kind: MediaKind
    key: str
    seed: int
    prompts: list[str]
    digests: list[str]
    scores: dict[str, list[float | None]]
    same: list[SampleRecord] = field(default_factory=list[SampleRecord])
    best: list[SampleRecord] = field(default_factory=list[SampleRecord])
    worst: list[SampleRecord] = field(default_factory=list[SampleRecord])

    def __post_init__(self) -> None:
        """ValueError for parts that do not belong together, as in a file made by hand."""
        lengths = {len(column) for column in self.scores.values()}
        groups = len(self.prompts)
        if self.key not in self.scores or len(lengths) != 1 or len(self.digests) != groups:
            raise ValueError("its scores are not those of its prompts and its key")
        if min(lengths) % max(1, groups):
            raise ValueError("its prompts have different numbers of samples")

    @property
    def per_prompt(self) -> int:
        return len(self.scores[self.key]) // max(1, len(self.prompts))


@dataclass(frozen=True)
class LevelRecord:
    """Nodes of one decision point. `node` is the index of each leaf's node in the other lists.

    sigma       noise level before the step; None for texts
    values      of the nodes, from the scores of their leaves
    advantages  None if a node is not trained on
    texts       of the nodes, if they are rewritings of the prompt
    """

    sigma: float | None
    noisy: bool
    trained: bool
    node: list[int]
    values: list[float | None]
    advantages: list[float | None]
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """ValueError for nodes that it does not have."""
        nodes = len(self.values)
        if len(self.advantages) != nodes or len(self.texts) not in (0, nodes):
            raise ValueError("its nodes have different numbers of values, advantages and texts")
        if not all(0 <= node < nodes for node in self.node):
            raise ValueError("its leaves name nodes that it does not have")


@dataclass(frozen=True)
class TreeRecord:
    """One draw of an iteration as a tree: its decision points in order, and its leaves."""

    iteration: int
    kind: MediaKind
    prompt: str
    plans: int  # of the iteration; the first is shown
    roots: int  # distinct states before the first step
    levels: list[LevelRecord]
    leaves: list[SampleRecord]
    totals: list[float | None]  # weighted sums of the rewards of each leaf

    def __post_init__(self) -> None:
        """ValueError for leaves that have no node or no total. Only the first ones are shown."""
        leaves = len(self.totals)
        if len(self.leaves) > leaves or any(len(level.node) != leaves for level in self.levels):
            raise ValueError("its leaves have different numbers of nodes and totals")


UNLIKE = "evaluations unlike training"  # a fact: settings that differ


@dataclass(frozen=True)
class LaunchRecord:
    """A start or resume: the machine, the versions, and the plan as text."""

    iteration: int  # done before
    facts: dict[str, str]
    plan: str


@dataclass(frozen=True)
class AlarmRecord:
    iteration: int
    text: str

    @property
    def sentence(self) -> str:
        """The first sentence: what happened."""
        return self.text.partition(". ")[0].rstrip(".") + "."

    @property
    def details(self) -> str:
        """The sentences after it: what can be done."""
        return self.text.partition(". ")[2]


@dataclass(frozen=True)
class EndRecord:
    """The end of the last start, if it came before the run's own end: `failed` by an error, or
    `stopped` by a signal that saves. `text` says why."""

    kind: Literal["failed", "stopped"]
    text: str

    @property
    def cause(self) -> str:
        """The first sentence, in one line."""
        line = " ".join(self.text.split())
        return line.partition(". ")[0].rstrip(".") + "."


AnyRecord = EvaluationRecord | TreeRecord
_READERS: dict[str, TypeAdapter[Any]] = {
    "evaluation": TypeAdapter(EvaluationRecord),
    "tree": TypeAdapter(TreeRecord),
    STARTS: TypeAdapter(LaunchRecord),
    ALARMS: TypeAdapter(AlarmRecord),
    END: TypeAdapter(EndRecord),
}


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """Cut the text off after `most` letters, with a note of how many were left out."""
    left = len(text) - most
    return text if left <= 0 else f"{text[:most]} ... ({left} more letters)"


def write_record(run: Path, record: AnyRecord) -> None:
    """Write `report/evaluation-000010.json` or `report/tree-000010.json`, completely or not at
    all."""
    kind = "tree" if isinstance(record, TreeRecord) else "evaluation"
    write_whole(run / RECORDS_FOLDER / f"{kind}-{record.iteration:06d}.json", _json(record))


def append_record(run: Path, record: LaunchRecord | AlarmRecord) -> None:
    """Add a line to `report/starts.jsonl` or `report/alarms.jsonl`."""
    path = run / RECORDS_FOLDER / (STARTS if isinstance(record, LaunchRecord) else ALARMS)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(_json(record) + "\n")


def write_end(run: Path, end: EndRecord) -> None:
    """Write `report/end.json`, which stands until the next start trains."""
    write_whole(run / RECORDS_FOLDER / END, _json(replace(end, text=shortened(end.text))))


def read_end(run: Path) -> EndRecord | None:
    """Read how the last start ended; None if it trains, was killed, or reached the run's end."""
    with suppress(OSError, ValidationError):
        return _READERS[END].validate_json(
            plain_bytes(run, run / RECORDS_FOLDER / END, _MOST_END_BYTES)
        )
    return None


def cut_back_records(run: Path, iteration: int) -> None:
    """Remove records of later iterations, since a resumed run writes them again, and that of the
    last start's end."""
    (run / RECORDS_FOLDER / END).unlink(missing_ok=True)
    for path, done in _numbered(run):
        if done > iteration:
            path.unlink()
    for torn in (run / RECORDS_FOLDER).glob("*.tmp"):  # of a process that was killed
        torn.unlink()
    for name in (STARTS, ALARMS):
        path = run / RECORDS_FOLDER / name
        if path.is_file():
            records = [record for record in _lines(run, name) if record.iteration <= iteration]
            write_whole(path, "".join(f"{_json(record)}\n" for record in records))


def thin_out(run: Path, interval: int, best: int | None) -> None:
    """Keep about `MOST_EVALUATIONS` records of each kind, evenly spaced over the iterations,
    always including the first, the newest and the `best` one. `interval`: iterations between
    evaluations.

    The spacing depends only on the newest iteration, so an interrupted run ends with the same
    records as an uninterrupted one."""
    for kind in ("evaluation", "tree"):
        numbered = sorted(
            (done, path) for path, done in _numbered(run) if path.name.startswith(kind)
        )
        last, spacing = max((done for done, _ in numbered), default=0), interval
        while last > MOST_EVALUATIONS * spacing:
            spacing *= 2
        for done, path in numbered[1:]:
            if done not in (best, last) and done % spacing:
                path.unlink()


def read_evaluations(run: Path) -> list[EvaluationRecord]:
    """Read the records of all evaluations, oldest first. Unreadable records are left out."""
    return _records(run, "evaluation")


def read_trees(run: Path) -> list[TreeRecord]:
    """Read the records of all trees, oldest first. Unreadable records are left out."""
    return _records(run, "tree")


def read_starts(run: Path) -> list[LaunchRecord]:
    return _lines(run, STARTS)


def read_alarms(run: Path) -> list[AlarmRecord]:
    return _lines(run, ALARMS)


def _records(run: Path, kind: str) -> list[Any]:
    records: list[Any] = []
    paths = [path for path, _ in _numbered(run) if path.name.startswith(kind)]
    for path in paths[-MOST_RECORDS:]:
        with suppress(OSError, ValueError):
            read = plain_bytes(run, path, MOST_RECORD_BYTES)
            check_values(read)
            records.append(_READERS[kind].validate_json(read))
    return records


def _lines(run: Path, name: str) -> list[Any]:
    records = deque[Any](maxlen=_MOST_LINES)
    with suppress(OSError):
        for line in plain_lines(run, run / RECORDS_FOLDER / name, MOST_RECORD_BYTES):
            with suppress(ValidationError):  # a kill may leave the last line torn
                records.append(_READERS[name].validate_json(line))
    return list(records)


def _numbered(run: Path) -> list[tuple[Path, int]]:
    folder = run / RECORDS_FOLDER
    files = folder.iterdir() if folder.is_dir() else ()
    matches = ((path, _NUMBERED.fullmatch(path.name)) for path in files)
    numbered = [(path, int(match[2])) for path, match in matches if match is not None]
    return sorted(numbered, key=lambda pair: pair[1])


def _json(record: Any) -> str:
    return json_text(asdict(record), ensure_ascii=False)
