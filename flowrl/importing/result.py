"""`import`: a run of another library as a run file, and what became of each of its leaves."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.importing.draft import LeafKind, LeafLine, RunDraft
from flowrl.importing.sources import read_source
from flowrl.settings.read import check_plan, run_from
from flowrl.settings.sections.recipe_kinds import recipe_kind
from flowrl.settings.sections.run import RunSettings
from flowrl.settings.trust import Need, asked
from flowrl.settings.words.sentences import settings_at


@dataclass(frozen=True)
class ImportedRun:
    """A run of another library, as flowrl's.

    peer     the library, with the release whose defaults are taken
    what     the input as it was named; of a command line only its library
    devices     processes that the batches are computed for
    tree     the settings of run.yaml
    lines    one for each leaf of the input, then the library's defaults that differ from flowrl's
    batches  sentences with the arithmetic of batches
    notes    sentences about the input as a whole
    files    further files that the run needs, by name
    needs    code, networks and files that the run asks for
    refusal  the sentence with which `flowrl plan` would refuse the run; None: it passes
    """

    peer: str
    what: str
    devices: int
    tree: Mapping[str, Any]
    lines: Sequence[LeafLine]
    batches: Sequence[str]
    notes: Sequence[str]
    files: Mapping[str, str]
    needs: Sequence[Need]
    refusal: str | None = None
    code: Sequence[str] = field(default_factory=tuple)

    @property
    def counts(self) -> dict[str, int]:
        """Number of leaves by kind."""
        counts = Counter(line.kind for line in self.lines)
        return {kind.value: counts[kind] for kind in LeafKind}


def imported(input_text: str, of: str | None = None, devices: int | None = None) -> ImportedRun:
    """Read a run of another library. Executes nothing of it, and reads no environment variable.

    input_text  FILE.py:FUNCTION, a YAML or JSON file, a Python or shell script, or a command line
    of          the library and its release, PEER==VERSION; None: as the input shows
    devices     processes that the input is meant for; None: 1

    UserError, in one sentence, for an input that has no counterpart.
    """
    if devices is not None and not (type(devices) is int and devices >= 1):
        raise UserError(
            f"--devices: {str(devices)[:100]} is not a number of processes of at least 1"
        )
    source = read_source(input_text, of)
    notes = list(source.notes)
    if devices is None:
        notes.append("batches are computed for 1 process: --devices N for another number")
    peer = source.peer
    draft = RunDraft(
        peer.name, source.leaves, peer.defaults(source.leaves, source.version), devices or 1
    )
    peer.read(draft)
    for name in source.leaves:
        if (reason := peer.absent(name, source.version)) is not None:
            draft.misunderstood(name, reason)
    _launcher(draft)
    draft.finish()
    tree = _ordered(_with_defaults(draft))
    refusal = _refusal(tree)
    folder = Path.cwd()
    try:
        needs = asked(tree, folder)
    except ValueError:
        needs = []
    lines = sorted(draft.lines.values(), key=lambda line: [*LeafKind].index(line.kind) * -1)
    return ImportedRun(
        peer=f"{peer.name} {source.version}",
        what=source.title,
        devices=devices or 1,
        tree=tree,
        lines=lines,
        batches=draft.batches,
        notes=[*notes, *draft.notes],
        files=draft.files,
        needs=needs,
        refusal=refusal,
        code=draft.code,
    )


def _launcher(draft: RunDraft) -> None:
    for name in draft.matching("(launcher) *"):
        option = name.partition(" ")[2]
        count = draft.value(name)
        if option in ("num_processes", "nproc_per_node") and count not in (None, draft.devices):
            draft.notes.append(
                f"{option}: the command has {count}, this import is for {draft.devices} processes"
            )
        draft.lose(name, "an option of the launcher: docs/processes.md", effect=False)
    for name in draft.matching("(environment) *"):
        draft.lose(name, "secrets are not copied; set the variable", effect=False)


def _with_defaults(draft: RunDraft) -> dict[str, Any]:
    """The tree without the library's defaults that are flowrl's too; a line for the others."""
    recipe = draft.tree.get("recipe", {})
    for setting, (name, value, reason) in draft.by_default.items():
        if any(setting in line.settings for line in draft.lines.values()):
            continue
        if _ours(setting, recipe.get("name")) == _plain(value):
            if setting != "recipe.name" and _get(draft.tree, setting) is not _MISSING:
                draft.drop_setting(setting)
        elif _get(draft.tree, setting) is not _MISSING:
            key = name if name not in draft.lines else f"{name} ({setting})"
            shown = draft.defaults.get(name, value)  # the library's word, such as dapo
            draft.lines[key] = LeafLine(key, shown, LeafKind.DEFAULT, {setting: value}, reason)
    return draft.tree


_MISSING = object()


def _get(tree: Mapping[str, Any], setting: str) -> Any:
    value: Any = tree
    for part in setting.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _ours(setting: str, recipe: Any) -> Any:
    """flowrl's default of a setting; _MISSING if it has none."""
    section, _, rest = setting.partition(".")
    if section == "recipe":
        fields = recipe_kind(recipe).model_fields if recipe else {}
        return _plain(fields[rest].default) if rest in fields else _MISSING
    kind: Any = RunSettings
    value: Any = _MISSING
    for part in setting.split("."):
        fields = {f.alias or name: f for name, f in kind.model_fields.items()}
        if part not in fields:
            return _MISSING
        field_ = fields[part]
        value = _MISSING if field_.is_required() else field_.default
        kind = settings_at(field_.annotation)
        if kind is None:
            break
    return _plain(value)


_ORDER = (
    "recipe",
    "model",
    "given",
    "prompts",
    "rewards",
    "held_out_rewards",
    "budget",
    "train",
    "evaluate",
    "checkpoint",
    "track",
)


def _ordered(tree: Mapping[str, Any]) -> dict[str, Any]:
    ordered = {name: tree[name] for name in _ORDER if name in tree}
    if isinstance(recipe := ordered.get("recipe"), dict):
        ordered["recipe"] = {"name": recipe.get("name"), **recipe}
    assert set(ordered) == set(tree), set(tree) - set(ordered)
    return ordered


def _refusal(tree: Mapping[str, Any]) -> str | None:
    """The sentence with which the settings or the plan are refused."""
    try:
        check_plan(run_from(tree, "run.yaml"))
    except UserError as error:
        return str(error)
    return None
