"""Reading a run: YAML, overrides of the command line, and every check that needs no weights."""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import tyro
import yaml
from pydantic import BaseModel, ValidationError

import rewards
from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.paths import find
from flowrl.prompts import PromptSet
from flowrl.recipes import RECIPES
from flowrl.settings import RECIPE_SETTINGS, Run

NAME = "--recipe.name"


def read_run(path: Path) -> Run:
    """Parse one file. Errors name the file and the key."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; `ls configs` shows the runs that come with flowrl")
    try:
        tree = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{path}: not valid YAML: {why}") from error
    return run_from(tree, str(path))


def run_from(tree: Any, source: str) -> Run:
    if not isinstance(tree, Mapping):
        raise UserError(f"{source}: expected settings such as `recipe:` and `model:`, got {tree!r}")
    recipe = tree.get("recipe")
    if isinstance(recipe, Mapping) and recipe.get("name") not in RECIPES:
        raise UserError(f"{source}: recipe.name: {_stranger(recipe.get('name'), list(RECIPES))}")
    try:
        return Run.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(error)}") from error


def override(run: Run, arguments: Sequence[str]) -> Run:
    """`--train.lr 1e-4` and the like over a run."""
    if not arguments:
        return run
    run, arguments = _other_recipe(run, list(arguments))
    changed, unknown = tyro.cli(
        Run,
        default=run,
        args=arguments,
        prog="flowrl train CONFIG",
        config=(tyro.conf.AvoidSubcommands, tyro.conf.SuppressFixed),
        return_unknown_args=True,
    )
    if unknown:
        near = get_close_matches(unknown[0].lstrip("-"), list(_flags(dump(run))), n=1)
        hint = f"did you mean --{near[0]}?" if near else "flowrl train CONFIG --help lists settings"
        raise UserError(f"{unknown[0]} is not known; {hint}")
    return run_from(dump(changed), "command line")


def _other_recipe(run: Run, arguments: list[str]) -> tuple[Run, list[str]]:
    """`--recipe.name` first, since the others are its settings: what the file says of the recipe
    stays where the other one takes it. The arguments that are left."""
    flat = [part for a in arguments for part in (a.split("=", 1) if a.startswith(NAME) else [a])]
    if NAME not in flat[:-1]:
        return run, arguments
    at = flat.index(NAME)
    name, rest = flat[at + 1], flat[:at] + flat[at + 2 :]
    if name not in RECIPES:
        raise UserError(f"command line: recipe.name: {_stranger(name, list(RECIPES))}")
    old: Any = run.recipe
    given = {key: getattr(old, key) for key in old.model_fields_set - {"name"}}
    known = inspect.signature(RECIPES[name]).parameters
    if lost := sorted(set(given) - set(known)):
        print(f"{name} has no {', '.join(lost)}: left out", file=sys.stderr)
    recipe = {"name": name} | {key: given[key] for key in given if key in known}
    return run_from(dump(run) | {"recipe": recipe}, "command line"), rest


def _flags(tree: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for key, value in tree.items():
        name = f"{at}.{key}" if at else key
        if isinstance(value, Mapping):
            yield from _flags(value, name)
        else:
            yield name


def dump(run: Run) -> dict[str, Any]:
    return run.model_dump(mode="json", by_alias=True)


def check_run(run: Run) -> None:
    """Refuse what cannot run, in a second and before any weights are read."""
    try:
        algorithm = run.algorithm()
    except ValueError as error:
        raise UserError(f"recipe: {error}") from error
    if run.train.updates > run.prompts.per_iteration * algorithm.group:
        raise UserError("train.updates: more optimizer steps than samples an iteration")
    for place in ("rewards", "held_out_rewards"):
        for spec in getattr(run, place):
            try:
                rewards.check_reward(spec.name, spec.settings)
            except ValueError as error:
                raise UserError(f"{place}: {error}") from error
    PromptSet.read(run.prompts.train, run.prompts.column, "prompts.train")
    if run.prompts.held_out is not None:
        PromptSet.read(run.prompts.held_out, run.prompts.column, "prompts.held_out")
    check_optimizer(run.train.optimizer)
    check_model(run, algorithm)
    check_trackers(run.track.trackers)


def check_optimizer(name: str) -> None:
    """UserError where the library of an optimizer is missing."""
    if name == "adamw8bit" and find_spec("bitsandbytes") is None:
        raise UserError(
            "train.optimizer: adamw8bit is bitsandbytes', which is not installed; pip install "
            "bitsandbytes, or set train.optimizer: adamw"
        )


def check_model(run: Run, algorithm: Algorithm) -> None:
    """Does the recipe draw what the model makes, and is there a model?"""
    m = run.model
    kind, other = ("language", "pipeline") if algorithm.text else ("pipeline", "language")
    if (m.language is not None) != algorithm.text:
        name = run.recipe.name  # type: ignore[attr-defined]
        raise UserError(f"recipe {name} is for model.{kind}, and the run has model.{other}")
    if m.pipeline is not None:
        check_pipeline(m.pipeline)
        if run.evaluate.temperature != 1:
            raise UserError("evaluate.temperature is for text (model.language): leave it out")
    else:
        assert m.language is not None
        check_language(m.language, m.gguf_file)
        if m.environment is not None:
            m.environment.function()


def check_language(source: str, gguf_file: str | None) -> None:
    folder = find(source)
    wanted = gguf_file or "config.json"
    if folder.is_dir() and not (folder / wanted).is_file():
        raise UserError(f"model.language: {source} has no {wanted}; give a transformers folder")
    if not folder.is_dir() and (source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise UserError(f"model.language: no folder {source}, and it is no hub name (owner/name)")


def check_pipeline(source: str) -> None:
    folder = find(source)
    if folder.is_dir() and not (folder / "model_index.json").is_file():
        raise UserError(
            f"model.pipeline: {source} has no model_index.json; give a diffusers folder"
        )
    if not folder.is_dir() and (source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise UserError(f"model.pipeline: no folder {source}, and it is no hub name (owner/name)")


def check_trackers(names: Sequence[str]) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = [str(name) for name in LOGGER_TYPE_TO_CLASS]
    here = [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in known:
            raise UserError(f"track.with: {_stranger(name, known)}")
        if name not in here:
            raise UserError(f"track.with: {name} is not installed; pip install it, or leave it out")


def explain(error: ValidationError) -> str:
    """One sentence a mistake: where, what was found, what would do."""
    sentences = []
    for e in error.errors():
        where = [str(part) for part in e["loc"] if part not in RECIPE_SETTINGS]
        if e["type"] == "extra_forbidden":
            known = _names(where[:-1], e["loc"])
            sentences.append(f"{'.'.join(where)}: {_stranger(where[-1], known)}")
        elif e["type"] == "missing":
            sentences.append(f"{'.'.join(where)}: missing")
        elif e["type"] == "value_error":
            at, why = ".".join(where), e.get("ctx", {}).get("error")
            sentences.append(f"{at}: {why}" if at else str(why))
        else:
            message = e["msg"][0].lower() + e["msg"][1:]
            sentences.append(f"{'.'.join(where)}: {message}, got {e['input']!r}")
    return "; ".join(dict.fromkeys(sentences))


def _stranger(key: Any, known: Sequence[str]) -> str:
    near = get_close_matches(str(key), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
    return f"{key!r} is not known; {hint}"


def _names(where: Sequence[str], loc: Sequence[Any]) -> list[str]:
    """The keys that the settings at a place have."""
    kind: Any = Run
    for part in where:
        if part == "recipe":
            kind = next((RECIPE_SETTINGS[p] for p in loc if p in RECIPE_SETTINGS), Run)
            continue
        annotation = kind.model_fields[part].annotation
        options = [annotation, *get_args(annotation)]
        kind = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), Run)
    return [field.alias or name for name, field in kind.model_fields.items()]
