"""The scale without guidance, measured: 1 of most pipelines, 0 of those that count from there."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from pydantic import ValidationError

from flowrl.errors import UserError
from flowrl.estimate.sizes import rows_per_state
from flowrl.models.before_weights import check_before_weights
from flowrl.models.description import public_model
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.public_configs import PUBLIC_MODELS
from flowrl.paths import PROJECT
from flowrl.settings import PipelineSettings
from flowrl.settings.model.pipeline import GuidanceScale
from flowrl.settings.read import read_run, run_from
from tests.support import runs
from tests.support.advice import advice
from tests.support.driving import PROMPTS, STEPS
from tests.support.tiny_pipelines import NAMED
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.pipelines import tiny

torch.set_num_threads(1)
SCALES = {"SD1.5": 1.0, "SD3": 1.0, "FLUX.1": 1.0, "Qwen-Image": 1.0, "Z-Image": 0.0}


@pytest.mark.quick_cases("FLUX.1", "SD3")
@pytest.mark.parametrize(("name", "scale"), SCALES.items())
def test_the_scale_without_guidance_is_measured(name: str, scale: float) -> None:
    family = NAMED[name]
    policy = PipelinePolicy(family.build(), call=family.call)
    assert policy.scale("none") == scale
    assert policy.scale(3.0) == 3.0 and policy.scale(None) is None
    policy = policy.guided("none", "none")
    (line,) = policy.proofs(PROMPTS, STEPS)
    assert f"guidance {scale}:" in line and "guided" not in line


def test_one_of_z_image_is_guided_and_the_proof_says_so() -> None:
    family = NAMED["Z-Image"]
    policy = PipelinePolicy(family.build(), call=family.call)
    proof = policy.prove(PROMPTS, steps=STEPS, guidance=1.0, complete=False, gradient=False)
    assert "guidance 1.0 (guided: 2 evaluations per row)" in str(proof)


def test_a_pipeline_that_guides_at_every_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = NAMED["SD3"]
    pipe = family.build()
    always: Any = property(lambda self: True)
    mixed: Any = property(lambda self: self._guidance_scale + 1)
    monkeypatch.setattr(type(pipe), "do_classifier_free_guidance", always)
    policy = PipelinePolicy(pipe, call=family.call)
    assert policy.scale("none") == 1.0  # two evaluations, of which the negative one has no weight
    monkeypatch.setattr(type(pipe), "guidance_scale", mixed)
    assert policy.scale("none") == 0.0
    three: Any = property(lambda self: 3.0)
    monkeypatch.setattr(type(pipe), "guidance_scale", three)
    advice(
        "also applies guidance at scales 1 and 0: give a number, or set model.guidance: null",
        lambda: policy.guided("none", "none"),
        lambda: policy.guided(1.0, 1.0),
    )
    null = PipelineSettings.model_validate({"pipeline": "x", "guidance": None}).guidance
    assert null.train is None and policy.guided(null.sample, null.train).guidance == (None, None)


class FixedGuidance(StableDiffusion3Pipeline):
    """Guides every call at a scale of its own, which no argument sets."""

    @torch.no_grad()
    def __call__(  # noqa: PLR0913
        self,
        prompt: Any = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 28,
        generator: Any = None,
        latents: Any = None,
        output_type: str = "pil",
        return_dict: bool = True,
        max_sequence_length: int = 256,
    ) -> Any:
        return inspect.unwrap(StableDiffusion3Pipeline.__call__)(
            self, prompt, height=height, width=width, num_inference_steps=num_inference_steps,
            generator=generator, latents=latents, output_type=output_type, return_dict=return_dict,
            max_sequence_length=max_sequence_length, guidance_scale=3.0,
        )  # fmt: skip


def test_guidance_that_no_argument_sets_is_left_as_it_is() -> None:
    """With null, as the messages say; left out, model.guidance is 1, which no argument takes."""
    pipe = NAMED["SD3"].build()
    pipe.__class__ = FixedGuidance
    policy = PipelinePolicy(pipe, call=NAMED["SD3"].call)

    def proven(setting: Any) -> str:
        guidance = PipelineSettings.model_validate({"pipeline": "x", **setting}).guidance
        assert guidance.train == "auto" or guidance.train == guidance.sample
        (line,) = policy.guided(guidance.sample, guidance.sample).proofs(PROMPTS, STEPS)
        return line

    line = advice(
        "guidance none: a component of {} makes {} evaluations per row, and its call takes no "
        "scale: change that component, or set model.guidance: null",
        lambda: proven({"guidance": "none"}),
        lambda: proven({"guidance": None}),
    )
    assert "FixedGuidance" in line and "2 evaluations per row" in line
    advice(
        "takes no guidance scale: set model.guidance: null, since 1 is its default",
        lambda: proven({}),
        lambda: proven({"guidance": None}),
    )


def test_settings_take_the_word_for_both_scales_or_one() -> None:
    both = PipelineSettings.model_validate({"pipeline": "x", "guidance": "none"}).guidance
    assert (both.sample, both.train) == ("none", "none")
    one = PipelineSettings.model_validate({"pipeline": "x", "guidance": {"train": "none"}}).guidance
    assert (one.sample, one.train) == (1.0, "none")
    own = PipelineSettings.model_validate({"pipeline": "x", "guidance": None}).guidance
    assert (own.sample, own.train) == (None, None)
    with pytest.raises(ValidationError):
        PipelineSettings.model_validate({"pipeline": "x", "guidance": {"train": "nothing"}})


@pytest.mark.parametrize(
    ("pipeline", "scale", "rows"),
    [
        ("ZImagePipeline", 1.0, 2), ("ZImagePipeline", 0.0, 1), ("ZImagePipeline", "none", 1),
        ("Krea2Pipeline", 1.0, 2), ("StableDiffusion3Pipeline", 1.0, 1),
        ("StableDiffusion3Pipeline", 4.5, 2), ("StableDiffusion3Pipeline", "none", 1),
    ],
)  # fmt: skip
def test_a_plan_counts_guidance_as_the_class_does(
    pipeline: str, scale: GuidanceScale, rows: int
) -> None:
    any_model = public_model(next(name for name in PUBLIC_MODELS if "stable-diffusion-3" in name))
    described = replace(any_model, pipeline=pipeline)
    assert rows_per_state(described, scale, 3) == [rows] * 3


@pytest.mark.parametrize("name", ["z_image", "z_image_turbo"])
def test_files_that_say_without_guidance_have_none(name: str) -> None:
    run = read_run(PROJECT / f"configs/models/{name}.yaml")
    assert (run.model.guidance.sample, run.model.guidance.train) == ("none", "none")
    assert run.evaluation_guidance == (4.0 if name == "z_image" else "none")


@pytest.mark.parametrize("scales", [{}, {"guidance": 3.5}, {"guidance": {"train": "none"}}])
def test_a_scale_that_no_argument_takes_is_refused_before_weights(
    scales: dict[str, Any], tmp_path: Path
) -> None:
    """The distilled FLUX.2 [klein], whose class has none; left out, the scale is 1."""
    made = tiny(diffusers.Flux2KleinKVPipeline, SPECIALS, SIZES)
    made.pipe.save_pretrained(tmp_path / "klein")
    tree = runs.tree(tmp_path / "klein", tmp_path, runs.FLOW_GRPO)
    tree["model"] |= {"height": 16, "width": 16}

    def started(**model: Any) -> None:
        check_before_weights(run_from(tree | {"model": {**tree["model"], **model}}, "test"))

    advice(
        "{} takes no guidance scale: set model.guidance: null, since 1 is its default, and leave "
        "evaluate.guidance out (in Python: guidance=None)",
        lambda: started(**scales),
        lambda: started(guidance=None),
    )
    tree["evaluate"]["guidance"] = 2.0
    with pytest.raises(UserError, match="takes no guidance scale"):
        started(guidance=None)
