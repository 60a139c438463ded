"""Each named family, tiny and random: driven exactly, trained, saved, read by plain diffusers."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.lora import lora
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.replay.own_call import record
from flowrl.recipes import RECIPES
from tests.support.driving import PROMPTS, STEPS, learn
from tests.support.tiny_pipelines import NAMED

torch.set_num_threads(1)
SAMPLED = ("LTX-Video with an image", "CogVideoX with an image")  # a posterior is drawn from
NOISY = ("CogVideoX",)  # its scheduler draws noise

Meta = Sequence[Mapping[str, Any]]


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "some.png"
    columns.placeholder_images(["image"], 24, 20)["image"].save(path)
    return str(path)


def meta(name: str, picture: str) -> Meta:
    return [{"image": picture}] * 2 if NAMED[name].images else []


def plain(name: str, pipe: Any, call: Mapping[str, Any], picture: str, **more: Any) -> Tensor:
    """The pipeline's own call, without any of flowrl."""
    pipe.set_progress_bar_config(disable=True)
    given: dict[str, Any] = dict(call) | {"prompt": list(PROMPTS), "num_inference_steps": STEPS}
    if "negative_prompt" in given:
        given["negative_prompt"] = [given["negative_prompt"]] * 2
    if NAMED[name].images:
        image = columns.open_images((picture,))[0]
        given["image"] = [image] * 2 if name == "CogVideoX with an image" else image
    given["generator"] = torch.Generator().manual_seed(0)
    return pipe(**given | more, output_type="pt", return_dict=False)[0].float()


def replaced(made: PipelinePolicy, pipe: Any, guidance: float | None, rows: Meta) -> list[Tensor]:
    """Let a plain pipeline's scheduler step with what we say at its states, not what it computed.

    Gives the states that it will have visited.
    """
    way = made.prove(PROMPTS, steps=STEPS, guidance=guidance, meta=rows).to_way
    conditioning, visits = made.encode(PROMPTS, rows), made.schedule(STEPS).visits
    scheduler, real = pipe.scheduler, pipe.scheduler.step
    signature, states = inspect.signature(real), []

    def step(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named)
        state, t = given.arguments["sample"], given.arguments["timestep"]
        if "scale_model_input" in dir(scheduler):
            state = scheduler.scale_model_input(state, t)
        with torch.no_grad():
            sigma = torch.full((2,), visits[len(states)])
            said = made.loop.received(state, sigma, conditioning, way).output
        given.arguments["model_output"] = said
        result = real(*given.args, **given.kwargs)
        states.append(result[0] if isinstance(result, tuple) else result.prev_sample)
        return result

    vars(step)["__signature__"] = signature
    vars(scheduler)["step"] = step
    return states


@pytest.mark.quick_cases("SD3-default", "HunyuanVideo-default", "Sana-default")
@pytest.mark.parametrize(
    "unusual", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["default", "unusual"]
)
@pytest.mark.parametrize("name", NAMED)
def test_a_family_is_driven_to_the_bit(name: str, unusual: bool, picture: str) -> None:
    family = NAMED[name]
    call = family.call | (family.unusual if unusual else {})
    made = PipelinePolicy(family.build(), call=call)
    guidance = 4.5 if unusual else None
    proof = made.prove(PROMPTS, steps=STEPS, guidance=guidance, meta=meta(name, picture))
    assert proof.way == ("forward" if family.forward and unusual and name == "SD3" else "pinned")
    assert proof.first is None if name in NOISY else proof.first is not None
    assert (proof.euler == 0) == (proof.scheduler == "FlowMatchEulerDiscreteScheduler")
    if name in SAMPLED:
        return
    more: dict[str, Any] = {} if guidance is None else {str(made.loop.guidance): guidance}
    theirs = plain(name, family.build(), call, picture, **more)
    pipe = family.build()
    states = replaced(made, pipe, guidance, meta(name, picture))
    ours = plain(name, pipe, call, picture, **more)
    assert torch.equal(ours, theirs) and theirs.std() > 1e-3
    conditioning = made.encode(PROMPTS, meta(name, picture))
    decoded = made.decode(states[-1], conditioning, steps=STEPS, guidance=guidance)
    assert torch.equal(decoded, theirs)


QUICK = ("SD3", "SD1.5", "Wan 2.1", "Qwen-Image-Edit")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in NAMED]
)
def test_a_family_learns_and_its_adapter_is_read(name: str, picture: str, tmp_path: Path) -> None:
    """A GRPO step and an AWM step change the adapter, at ratio 1; plain diffusers reads it."""
    family, rows = NAMED[name], meta(name, picture)
    made = PipelinePolicy(family.build(), call=family.call)
    alpha = 2 if name == "SD1.5" else 4
    made.add_lora(rank=2, alpha=alpha, targets=None, seed=0)
    flow = made.loop.traits.kind == "flow"
    steps = 5 if name == "Wan 2.2" else 3  # so that its second expert has a trained step
    recipes = {
        "flow_grpo" if flow else "ddpo": {"steps": steps, "group": 2},
        "awm": {"steps": 4, "group": 2, "levels_per_sample": 2, "kl": 0.0},
    }
    for recipe, settings in recipes.items():
        before = {key: value.detach().clone() for key, value in made.trainable().items()}
        assert learn(made, RECIPES[recipe](**settings), rows) < 1e-4
        moved = [key for key, value in made.trainable().items() if not value.equal(before[key])]
        assert {key.split(".")[0] for key in moved} == set(made.loop.driver.denoisers)
    made.save(tmp_path)
    read = family.build()
    read.load_lora_weights(tmp_path)
    if name == "Wan 2.2":
        read.load_lora_weights(tmp_path, weight_name=lora.SECOND, load_into_transformer_2=True)
    images = []
    for policy in (
        made,
        PipelinePolicy(read, call=family.call),
        PipelinePolicy(family.build(), call=family.call),
    ):
        extras = policy.loop.row_extras(rows)
        images.append(record(policy.loop, PROMPTS, extras, STEPS, None)[1].media)
    assert torch.equal(images[0], images[1]) and not torch.equal(images[0], images[2])
