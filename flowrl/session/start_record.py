"""The record of a run's start: settings, base weights, prompts, and source files.

Every checkpoint contains one. A resume compares it with the current files: `flowrl.settings.base`
says which settings may change. Large files are sampled, so that the check reads a few megabytes.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from pydantic import TypeAdapter

import rewards
from flowrl.credit.trackers import NoTracker
from flowrl.credit.trees import families_read
from flowrl.errors import UserError
from flowrl.evaluation.sources import MEDIA_SUFFIXES
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.token import Token
from flowrl.models.description import describe, local_folder
from flowrl.models.diffusers.modular.revisions import snapshot
from flowrl.models.language.older_ends import changed_ends, changed_prompts
from flowrl.models.open import modular_source
from flowrl.models.open import place as place_of_model
from flowrl.paths import find
from flowrl.prompts import DataSource, PromptSet, Selection
from flowrl.prompts.prompt_set import SOUND_COLUMNS
from flowrl.session.named_files import named_file_digests
from flowrl.session.state_file import read_state
from flowrl.settings import LanguageSettings, OwnSettings, PipelineSettings, RunSettings
from flowrl.settings.base import OnResume, Settings
from flowrl.settings.read import dump, run_from
from flowrl.settings.sections.data import IN_PYTHON
from rewards.load import own_name
from rewards.perception.files import READER
from rewards.perception.sound_files import SOUND_READER
from rewards.rules import RULES_VERSION, changed_rules
from samplers import Columns, Plan

WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
CONFIGURATIONS = (".json", ".txt", ".model", ".jinja")
BLOCKS, BLOCK = 64, 2**12  # sampled blocks per file, and their bytes
WHOLE = 2**25  # bytes: smaller files other than weights are read whole
LONG = 60  # letters: longer values of settings are not printed


@dataclass(frozen=True)
class StartRecord:
    settings: dict[str, Any]
    processes: int
    revision: str | None  # of a model from the hub
    base: dict[str, str]  # file of the base model -> digest
    prompts: dict[str, str]  # setting -> digest
    sources: dict[str, str]  # source file of a reward, recipe, part or environment -> digest
    shared_states: bool = False  # evaluated once and dealt together: older versions did not
    texts_by_length: bool = False  # in calls of the update: older versions took the order of draws
    media_reader: int = 1  # the version by which files of images and videos are read
    turns_by_template: bool = False  # where turns end: older versions asked the tokenizer
    parents_as_data: bool = False  # of nodes: older versions inferred them from numbers of nodes
    abstaining: bool = False  # None of a reward: a failure in older versions
    reward_rules: int = 1  # the version of the rules of flowrl's rewards
    revisions: dict[str, str] | None = None  # of a modular pipeline's components; None: not noted
    named_files: dict[str, str] = field(
        default_factory=dict
    )  # setting -> digest of its rows' files
    equal_pairs_left_out: bool = False  # older versions trained on pairs of one sample twice
    sound_reader: int = 0  # the version of the reader of sounds; 0: before there was one
    prompts_go_on: bool = False  # older versions left the end that a tokenizer adds to a text
    tokens_by_blocks: bool = False  # older versions drew noise for every token of a vocabulary
    segments_encoded: bool = False  # older versions could take those of another sample's frames

    @classmethod
    def of(cls, run: RunSettings, processes: int) -> "StartRecord":
        """Create the record. Files that are not on this machine are left out."""
        folder = None if isinstance(run.model, OwnSettings) else local_folder(run.model.source)
        modular = modular_source(run.model)
        revisions = {} if modular is None else modular.revisions()
        return cls(
            settings=dump(run),
            processes=processes,
            revision=folder.name if folder and folder.parent.name == "snapshots" else None,
            base=(dict(_base(folder)) if folder else _own_base(run))
            | dict(_adapters(run))
            | dict(_of_repositories(revisions)),
            prompts=dict(prompt_digests(run)),
            sources=source_digests(run),
            shared_states=True,
            texts_by_length=True,
            media_reader=READER,
            sound_reader=SOUND_READER,
            turns_by_template=True,
            parents_as_data=True,
            abstaining=True,
            reward_rules=RULES_VERSION,
            revisions=revisions,
            named_files=dict(named_file_digests(run)),
            equal_pairs_left_out=True,
            prompts_go_on=True,
            tokens_by_blocks=True,
            segments_encoded=True,
        )

    @classmethod
    def read(cls, checkpoint: Path) -> "StartRecord | None":
        """Read the record of a checkpoint; None if it is missing or unreadable."""
        try:
            record = cls(**read_state(checkpoint)["origin"])
            for name, kind in _kinds().items():
                kind.validate_python(getattr(record, name), strict=True)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record

    def state(self) -> dict[str, Any]:
        return asdict(self)


@cache
def _kinds() -> Mapping[str, TypeAdapter[Any]]:
    """Types of the fields of a record. Anybody may have written a checkpoint's file."""
    return {name: TypeAdapter(kind) for name, kind in get_type_hints(StartRecord).items()}


def source_digests(run: RunSettings) -> dict[str, str]:
    """Digests of the source files that a run file names, and of its rewards."""
    return {name: _digest(path) for name, path in _sources(run) if path.is_file()}


def changes(run: RunSettings, folder: Path, checkpoint: Path, processes: int) -> list[str]:
    """Compare a run with its checkpoint; returns one sentence per difference.

    UserError for a change that prevents a resume.
    """
    before, now = StartRecord.read(checkpoint), StartRecord.of(run, processes)
    iterations = int(checkpoint.name)
    if run.train.iterations < iterations:
        raise UserError(
            f"train.iterations: {run.train.iterations}, but {folder} has already done "
            f"{iterations}; set at least {iterations}"
        )
    if before is None:
        unknown = (
            f"checkpoint {checkpoint.name} does not record its initial settings, so "
            "changes of settings and files are not noticed"
        )
        return [unknown, *_moved(None, run)]
    allowed = [*_settings(before, run, folder), *_files(before, now, run, folder)]
    lines = [*_moved(before, run)]
    lines += (
        [f"changed since checkpoint {checkpoint.name}: {'; '.join(allowed)}"] if allowed else []
    )
    if before.processes != processes:
        lines.append(
            f"processes: {processes} now, {before.processes} before; sums are taken in another "
            "order, so results agree up to rounding, not to the bit"
        )
    return lines


class _Changed(NamedTuple):
    """A rule that an older version had otherwise: the field of a record that says that it is
    today's, the runs that it concerns, and what a resume says."""

    field: str
    concerns: Callable[[RunSettings], bool]
    sentence: str


def _moved(before: StartRecord | None, run: RunSettings) -> Iterator[str]:
    """Lines about an older version by whose rules the run would have gone on otherwise."""
    if (before is None or before.media_reader != READER) and _reads_media(run):
        yield (
            "the checkpoint is from an older version, which read some files otherwise: pixels now "
            "follow colour profiles, and frames of videos their rotation, pixel aspect and times "
            "(docs/pixels.md); results differ from those of an "
            "uninterrupted run where the run's images and videos have them"
        )
    if before is not None and before.sound_reader not in (0, SOUND_READER) and _reads_sounds(run):
        yield (
            "the checkpoint is from another version, which read files of sounds otherwise; results "
            "differ from those of an uninterrupted run"
        )
    if not (before and before.turns_by_template):
        yield from _ends(run)
    if not (before and before.prompts_go_on):
        for one_run in _of_texts(run):
            yield from changed_prompts(place_of_model(one_run.model.language), one_run.model)
    for rule in _CHANGED:
        if not (before and getattr(before, rule.field)) and rule.concerns(run):
            yield f"the checkpoint is from an older version{rule.sentence}"
    for clause in rules_changed_since(before, run):
        yield (
            f"the checkpoint is from an older version, whose rule of a reward was another: {clause}"
            "; results differ from those of an uninterrupted run where it matters"
        )


def _draws_tokens(run: RunSettings) -> bool:
    """Whether a language model of the run draws tokens itself: for training, or for evaluations
    above temperature 0. A server that gets the run's weights draws for both."""
    for one_run in (run, run.prompt_writer):
        if one_run is None or not isinstance(one_run.model, LanguageSettings):
            continue
        server = one_run.server
        trains = server is None and one_run.drawn > 0
        evaluates = server is None or server.sync == "none"
        if trains or (evaluates and one_run.evaluate.temperature > 0):
            return True
    return False


def _continues_segments(run: RunSettings) -> bool:
    """Whether the model encodes decoded frames again, to begin the next segment of a video."""
    described = describe(run.model) if isinstance(run.model, PipelineSettings) else None
    return described is not None and "WanAnimate" in described.kind.__name__


def _compares_pairs(run: RunSettings) -> bool:
    likelihood = run.algorithm().likelihood
    return isinstance(likelihood, Matching | Token) and likelihood.paired


def _has_other_parents(run: RunSettings) -> bool:
    """Whether credit compares nodes with their parents, which an older version inferred from the
    numbers of nodes and took for others."""
    algorithm = run.algorithm()
    for columns in (plan.columns for plan in algorithm.plans):
        read = families_read(algorithm.transforms, columns)
        if read and read != _inferred(columns)[-len(read) :]:
            return True
    return False


def _inferred(columns: Columns) -> tuple[int, ...]:
    """Families by the older rule: the draw was the only parent of all first nodes."""
    families: list[int] = []
    for k, nodes in enumerate(columns.nodes):
        fewer = [before for before in columns.nodes[:k] if before < nodes]
        families.append(fewer[-1] if fewer else 1)
    return tuple(families)


def _may_abstain(run: RunSettings) -> bool:
    """Whether a reward of the run may return None: a user's own, a served one, or one of some data
    sets."""
    specs = (*run.rewards, *run.judges, *run.intermediate_rewards)
    return any(_names_own([spec.name, spec.settings]) or bool(spec.sets) for spec in specs)


def _writes_texts(run: RunSettings) -> bool:
    return run.algorithm().text


def _shares_states(run: RunSettings) -> bool:
    return any(plan.shares_states for plan in run.algorithm().plans if isinstance(plan, Plan))


_CHANGED = (
    _Changed(
        "texts_by_length",
        _writes_texts,
        ": calls of the update now group texts of similar lengths, so results differ from those of "
        "an uninterrupted run by rounding",
    ),
    _Changed(
        "tokens_by_blocks",
        _draws_tokens,
        ", which drew tokens with other noise: now a block of the vocabulary is drawn, then a "
        "token of it, with the same probabilities; what the model writes from here on are other "
        "draws than those of an uninterrupted run",
    ),
    _Changed(
        "segments_encoded",
        _continues_segments,
        ", in which a segment of a video could begin from another sample's last frames; where "
        "prompts have videos of several segments, results differ from those of an uninterrupted "
        "run",
    ),
    _Changed(
        "abstaining",
        _may_abstain,
        ", in which None from a reward was a failure: now the reward does not apply to that "
        "sample, and totals, groups, `reward` and held-out means are over the rewards that apply "
        '(docs/rewards.md, "Rewards that do not apply")',
    ),
    _Changed(
        "equal_pairs_left_out",
        _compares_pairs,
        ", which trained on pairs of one sample twice: now they are left out or masked "
        "(docs/given_data.md), so results differ from those of an uninterrupted run where the run "
        "has such pairs",
    ),
    _Changed(
        "shared_states",
        _shares_states,
        ": samples that continue from the same state now stay in one optimizer step, so results "
        "differ from those of an uninterrupted run",
    ),
    _Changed(
        "parents_as_data",
        _has_other_parents,
        ", which took all first nodes of a tree for children of one parent: advantages now compare "
        "those that were drawn from the same noise, so results differ from those of an "
        "uninterrupted run",
    ),
)


def _names_own(value: Any) -> bool:
    """Whether settings name a reward server, a Python object or something in a user's file."""
    if isinstance(value, Mapping):
        return any(map(_names_own, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_names_own, value))
    if not isinstance(value, str):
        return False
    return value == "remote" or value.startswith(IN_PYTHON) or own_name(value) is not None


def rules_changed_since(before: StartRecord | None, run: RunSettings) -> list[str]:
    """A clause for each rule of the run's rewards that has changed since a checkpoint."""
    version = 1 if before is None else before.reward_rules
    clauses = [
        clause
        for spec in (*run.rewards, *run.judges, *run.intermediate_rewards)
        for clause in changed_rules(spec.name, spec.settings, version)
    ]
    return list(dict.fromkeys(clauses))


def _reads_sounds(run: RunSettings) -> bool:
    """Whether the run's model is given sounds: in cells of its prompts, or in `model.call`."""
    names = list(run.model.call) if isinstance(run.model, PipelineSettings) else []
    try:
        for place in run.prompts.given:
            names += run.prompts.read(place).columns
    except UserError:  # the resume that follows names it
        return True
    return any(SOUND_COLUMNS.fullmatch(name) for name in names)


def _reads_media(run: RunSettings) -> bool:
    """Whether the run reads files of images or videos: given samples, or cells of its prompts."""
    if run.given is not None and not isinstance(run.model, LanguageSettings):
        return True
    try:
        return any(
            _names_media(value)
            for place in run.prompts.given
            for row in run.prompts.read(place).meta
            for value in row.values()
        )
    except UserError:  # the resume that follows names it
        return True


def _names_media(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_names_media, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_names_media, value))
    if isinstance(value, str):
        return value.partition("#")[0].lower().endswith(tuple(MEDIA_SUFFIXES))
    return isinstance(value, bytes)


def _ends(run: RunSettings) -> Iterator[str]:
    """Lines about tokens that end turns otherwise than in an older version."""
    for one_run in _of_texts(run):
        of_texts = one_run.given is not None and one_run.given.kind != "images"
        yield from changed_ends(place_of_model(one_run.model.language), one_run.model, of_texts)


def _of_texts(run: RunSettings) -> Iterator[Any]:
    """The runs within a run whose language model writes texts."""
    for one_run in (run, run.prompt_writer):
        if (
            one_run is not None
            and isinstance(one_run.model, LanguageSettings)
            and one_run.writes_texts
        ):
            yield one_run


def _settings(before: StartRecord, run: RunSettings, folder: Path) -> Iterator[str]:
    try:
        old = dump(run_from(before.settings, "checkpoint"))  # fills in settings of later versions
    except UserError:
        old = before.settings
    for path, was, value in _differences(old, dump(run)):
        name, kind = ".".join(path), on_resume(run, path)
        if name == "rewards" and run.budget.replay and _labels(was) != _labels(value):
            raise UserError(
                f"rewards: {_labels(was)} cannot become {_labels(value)}, since budget.replay "
                "has stored their scores; change them back, or start a new run"
            )
        if kind is OnResume.NEVER:
            raise UserError(
                f"{name} cannot change within a run: {folder} was started with {_shown(was)}, "
                f"but {folder / 'run.yaml'} or the command line has {_shown(value)}; change it "
                "back, or start a new run"
            )
        if kind is OnResume.SAID:
            texts = _shown(was), _shown(value)
            yield name if max(map(len, texts)) > LONG else f"{name} {' -> '.join(texts)}"


def _files(before: StartRecord, now: StartRecord, run: RunSettings, folder: Path) -> Iterator[str]:
    commits = now.revisions or {}
    for name, place in (before.revisions or {}).items():
        if commits.get(name, place) != place:
            raise UserError(
                f"the {name} of {run.model.source} is not the one that {folder} was started with: "
                f"{commits[name]} now, {place} before; start a new run, with revision: "
                f"{place.rpartition('@')[2]} for it in the index to train the earlier one"
            )
    changed = [n for n, digest in before.base.items() if now.base and now.base.get(n) != digest]
    if changed:
        revisions = before.revision, now.revision
        which = f" (revisions {revisions[0]} and {revisions[1]})" if None not in revisions else ""
        raise UserError(
            f"the base model {run.model.source} is not the one that {folder} was started with: "
            f"{', '.join(sorted(changed)[:3])} differs{which}; restore it, "
            "or start a new run"
        )
    if before.base and not now.base:
        yield "the files of the base model are not on this machine and were not compared"
    for name, digest in now.prompts.items():
        if before.prompts.get(name, digest) != digest:
            if name == "prompts.train" and remembers_prompts(run):
                raise UserError(
                    f"{name}: the prompts have changed, but this run stores scores by prompt "
                    "index; restore the prompts, or start a new run"
                )
            yield f"the prompts of {name}"
    for name, digest in now.named_files.items():
        if before.named_files.get(name, digest) != digest:
            if name == "prompts.train" and remembers_prompts(run):
                raise UserError(
                    f"{name}: files that its rows name have changed, but this run stores scores by "
                    "prompt index; restore the files, or start a new run"
                )
            yield f"files that rows of {name} name"
    for name, digest in now.sources.items():
        if before.sources.get(name, digest) != digest:
            yield f"the source {name}"


def remembers_prompts(run: RunSettings) -> bool:
    """Whether the budget or the credit stores numbers by the index of a prompt in the file."""
    b = run.budget
    by_rate = b.order == "uncertain" or b.rates is not None or b.repeat > 1 or b.replay > 0
    return by_rate or run.algorithm().tracker is not NoTracker


def on_resume(run: RunSettings, path: tuple[str, ...]) -> OnResume:
    """Whether a setting may change on resume; the answer for a section applies to everything in
    it."""
    kind, place = OnResume.SAID, run
    for name in path:
        if isinstance(place, Settings):
            kind = type(place).ON_RESUME.get(name, kind)
        place = getattr(place, name, None)
    return kind


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], at: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Walk two trees of settings; yield path, old and new value of each leaf that differs."""
    for name in dict.fromkeys((*new, *old)):
        was, value = old.get(name), new.get(name)
        if isinstance(was, Mapping) and isinstance(value, Mapping):
            yield from _differences(was, value, (*at, name))
        elif was != value:
            yield (*at, name), was, value


def _labels(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [spec["label"] for spec in specs]


def _shown(value: Any) -> str:
    return "null" if value is None else json.dumps(value)


def _base(folder: Path) -> Iterator[tuple[str, str]]:
    """Digests of a model's configurations and weights, by their names in its folder."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.suffix in (*WEIGHTS, *CONFIGURATIONS) and path.is_file():
            yield name, _digest(path)


def _of_repositories(revisions: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The same of a modular pipeline's components that are in the hub's cache."""
    for place in sorted(set(revisions.values())):
        folder = snapshot(place)
        for name, digest in _base(folder) if folder else ():
            yield f"{place}/{name}", digest


def _own_base(run: RunSettings) -> dict[str, str]:
    """The digest of the weights of a user's own model."""
    weights = run.model.weights if isinstance(run.model, OwnSettings) else None
    return {} if weights is None else {Path(weights).name: _digest(find(weights))}


def _adapters(run: RunSettings) -> Iterator[tuple[str, str]]:
    """Digests of the adapters, the rewriter and the quantized file that a run starts with, by
    their setting."""
    folder = None if run.prompt_writer is None else local_folder(run.prompt_writer.model.source)
    for name, digest in _base(folder) if folder else ():
        yield f"model.rewriter ({name})", digest
    quantized = run.model.quantized
    if quantized is not None and quantized.file is not None:
        yield f"model.quantization ({Path(quantized.file).name})", _digest(find(quantized.file))
    for setting, source in run.model.given_adapters.items():
        path = find(source)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        for file in files:
            if file.is_file():
                yield f"{setting} ({file.name})", _digest(file)


def prompt_digests(run: RunSettings) -> Iterator[tuple[str, str]]:
    """Digests of prompt files and of the chosen rows of hub data sets, which may have a new
    revision. Files that are not on this machine are left out."""
    for place in run.prompts.given:
        parts = []
        for source in getattr(run.prompts, place):
            data = source.at(run.prompts.column)
            if (digest := _data_digest(data, f"prompts.{place}")) is None:
                break
            plain = (data.selection, data.split) == (Selection(), None)
            parts.append(digest if plain else _hash(f"{digest} {data.selection} {data.split}"))
        else:
            yield f"prompts.{place}", parts[0] if len(parts) == 1 else _hash("\n".join(parts))
    if run.given is not None:
        digest = _data_digest(DataSource(run.given.file), "given.file")
        yield from [] if digest is None else [("given.file", digest)]


def _data_digest(data: DataSource, place: str) -> str | None:
    path = find(data.source)
    if path.is_file():
        return _digest(path)
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if p.is_file()]
        return _hash("\n".join(f"{p.relative_to(path).as_posix()} {_digest(p)}" for p in files))
    try:
        return PromptSet.of(data, place).digest()
    except UserError:
        return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sources(run: RunSettings) -> Iterator[tuple[str, Path]]:
    """Find the files of rewards (including rewards in a reward's settings), of the recipe, its
    parts and the levels, of the environment, and the weights of teachers."""
    for folder in () if run.teachers is None else run.teachers.folders.values():
        for path in sorted(find(folder).rglob("*.safetensors")):
            yield str(Path(folder) / path.relative_to(find(folder))), path
    specs = (*run.rewards, *run.judges, *run.intermediate_rewards)
    named: list[Any] = [[spec.name, spec.settings] for spec in specs]
    named.append(run.sigmas)
    if isinstance(run.model, OwnSettings):
        named.append([run.model.own.name, run.model.own.settings])
    if run.environment is not None:
        named.append(run.environment.name)
    yield from files_named(named)
    yield from files_named(list(dict(run.recipe).values()), rewards_too=False)


def files_named(value: Any, rewards_too: bool = True) -> Iterator[tuple[str, Path]]:
    """Source files that a value of the settings names, at any depth."""
    named = [value]
    while named:
        value = named.pop()
        if isinstance(value, Mapping):
            named += value.values()
        elif isinstance(value, list | tuple):
            named += value
        elif isinstance(value, str):
            code = own_name(value)
            builtin = Path(rewards.__file__).parent / "catalogue" / f"{value}.py"
            if code is not None:
                yield code.file, code.path
            elif rewards_too and value.isidentifier() and builtin.is_file():
                yield f"rewards/{value}.py", builtin


def _digest(path: Path) -> str:
    """Digest a file: completely if small, otherwise its size, the safetensors header and BLOCKS
    sampled blocks."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= BLOCKS * BLOCK or (path.suffix not in WEIGHTS and size <= WHOLE):
            digest.update(file.read())
            return digest.hexdigest()
        if path.suffix == ".safetensors":
            header = int.from_bytes(file.read(8), "little")  # of JSON that follows
            digest.update(file.read(min(header, WHOLE)))
        for index in range(BLOCKS):
            file.seek(index * (size - BLOCK) // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()
