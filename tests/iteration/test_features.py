"""Features stand apart: a plain run imports none of their files, nor of contributed recipes, nor
libraries that other runs need, and works without their folder."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from flowrl.iteration.open import FEATURES, OF_ITERATIONS, OF_UNITS, feature
from flowrl.paths import PROJECT
from flowrl.session.session import Session
from flowrl.settings.parts.names import part_classes
from flowrl.table import STAGES, Column
from tests.support import every_recipe, runs, text_runs, tiny_lm
from tests.support.engines import EXAMPLE
from tests.votes.test_asking import RUN

NAMES = sorted({each.name for each in (*OF_UNITS, *OF_ITERATIONS)})
FILES = sorted(p.stem for p in (PROJECT / "flowrl/iteration/features").glob("*.py"))
OTHERS = {"__init__", "ahead"}  # of a lag, which the start opens
LIKELIHOODS = "flowrl.likelihoods.shortcuts"  # from states that a route keeps
LIBRARIES = (  # that only some runs need, and that cost start time and memory
    "av", "datasets", "fastapi", "math_verify", "open_clip", "pandas", "pyarrow", "ray", "sklearn",
    "starlette", "tenacity", "trl", "uvicorn",
)  # fmt: skip


def test_a_session_has_no_field_of_a_feature() -> None:
    """What a feature holds for a whole run is a column of `Session.table`. These fields are empty
    where a run has no held-out prompts, or beside the main process."""
    optional = {f.name for f in fields(Session) if "None" in str(f.type)}
    assert optional == {"held_out", "start_record", "notices"}


SCRIPT = """
import contextlib, io, json, sys
# an editable installation would find a folder that the tree lacks in its own tree
sys.meta_path[:] = [each for each in sys.meta_path if "Editable" not in str(each)]
from flowrl.cli import main

def trained(config, folder):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(["train", config, "--folder", folder])
        except SystemExit as end:
            return end.code, said.getvalue()
    return 0, said.getvalue()

found = {}
for name, config, folder in json.loads(sys.argv[1]):
    code, said = trained(config, folder)
    loaded = sorted(each for each in sys.modules if each.startswith(APART) or each in LIBRARIES)
    found[name] = [code or 0, said, loaded]
print(json.dumps(found))
""".replace(
    "APART", repr((FEATURES + ".", "flowrl.contrib.", "samplers.routes.", LIKELIHOODS))
).replace("LIBRARIES", repr(LIBRARIES))


BESIDE = """
class Beside:
    concurrent = True  # may be called beside others

    def __call__(self, samples):
        return [float(image.mean()) for image in samples.media]
"""


def plain(name: str, folder: Path, pipeline: Path, language: Path) -> dict[str, Any]:
    return every_recipe.settings(name, folder, pipeline=pipeline, language=language, iterations=1)


def joint(folder: Path, pipeline: Path, language: Path) -> dict[str, Any]:
    text = {"name": "text_grpo", "length": 4, "group": 2, "kl": 0.0}
    image = {"name": "flow_grpo", "steps": 3, "group": 2, "clip": 0.2}
    tree = runs.tree(pipeline, folder, {"name": "joint", "text": text, "image": image})
    tree["model"]["rewriter"] = {"language": str(language), "template": "{prompt}:", "lora": None}
    return tree


def needing(name: str, folder: Path, pipeline: Path, language: Path) -> dict[str, Any]:
    """A run that needs a feature."""
    of_recipe = {
        "guide": "euphonium", "lookahead": "pro_grpo", "intermediate": "dense_grpo",
        "reward_gradient": "draft", "teachers": "opd", "turns": "text_turns",
        "reference": "text_rloo", "gate": "gardo", "tracker": "text_riskpo",
        "start_values": "text_a_star_po", "uncertain": "text_forking", "keeping": "leap_align",
    }  # fmt: skip
    if name == "joint":
        return joint(folder, pipeline, language)
    if name == "ask":
        return RUN | {
            "prompts": RUN["prompts"] | {"held_out": "configs/prompts/shapes_held_out.jsonl"},
            "held_out_rewards": ["flowrl/demo/taste.py:large"],
            "ask": {"votes": 4, "person": "simulated", "port": 0},
        }
    tree = plain(of_recipe.get(name, "flow_grpo"), folder, pipeline, language)
    if name == "steering":
        tree = plain("nft", folder, pipeline, language)
        tree["steer"] = {"iterations": [0, 1]}
    if name == "teachers":
        tree["teachers"] = {"folders": {"all": str(every_recipe.teacher(pipeline, folder))}}
    if name in ("budget", "replay"):
        tree["budget"] = {"flat": "resample", "rounds": 2}
    if name == "reference":
        tree["recipe"] |= {"kl": 0.1, "kl_in": "reward"}
    if name == "units":
        tree["workers"] = {"unit": 1}
    if name == "engine":
        tree["model"]["engine"] = {"own": {"name": f"{EXAMPLE}:SD3Engine", "folder": str(pipeline)}}
    if name == "overlap":
        (folder / "beside.py").write_text(BESIDE)
        tree["rewards"] += [{"name": f"{folder / 'beside.py'}:Beside"}]
    if name == "sizes":
        square, wide = {"width": 16, "height": 16}, {"width": 32, "height": 16}
        runs.sized(tree, [square, wide, square, wide])
    if name == "given":
        rows = [{"prompt": p, "completion": "ab"} for p in ("a:", "cab :")]
        tree = text_runs.tree(language, folder, text_runs.GRPO)
        (folder / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree["given"] = {"kind": "texts", "file": str(folder / "given.jsonl"), "share": 0.5}
    return tree


def run_all(wanted: dict[str, dict[str, Any]], folder: Path, tree: Path) -> dict[str, Any]:
    """Exit code, output and loaded features of each run, all in one process on a source tree."""
    asked = []
    for name, settings in wanted.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        asked.append((name, str(runs.write(settings, own)), str(own / "run")))
    env = runs.environment() | {"PYTHONPATH": f"{tree}"}
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(asked)],
        env=env, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    return json.loads(made.stdout.splitlines()[-1])


def columns() -> set[Column[Any]]:
    """All columns that the package defines."""
    source = PROJECT / "flowrl"
    defining = [p for p in source.rglob("*.py") if ": Column[" in p.read_text()]
    names = [".".join(("flowrl", *p.relative_to(source).with_suffix("").parts)) for p in defining]
    modules = [import_module(name) for name in names]
    return {each for m in modules for each in vars(m).values() if isinstance(each, Column)}


def owners() -> set[str]:
    """Features that columns name."""
    return {column.owner for column in columns()} - {*STAGES}


def test_every_column_has_an_owner_that_a_reader_can_open() -> None:
    """A part that declares a column in `reads` opens its owner by `wrap`, unless a stage writes the
    column; and parts that a column needs exist."""
    found = columns()
    parts = {kind.__name__ for kind in part_classes()}
    for column in found:
        assert column.owner in STAGES or callable(feature(column.owner).wrap), column
        assert column.part is None or column.part in parts, column
    names = [column.name for column in found]
    assert len(found) > 15 and len({*names}) == len(names), sorted(names)


def test_every_file_of_features_is_opened_by_a_name() -> None:
    assert {*FILES} == {*NAMES} | OTHERS | owners()


@pytest.mark.slow
def test_a_plain_run_imports_no_feature(pipeline: Path, tmp_path: Path) -> None:
    """Images and texts, in one process: whatever one needed would be there for the other."""
    language = tiny_lm.write(tmp_path / "lm")
    wanted = {}
    for name in ("flow_grpo", "nft", "dpo", "branch_grpo", "text_grpo"):
        (tmp_path / name).mkdir()
        wanted[name] = plain(name, tmp_path / name, pipeline, language)
    for name, (code, said, loaded) in run_all(wanted, tmp_path, PROJECT).items():
        assert code == 0, (name, said)
        assert not loaded, (name, loaded)


@pytest.mark.slow
def test_without_their_folder_a_plain_run_works_and_others_get_one_sentence(
    pipeline: Path, tmp_path: Path
) -> None:
    language, bare = tiny_lm.write(tmp_path / "lm"), tmp_path / "bare"
    skip = shutil.ignore_patterns("features", "routes", "__pycache__", "runs")
    for package in ("flowrl", "rewards", "samplers", "configs"):
        shutil.copytree(PROJECT / package, bare / package, ignore=skip)
    wanted = {}
    for name in ("plain", "keeping", "steering", *NAMES):
        (tmp_path / name).mkdir()
        wanted[name] = needing(name, tmp_path / name, pipeline, language)
    found = run_all(wanted, tmp_path, bare)
    code, said, _ = found.pop("plain")
    assert code == 0, said
    for name, (code, said, _) in found.items():
        assert code not in (0, None) and "Traceback" not in said, (name, said[-2000:])
        assert "this run needs the feature" in said, (name, said[-2000:])
