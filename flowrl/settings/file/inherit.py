"""Run files that inherit another file's settings: `base: ../demo.yaml`."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.paths import CONFIGS_FOLDER
from flowrl.settings.file.exclusive import taken_over
from flowrl.settings.file.older_names import renewed
from flowrl.settings.file.places import at_file
from flowrl.settings.file.strict_yaml import read_yaml
from flowrl.settings.words.names import BASE_KEY
from flowrl.settings.words.short_forms import spelled_out
from flowrl.settings.words.values import short_repr

_OWN = "configs/"  # begins the name of a file of flowrl


def read_tree(path: Path) -> tuple[Any, str]:
    """Read a file, with the settings of its base (and its base's base, and so on) below its own.

    Returns the settings and the names of the files, for messages. Mappings merge; every other
    value, including a list, replaces the base's; a recipe of another name replaces the base's,
    whose settings do not apply to it; and one of several exclusive settings takes the place of the
    others (`flowrl.settings.file.exclusive`). `base` is relative to the file that contains it, or
    is `configs/...` of flowrl; other paths are also relative to that file, or else to the working
    folder: see `flowrl.settings.file.places`. UserError, in one sentence that names every file
    involved, for a base that cannot be read and for a circle of files.
    """
    return with_base(at_file(read_yaml(path), path), path)


def with_base(
    tree: Any,
    path: Path,
    above: tuple[Path, ...] = (),
    check: Callable[[Path], None] = lambda _: None,
) -> tuple[Any, str]:
    """Merge the settings of a file (which may not exist yet) over its base's settings. `check`
    is called with each base before it is read."""
    if not isinstance(tree, Mapping) or BASE_KEY not in tree:
        return tree, str(path)
    settings = {key: value for key, value in tree.items() if key != BASE_KEY}
    base = _base_file(path, tree[BASE_KEY])
    chain = (*above, path)
    seen = [path.resolve() for path in chain]
    if base.resolve() in seen:
        names = " -> ".join(str(path) for path in (*chain[seen.index(base.resolve()) :], base))
        raise UserError(
            f"{path}: base: the files refer to each other in a circle, {names}: remove one `base`"
        )
    check(base)
    try:
        under, names = with_base(at_file(read_yaml(base), base), base, chain, check)
        if not isinstance(under, Mapping):
            content = "and it is empty" if under is None else f"not {short_repr(under)}"
            raise UserError(f"{base}: expected settings, {content}")
    except UserError as error:
        raise UserError(f"{path}: base: {error}") from error
    return _over(under, settings), f"{path} over {names}"


def _base_file(path: Path, value: Any) -> Path:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise UserError(f"{path}: base: expected a file such as demo.yaml, not {short_repr(value)}")
    near = path.parent / value
    ours = CONFIGS_FOLDER / value.removeprefix(_OWN)
    base = ours if value.startswith(_OWN) and not near.exists() and ours.is_file() else near
    if not base.is_file():
        raise UserError(
            f"{path}: base: there is no file {base}; the path is relative to {path}"
            f"{_near_name(value, path.parent)}"
        )
    return base


def _near_name(value: str, folder: Path) -> str:
    """A file name that a misspelt base may mean: in this folder, or one of flowrl's runs."""
    ours = sorted(
        _OWN + f.relative_to(CONFIGS_FOLDER).as_posix() for f in CONFIGS_FOLDER.rglob("*.yaml")
    )
    names = [*sorted(file.name for file in folder.glob("*.yaml")), *ours]
    wanted = value if value.endswith((".yaml", ".yml")) else f"{value}.yaml"
    same = [name for name in names if name.removeprefix(_OWN) == wanted.removeprefix(_OWN)]
    near = (
        same or get_close_matches(wanted, names, n=1) or get_close_matches(_OWN + wanted, ours, n=1)
    )
    return f"; did you mean {near[0]}?" if near else ""


def _over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings of a file over its base's. A recipe of another name replaces the base's
    recipe and its settings, and exclusive settings take each other's place."""
    sides = [{**tree, "recipe": _as_mapping(tree["recipe"])} if "recipe" in tree else tree
             for tree in (under, over)]  # fmt: skip
    sides[0] = spelled_out(renewed(sides[0]))  # older names in `over` then lie over newer ones
    sides[1] = spelled_out(sides[1], sides[0].get("recipe"))
    recipes = [side.get("recipe", {}) for side in sides]
    if all(isinstance(recipe, Mapping) for recipe in recipes):
        old, new = (recipe.get("name") for recipe in recipes)
        if new not in (None, old):
            sides[0] = {key: value for key, value in sides[0].items() if key != "recipe"}
    return merged(taken_over(*sides), sides[1])


def _as_mapping(recipe: Any) -> Any:
    """`recipe: nft` as `recipe: {name: nft}`."""
    return {"name": recipe} if isinstance(recipe, str) else recipe


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings: values of `over` win, and mappings in both are merged recursively."""
    result = dict(under)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merged(old, value)
        result[key] = value
    return result
