"""The packages, in code: pyproject.toml can find packages or list them, but not do both."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["flowrl*", "rewards*", "samplers*"]), "flowrl.configs"],
    package_dir={"flowrl.configs": "configs"},  # runs, prompts and suites, for flowrl/paths.py
)
