"""Find files: the user's, and files that come with flowrl.

Files of flowrl are named `configs/...` and `flowrl/...` in any working folder. In a source tree
`configs` is next to the package, in a wheel inside it.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from flowrl.errors import UserError, write_fault

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = "package:"
CACHE_VARIABLE = "FLOWRL_CACHE"
_INSIDE = Path(__file__).resolve().parent / "configs"
CONFIGS_FOLDER = _INSIDE if _INSIDE.is_dir() else PROJECT / "configs"
_RUN_FOLDERS = (".", "models", "papers")  # of CONFIGS_FOLDER
_RUN_SUFFIXES = (".yaml", ".yml")


def cache_folder() -> Path:
    """Folder of flowrl's cache: FLOWRL_CACHE, or flowrl in XDG_CACHE_HOME, or in ~/.cache."""
    named, base = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path(base or Path.home() / ".cache") / "flowrl").expanduser()


def find(path: str) -> Path:
    """Resolve a path: as written, or as a file of flowrl (`configs/...`, `flowrl/...`);
    `package:name/inside` is the folder of an installed Python package, or a path in it.

    UserError if the package is not installed, or if no file can have this name.
    """
    if path.startswith(PACKAGE):
        return _in_package(path)
    near = Path(path)
    try:
        near = near.expanduser()
        shipped, exists = own_file(near), near.exists()  # raises for a name that is too long
        return shipped if shipped is not None and not exists and shipped.exists() else near
    except (OSError, ValueError, RuntimeError) as error:
        from rewards.perception.reachable import NO_DAMAGE, way_to_read  # torch comes with it

        if isinstance(error, OSError) and error.errno in NO_DAMAGE:
            reason, way = str(error.strerror).lower(), way_to_read(near, error)
            raise UserError(f"{path[:100]!r} cannot be looked up ({reason}): {way}") from error
        raise UserError(f"{path[:100]!r} is not a file name ({str(error)[:100]})") from error


def shipped_path(name: str) -> Path:
    """The location of a file or folder that comes with flowrl, under the name that run files use:
    `flowrl/demo/shapes-sd3`, `configs/demo.yaml`. For other libraries, which know no such names:
    `DiffusionPipeline.from_pretrained(flowrl.path("flowrl/demo/shapes-sd3"))`.

    Works in any working folder; a file of the user with this name is not looked at.
    `package:name/inside` is a path in an installed package, as in run files. UserError for a name
    that does not exist, with the names beside it.
    """
    if not isinstance(name, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"flowrl.path: {name!r:.100} is not a name, such as flowrl/demo/shapes-sd3")
    name = str(name)
    if name.startswith(PACKAGE):
        return _in_package(name)
    shipped = own_file(Path(name))
    if shipped is not None and ".." not in Path(name).parts and shipped.exists():
        return shipped
    beside = _shipped_beside(Path(name))
    nearest = get_close_matches(Path(name).name, beside, n=3, cutoff=0.3) or beside[:5]
    hint = (
        f"{Path(name).parent} has {', '.join(nearest)}"
        if nearest
        else "such names begin with configs/ or flowrl/, as in flowrl/demo/shapes-sd3"
    )
    raise UserError(f"{name[:200]} does not come with flowrl: {hint}")


def _shipped_beside(path: Path) -> list[str]:
    """Names of flowrl's files and folders beside a path of flowrl's."""
    shipped = own_file(path)
    near = None if shipped is None else shipped.parent
    return sorted(entry.name for entry in near.iterdir()) if near and near.is_dir() else []


def is_own_name(name: str) -> bool:
    """Whether a name means a file or a folder to flowrl alone, and to no other library."""
    if name.startswith(PACKAGE):
        return True
    shipped = own_file(Path(name))
    return shipped is not None and ".." not in Path(name).parts and shipped.exists()


def no_such_model(source: str) -> str:
    """The sentence for a model that is neither a folder nor a hub name, with the nearest name of a
    model that comes with flowrl."""
    path = Path(source)
    near = get_close_matches(path.name, _shipped_beside(path), n=1)
    hint = f"; did you mean {path.parent / near[0]}?" if near else ""
    return f"{source} is neither a folder nor a hub name (owner/name){hint}"


def own_file(path: Path) -> Path | None:
    """Location of a file of flowrl; None for a path outside its folders."""
    first, *rest = path.parts or (".",)
    if first == "configs":
        return CONFIGS_FOLDER.joinpath(*rest)
    return PROJECT / path if first == "flowrl" else None


def _in_package(path: str) -> Path:
    name, _, inside = path.removeprefix(PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise UserError(f"{path[:100]}: the package {name[:100]!r} is not installed")
    return Path(next(iter(places))) / inside


def run_file(word: str) -> Path:
    """A run file: a path, with or without `.yaml`, or the name of one of flowrl's runs (`demo`).

    A user's file takes precedence over a name. A line on stderr reports the file used, unless the
    word is its path. A folder only counts if it has a `run.yaml`. UserError if nothing is found.
    """
    path, folder = run_path(word), find(word)
    if path is not None:
        if not Path(word).expanduser().is_file():
            print(f"{word}: {_shown(path)}", file=sys.stderr)
        return path
    names = dict(own_runs())
    if (folder / "run.yaml").is_file():
        file = names.get(_run_name(word))
        if file is None:
            raise UserError(f"{word} is a folder: write {folder / 'run.yaml'}")
        raise UserError(
            f"{word} is a run's folder and the name of one of flowrl's runs: write "
            f"{folder / 'run.yaml'} or {_shown(file)}"
        )
    if folder.is_dir():
        raise UserError(f"{word} is a folder: give a run file, such as configs/demo.yaml")
    other = next((p for s in _RUN_SUFFIXES if (p := folder.with_suffix(s)).is_file()), None)
    if other is not None and folder.suffix in _RUN_SUFFIXES:
        raise UserError(f"{word[:200]}: no such file; did you mean {other}?")
    close = get_close_matches(_run_name(word), names, n=1)
    choices = ", ".join(name for name in names if "/" not in name)
    hint = (
        f"did you mean {close[0]!r}?"
        if close
        else f"choose one of {choices}, or papers/... and models/..."
    )
    raise UserError(f"{word[:200]}: no such file, and none of flowrl's runs has this name; {hint}")


def run_path(word: str) -> Path | None:
    """The file that `run_file` finds for this word; None if it raises."""
    near = find(word)
    if near.is_file():
        return near
    if (near / "run.yaml").is_file():
        return None
    beside = [path for suffix in _RUN_SUFFIXES if (path := Path(f"{near}{suffix}")).is_file()]
    return beside[0] if beside else dict(own_runs()).get(_run_name(word))


def own_name_of(word: str | Path | None) -> bool:
    """Whether a word is the name of one of flowrl's runs. A `Path` is no name."""
    return isinstance(word, str) and _run_name(word) in dict(own_runs())


def folder_taken(folder: Path) -> str:
    """Sentence for a new run's folder that exists; only a run's folder can be resumed."""
    resumed = f", or --resume {quote(str(folder))}" if (folder / "run.yaml").is_file() else ""
    return f"{folder} already exists; choose another --folder{resumed}"


def no_run_in(folder: Path) -> str:
    """Sentence for a folder without a run.yaml, which names the run that the folder belongs to,
    such as that of a checkpoint."""
    above = folder.absolute().parents[:2]
    run = next((path for path in above if (path / "run.yaml").is_file()), None)
    hint = "" if run is None else f"; it belongs to the run {run}: name that"
    return f"{folder} is not a run's folder: it has no run.yaml{hint}"


def _run_name(word: str) -> str:
    return word.removeprefix("configs/").removesuffix(".yaml")


def own_runs() -> Iterator[tuple[str, Path]]:
    """Names and files of the runs included in flowrl: `demo`, `papers/awm_sd35m_ocr`, ..."""
    for folder in _RUN_FOLDERS:
        for path in sorted((CONFIGS_FOLDER / folder).glob("*.yaml")):
            yield path.relative_to(CONFIGS_FOLDER).with_suffix("").as_posix(), path


def _shown(path: Path) -> str:
    """For flowrl's own files a name that works in any folder; otherwise the path unchanged."""
    if not path.is_relative_to(CONFIGS_FOLDER):
        return str(path)
    return f"{(Path('configs') / path.relative_to(CONFIGS_FOLDER)).as_posix()} of flowrl ({path})"


def folder_inside(run: Path, name: str) -> Path:
    """A folder of a run's, in which a command writes. UserError for a link, which could lead
    anywhere: the run's folder may be another person's."""
    folder = run / name
    if folder.is_symlink():
        raise UserError(
            f"{folder} is a link, and a command writes into a run's own folders alone: replace it "
            "with a folder, or set --out"
        )
    return folder


def new_numbered(parent: Path, stem: str) -> Path:
    """Create `parent/stem-0001`, or the next number, which no other process gets. UserError if that
    is impossible."""
    while True:
        folder = numbered(parent, stem)
        try:
            folder.mkdir(parents=True)
        except (OSError, ValueError) as error:  # ValueError: a name with NUL
            if isinstance(error, FileExistsError) and os.path.lexists(folder):
                continue  # another process was first
            raise UserError(
                f"cannot create the folder {folder}: {write_fault(error)} (--out)"
            ) from error
        return folder


@contextmanager
def removed_on_error(*files: Path) -> Iterator[None]:
    """If the body fails, as on a full disk, remove these files, which would be cut short."""
    try:
        yield
    except BaseException:
        for file in files:
            with suppress(OSError):
                file.unlink()
        raise


def numbered(parent: Path, stem: str) -> Path:
    """`parent/stem-0001`, or the next free number."""
    used = [p.name.removeprefix(f"{stem}-") for p in parent.glob(f"{stem}-*")]
    last = max((int(t) for t in used if t.isdigit()), default=0)
    return parent / f"{stem}-{last + 1:04d}"
