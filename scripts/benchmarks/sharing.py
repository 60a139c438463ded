"""Recipes whose samples share states: an iteration as it is, beside one whose trained rows are all
evaluated by themselves, and beside independent chains with as many trained rows.

All arms are opened runs of one process that take turns. `cheap` takes latents for images and reads
their brightness, so that the network is nearly all of the time. The ratio that the counts predict
takes an evaluation with gradients for three.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from flowrl.likelihoods.rows import Rows
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.run.floor import Opened
from flowrl.settings.read import run_from
from scripts.benchmarks.suite_runs import settings_of

DEMO = "configs/demo_flow_grpo.yaml"
STEPS = 8
RECIPES: dict[str, dict[str, Any]] = {
    "temp_flow": {"steps": STEPS, "roots": 4, "branch": 6, "kl": 0.004},
    "branch_grpo": {"steps": STEPS, "at": [0, 1, 2, 3], "kernel": "flow_sde"},
    "branch_grpo_mix": {"steps": STEPS, "at": [0, 1, 2, 3]},
    "mix_grpo": {"steps": STEPS, "group": 12, "window": 3},
}
SMALL: dict[str, dict[str, Any]] = {
    "temp_flow": {"steps": 2, "roots": 1, "branch": 2},
    "branch_grpo": {"steps": 2, "at": [0]},
    "branch_grpo_mix": {"steps": 2, "at": [0]},
    "mix_grpo": {"steps": 4, "group": 2, "window": 2},
}
PROMPTS = 4  # an iteration
REWARDS = ("rewards", "held_out_rewards")
KINDS = ("sampling", "training", "frozen")
Patches = tuple[Callable[[], AbstractContextManager[Any]], ...]


def by_itself(rows: Rows, unit: int = 1) -> torch.Tensor:
    """In place of `input_of`: no two rows share an input."""
    return torch.arange(len(rows.prompt), device=rows.prompt.device) // unit


def latents_as_images(_policy: Any, x0: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x0[:, :3].clamp(0, 1).float()


CHEAP: Patches = (partial(patch.object, PipelinePolicy, "decode", latents_as_images),)
ALONE: Patches = tuple(
    partial(patch, f"flowrl.{module}.input_of", by_itself)
    for module in ("run.deal", "likelihoods.rows")
)


@dataclass
class Arm:
    """An opened run with something replaced during its iterations."""

    kept: Opened
    patches: Patches

    @classmethod
    def of(cls, tree: dict[str, Any], folder: Path, patches: Patches) -> "Arm":
        with ExitStack() as stack:
            for each in patches:
                stack.enter_context(each())
            return cls(Opened.of(run_from(tree, "suites"), folder), patches)

    def turn(self) -> float:
        with ExitStack() as stack:
            for each in self.patches:
                stack.enter_context(each())
            return self.kept.turn()

    @property
    def counts(self) -> dict[str, int]:
        last = self.kept.metrics[-1]
        return {kind: round(last.get(f"count/{kind}", 0.0)) for kind in KINDS}

    @property
    def cost(self) -> int:
        """Evaluations of an iteration; one with gradients counts as three."""
        counts = self.counts
        return counts["sampling"] + counts["frozen"] + 3 * counts["training"]


def arms(name: str, cheap: bool, tiny: bool, folder: Path) -> dict[str, Arm]:
    """The recipe as it is, with every trained row alone, and chains with as many trained rows."""
    prompts = 1 if tiny else PROMPTS
    tree = settings(prompts, {"name": name, **RECIPES[name], **(SMALL[name] if tiny else {})})
    tree |= {place: [{"name": "brightness"}] for place in REWARDS} if cheap else {}
    patches = CHEAP if cheap else ()
    found = {
        "states once": Arm.of(tree, folder / "once", patches),
        "every row alone": Arm.of(tree, folder / "alone", patches + ALONE),
    }
    steps = tree["recipe"]["steps"]
    group = max(2, round(found["every row alone"].counts["training"] / prompts / steps))
    chain = settings(prompts, {"name": "flow_grpo", "steps": steps, "group": group})["recipe"]
    chain["kl"] = tree["recipe"].get("kl", 0.0)
    found["chains"] = Arm.of(tree | {"recipe": chain}, folder / "chains", patches)
    return found


def settings(prompts: int, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The demo's settings with another recipe, whose own values are the rest."""
    return settings_of(DEMO, {"prompts": {"per_iteration": prompts}}) | {"recipe": dict(recipe)}
