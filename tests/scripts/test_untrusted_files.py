"""Nothing that comes from outside is run: readers, and the versions below which they have holes."""

import ast
import re
import tomllib
from itertools import chain

from flowrl.paths import PROJECT

TOPS = ("flowrl", "rewards", "samplers", "scripts")
FLOORS = {  # package: the first version without a known hole that a run could meet
    "pillow": (10, 3),  # CVE-2024-28219
    "datasets": (4,),  # no scripts of data sets
    "h11": (0, 16),  # CVE-2025-43859
}


def test_packages_with_holes_are_not_installed():
    table = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    texts = [*table["dependencies"], *chain(*table["optional-dependencies"].values())]
    pins = (PROJECT / "constraints.txt").read_text().splitlines()
    for name, floor in FLOORS.items():
        asked = [re.fullmatch(rf"{name}>=([0-9.]+)", text) for text in texts]
        pinned = [re.match(rf"{name}==([0-9.]+)", line) for line in pins]
        for found in (asked, pinned):
            versions = [tuple(map(int, match[1].split("."))) for match in found if match]
            assert versions and all(version >= floor for version in versions), (name, versions)


def test_no_pickle_is_run():
    """`torch.load` of weights only, and no other reader that runs what it reads."""
    loads = 0
    for path in chain(*(PROJECT.glob(f"{top}/**/*.py") for top in TOPS)):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("load", "loads", "unsafe_load"):
                continue
            called = ast.unparse(node.func)
            where = f"{path.relative_to(PROJECT)}:{node.lineno}"
            assert called not in ("pickle.load", "pickle.loads", "yaml.unsafe_load"), where
            if called == "torch.load" and where.startswith("scripts/authors/"):
                continue  # files that the script has just written, as the authors do
            if called == "torch.load":
                loads += 1
                named = {word.arg: ast.unparse(word.value) for word in node.keywords}
                reader = named.get("pickle_module") == "_AS_MODULE"  # it runs no code of the file
                assert named.get("weights_only") == "True" or reader, where
    assert loads >= 5


def test_the_tested_versions_are_named_where_one_installs():
    for page in ("CONTRIBUTING.md", "docs/installing.md"):
        assert "constraints.txt" in (PROJECT / page).read_text(), page
