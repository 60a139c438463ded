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
    assert loads >= 4


UNBOUNDED = {"read_text", "read_bytes", "load_file", "load_model", "load_peft_weights", "safe_open"}
UNBOUNDED |= {"read_table", "ParquetFile", "ZipFile", "json.load", "json.loads", "torch.load"}
UNBOUNDED |= {"yaml.safe_load", "yaml.compose"}
READERS = {  # files of flowrl that call such a reader, and why that is within bounds
    "bounded_files.py": "they are the bounds",
    "json_text.py": "a text of this process",
    "api/same_files.py": "the model's own files, of which `check_model` knows that they are whole",
    "api/scoring.py": "a file that was written before, by the same call",
    "cli/export.py": "adapters that this command has written",
    "cli/single_file.py": "a header that was checked before",
    "cli/device_check.py": "a run of this command",
    "cli/doctor.py": "files of flowrl and of the system",
    "cli/drill.py": "a run of the user's own, copied",
    "cli/installed.py": "files of an installed package",
    "cli/rights.py": "a text that was read within bounds",
    "cli/sandbox_check.py": "answers of flowrl's own process",
    "cli/schema.py": "files of flowrl",
    "drill/faults.py": "runs of the drill",
    "drill/same_end.py": "runs of the drill",
    "drill/training.py": "runs of the drill",
    "evaluation/measure.py": "the system's",
    "run/workers/causes.py": "a count of the system's, and a worker's log within bounds",
    "evaluation/suite_layouts.py": "a cell of a table that was read within bounds",
    "models/peft_version.py": "a file of an installed package",
    "models/adapters.py": "an adapter that `check_saved` has taken",
    "models/diffusers/call/inputs/columns.py": "a prompt",
    "models/diffusers/call/rows/encoding_cache.py": "a temporary file of this process",
    "models/diffusers/call/traits/verdicts.py": "a file of flowrl",
    "models/diffusers/lora/lora_formats.py": "a file that was written before, by the same call",
    "models/diffusers/modular/verdicts.py": "a file of flowrl",
    "models/diffusers/whole/proof_cache.py": "a text of this process, and the modules' own sources",
    "models/engine/wire.py": "an answer that its client bounds",
    "models/fixed_order.py": "a file that was written before, by the same call",
    "models/own/policy.py": "weights that `check_saved` has taken",
    "models/public_configs.py": "a file of flowrl",
    "models/saved_weights.py": "a file that `check_saved` has taken",
    "processes/at_work.py": "the system's",
    "processes/watch.py": "what another process of the run says of itself",
    "prompts/prepared.py": "a description that was read within bounds",
    "prompts/unpacked.py": "an archive whose parts are counted up to a bound",
    "prompts/parquet.py": "a file whose pages and rows were counted before",
    "prompts/files.py": "a text and a table that are read within bounds",
    "recipes/evidence.py": "a file of flowrl",
    "run/show/track.py": "a page that this run has written",
    "run/start.py": "a text of this process",
    "session/given_file.py": "two media of the user's, compared",
    "votes/fit.py": "features that `check_file` has taken, and the digest of a table",
    "votes/server.py": "requests that the server bounds, and media that this page shows",
    "votes/simulated.py": "answers of flowrl's own server",
}


def test_files_are_read_within_bounds() -> None:
    """What flowrl reads back from a folder, which may be another's, passes `bounded_files` or the
    checks of weights; any other reader stands in the table with its reason."""
    root, found = PROJECT / "flowrl", set[str]()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in UNBOUNDED or called.rpartition(".")[2] in UNBOUNDED:
                    found.add(path.relative_to(root).as_posix())
    assert found == set(READERS), found ^ set(READERS)


def test_the_tested_versions_are_named_where_one_installs():
    for page in ("CONTRIBUTING.md", "docs/installing.md"):
        assert "constraints.txt" in (PROJECT / page).read_text(), page
