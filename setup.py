"""The packages, in code: pyproject.toml can find packages or list them, but not do both; and the
schema that a wheel carries."""

import gzip
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

PROJECT = Path(__file__).resolve().parent
# the date of all files of a wheel, so that equal sources make equal bytes: the first of a zip file
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")
os.umask(0o022)  # a wheel holds the modes of the files that its build writes
FILE_MODE = 0o644  # none of them is a program


def give_modes(folder: Path) -> None:
    """Give all files equal modes: copies keep those of their sources, which umask decides."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(FILE_MODE)


class BuildWithSchema(build_py):
    """A build that writes flowrl/cli/schema.json first.

    It needs flowrl's dependencies, which an isolated build does not have. There a file that
    `make setup` wrote is taken if it fits the code; without one the first reader makes it.
    """

    def run(self) -> None:
        sys.path.insert(0, str(PROJECT))
        from flowrl.cli.schema import BUILT, read_schema

        try:
            read_schema()
        except ImportError as error:
            BUILT.unlink(missing_ok=True)  # of other code
            self.warn(f"schema.json is left to its first reader: {error}")
        super().run()
        give_modes(Path(self.build_lib))


class WheelOfEqualModes(bdist_wheel):
    """A wheel whose own texts have equal modes too, the licence's among them."""

    def write_wheelfile(self, wheelfile_base: str, *words: Any, **more: Any) -> None:
        super().write_wheelfile(wheelfile_base, *words, **more)
        give_modes(Path(wheelfile_base))


class SameBytes(sdist):
    """An archive of the sources whose bytes depend on their names and contents alone."""

    def make_archive(
        self, base_name: str, format: str, root_dir: Any = None, base_dir: Any = None, *owners: Any,
        **more: Any,
    ) -> str:  # fmt: skip
        if format != "gztar" or base_dir is None:
            return super().make_archive(base_name, format, root_dir, base_dir, *owners, **more)
        date, name = int(os.environ["SOURCE_DATE_EPOCH"]), f"{base_name}.tar.gz"
        with (
            open(name, "wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=date) as packed,
            tarfile.open(fileobj=packed, mode="w", dereference=True) as archive,
        ):
            for path in sorted(path for path in Path(base_dir).rglob("*") if path.is_file()):
                entry = tarfile.TarInfo(path.as_posix())
                entry.size, entry.mtime, entry.mode = path.stat().st_size, date, FILE_MODE
                with path.open("rb") as content:
                    archive.addfile(entry, content)
        return name


setup(
    packages=[*find_packages(include=["flowrl*", "rewards*", "samplers*"]), "flowrl.configs"],
    package_dir={"flowrl.configs": "configs"},  # runs, prompts and suites, for flowrl/paths.py
    cmdclass={
        "build_py": BuildWithSchema,
        "bdist_wheel": WheelOfEqualModes,
        "sdist": SameBytes,
    },
)
