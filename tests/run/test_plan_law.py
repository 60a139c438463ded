"""What plan accepts, a start accepts: over shipped configurations, refused pipelines, and
machine-made combinations of settings."""

import importlib
import json
import random
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest

from flowrl.errors import UserError
from flowrl.models.diffusers.call.traits.verdicts import refused_because, swept_verdicts
from flowrl.paths import CONFIGS_FOLDER
from flowrl.run.watch import start_check
from flowrl.run.watch.start_check import (
    check_classes_of,
    check_model_of,
    check_start,
    refusals,
    unchecked,
)
from flowrl.settings.model.server import Server
from flowrl.settings.read import override, read_run, run_from
from rewards.load import columns_needed, names, reward_parameters
from rewards.perception.packages import REWARD_PACKAGES
from tests.support import runs, text_runs, tiny_lm
from tests.support.runs import flowrl

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"compare", "accelerate", "alarms"}
SHIPPED = sorted(p for p in CONFIGS_FOLDER.rglob("*.yaml") if not LIBRARIES & {*p.parts})
# settings that machine-made runs draw from, some of which do not fit a tiny SD3 or a tiny Llama
IMAGES = (
    ("--model.attention", "native"), ("--model.attention", "flash"), ("--model.attention", "sage"),
    ("--model.vae.tiling",), ("--model.vae.slicing",), ("--model.offload-experts",),
    ("--model.sigmas", "{shift: 2.0}"), ("--model.sigmas", "[1.0, 0.5]"),
    ("--model.call", "{max_sequence_length: 8}"), ("--model.call", "{max_sequence: 8}"),
    ("--model.call", "{prompt_embeds: 1}"), ("--evaluate.num-frames", "5"),
    ("--evaluate.height", "32"), ("--model.lora.targets", "to_q"), ("--model.lora.targets", "to_x"),
    ("--train.gradient-checkpointing",), ("--workers.lag", "1"), ("--model.device", "cuda"),
    ("--train.optimizer", "adamw8bit"), ("--rewards", "[{name: hps}]"), ("--model.lora", "null"),
    ("--train.updates", "2"), ("--recipe.group", "2"), ("--model.lora.rank", "2"),
    ("--evaluate.guidance", "2.0"), ("--train.noise", "counter"), ("--model.guidance", "1.0"),
    ("--model.encodings.keep", "cpu"), ("--evaluate.call", "{max_sequence_length: 8}"),
    ("--model.scheduler", "{shift: 2.0}"), ("--model.scheduler", "{shfit: 2.0}"),
    ("--model.lora.merge", "evaluation"), ("--train.states.dtype", "bfloat16"),
    ("--track.with", "nothing"), ("--recipe.name", "flow_grpo"), ("--recipe.name", "text_grpo"),
)  # fmt: skip
TEXTS = (
    ("--model.stop", "b"), ("--model.system", "be brief"), ("--model.head-dtype", "float32"),
    ("--model.template", "{thinking: false}"), ("--train.share-prompts",), ("--model.lora", "4"),
    ("--train.gradient-checkpointing",), ("--model.attention", "eager"),
    ("--model.attention", "nothing"), ("--model.dtype", "bfloat16"), ("--model.offload",),
    ("--rewards", "[{name: math_answer}]"), ("--train.rows-per-call", "1"),
)  # fmt: skip


def test_every_shipped_configuration_has_the_same_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first refusal of plan is the start's, word for word, and no trace comes instead."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(start_check, "check_hub", lambda _: None)  # what plan leaves unchecked
    assert len(SHIPPED) > 70
    for path in SHIPPED[::6]:
        run = read_run(path)
        if any(run.prompts.on_hub(place) for place in run.prompts.given):
            continue  # which plan leaves unchecked
        found = list(refusals(run))
        if not found:
            check_start(run)
            continue
        with pytest.raises(UserError) as error:
            check_start(run)
        assert str(error.value) == found[0], path
        check_model_of(run)


def index_of(name: str, folder: Path) -> Path:
    """A folder with the index of a pipeline class, and its denoiser's configuration."""
    folder.mkdir()
    tiny = {"_class_name": "SD3Transformer2DModel", "num_layers": 1}
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": name, "transformer": ["diffusers", "SD3Transformer2DModel"]})
    )
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps(tiny))
    return folder


def test_pipelines_that_are_known_to_be_refused_are_refused_before_weights(tmp_path: Path) -> None:
    known = swept_verdicts()
    assert known, f"no sweep has seen diffusers {diffusers.__version__}: scripts/benchmarks"
    names = [*known["refused"], *(name for name in known["known"] if refused_because(name))]
    assert len(names) > 60
    settings = {
        "recipe": "nft", "prompts": {"train": "p.txt"}, "rewards": ["brightness"],
    }  # fmt: skip
    for name in names:
        folder = index_of(name, tmp_path / name)
        run = run_from(settings | {"model": {"pipeline": str(folder)}}, "run")
        if re.search(r"prediction_type|model\.dtype", known["refused"].get(name, "")):
            continue  # what its folder or its run may set otherwise
        with pytest.raises(UserError, match=name):
            check_classes_of(run)
    for name in known["exact"]:
        assert refused_because(name) is None


def test_the_page_and_the_verdicts_are_one_sweep() -> None:
    page = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
    version = re.search(r"^diffusers (\S+)", page, re.MULTILINE)
    assert version is not None
    for found in swept_verdicts(version[1]).values():
        for name in found:
            assert f"\n| {name} | " in page


def test_plan_says_what_is_refused_and_what_it_could_not_check(capsys, tmp_path) -> None:
    folder = index_of("OmniGenPipeline", tmp_path / "omni")
    for command in ("plan", "train", "prove"):
        assert flowrl(command, "demo", "--model.pipeline", folder) == 2
        err = capsys.readouterr().err
        assert "has no weights" in err and "Trace" not in err
    (folder / "transformer" / "diffusion_pytorch_model.bin").write_bytes(b"weights")
    for command in ("plan", "train", "prove"):
        assert flowrl(command, "demo", "--model.pipeline", folder) == 2
        err = capsys.readouterr().err
        assert "flowrl: OmniGenPipeline has no encode_prompt" in err
    assert flowrl("plan", "demo") == 0
    out = capsys.readouterr().out
    for what in ("weights: ", "the proof at load: ", "rewards (", "the disk: ", "free memory: "):
        assert f"\n  {what}" in out
    run = read_run(CONFIGS_FOLDER / "text_demo.yaml")
    server = Server(url="http://127.0.0.1:1/v1", model="a")
    served = run.model_copy(update={"model": run.model.model_copy(update={"server": server})})
    assert any("model.server" in line for line in unchecked(served))


def test_a_missing_package_of_a_reward_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.perception.packages.importlib.util.find_spec", lambda _: None)
    run = read_run(CONFIGS_FOLDER / "demo.yaml")
    rest = {
        "clip": {"library": "open_clip"},
        "unified_reward": {"question": "question.txt"},
        "unigenbench": {"question": "question.txt"},
    }
    server = {"url": "http://127.0.0.1:1/v1"}
    for name in REWARD_PACKAGES:
        needed = {s for s, p in reward_parameters(name, "load").items() if p.default is p.empty}
        named = {k: v for k, v in {**server, "model": "a"}.items() if k in needed}
        settings = json.dumps([{"name": name, **named, **rest.get(name, {})}])
        made = override(run, ["--rewards", settings])
        assert any("pip install" in line for line in refusals(made)), name


def combined(base: dict[str, Any], pool: tuple[tuple[str, ...], ...], seed: int) -> Any:
    """A run with a few settings of the pool; None if the settings alone refuse it."""
    draws = random.Random(seed)
    words = [word for option in draws.sample(pool, draws.randint(1, 3)) for word in option]
    names = [word for word in words if word.startswith("--")]
    if len(set(names)) < len(names):
        return None
    try:
        return override(run_from(base, "run"), words)
    except UserError:
        return None


def check_law(base: dict[str, Any], pool: tuple, seeds: range, folder: Path) -> tuple[int, int]:
    """Open machine-made runs; returns how many plan accepted and refused."""
    accepted = refused = 0
    for seed in seeds:
        run = combined(base, pool, seed)
        if run is None:
            continue
        found = list(refusals(run))
        if found:
            with pytest.raises(UserError) as error:
                check_start(run)
            assert str(error.value) == found[0]
            refused += 1
            continue
        accepted += 1
        check_start(run)
        try:
            runs.session_of(run, folder / str(seed))
        except UserError as error:
            pytest.fail(f"seed {seed}: plan accepts, and the start says: {error}")
    return accepted, refused


@pytest.mark.parametrize("count", [10, pytest.param(400, marks=pytest.mark.slow)])
def test_machine_made_runs_of_images(pipeline: Path, tmp_path: Path, count: int) -> None:
    base = runs.tree(pipeline, tmp_path, dict(runs.NFT))
    accepted, refused = check_law(base, IMAGES, range(count), tmp_path)
    assert accepted > count / 10 and refused > count / 10


@pytest.mark.parametrize("count", [10, pytest.param(400, marks=pytest.mark.slow)])
def test_machine_made_runs_of_texts(tmp_path: Path, count: int) -> None:
    base = text_runs.tree(tiny_lm.write(tmp_path / "lm"), tmp_path, dict(text_runs.GRPO))
    accepted, refused = check_law(base, TEXTS, range(count), tmp_path)
    assert accepted > count / 10 and refused > count / 10


BROKEN = {  # files of rewards that cannot be used
    "its syntax": "def mine(samples)\n    return 1\n",
    "its name": "def other(samples):\n    return [0.0] * len(samples.prompts)\n",
    "its import": "import no_such_package\n",
    "its end": "import sys\nsys.exit(0)\n",
    "its error": "1 / 0\n",
    "its return": "def mine(samples):\n    print(samples)\n",
}


@pytest.mark.parametrize("place", ["rewards", "held_out_rewards"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_of_a_reward_is_refused_by_plan_as_by_a_start(
    tmp_path: Path, broken: str, place: str
) -> None:
    """No check after the first refusal stumbles over the same file."""
    (tmp_path / "own.py").write_text(BROKEN[broken])
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    tree = {
        "recipe": {"name": "text_grpo", "length": 5}, "model": {"language": "flowrl/demo/sums-lm"},
        "prompts": {"train": str(tmp_path / "p.jsonl"), "per_iteration": 1},
        "rewards": [{"name": "exact_answer"}],
    } | {place: [{"name": f"{tmp_path / 'own.py'}:mine"}]}  # fmt: skip
    run = run_from(tree, "run")
    (said, *_) = refusals(run)
    with pytest.raises(UserError) as error:
        check_start(run)
    assert str(error.value) == said and "own.py" in said


def test_a_check_may_stumble_over_what_is_refused_and_over_nothing_else(monkeypatch) -> None:
    def refuse() -> None:
        raise UserError("no")

    def stumble() -> None:
        raise KeyError("broken")

    run = read_run(CONFIGS_FOLDER / "text_demo.yaml")
    monkeypatch.setattr(start_check, "_checks", lambda *_, **__: iter([refuse, stumble]))
    assert [*refusals(run)] == ["no"]
    monkeypatch.setattr(start_check, "_checks", lambda *_, **__: iter([stumble, refuse]))
    with pytest.raises(KeyError):
        list(refusals(run))


NEEDS_COLUMNS = {  # rewards of the catalogue that score no row without a column
    "exact_answer": "answer", "math_answer": "answer", "code_tests": "tests",
    "soft_tifa": "vqa_list", "similarity": "reference", "dreamsim": "reference",
}  # fmt: skip


def columns_tree(folder: Path, reward: Any, **held_out: Any) -> dict[str, Any]:
    (folder / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "tests": ["a"]}\n')
    (folder / "h.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n')
    return {
        "recipe": {"name": "text_grpo", "length": 5}, "model": {"language": "flowrl/demo/sums-lm"},
        "prompts": {"train": str(folder / "p.jsonl"), "per_iteration": 1, **held_out},
        "rewards": [reward],
    }  # fmt: skip


def test_the_catalogues_columns_are_marked() -> None:
    found = {}
    for name in names():
        if "load" in vars(importlib.import_module(f"rewards.catalogue.{name}")):
            for _, column in columns_needed(name, {}):
                found[name] = column
    assert found == NEEDS_COLUMNS


@pytest.mark.parametrize("name", NEEDS_COLUMNS)
def test_a_column_that_no_row_has_is_refused_by_plan_as_by_a_start(
    tmp_path: Path, name: str
) -> None:
    needed = {
        "soft_tifa": {"url": "http://127.0.0.1:9/v1", "model": "a-judge"},
        "dreamsim": {"folder": str(tmp_path)},
    }
    reward = {"name": name, "column": "anwser", **needed.get(name, {})}
    run = run_from(columns_tree(tmp_path, reward), "run")
    words = "no row of prompts.train has a column 'anwser' (column); it has prompt, answer, tests"
    assert any(f"reward {name}: {words}: name another" in line for line in refusals(run))


def test_columns_of_held_out_rows_and_of_members_are_asked_for(tmp_path: Path) -> None:
    held = {"held_out": str(tmp_path / "h.jsonl")}
    run = run_from(columns_tree(tmp_path, {"name": "exact_answer"}, **held), "run")
    said = "reward exact_answer: no row of prompts.held_out has a column 'answer'"
    assert any(said in line for line in refusals(run))
    with pytest.raises(UserError, match=r"no row of prompts\.held_out has a column"):
        check_start(run)
    inner = {"name": "clipped", "reward": {"name": "math_answer", "column": "a"}, "low": 0.0}
    run = run_from(columns_tree(tmp_path, inner), "run")
    assert any("has a column 'a' (column)" in line for line in refusals(run))
    shared = {"name": "by_row", "column": "set", "rewards": {"sums": {"name": "exact_answer"}}}
    run = run_from(columns_tree(tmp_path, shared, **held), "run")
    assert not any("has a column" in line for line in refusals(run))
