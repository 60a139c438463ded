"""The packages, in code: pyproject.toml can find packages or list them, but not do both; and the
schema that a wheel carries."""

import os
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PROJECT = Path(__file__).resolve().parent
# the date of all files of a wheel, so that equal sources make equal bytes: the first of a zip file
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")


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


setup(
    packages=[*find_packages(include=["flowrl*", "rewards*", "samplers*"]), "flowrl.configs"],
    package_dir={"flowrl.configs": "configs"},  # runs, prompts and suites, for flowrl/paths.py
    cmdclass={"build_py": BuildWithSchema},
)
