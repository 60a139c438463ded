"""Settings of a tiny run of every recipe."""

from pathlib import Path
from typing import Any

from flowrl.recipes.table import IMAGE_RECIPES
from tests.support import environments, runs, text_runs

TREE = {"length": 6, "roots": 3, "branch": 2, "at": [2]}
SMALL: dict[str, dict[str, Any]] = {
    "text_tree": TREE,
    "text_spo_tree": TREE,
    "text_tempo": TREE,
    "text_treerl": {"length": 6, "roots": 3},
    "text_stream": {"length": 6, "group": 1, "uncertain": False},
    "text_riskpo": {"length": 6, "group": 6, "bundle": 3},
    "awm": {"steps": 4, "group": 4, "levels_per_sample": 2},
    "temp_flow": {"steps": 4, "roots": 2, "branch": 2},
    "branch_grpo": {"steps": 4, "at": [0, 1]},
    "branch_grpo_mix": {"steps": 4, "at": [0, 1]},
    "mix_grpo": {"steps": 4, "group": 4, "window": 2},
    "mix_grpo_flash": {"steps": 4, "group": 4, "window": 2},
    "flow_grpo_fast": {"steps": 4, "group": 4, "window": 2},
    "flow_dppo": {"steps": 4, "group": 4, "noisy": 1},
    "dgpo": {"steps": 4, "group": 4, "levels_per_sample": 2},
    "crd": {"steps": 4, "group": 4, "levels_per_sample": 2},
    "g2rpo": {"steps": 4, "group": 4, "at": [0, 1]},
    "euphonium": {"steps": 4, "group": 4, "first": 1},
    "pro_grpo": {"steps": 4, "start": 6, "keep": [4], "at": [2]},
    "potential_tree": {"steps": 4, "at": [0, 1]},
    "opd": {"steps": 4, "group": 2, "window": 2},
    "text_process": {"length": 6, "group": 6, "outcome": True},
}
HIT = """
def hit(samples):
    return [float("a" in text) for text in samples.media]
"""
TURNS = ("text_gigpo", "text_turns", "text_rebn", "text_process", "text_igpo")


def settings(
    name: str, folder: Path, *, pipeline: Path, language: Path, **train: Any
) -> dict[str, Any]:
    """A run of a tiny pipeline or language model; its prompts and rewards are written into
    `folder`."""
    image = name in IMAGE_RECIPES
    usual = {"steps": 4, "group": 4} if image else {"length": 6, "group": 6}
    recipe = {"name": name, **SMALL.get(name, usual)}
    if image:
        tree = runs.tree(pipeline, folder, recipe, **train)
    else:
        tree = text_runs.tree(language, folder, recipe, **train)
        tree["model"]["lora"] = {"rank": 2, "alpha": 8}
    if name == "text_pass_at_k":  # counts successes
        (folder / "hit.py").write_text(HIT)
        tree["rewards"] = [{"name": f"{folder / 'hit.py'}:hit"}]
    if name == "gardo":  # compares with further rewards
        tree["rewards"] += [{"name": "jpeg", "weight": 0}, {"name": "colour", "weight": 0}]
        tree["recipe"] |= {"auxiliary": ["jpeg"], "distance": "colour"}
    if name in TURNS:
        (folder / "env.py").write_text(environments.GUESS)
        tree["model"]["environment"] = {"name": f"{folder / 'env.py'}:reply", "turns": 3}
        tree["recipe"]["length"] = 16
    return tree


def teacher(pipeline: Path, folder: Path) -> Path:
    """The folder of an adapter that fits the runs of `settings`."""
    tree = runs.tree(pipeline, folder, {"name": "nft", "steps": 4})
    runs.opened(tree, folder).learner.policy.save(folder / "teacher")
    return folder / "teacher"
