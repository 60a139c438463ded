"""Where files are."""

from importlib.util import find_spec
from pathlib import Path

from flowrl.errors import UserError

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = "package:"


def find(path: str) -> Path:
    """A path as written, or below the project's own folder; `package:name/inside` is the folder of
    an installed Python package, or a place in it. UserError if it is not installed."""
    if path.startswith(PACKAGE):
        return _in_package(path)
    near = Path(path).expanduser()
    return near if near.exists() or near.is_absolute() else PROJECT / path


def _in_package(path: str) -> Path:
    name, _, inside = path.removeprefix(PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise UserError(f"{path}: no package {name!r} is installed here")
    return Path(next(iter(places))) / inside


def numbered(parent: Path, stem: str) -> Path:
    """`parent/stem-0001`, or the first number that is free above all that are taken."""
    taken = [p.name.removeprefix(f"{stem}-") for p in parent.glob(f"{stem}-*")]
    last = max((int(t) for t in taken if t.isdigit()), default=0)
    return parent / f"{stem}-{last + 1:04d}"
