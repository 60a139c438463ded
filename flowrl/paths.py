"""Where files are."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def find(path: str) -> Path:
    """A path as written, or below the project's own folder."""
    near = Path(path).expanduser()
    return near if near.exists() or near.is_absolute() else PROJECT / path


def numbered(parent: Path, stem: str) -> Path:
    """`parent/stem-0001`, or the first number that is free above all that are taken."""
    taken = [p.name.removeprefix(f"{stem}-") for p in parent.glob(f"{stem}-*")]
    last = max((int(t) for t in taken if t.isdigit()), default=0)
    return parent / f"{stem}-{last + 1:04d}"
