"""Arguments of each command, declared as dataclasses that `parse_arguments` fills."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from flowrl.errors import UserError
from flowrl.settings.command_line.options import split_by_commas
from flowrl.settings.model.pipeline import GuidanceScale
from flowrl.settings.words.names import suggestion
from flowrl.settings.words.sentences import plain_message

T = TypeVar("T")
_POSITIONAL = "positional"
_ONE_DASH = re.compile(r"-[A-Za-z][\w-]*")  # neither a number nor a prompt of several words
Word = Annotated[T, _POSITIONAL]
MOST_COUNTED = (
    1_000_000  # of what is counted out in memory: samples, prompts, steps, pixels of a side
)
AtLeastOne = Annotated[int, Field(ge=1, le=MOST_COUNTED)]
KeyFormat = Literal["diffusers", "comfyui", "kohya"]


@dataclasses.dataclass
class TrainArguments:
    """Align a model; every setting of the file is an option."""

    config: Word[Path | None] = None
    """The file of a run; not with --resume RUN."""
    folder: Path | None = None
    """A new folder for the run; runs/CONFIG-0001 if absent."""
    resume: Path | None = None
    """Continue this run from its last checkpoint. `auto`, with a file and --folder: begin the run
    if the folder is absent, continue it if it is there, and do nothing if it has finished."""
    wait: bool = False
    """With --resume auto: wait while another process trains in the folder."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Restart a training that dies, at most this many times without a new checkpoint."""
    no_cache: bool = False
    """Prove the model at the start even if a proof is cached."""
    trust: bool | str = False
    """Grant a folder that was not started here all that its run.yaml asks for, such as code, or
    the rights that are named: --trust=code,network,variables,files,accounts. See SECURITY.md."""


@dataclasses.dataclass
class SampleArguments:
    """Generate samples for prompts with a run's weights, or with an untrained model. Every setting
    of a run file is an option too, after the prompts: --model.dtype bfloat16."""

    run: Word[str | None] = None
    """The run's folder; not with --model."""
    prompts: Word[tuple[str, ...]] = ()
    model: str | None = None
    """A pipeline's or a language model's folder or hub name, instead of a run."""
    adapter: Path | None = None
    """A folder with an adapter for --model."""
    weights: str = "last"
    """last, best, base, a checkpoint's name such as 000010, or a folder, such as an adapter's."""
    count: AtLeastOne = 4
    """Samples per prompt."""
    steps: AtLeastOne | None = None
    """Denoising steps (num inference steps) or maximum tokens; the evaluation's if absent."""
    guidance: GuidanceScale = None
    """Guidance scale; the evaluation's if absent."""
    height: AtLeastOne | None = None
    """Height in pixels; the evaluation's if absent."""
    width: AtLeastOne | None = None
    """Width in pixels; the evaluation's if absent."""
    image: str | None = None
    """An image for all prompts: the image to edit, or a video's first frame. FILE, or a part of it,
    FILE#xywh=0,0,64,64."""
    trust: bool | str = False
    """Grant a folder that was not started here all that its run.yaml asks for, such as code, or
    the rights that are named: --trust=code,network,variables,files,accounts. See SECURITY.md."""
    seed: int = 0
    out: Path | None = None
    """A new or empty folder for the samples; RUN/samples/sample-0001 if absent."""
    base_steps: Annotated[int, Field(ge=0, le=MOST_COUNTED)] = 0
    """Number of last denoising steps that use the base weights (hybrid inference), which hides
    over-optimisation; 0: none."""
    steer: Literal["no", "best", "importance", "particles"] = "no"
    """How the rewards select among several samples: see flowrl/cli/steer.py."""
    particles: AtLeastOne = 8
    """Number of samples from which one is selected."""
    strength: float = 10.0
    """Weight of the rewards, in exp(strength * reward)."""
    rewrite: AtLeastOne = 1
    """In a joint run, number of rewritings per sample, from which the rewards select the best
    image."""
    optimise: Literal["no", "gradient", "search", "best"] = "no"
    """How to search a better noise for each sample: see flowrl/cli/optimise.py."""
    rounds: AtLeastOne = 50
    """Rounds of --optimise."""
    rate: Annotated[float, Field(gt=0)] = 5.0
    """Step size of --optimise gradient."""
    naturalness: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the term that keeps the noise's norm typical, with --optimise gradient."""
    rewards: tuple[str, ...] = ()
    """Rewards that score, steer and optimise: names or YAML; the run's if absent."""


@dataclasses.dataclass
class EvaluateArguments:
    """Score a run's weights, or an untrained model, on prompts and compare with the base model,
    with deterministic sampling from the same keyed noise. Differences have 95 % intervals over
    prompts. Every setting of a run file is an option too: --evaluate.temperature 0."""

    run: Word[Path | None] = None
    """The run's folder; not with --model."""
    model: str | None = None
    """A pipeline's or a language model's folder or hub name, instead of a run."""
    adapter: Path | None = None
    """A folder with an adapter for --model."""
    prompts: tuple[str, ...] = ()
    """Prompt files, or data sets as YAML such as '{source: openai/gsm8k, config: main, column:
    question}'; the run's held-out prompts if absent."""
    suite: str | None = None
    """Use a prompt set with its own rewards: see `flowrl suites`."""
    weights: str = "last"
    """last, best, base, a checkpoint's name such as 000010, or a folder, such as an adapter's."""
    trust: bool | str = False
    """Grant a folder that was not started here all that its run.yaml asks for, such as code, or
    the rights that are named: --trust=code,network,variables,files,accounts. See SECURITY.md."""
    alone: bool = False
    """Do not evaluate the base model."""
    rewards: tuple[str, ...] = ()
    """Names, or YAML such as '{name: shapes, kind: strict, iou: 0.85}'; the run's if absent."""
    samples: AtLeastOne | None = None
    """Total number of samples; the run's evaluate.samples if absent."""
    per_prompt: AtLeastOne | None = None
    """Minimum samples per prompt; the run's evaluate.per_prompt if absent."""
    steps: AtLeastOne | None = None
    """Denoising steps (num inference steps) or maximum tokens; the run's evaluation steps if
    absent."""
    guidance: GuidanceScale = None
    """Guidance scale; the run's evaluate.guidance if absent."""
    height: AtLeastOne | None = None
    """Height in pixels; the run's evaluate.height if absent."""
    width: AtLeastOne | None = None
    """Width in pixels; the run's evaluate.width if absent."""
    base_steps: Annotated[int, Field(ge=0, le=MOST_COUNTED)] = 0
    """Number of last denoising steps that use the base weights (hybrid inference), which hides
    over-optimisation; 0: none."""
    pass_at: tuple[AtLeastOne, ...] = ()
    """Numbers k for pass@k, such as --pass-at 1 4; the run's evaluate.pass_at if absent."""
    majority: bool = False
    """Also score the most frequent answer among each prompt's texts."""
    seed: int | None = None
    out: Path | None = None
    """A file for the scores of every sample, as JSON lines."""


@dataclasses.dataclass
class PlanArguments:
    """Describe an iteration of a run and its costs, without loading weights. Every setting of a
    file is an option. Exit code 1 if the run could not start here, or does not fit in memory."""

    configs: Word[tuple[Path, ...]]
    """Files of runs."""
    svg: Path | None = None
    """Draw the plan's tree into this file."""
    iteration: Annotated[int, Field(ge=0)] = 0
    memory: str | None = None
    """The memory that the run must fit in, such as 24GiB; by default that of --devices or of the
    visible GPU."""
    devices: str | None = None
    """GPUs to estimate seconds for, such as 8xH100 or RTX-4090."""
    utilisation: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Assumed fraction of the devices' peak FLOP/s, with --devices."""
    check_rows: bool = False
    """Ask of every training row whether anything can win it, with the programs of its reference.
    The answers are kept, and `train` does not ask again. Exit code 1 if rows are refused."""


@dataclasses.dataclass
class ProveArguments:
    """Compare flowrl's samples of a run's pipeline with the pipeline's own, over all steps, at the
    run's settings and prompts. Every setting of a file is an option. Exit code 1 if the pipeline is
    refused. The result is cached, and `train` does not repeat it."""

    config: Word[Path | None] = None
    """The file of a run. Without it: 10 steps, guidance 1, built-in prompts."""
    model: str | None = None
    """A pipeline's folder or hub name, instead of the file's."""
    no_cache: bool = False
    """Prove the pipeline even if a proof is cached."""


@dataclasses.dataclass
class ExportArguments:
    """Export a run's weights into a folder to share: the adapter in the key formats of diffusers,
    ComfyUI and kohya's tools, each read back and compared, and a model card with prompts, rewards,
    recipe, inference settings, curves and samples. See docs/export.md."""

    run: Word[Path]
    """The run's folder."""
    trust: bool | str = False
    """Grant a folder that was not started here all that its run.yaml asks for, such as code, or
    the rights that are named: --trust=code,network,variables,files,accounts. See SECURITY.md."""
    out: Path | None = None
    """A new or empty folder; RUN/export-0001 if absent."""
    weights: str = "last"
    """last, best, or a folder: an adapter's or a whole model's."""
    formats: tuple[KeyFormat, ...] = ()
    """Key formats of an adapter: diffusers, comfyui, kohya; by default all that are known for the
    model."""
    merged: bool = False
    """Write the whole model too, with the adapter merged into its weights."""
    push_to_hub: str | None = None
    """Upload the folder to this repository on the hub (owner/name), which is created if missing."""
    private: bool = False
    """Make a newly created repository private."""


def parse_arguments(kind: type[T], words: Sequence[str], command: str) -> T:
    """Parse the words after `flowrl COMMAND` into a dataclass. UserError, in one sentence, for an
    unknown option, a missing word or a value of the wrong type."""
    values = _collect(kind, words, command)
    hints, shown_names = field_types(kind), word_fields(kind)
    for name, value in values.items():
        if isinstance(value, str) and Path in _types(hints[name]):
            if not value:
                raise UserError(f"{command}: {_shown(name, shown_names)}: the name is empty")
            values[name] = expanded(value)
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        problem = "missing" if first["type"] == "missing" else plain_message(first)
        raise UserError(
            f"{command}: {_shown(name, shown_names)}: {problem}; `flowrl {command} --help` lists "
            "all options"
        ) from error


def expanded(path: str) -> Path:
    """The path with ~ as the home folder, which a shell leaves as it is in quotes and after `=`."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path[:100]}: {error}") from error


def _shown(name: str, words: Sequence[str]) -> str:
    return name.upper() if name in words else f"--{name.replace('_', '-')}"


def _collect(kind: type, words: Sequence[str], command: str) -> dict[str, Any]:
    hints, positional = field_types(kind), word_fields(kind)
    options = [name for name in hints if name not in positional]
    values: dict[str, Any] = {}
    alone: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":  # what follows are no options, even with dashes
            alone += rest
            break
        if _ONE_DASH.fullmatch(word):
            raise UserError(
                f"{command}: {word[:100]} is not known; options begin with two dashes, and a name "
                "that begins with one goes after --"
            )
        if not word.startswith("--"):
            alone.append(word)
            continue
        written, equals, value = word.removeprefix("--").partition("=")
        name = written.replace("-", "_")
        if name not in options:
            hint = suggestion(written, [o.replace("_", "-") for o in options], "--")
            raise UserError(f"{command}: --{written[:100]} is not known; {hint}")
        if _types(hints[name]) & {bool}:
            values[name] = value or True
            continue
        values_given = [value] if equals else []
        many = bool(_types(hints[name]) & {tuple})
        if name in values and not many:
            values_named = f"{values[name]} and {value or ' '.join(rest[:1])}"[:200]
            raise UserError(f"{command}: --{written} is given twice, with {values_named}: keep one")
        while rest and not rest[0].startswith("--") and (many or not values_given):
            values_given.append(rest.pop(0))
        if not values_given:
            raise UserError(f"{command}: --{written} needs a value")
        values_given = split_by_commas(values_given, hints[name]) if many else values_given
        values[name] = [*values.get(name, []), *values_given] if many else values_given[0]
    return values | _placed(hints, positional, alone, command)


def _placed(
    hints: dict[str, Any], positional: Sequence[str], words: Sequence[str], command: str
) -> dict[str, Any]:
    """Assign the words without dashes to the positional fields, in their order."""
    values: dict[str, Any] = {}
    rest = list(words)
    for name in positional:
        if _types(hints[name]) & {tuple}:
            values[name], rest = rest, []
        elif rest:
            values[name] = rest.pop(0)
    if rest:
        raise UserError(f"{command}: unexpected argument {' '.join(rest)[:200]!r}")
    return values


def field_types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def word_fields(kind: type) -> list[str]:
    """Positional fields of a command's arguments, given as words without dashes."""
    hints = field_types(kind).items()
    return [name for name, hint in hints if _POSITIONAL in getattr(hint, "__metadata__", ())]


def _types(hint: Any) -> set[Any]:
    """The types in an annotation; `tuple` for every list."""
    if get_origin(hint) in (tuple, list):
        return {tuple}
    if get_origin(hint) is Annotated:
        return _types(get_args(hint)[0])
    inner = [_types(part) for part in get_args(hint)] if get_origin(hint) is not Literal else []
    return set().union(*inner) if inner else {hint} if isinstance(hint, type) else set()
