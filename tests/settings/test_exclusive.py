"""Exclusive settings in layers: a later layer that names one takes the others' place."""

import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.errors import UserError
from flowrl.paths import CONFIGS_FOLDER
from flowrl.session.given_check import check_choices
from flowrl.settings.file.exclusive import EXCLUSIVE, OF_NAMES
from flowrl.settings.file.inherit import merged, read_tree
from flowrl.settings.read import dump, override, read_run, run_from

# a value that chooses the setting, and what a run needs beside it
VALUES: dict[str, Any] = {
    "model.pipeline": "flowrl/demo/shapes-sd3",
    "model.language": "flowrl/demo/sums-lm",
    "model.own": "mine.py:Flow",
    "model.lora.from": "old/adapter",
    "model.lora.rank": 8,
    "model.lora.alpha": 8.0,
    "model.lora.targets": ["to_q"],
    "model.lora.merge": "evaluation",
    "model.sigmas": {"shift": 2.0},
    "model.scheduler": {"shift": 3.0},
    "model.offload_experts": True,
    "model.context_parallel": 2,
    "model.compile": True,
    "model.attention": "flash",
    "model.quantization": {"backend": "bitsandbytes", "bits": 8},
    "model.quantization.components": ["text_encoder"],
    "model.adapters": ["style.safetensors"],
    "model.gguf_file": "a.gguf",
    "model.offload": True,
    "model.engine": {"url": "http://localhost:8200"},
    "model.engine.own": "mine.py:Mine",
    "model.engine.url": "http://localhost:8200",
    "model.server": {"url": "http://127.0.0.1:1/v1", "model": "a"},
    "workers.sampling": 2,
    "model.environment": {"name": "env.py:reply"},
    "model.steps": {"most": 3},
    "given": {"file": "given.jsonl", "kind": "texts", "share": 0.5},
    "given.media": "answer",
    "given.layout": "imagereward",
    "given.label": "ranking",
    "budget.replay": 2,
    "train.recompute_old": True,
}
QUANTIZED = {"backend": "bitsandbytes", "bits": 8}
BESIDE: dict[str, dict[str, Any]] = {
    "model.quantization.components": {"model.quantization": QUANTIZED}
}
OF_KIND = {"given.media": "images", "given.layout": "pairs", "given.label": "pairs"}
RECIPES = {
    "model.steps": {"recipe": "text_process", "intermediate_rewards": ["process_reward"]},
    "given": {"recipe": {"name": "text", "loss": "reinforce"}},
    "given.media": {"recipe": {"name": "rwr", "anchor": 0}},
    "given.layout": {"recipe": "dpo"},
    "given.label": {"recipe": "dpo"},
    "budget.replay": {"recipe": "nft"},
}
# together in one layer they are refused where the model is at hand, or not at all
SEPARATE = [
    ("model.server", "workers.sampling"),
]
ROOT = Path(__file__).resolve().parents[2]
TEXT = {"recipe": {"name": "text_grpo"}, "model": {"language": "flowrl/demo/sums-lm"}}
IMAGES = {"recipe": {"name": "flow_grpo"}, "model": {"pipeline": "flowrl/demo/shapes-sd3"}}
TEXT_ONLY = ("model.server", "model.environment", "model.steps", "model.gguf_file")
PAIRS = [
    (old, new)
    for sides in EXCLUSIVE
    for one, other in permutations(sides, 2)
    for old in one.names
    for new in other.names
]


def put(tree: dict[str, Any], setting: str, value: Any) -> None:
    *parents, last = setting.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    if isinstance(value, dict) and isinstance(tree.get(last), dict):
        tree[last] = value | tree[last]
    else:
        tree[last] = value


def value_at(tree: Any, setting: str) -> Any:
    for part in setting.split("."):
        tree = None if tree is None else tree.get(part)
    return tree


def layers(old: str, new: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A base that names `old`, and a file over it that names `new` alone."""
    text = any(name in TEXT_ONLY for name in (old, new))
    base: dict[str, Any] = yaml.safe_load(yaml.safe_dump(TEXT if text else IMAGES))
    base |= {"prompts": {"train": "p.txt"}, "rewards": ["brightness"]}
    over: dict[str, Any] = {}
    if {old, new} <= {"model.pipeline", "model.language", "model.own"}:
        base["model"] = {}
        base["recipe"] = "text_grpo" if old == "model.language" else "nft"
        over["recipe"] = "text_grpo" if new == "model.language" else "nft"
    for name, tree in ((old, base), (new, over)):
        if name.startswith("given."):
            tree["given"] = {"file": "g.jsonl", "kind": OF_KIND[name]}
    over |= RECIPES.get(new, {})
    for name, tree in ((old, base), (new, over)):
        for setting, value in (BESIDE.get(name, {}) | {name: VALUES[name]}).items():
            put(tree, setting, value)
    return base, over


def written(folder: Path, base: dict[str, Any], over: dict[str, Any]) -> Path:
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    (folder / "mine.yaml").write_text(yaml.safe_dump({"base": "base.yaml"} | over))
    return folder / "mine.yaml"


def judged(tree: dict[str, Any]) -> None:
    """All checks of a run's settings alone."""
    run = run_from(tree, "run")
    run.algorithm()
    if run.given is not None:
        check_choices(run, run.given)


@pytest.mark.parametrize("old, new", PAIRS)
def test_what_a_later_layer_names_takes_the_place(old: str, new: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base, over = layers(old, new)
    tree, _ = read_tree(written(tmp_path, base, over))
    assert value_at(tree, old) is None and value_at(tree, new) is not None
    judged(tree)
    # the same pair in one layer is a mistake, which no rule hides
    both = merged(base, over)
    if (old, new) not in SEPARATE and (new, old) not in SEPARATE:
        with pytest.raises(UserError):
            judged(both)


@pytest.mark.parametrize("new", ["model.lora.from", "model.lora.rank", "model.compile"])
def test_options_are_a_layer(new: str):
    sides = next(s for s in EXCLUSIVE if any(new in side.names for side in s))
    old = next(side.names[0] for side in sides if new not in side.names)
    base, _ = layers(old, new)
    run = override(run_from(base, "run"), [f"--{new}", str(VALUES[new])])
    tree = dump(run)
    assert str(value_at(tree, new)) == str(VALUES[new])
    assert value_at(tree, old) in (None, False, 16)


def test_both_as_options_are_refused():
    run = read_run(CONFIGS_FOLDER / "demo_lora.yaml")
    with pytest.raises(UserError, match="have their own rank"):
        override(run, ["--model.lora.from", "old/adapter", "--model.lora.rank", "8"])


@pytest.mark.parametrize("section", OF_NAMES)
def test_settings_go_with_the_name_that_they_belong_to(section: str, tmp_path):
    key, belongs = OF_NAMES[section]
    old = {key: "one", **dict.fromkeys(belongs or ("kind_of_one",), "of one"), "shared": 1}
    base: dict[str, Any] = {}
    over: dict[str, Any] = {}
    put(base, section, old)
    put(over, section, {key: "two"})
    for tree in (base, over):
        if section.startswith("recipe."):
            tree["recipe"] |= {"name": "joint"}
    tree, _ = read_tree(written(tmp_path, base, over))
    kept = {"shared": 1} if belongs else {}
    assert value_at(tree, section) == {key: "two"} | kept
    over = {"recipe": {"name": "joint"}} if section.startswith("recipe.") else {}
    put(over, section, {key: "one", "more": 2})
    tree, _ = read_tree(written(tmp_path, base, over))
    assert value_at(tree, section) == old | {"more": 2}


@pytest.mark.slow
def test_every_shipped_run_with_adapters_can_begin_from_others(tmp_path):
    shipped = [
        path
        for path in CONFIGS_FOLDER.rglob("*.yaml")
        if "compare" not in path.parts and "accelerate" not in path.parts
        and "alarms" not in path.parts and read_run(path).model.lora is not None
    ]  # fmt: skip
    assert len(shipped) > 60
    for path in shipped:
        (tmp_path / "mine.yaml").write_text(
            f"base: {path}\nmodel: {{lora: {{from: old/adapter}}}}\n"
        )
        lora = read_run(tmp_path / "mine.yaml").model.lora
        assert lora is not None and lora.start is not None and lora.start.endswith("old/adapter")


def test_messages_that_leave_one_out_are_in_the_table():
    """A refusal of two settings together, without its pair in the table, would be judged after
    inheritance alone."""
    listed = {name.rsplit(".", 1)[-1] for sides in EXCLUSIVE for s in sides for name in s.names}
    for path in (ROOT / "flowrl" / "settings").rglob("*.py"):
        flat = re.sub(r'"\s+f?"', "", path.read_text())
        for sentence in re.findall(r'"([^"]*leave one of the two out[^"]*)"', flat):
            named = set(re.findall(r"[a-z_]+", sentence))
            assert named & listed, f"{path.name}: {sentence}: add the pair to EXCLUSIVE"
