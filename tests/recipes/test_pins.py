"""What every recipe is made of, and what three pipelines sample: pinned, so that a move of code or
a changed default cannot pass unseen.

    python -m tests.recipes.test_pins      write both anew, and print the digests of the samples
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.recipes import RECIPES
from samplers import Chain, FlowSDE, Ode, Prune, Tree
from tests.support.tiny_pipelines import FAMILIES, SIZE
from tests.support.tiny_pipelines_unet import sd15

GOLDEN = Path(__file__).parents[1] / "golden"
PARTS = GOLDEN / "recipes_pinned.json"
LATENTS = GOLDEN / "latents_pinned.npz"
PROMPTS = ["a red cube", "two blue cat"]
SAMPLED: dict[str, tuple[Callable[[], Any], dict[str, Any], Any]] = {
    "sd3 chain": (*FAMILIES["sd3"], Chain(FlowSDE(0.7), 2)),
    "flux tree": (*FAMILIES["flux"], Tree(FlowSDE(0.7), (1, 2))),
    "sd15 ode": (sd15, SIZE, Ode(2)),
}


def described(part: Any) -> Any:
    """A part with all its settings as JSON holds it; functions by their names."""
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        settings = {f.name: described(getattr(part, f.name)) for f in dataclasses.fields(part)}
        return {type(part).__name__: settings}
    if isinstance(part, functools.partial):
        return {f"partial {part.func.__name__}": described([part.args, part.keywords])}
    if isinstance(part, dict):
        return {str(name): described(value) for name, value in part.items()}
    if isinstance(part, tuple | list):
        return [described(each) for each in part]
    if callable(part):
        made = part() if getattr(part, "__name__", "") == "<lambda>" else part
        return described(made) if made is not part else part.__name__
    return part


def recipe_parts() -> dict[str, Any]:
    return {name: described(recipe()) for name, recipe in RECIPES.items()}


def sampled(name: str) -> torch.Tensor:
    build, call, plan = SAMPLED[name]
    policy = PipelinePolicy(build(), call=call)
    policy = policy.guided(3.0, 3.0)
    batch = policy.open(PROMPTS, (), 4)
    (rollout,) = batch.rollouts(plan, (0, 1), seed=0, iteration=0)
    return rollout.x0


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_made_of_its_pinned_parts(name: str) -> None:
    assert described(RECIPES[name]()) == json.loads(PARTS.read_text())[name]


def test_depth_pruning_moves_to_earlier_steps() -> None:
    plan = RECIPES["branch_grpo"](prune="depth").plan
    assert plan.prune == Prune((14, 15, 16, 17, 18), every=30, move=-1, stop=8)


def test_every_pinned_recipe_is_there() -> None:
    assert list(json.loads(PARTS.read_text())) == list(RECIPES)


@pytest.mark.parametrize("name", SAMPLED)
def test_the_latents_of_a_pipeline_are_those_pinned(name: str) -> None:
    pinned = torch.from_numpy(np.load(LATENTS)[name])
    assert pinned.std() > 0.1
    # processors of another kind differ by up to 6e-6
    torch.testing.assert_close(sampled(name), pinned, atol=5e-5, rtol=5e-5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = [f"{json.dumps(name)}: {json.dumps(parts)}" for name, parts in recipe_parts().items()]
    PARTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")  # a line a recipe
    arrays = {name: sampled(name).numpy() for name in SAMPLED}
    np.savez_compressed(LATENTS, **arrays)
    for name, array in arrays.items():
        print(name, hashlib.sha256(array.tobytes()).hexdigest()[:16])
