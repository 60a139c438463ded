"""Places of files."""

from importlib.util import find_spec
from pathlib import Path

from flowrl.errors import UserError

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = "package:"


def find(path: str) -> Path:
    """The path as written, or else below the project's own folder; `package:name/inside` is the
    folder of an installed Python package, or a path in it. UserError if it is not installed, or if
    no file can have this name."""
    if path.startswith(PACKAGE):
        return _in_package(path)
    try:
        near = Path(path).expanduser()
        here = near.exists()
        below = PROJECT / path
        below.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{path[:100]!r} is not a file name ({str(error)[:100]})") from error
    return near if here or near.is_absolute() else below


def _in_package(path: str) -> Path:
    name, _, inside = path.removeprefix(PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise UserError(f"{path[:100]}: the package {name[:100]!r} is not installed")
    return Path(next(iter(places))) / inside


def numbered(parent: Path, stem: str) -> Path:
    """`parent/stem-0001`, or the number after the highest one in use."""
    used = [p.name.removeprefix(f"{stem}-") for p in parent.glob(f"{stem}-*")]
    last = max((int(t) for t in used if t.isdigit()), default=0)
    return parent / f"{stem}-{last + 1:04d}"
