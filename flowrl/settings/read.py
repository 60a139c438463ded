"""A run from its file and from options, and every check that needs no weights."""

import copy
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

import rewards
from flowrl.algorithm import Algorithm
from flowrl.credit.choices import named_rewards
from flowrl.credit.prompt_weights import PROMPT_ROWS, check_prompt_rows
from flowrl.errors import UserError, options_place
from flowrl.laws import check_laws
from flowrl.likelihoods.matching import Matching
from flowrl.paths import no_run_in
from flowrl.settings.checks.asking import check_asking
from flowrl.settings.checks.gradients import check_gradients, check_own_gradients
from flowrl.settings.checks.guidance import check_ratio_guidance
from flowrl.settings.checks.learning import check_learning, check_single_step
from flowrl.settings.checks.machine import (
    check_bundles,
    check_hub,
    check_joint,
    check_kind,
    check_model,
    check_optimizer,
    check_start_samples,
    check_texts,
    check_trackers,
    check_workers,
)
from flowrl.settings.checks.scoring import check_own_scoring
from flowrl.settings.command_line.options import with_options
from flowrl.settings.file.exclusive import taken_over
from flowrl.settings.file.inherit import read_tree, with_base
from flowrl.settings.file.older_names import renewed
from flowrl.settings.file.places import in_full
from flowrl.settings.file.plain import check_integers, texts_of_paths
from flowrl.settings.file.strict_yaml import parse_yaml, read_yaml
from flowrl.settings.model.environment import EnvironmentSettings, check_answers
from flowrl.settings.parts.own_parts import RECIPE_PARTS, takes
from flowrl.settings.sections.budget import BudgetSettings
from flowrl.settings.sections.data import RewardSpec
from flowrl.settings.sections.recipe_kinds import recipe_kind
from flowrl.settings.sections.run import RunSettings
from flowrl.settings.trust import (
    ALL_PARTS,
    Need,
    Trust,
    asked,
    asked_by_recipe,
    granted,
    not_granted,
    record_granted,
    recorded,
    refusal_of,
    trusted_rights,
    used_by,
    within,
)
from flowrl.settings.words.names import BASE_KEY
from flowrl.settings.words.sentences import clauses_of, explain, in_one
from flowrl.settings.words.short_forms import spelled_out
from flowrl.settings.words.values import short_repr
from rewards import Reward
from rewards.rights import Limits, Right, inside, limited

_NAME = "--recipe.name"
Overrides = Sequence[str] | Mapping[str, Any]  # words of a command line, or settings
PART_SETTINGS = ("kernel", "solver", *RECIPE_PARTS)


def read_run(path: Path) -> RunSettings:
    """Read a run file, with its base if it has one. Errors name the file and the key."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a run's file, such as configs/demo.yaml")
    if not path.is_file():
        raise UserError(f"{path}: no such file; `flowrl train demo` starts an included run by name")
    return run_from(*read_tree(path))


@dataclass(frozen=True)
class OpenedFolder:
    """A run's folder as it was read, once: its settings, and the limits of what they may use.

    limits  None: the folder is the user's
    asks    what its settings ask for
    """

    folder: Path
    run: RunSettings
    limits: Limits | None
    asks: frozenset[tuple[Right, str]]

    @property
    def opens_rewards(self) -> bool:
        """Whether commands that need no rewards may open them."""
        return self.limits is None or Right.CODE in self.limits.granted

    def overridden(self, arguments: Overrides) -> "OpenedFolder":
        """With options such as `--train.lr 1e-4`, or a mapping of settings. What they name is the
        user's."""
        with self.limited():
            run = override(self.run, arguments)
        return self.changed(run)

    def changed(self, run: RunSettings) -> "OpenedFolder":
        """With other settings, which the user gave."""
        if self.limits is None:
            return replace(self, run=run)
        named = {need.thing for need in asked(dump(run), self.folder)} - self.asks
        return replace(self, run=run, limits=replace(self.limits, own=self.limits.own | named))

    def limited(self) -> AbstractContextManager[None]:
        """A context in which the folder's settings are used."""
        return within(self.limits)


def run_of(folder: Path, trust: Trust = False, parts: Collection[str] = ALL_PARTS) -> RunSettings:
    """Settings of a run's folder: see `open_folder`."""
    return open_folder(folder, trust, parts).run


def open_folder(
    folder: Path,
    trust: Trust = False,
    parts: Collection[str] = ALL_PARTS,
    beside: RunSettings | None = None,
) -> OpenedFolder:
    """Read the settings of a run's folder. UserError for a folder from elsewhere whose sections
    `parts`, which the caller uses, ask for rights that neither `trust` nor a record grants, nor
    the user by naming the same things in a run of their own, `beside` the folder: a job that goes
    on with the user's file on a new machine, which has no record."""
    trusted_rights(trust)
    named = frozenset(n.thing for n in asked(dump(beside), folder)) if beside else frozenset()
    tree, source, outside = _tree_of(folder, trust, named)
    tree = _as_begun(tree)
    try:
        needs = asked(tree, folder)
    except ValueError:  # an invalid section, which `run_from` explains
        needs = asked_by_recipe(tree, folder)
        _check_granted(folder, needs, trust, parts, named)
        with limited(Limits(folder.resolve(), frozenset({Right.CODE} if needs else ()))):
            run_from(tree, source)
        raise
    needs = [*outside, *needs]
    limits = _check_granted(folder, needs, trust, parts, named)
    record = recorded(folder)
    if trust or (record is not None and record.things is None):
        record_granted(folder, needs, limits)
    with limited(limits):
        run = run_from(tree, source)
    return OpenedFolder(folder, run, limits, frozenset(need.thing for need in needs))


def rights_of(folder: Path) -> tuple[Sequence[Need], Sequence[Need]]:
    """List what a run's folder asks for, and the part that is not granted. Imports nothing that it
    names. UserError for settings that are invalid."""
    tree, source, outside = _tree_of(folder, trust=True)
    try:
        needs = [*outside, *asked(tree, folder)]
    except ValidationError as error:
        raise UserError(f"{source}: {explain(error)}") from error
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error
    return needs, not_granted(needs, granted(folder, needs))


def _check_granted(
    folder: Path,
    needs: Sequence[Need],
    trust: Trust,
    parts: Collection[str],
    named: frozenset[tuple[Right, str]],
) -> Limits | None:
    used = used_by(needs, parts)
    limits = granted(folder, used, trust, named)
    if lacking := not_granted(used, limits):
        raise UserError(refusal_of(folder, lacking))
    return limits


def _as_begun(tree: Any) -> Any:
    """Settings of a run's folder; adapters are float32 where it is older than `lora.dtype`."""
    model = tree.get("model") if isinstance(tree, Mapping) else None
    lora = model.get("lora") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(lora, Mapping) or "dtype" in lora:
        return tree
    return {**tree, "model": {**model, "lora": {**lora, "dtype": "float32"}}}


def _tree_of(
    folder: Path, trust: Trust, named: frozenset[tuple[Right, str]] = frozenset()
) -> tuple[Any, str, Sequence[Need]]:
    """The settings in a run's folder, their source, and what a base outside of it asks for.
    UserError for such a base of a folder without the right to it."""
    file = folder / "run.yaml"
    if not file.is_file():
        raise UserError(no_run_in(folder))
    outside = list[Need]()

    def check(base: Path) -> None:
        if not inside(base, folder):
            outside.append(Need(Right.FILES, BASE_KEY, str(base.resolve()), "a file to read"))
            _check_granted(folder, outside, trust, ALL_PARTS, named)

    return *with_base(read_yaml(file), file, check=check), outside


class _Refused(Exception):
    """A tree of settings that is no run: one clause per mistake."""

    def __init__(self, *clauses: str) -> None:
        super().__init__(*clauses)
        self.clauses = clauses


def run_from(tree: Any, source: str) -> RunSettings:
    """Check a tree of settings. UserError, in one sentence that begins with `source`."""
    try:
        return _validated(tree)
    except _Refused as error:
        raise UserError(f"{source}: {in_one(error.clauses)}") from error.__cause__


def run_over(tree: Any, call: str, under: Any, source: str) -> RunSettings:
    """Check a tree of settings that a call has laid over `under`, those of a file. UserError, as of
    `run_from`: mistakes that the file has without the call begin with `source`, its name, and the
    others with `call`."""
    try:
        return _validated(tree)
    except _Refused as error:
        alone = _mistakes(under)
        sides = (
            (call, [clause for clause in error.clauses if clause not in alone]),
            (source, [clause for clause in error.clauses if clause in alone]),
        )
        said = [f"{name}: {in_one(clauses)}" for name, clauses in sides if clauses]
        raise UserError("; ".join(said)) from error.__cause__


def _mistakes(tree: Any) -> Sequence[str]:
    try:
        _validated(tree)
    except _Refused as error:
        return error.clauses
    return ()


def _validated(tree: Any) -> RunSettings:
    if not isinstance(tree, Mapping):
        content = "and it is empty" if tree is None else f"not {short_repr(tree)}"
        raise _Refused(f"expected settings such as `recipe:` and `model:`, {content}")
    if BASE_KEY in tree:
        raise _Refused("base: only a run file can have a base: name that file itself")
    kind = None
    if isinstance(tree.get("recipe"), str):
        tree = {**tree, "recipe": {"name": tree["recipe"]}}
    try:
        tree = spelled_out(renewed(texts_of_paths(tree)))
        recipe = tree.get("recipe")
        kind = recipe_kind(recipe.get("name")) if isinstance(recipe, Mapping) else None
        run = RunSettings.model_validate(tree)
        check_integers(dump(run))
    except ValidationError as error:
        raise _Refused(*clauses_of(error, RunSettings, kind)) from error
    except UserError as error:
        raise _Refused(str(error)) from error
    except PydanticSerializationError as error:  # an object from Python
        reason = " ".join(str(error).split())[:200]
        raise _Refused(f"the settings cannot be written to run.yaml: {reason}") from error
    return run


def override(run: RunSettings, arguments: Overrides) -> RunSettings:
    """The run with options such as `--train.lr 1e-4` applied, or with settings from Python, such as
    {"train": {"lr": 1e-4}}."""
    if not arguments:
        return run
    if isinstance(arguments, Mapping):
        return _laid_over(run, arguments)
    run, words = _other_recipe(run, list(arguments))
    tree = with_options(dump(run), type(run.recipe), words)
    changed = run_from(tree, options_place())
    named = any(w.startswith(f"--recipe.{part}") for w in words for part in PART_SETTINGS)
    return _without_unread(changed, tree, words) if named else changed


def _laid_over(run: RunSettings, settings: Mapping[str, Any]) -> RunSettings:
    """The run with a mapping of settings over its own. Mappings are merged, other values replaced;
    another recipe keeps the run's settings that it has too, as it does by an option."""
    recipe = settings.get("recipe")
    name = recipe.get("name") if isinstance(recipe, Mapping) else recipe
    if isinstance(name, str):  # its other settings are known only then
        run = _as_recipe(run, name, recipe if isinstance(recipe, Mapping) else ())
    return run_from(merged_settings(dump(run), settings), "settings")


def merged_settings(tree: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of settings with others over it, which take the place of settings that they exclude.
    Short forms are spelled out."""
    under = _spelled(tree)
    layer = _spelled(copy.deepcopy(dict(settings)), under.get("recipe"))
    result = copy.deepcopy(taken_over(under, layer))
    merge_settings(result, layer)
    return result


def _spelled(tree: Mapping[str, Any], recipe: Any = None) -> dict[str, Any]:
    if isinstance(tree.get("recipe"), str):
        tree = {**tree, "recipe": {"name": tree["recipe"]}}
    return spelled_out(renewed(tree), recipe)


def merge_settings(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Change a tree of settings: mappings are merged, other values replaced."""
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
            merge_settings(tree[name], value)
        else:
            tree[name] = value


def _without_unread(run: RunSettings, tree: dict[str, Any], words: Sequence[str]) -> RunSettings:
    """Leave out settings of the file (such as a kernel's eta) that are no longer read once an
    option replaces the part."""
    lost = [n for n in run.recipe.unread if not any(w.startswith(f"--recipe.{n}") for w in words)]
    for name in lost:
        value = tree["recipe"].pop(name)
        print(f"nothing reads recipe.{name} any more: {value} is left out", file=sys.stderr)
    return run_from(tree, options_place()) if lost else run


def settings_of_words(words: Sequence[str], recipe: Any) -> dict[str, Any]:
    """The words of a command line as a mapping of settings; `recipe`, a name or a section, if they
    name none. UserError for words that are no settings of it, or without any recipe."""
    name, rest = _named_recipe(list(words))
    under = name or (recipe.get("name") if isinstance(recipe, Mapping) else recipe)
    if not isinstance(under, str):
        raise UserError(
            f"{options_place()}: pass a recipe, such as recipe=flowrl.recipe('nft', steps=8)"
        )
    settings = with_options({}, _kind_of(under), rest)
    if name is not None:
        settings["recipe"] = {**settings.get("recipe", {}), "name": name}
    return settings


def with_recipe_of(
    tree: Mapping[str, Any], settings: Mapping[str, Any], source: str
) -> Mapping[str, Any]:
    """A file's tree with the recipe that settings over it name, which keeps the file's recipe
    settings that it has too."""
    below, name = (
        section.get("name") if isinstance(section, Mapping) else section
        for section in (tree.get("recipe"), settings.get("recipe"))
    )
    if not isinstance(below, str) or not isinstance(name, str) or below == name:
        return tree
    try:
        run = run_from(tree, source)
    except UserError:  # a file that is no whole run: what both lack is said of them together
        return tree
    section = settings["recipe"]
    changed = _as_recipe(run, name, section if isinstance(section, Mapping) else ())
    return {**tree, "recipe": dump(changed)["recipe"]}


def _other_recipe(run: RunSettings, arguments: list[str]) -> tuple[RunSettings, list[str]]:
    """Apply `--recipe.name` first, since the other options are its settings.

    The file's recipe settings are kept if the other recipe has them. Returns the remaining options.
    """
    name, rest = _named_recipe(arguments)
    return (run if name is None else _as_recipe(run, name, _recipe_settings(rest))), rest


def _named_recipe(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The value of `--recipe.name`, if it is given, and the remaining options."""
    flat = [part for a in arguments for part in (a.split("=", 1) if a.startswith(_NAME) else [a])]
    if _NAME not in flat[:-1]:
        return None, arguments
    at = flat.index(_NAME)
    name, rest = flat[at + 1], flat[:at] + flat[at + 2 :]
    if _NAME in rest[:-1]:
        raise UserError(
            f"{_NAME} is given twice, with {name} and {rest[rest.index(_NAME) + 1]}: keep one"
        )
    return name, rest


def _kind_of(name: str) -> type[BaseModel]:
    """The settings of a recipe. UserError, with the options' place, for an unknown one."""
    try:
        return recipe_kind(name)
    except UserError as error:
        raise UserError(f"{options_place()}: {error}") from error


def _recipe_settings(words: Sequence[str]) -> set[str]:
    """The settings of a recipe that options name: `steps` for --recipe.steps 6."""
    prefix = "--recipe."
    names = (w.removeprefix(prefix) for w in words if w.startswith(prefix))
    return {re.split("[.=]", name)[0].replace("-", "_") for name in names}


def _as_recipe(run: RunSettings, name: str, named: Collection[str]) -> RunSettings:
    """The run with another recipe, which keeps the run's recipe settings that it has too. Prints
    what is left out, and what is kept beside a number of the recipe's own, but for the settings in
    `named`, which the caller sets."""
    fields = _kind_of(name).model_fields
    old: Any = run.recipe
    chosen = {key: getattr(old, key) for key in old.model_fields_set - {"name"}}
    taken_over = {k: v for k, v in chosen.items() if k in fields and takes(fields[k].annotation, v)}
    lost = [key for key in chosen if key not in fields]
    lost += [
        f"{k} {v}"
        for k, v in chosen.items()
        if k in fields and k not in taken_over and v is not None
    ]
    if lost:
        print(f"{name} has no {', '.join(sorted(lost))}: left out", file=sys.stderr)
    changed = run_from(dump(run) | {"recipe": {"name": name} | taken_over}, options_place())
    if name != old.name:
        _tell_kept(changed, {key for key in taken_over if key not in named})
    return changed


def _tell_kept(run: RunSettings, keys: Collection[str]) -> None:
    """Print the kept settings whose value is not the recipe's own: else a run under a method's name
    has another method's numbers, and nothing says so."""
    recipe: Any = run.recipe
    defaults = type(recipe)(name=recipe.name)
    pairs = [
        (key, getattr(recipe, key), getattr(defaults, key)) for key in type(recipe).model_fields
    ]
    values = [
        f"{k} {short_repr(v)} (its own: {short_repr(o)})"
        for k, v, o in pairs
        if k in keys and v != o
    ]
    if values:
        print(
            f"{recipe.name} keeps settings of the file: {', '.join(values)}; give others as "
            f"options, or write a file with `base:` and `recipe: {recipe.name}`, which has the "
            "recipe's own",
            file=sys.stderr,
        )


def dump(run: RunSettings) -> dict[str, Any]:
    """The run as plain data, as in `run.yaml`."""
    return run.model_dump(mode="json", by_alias=True)


def run_yaml_text(run: RunSettings) -> str:
    """The text of the run's run.yaml. UserError for settings that could not be read from it."""
    try:
        text = yaml.safe_dump(dump(run), sort_keys=False)
        again = yaml.safe_dump(parse_yaml(text, "run.yaml"), sort_keys=False)
    except UserError as error:
        raise UserError(f"the settings could not be read again: {error}") from error
    if text != again:
        lines = zip(text.splitlines(), again.splitlines(), strict=False)
        first = next((line for line, other in lines if line != other), "")
        raise UserError(f"the settings could not be read again from run.yaml: {first.strip()}")
    return text


def with_full_paths(run: RunSettings) -> RunSettings:
    """The run with paths that mean the same in every folder."""
    tree = dump(run)
    full = in_full(tree)
    return run if full == tree else run_from(full, "the run")


def check_plan(run: RunSettings) -> None:
    """UserError for a recipe that does not fit its settings or its model. The result is the same on
    any machine."""
    try:
        algorithm = run.algorithm()
    except ValueError as error:
        raise UserError(f"recipe: {error}") from error
    check_workers(run, algorithm)
    check_asking(run, algorithm)
    _check_merging(run, algorithm)
    if run.sigmas is not None:
        _check_levels(run, algorithm)
    if run.train.updates > run.prompts.per_iteration * (algorithm.group if run.drawn else 1):
        raise UserError(
            "train.updates: there are more optimizer steps than samples in an iteration"
        )
    check_joint(run)
    check_kind(run, algorithm)
    check_bundles(run, algorithm)
    check_start_samples(run, algorithm)
    check_gradients(run, algorithm)
    for one_run in (run, run.prompt_writer):
        if one_run is not None:
            part_algorithm = algorithm if one_run is run else one_run.algorithm()
            levels, labels = (
                one_run.levels(part_algorithm.steps),
                [spec.label for spec in one_run.rewards],
            )
            check_laws(part_algorithm, levels, one_run.train.seed, labels or ["reward"])
    check_ratio_guidance(run, algorithm)
    check_learning(run)
    check_single_step(run)


def _check_merging(run: RunSettings, algorithm: Algorithm) -> None:
    merge = "none" if run.model.lora is None else run.model.lora.merge
    if merge in ("untrained", "sampling") and algorithm.reward_gradient:
        raise UserError(
            f"model.lora.merge: {merge}: this recipe rebuilds its samples with gradients, which "
            "merged adapters do not have; set merge: evaluation"
        )
    stored = not isinstance(algorithm.likelihood, Matching)
    if merge == "sampling" and stored and not run.recomputes_old:
        raise UserError(
            "model.lora.merge: sampling would store log-densities of merged weights, which differ "
            "from training's by rounding; set train.recompute_old: true, or merge: untrained"
        )


def _check_levels(run: RunSettings, algorithm: Algorithm) -> None:
    """UserError for levels that do not fit the steps of the recipe or of evaluations, or for which
    the recipe has no plan."""
    run.levels(run.evaluation_steps)
    try:
        algorithm.planned(run.levels(algorithm.steps), 0, run.train.seed)
    except UserError:
        raise
    except ValueError as problem:
        raise UserError(f"recipe: the plan does not fit model.sigmas: {problem}") from problem


def check_rewards(run: RunSettings, python_rewards: Collection[str] = ()) -> None:
    """UserError for a reward that does not exist or does not take its settings, and for weights
    that cancel. Rewards with the labels `python_rewards` are Python objects."""
    for check in _reward_checks(run, python_rewards):
        check()


def _reward_checks(
    run: RunSettings, python_rewards: Collection[str]
) -> Iterator[Callable[[], object]]:
    """The checks of `check_rewards`, one of each reward."""
    yield partial(_check_weights, run)
    for place in ("rewards", "held_out_rewards", "intermediate_rewards"):
        for spec in getattr(run, place):
            if spec.label not in python_rewards:
                yield partial(_check_reward, place, spec)


def _check_weights(run: RunSettings) -> None:
    if _cancel(run.rewards) and _cancel(run.intermediate_rewards):
        raise UserError(
            f"rewards: the weights of {', '.join(spec.label for spec in run.rewards)} add up to 0, "
            "so no sample is better than another: change a weight"
        )


def _check_reward(place: str, spec: RewardSpec) -> None:
    try:
        spec.refuse_python(in_python=False)
    except ValueError as error:
        raise UserError(f"{place}: {spec.label}: {error}") from error
    try:
        rewards.check_reward(spec.name, spec.settings)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error


def _check_prompt_rows(run: RunSettings) -> None:
    """UserError for a prompt whose row lacks what credit reads."""
    prompts = run.prompts.read("train")
    rows = prompts.meta or [{} for _ in prompts.texts]
    check_prompt_rows(run.algorithm().transforms, rows)


def check_named_rewards(run: RunSettings) -> None:
    """UserError unless the rewards that credit reads by name are the run's, untrained, and have
    scored all samples that it compares."""
    algorithm, weights = run.algorithm(), {spec.label: spec.weight for spec in run.rewards}
    named = named_rewards(algorithm.transforms)
    for label in named:
        if weights.get(label) != 0:
            fault = f"has weight {weights[label]}" if label in weights else "is missing"
            raise UserError(
                f"rewards: {label} {fault}, but this recipe only compares samples by it: write "
                f"{{name: {label}, weight: 0}}, or name another reward in the recipe"
            )
    places = ("given", run.given is not None), ("budget", run.budget != BudgetSettings())
    for place, used in (*places, ("recipe.modalities", run.recipe.modalities is not None)):
        if used and named:
            raise UserError(
                f"{place}: this recipe compares all samples of an iteration by further rewards, "
                f"which {place} does not support: leave it out"
            )


def _cancel(specs: Sequence[RewardSpec]) -> bool:
    """Whether the weights of equal rewards add up to 0 in every iteration; true without rewards."""
    turns = {0, *(at for s in specs if isinstance(s.weight, tuple) for at, _ in s.weight)}
    for turn in turns:
        sums: dict[str, float] = {}
        for spec in specs:
            same = f"{spec.name} {sorted(spec.settings.items(), key=str)}"
            sums[same] = sums.get(same, 0.0) + spec.weight_at(turn)
        if any(sums.values()):
            return False
    return True


def check_run(run: RunSettings, python_rewards: Mapping[str, Reward] = {}) -> None:
    """UserError for a run that cannot work on this machine, within about a second and without
    reading weights. `python_rewards`: those that are Python objects, by their labels."""
    for check in run_checks(run, python_rewards):
        check()
    for one_run in (run, run.prompt_writer):
        if one_run is not None:
            check_hub(one_run.model)


def run_checks(
    run: RunSettings, python_rewards: Mapping[str, Reward] = {}, *, hub: bool = True
) -> Iterator[Callable[[], object]]:
    """The checks of `check_run`, each of which raises a UserError, but for that of the hub. `hub`:
    whether prompts on the hub are read."""
    yield partial(check_plan, run)
    yield from _reward_checks(run, python_rewards)
    yield partial(check_own_scoring, run, python_rewards)
    yield partial(check_named_rewards, run)
    yield partial(check_own_gradients, run)
    for place in run.prompts.given:
        if hub or not run.prompts.on_hub(place):
            yield lambda place=place: check_texts(run.prompts.read(place), run.model)
    read = hub or not run.prompts.on_hub("train")
    if read and (asked := run.algorithm().information) is not None:
        yield lambda: check_answers(asked, run.prompts.read("train"))
    if read and PROMPT_ROWS in run.algorithm().reads:
        yield partial(_check_prompt_rows, run)
    if (teachers := run.teachers) is not None:
        adapters = run.model.lora is not None
        yield lambda: teachers.check(run.prompts.read("train") if read else None, adapters)
    yield partial(check_optimizer, run.train.optimizer)
    for one_run in filter(None, (run, run.prompt_writer)):
        yield partial(check_model, one_run.model)
        if (environment := one_run.environment) is not None:
            yield partial(_check_turn_rewards, environment, one_run)
    yield partial(check_trackers, run.track.trackers)


def _check_turn_rewards(environment: EnvironmentSettings, run: RunSettings) -> None:
    environment.check_rewards(run.algorithm())
