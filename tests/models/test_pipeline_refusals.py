"""Nothing is left behind in a pipeline, and what cannot be driven is refused with the reason."""

import functools
import inspect
import logging
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    FlowMatchHeunDiscreteScheduler,
    StableDiffusion3Pipeline,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.received import Received
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.results.proof_checks import check_states, refuse_weights
from flowrl.models.diffusers.call.traits import checks
from flowrl.models.diffusers.call.traits.verdicts import refuse_known
from flowrl.models.diffusers.lora import lora
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.settings import PipelineSettings
from tests.support.advice import advice
from tests.support.driving import PROMPTS, STEPS, noise, own, policy
from tests.support.tiny_pipelines import FAMILIES, SIZE, SQUARE, flux, qwen_image, sd3
from tests.support.tiny_pipelines_image import qwen_image_edit


@pytest.mark.parametrize("family", ["sd3", "sd3 with skipped layers"])
def test_nothing_is_left_behind(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After driving, and after an error in the middle of it, the pipeline is as it was."""
    build, call = FAMILIES[family]
    pipe = build()
    made = PipelinePolicy(pipe, call=call)
    latents = noise(made)
    scheduler, config = pipe.scheduler, dict(pipe.config)
    velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=4.5)
    cleanings = []
    vars(pipe)["_all_hooks"] = [object()]  # as of a pipeline that offloads
    monkeypatch.setattr(pipe, "maybe_free_model_hooks", lambda: cleanings.append(1))
    velocity(latents, torch.ones(2), torch.tensor([0, 1]))
    assert len(cleanings) == 1

    def broken(*args: Any, **named: Any) -> Any:
        raise OSError("broken")

    block = pipe.transformer.transformer_blocks[1]
    block.forward = broken
    with pytest.raises(OSError, match="broken"):
        velocity(latents, torch.ones(2), torch.tensor([0, 1]))
    with pytest.raises(OSError, match="broken"):
        made.prove(PROMPTS, steps=STEPS, guidance=2.0)
    del block.forward
    assert len(cleanings) == 3
    assert type(pipe) is type(build())  # driven as a class that knows its device
    vars(pipe)["_all_hooks"] = []
    assert pipe.scheduler is scheduler and dict(pipe.config) == config
    assert not {"encode_prompt", "__call__"} & set(vars(pipe))
    assert "forward" not in vars(pipe.transformer)
    theirs = own(build(), latents, call, guidance_scale=4.5)
    assert torch.equal(own(pipe, latents, call, guidance_scale=4.5), theirs)


def test_proof_refuses_what_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that carries state from step to step is seen by neither way in."""
    pipe = sd3()
    made = PipelinePolicy(pipe, call=SQUARE)
    forward = pipe.transformer.forward
    seen: list[int] = []

    def drifting(*args: Any, **named: Any) -> Any:
        seen.append(1)
        return (forward(*args, **named)[0] + 1e-3 * len(seen),)

    monkeypatch.setattr(pipe.transformer, "forward", drifting)
    with pytest.raises(UserError, match=r"pinned is off by 0\.\d+ at step 0.*fast-forward is off"):
        made.prove(PROMPTS, steps=STEPS, guidance=4.5)


def test_the_argument_that_carries_state_is_found_by_leaving_arguments_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = sd3()
    forward = pipe.transformer.forward
    seen: list[int] = []

    def drifting(*args: Any, joint_attention_kwargs: Any = None, **named: Any) -> Any:
        seen.append(1)
        drift = (joint_attention_kwargs or {}).get("drift", 0.0)
        return (forward(*args, **named)[0] + drift * len(seen),)

    monkeypatch.setattr(pipe.transformer, "forward", drifting)

    def proven(**call: Any) -> Any:
        made = PipelinePolicy(pipe, call=SQUARE | call)
        return made.prove(PROMPTS, steps=STEPS, guidance=1.0, complete=False)

    arguments = {"joint_attention_kwargs": {"drift": 1e-3}, "clip_skip": 0}
    advice(
        "when driven, its steps receive other values ({}). Leave arguments out one by one to find "
        "the cause, or use another pipeline",
        lambda: proven(**arguments),
        lambda: proven(clip_skip=0),
    )


def test_proof_refuses_cut_gradients_and_another_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = sd3()
    made = PipelinePolicy(pipe, call=SQUARE)
    with monkeypatch.context() as patch:
        patch.setattr(pipe.transformer, "forward", torch.no_grad()(pipe.transformer.forward))
        with pytest.raises(UserError, match="detaches the gradient"):
            made.prove(PROMPTS, steps=STEPS, guidance=1.0)
    decode, seen = pipe.vae.decode, []

    def drifting(latents: Any, **named: Any) -> Any:
        seen.append(1)
        return decode(latents * len(seen), **named)

    monkeypatch.setattr(pipe.vae, "decode", drifting)
    with pytest.raises(UserError, match="decoding its own last state is off"):
        made.prove(PROMPTS, steps=STEPS, guidance=1.0)


def test_proof_refuses_several_loops() -> None:
    class Twice(StableDiffusion3Pipeline):
        @functools.wraps(StableDiffusion3Pipeline.__call__)
        def __call__(self, *args: Any, **named: Any) -> Any:
            super().__call__(*args, **named)
            return super().__call__(*args, **named)

    pipe = sd3()
    pipe.__class__ = Twice
    with pytest.raises(UserError, match="8 times in 4 steps"):
        PipelinePolicy(pipe, call=SQUARE).prove(PROMPTS, steps=STEPS, guidance=1.0)


def test_proof_refuses_states_that_change_between_steps() -> None:
    """Inpainting puts the known part back after every step."""

    def halved(pipe: Any, step: int, time: Any, held: dict[str, Any]) -> dict[str, Any]:
        return {"latents": 0.5 * held["latents"]}

    class Blending(StableDiffusion3Pipeline):
        @functools.wraps(StableDiffusion3Pipeline.__call__)
        def __call__(self, *args: Any, **named: Any) -> Any:
            return super().__call__(*args, **named, callback_on_step_end=halved)

    pipe = sd3()
    pipe.__class__ = Blending
    with pytest.raises(UserError, match="changes its state between steps"):
        PipelinePolicy(pipe, call=SQUARE).prove(PROMPTS, steps=STEPS, guidance=1.0)


def test_index_dependent_velocities_exist_at_the_schedules_sigmas_only() -> None:
    made = policy(FAMILIES["sd3 with skipped layers"][1])
    velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=4.5)
    x = torch.randn(1, *made.shape(STEPS))
    with pytest.raises(UserError, match="depends on the step's index"):
        velocity(x, torch.tensor([0.3]), torch.tensor([0]))


def test_refusals() -> None:
    with pytest.raises(UserError, match="did you mean height"):
        policy({"heigth": 16})
    with pytest.raises(UserError, match=r"'latents'.*set by flowrl"):
        policy({"latents": None})
    for name in ("guidance_scale", "num_inference_steps", "sigmas"):
        advice(
            "{} of {} is set by {}: leave it out of `call`",
            lambda name=name: policy(SQUARE | {name: 3}),
            policy,
        )
    with pytest.raises(UserError, match=r"'guidance_scale'.*set by guidance"):
        policy({"guidance_scale": 3.0})
    with pytest.raises(UserError, match=r"rejects its arguments.*divisible"):
        policy({"height": 17, "width": 16})
    with pytest.raises(UserError, match="not supported"):
        policy({"ip_adapter_image": None})


def test_guidance_without_a_negative_prompt_has_no_effect_on_some() -> None:
    """Either way out of it ends in a proof: a negative prompt, or no scale, which is 1 or null."""
    call = FAMILIES["qwen"][1]
    bare = {key: value for key, value in call.items() if key != "negative_prompt"}
    pipe = qwen_image()

    def proven(call: dict[str, Any], guidance: float | None) -> str:
        made = PipelinePolicy(pipe, call=call)
        return str(made.prove(PROMPTS, steps=2, guidance=guidance, complete=False, gradient=False))

    assert "guided" in advice(
        "guidance {} has no effect on {} with {}: set model.call.negative_prompt, or leave "
        "guidance out",
        lambda: proven(bare, 4.5),
        lambda: proven(bare | {"negative_prompt": "bad"}, 4.5),
    )
    left_out = PipelineSettings.model_validate({"pipeline": "x"}).guidance.sample
    for scale in (left_out, None):
        assert isinstance(scale, float | None)
        proven(bare, scale)


def test_experts_without_a_file_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pipeline cannot write them, so they are written in a form of their own."""
    build, _ = FAMILIES["wan 2.2"]
    pipe = build()
    names = {"transformer": pipe.transformer, "transformer_2": pipe.transformer_2}
    assert lora.writes_adapters(pipe, names)
    monkeypatch.setattr(lora, "TWO_FILES", ())
    assert not lora.writes_adapters(pipe, names)


def test_refused_pipelines() -> None:
    pipe = flux()
    pipe.transformer.enable_cache(FirstBlockCacheConfig())

    def uncached() -> PipelinePolicy:
        pipe.transformer.disable_cache()
        return PipelinePolicy(pipe, call=SQUARE)

    advice(
        "keeps a cache between calls, so velocities would depend on earlier calls: call "
        "pipe.{}.disable_cache()",
        lambda: PipelinePolicy(pipe, call=SQUARE),
        uncached,
    )

    class NoPrompt(StableDiffusion3Pipeline):
        def __call__(self, latents: Any, num_inference_steps: int, output_type: str) -> None: ...

    class Changing(StableDiffusion3Pipeline):
        def prepare_latents(self, *args: Any, **named: Any) -> Any:
            return super().prepare_latents(*args, **named) * 2

    class NoStep:
        config: Any = {}  # noqa: RUF012

    class OtherStep:
        def step(self, velocity: Any, state: Any) -> None: ...

    pipe = sd3()
    pipe.__class__ = NoPrompt
    with pytest.raises(UserError, match="no `prompt`"):
        PipelinePolicy(pipe, call=SQUARE)
    pipe = sd3()
    vars(pipe)["scheduler"] = NoStep()
    with pytest.raises(UserError, match="no scheduler with a `step`"):
        PipelinePolicy(pipe, call=SQUARE)
    vars(pipe)["scheduler"] = OtherStep()
    with pytest.raises(UserError, match="step takes velocity, state"):
        PipelinePolicy(pipe, call=SQUARE)
    pipe = sd3()
    pipe.__class__ = Changing  # its `latents` are not the loop's, so they go in behind it
    made = PipelinePolicy(pipe, call=SQUARE)
    assert made.prove(PROMPTS, steps=STEPS, guidance=4.5).way == "pinned"
    entry = made.loop.traits.entry
    assert entry.output == 0


def test_stages_of_growing_resolution_are_refused_with_the_reason_in_their_code() -> None:
    """Helios Pyramid has no `num_inference_steps`, which is not what stands in the way."""
    kind = diffusers.HeliosPyramidPipeline
    with pytest.raises(UserError, match="HeliosPyramidPipeline steps each chunk in stages of grow"):
        checks.refuse_class(kind)
    with pytest.raises(UserError, match="steps each chunk in stages of growing resolution"):
        refuse_known(kind.__name__)


def test_a_solver_that_looks_at_a_level_twice() -> None:
    pipe = sd3()
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    made = PipelinePolicy(pipe, call=SQUARE)
    assert made.prove(PROMPTS, steps=STEPS, guidance=4.5).way == "pinned"
    schedule = made.schedule(STEPS)
    assert len(schedule.sigmas) == STEPS + 1 and len(schedule.visits) == 2 * STEPS - 1


@pytest.mark.slow
def test_offloaded_pipelines_are_driven_and_offloaded_again() -> None:
    pipe = sd3()
    pipe.enable_model_cpu_offload(device="cpu")
    made = PipelinePolicy(pipe, call=SQUARE)
    made.prove(PROMPTS, steps=STEPS, guidance=4.5)
    hooks = len(pipe._all_hooks)
    assert hooks and all(module._hf_hook is not None for module in made.denoisers)
    latents = noise(made)
    theirs = own(sd3(), latents, SQUARE, guidance_scale=4.5)
    assert torch.equal(own(pipe, latents, SQUARE, guidance_scale=4.5), theirs)
    assert len(pipe._all_hooks) == hooks


def test_driven_calls_do_not_repeat_the_pipelines_warnings() -> None:
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    logger = logging.getLogger("diffusers.pipelines.qwenimage.pipeline_qwenimage")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.WARNING)  # the command line quiets all of diffusers
    try:
        made = PipelinePolicy(qwen_image(), call=FAMILIES["qwen"][1])
        made.prove(PROMPTS, steps=STEPS, guidance=1.0)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert [record.levelname for record in seen] == ["WARNING"]  # of its own call
    assert not logger.disabled


def test_a_class_that_is_not_diffusers_own_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": ["pipeline", "MyPipeline"]}')
    with pytest.raises(UserError, match="pipelines with custom code cannot be loaded"):
        checks.from_pretrained(str(tmp_path), torch.float32)


@pytest.mark.parametrize("name", ["denoising_end", "denoising_start"])
def test_a_part_of_the_noise_levels_is_refused(name: str) -> None:
    takes = {name: Parameter(name, Parameter.KEYWORD_ONLY)}
    advice(
        "leaves some noise levels to another pipeline, but flowrl samples all of them: leave it "
        "out of `call`",
        lambda: checks.arguments("Some", {name: 0.8}, takes, None),
        lambda: checks.arguments("Some", {}, takes, None),
    )


def test_an_argument_that_a_pipeline_needs_comes_from_the_call() -> None:
    takes = inspect.signature(diffusers.CycleDiffusionPipeline.__call__).parameters
    taken = advice(
        "cannot be called without {}: set it in `call`",
        lambda: checks.arguments("CycleDiffusionPipeline", {}, takes, None),
        lambda: checks.arguments("CycleDiffusionPipeline", {"source_prompt": "a"}, takes, None),
    )
    assert taken == {"source_prompt": "a"}


@pytest.mark.quick_cases("tall")
@pytest.mark.parametrize(
    "sides",
    [
        lambda ratio: (max(1, round(ratio)), 1),
        lambda ratio: (1, 2 if ratio < 1 / 1.5 else 1),  # a list of allowed sizes: square and tall
        lambda ratio: (2 if 1.2 < ratio < 1.5 else 1, 1),
    ],
    ids=["wide", "tall", "between"],
)
def test_latents_of_the_pictures_shape_are_refused(
    sides: Callable[[float], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen-Image-Edit without height and width: other shapes would fail in the middle of a run."""
    call = {key: value for key, value in SQUARE.items() if key not in SIZE}
    picture = columns.placeholder_images(["image"], 16, 16)
    pipe = qwen_image_edit()
    sizes = lambda area, ratio: (*(16 * side for side in sides(ratio)), None)
    monkeypatch.setitem(vars(pipeline_qwenimage_edit), "calculate_dimensions", sizes)
    made = PipelinePolicy(pipe, call=call | picture | {"negative_prompt": "bad"})
    sized = advice(
        "makes latents in the shape of its image, so images of different shapes could not be "
        "trained on together: set height and width, or give rows columns of these names",
        lambda: made.prove(PROMPTS, steps=STEPS, guidance=4.5),
        lambda: PipelinePolicy(pipe, call=SQUARE | picture | {"negative_prompt": "bad"}),
    )
    assert sized.prove(PROMPTS, steps=STEPS, guidance=4.5).way == "pinned"
    by_row = made.guided(4.5, 4.5).proofs(PROMPTS, STEPS, [dict(SIZE)] * len(PROMPTS))
    assert len(by_row) == 1 and "equal" in by_row[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_a_weight_that_is_not_finite_is_named(part: str, value: float) -> None:
    pipe = sd3()
    module = getattr(pipe, part) if part == "transformer" else pipe.vae.decoder
    name, weight = next((n, p) for n, p in module.named_parameters() if n.endswith("weight"))
    with torch.no_grad():
        weight.view(-1)[0] = value
    place = f"{part}.{name}" if part == "transformer" else f"vae.decoder.{name}"
    with pytest.raises(UserError, match=f"tensor {place} has NaN or infinity"):
        PipelinePolicy(pipe, call=SQUARE).prove(PROMPTS, steps=STEPS, guidance=1.0)


@pytest.mark.slow
def test_a_weight_beyond_half_precision_is_finite_in_another_dtype(tmp_path: Path) -> None:
    pipe = sd3()
    with torch.no_grad():
        pipe.transformer.proj_out.bias[0] = 1e5  # float16 ends at 65504
    pipe.save_pretrained(tmp_path)

    def weights(dtype: torch.dtype) -> None:
        made = PipelinePolicy.load(str(tmp_path), dtype=dtype, device="cpu", call=SQUARE)
        refuse_weights("P", made.pipe.components)

    advice(
        "the tensor {} has NaN or infinity: load the model's files again, in another dtype if it "
        "was converted",
        lambda: weights(torch.float16),
        lambda: [weights(dtype) for dtype in (torch.float32, torch.bfloat16)],
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_pixel_that_is_not_finite_is_no_white(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = sd3()
    made = PipelinePolicy(pipe, call=SQUARE)
    conditioning, latents, real = made.encode(PROMPTS), noise(made), pipe.vae.decode

    def hot(latents: Any, **named: Any) -> Any:
        (media,) = real(latents, **named)
        media[0, 0, 0, 0] = value
        return (media,)

    assert made.decode(latents, conditioning, steps=STEPS, guidance=1.0).isfinite().all()
    monkeypatch.setattr(pipe.vae, "decode", hot)
    with pytest.raises(UserError, match="decoder vae outputs NaN or infinity"):
        made.decode(latents, conditioning, steps=STEPS, guidance=1.0)


def test_numbers_that_overflow_have_another_dtype_or_less_guidance() -> None:
    """float16 ends at 65504; in other dtypes the settings of a call are the cause."""

    def proven(dtype: torch.dtype, guidance: float) -> None:
        pipe = sd3().to(dtype)
        with torch.no_grad():
            pipe.transformer.proj_out.weight.mul_(60000)
        made = PipelinePolicy(pipe, call=SQUARE)
        made.prove(PROMPTS, steps=STEPS, guidance=guidance, complete=False)

    for dtype in (torch.float32, torch.bfloat16):
        advice(
            "predicts NaN or infinity, though its weights are finite: use model.dtype: float32 or "
            "bfloat16",
            lambda: proven(torch.float16, 1.0),
            lambda dtype=dtype: proven(dtype, 1.0),
        )
    advice(
        "predicts NaN or infinity, though its weights are finite: lower guidance, or leave",
        lambda: proven(torch.float32, 1e38),
        lambda: proven(torch.float32, 4.5),
    )


def test_a_decoder_beyond_half_precision_decodes_in_float32() -> None:
    pipe = sd3()
    with torch.no_grad():
        pipe.vae.decoder.conv_out.bias += 6e4
        pipe.vae.decoder.conv_out.weight *= 6e4 / pipe.vae.decoder.conv_out.weight.abs().max()

    def media(dtype: torch.dtype) -> torch.Tensor:
        made = PipelinePolicy(pipe.to(dtype), call=SQUARE)
        x, rows = noise(made), made.encode(PROMPTS)
        return made.decode(x, rows, steps=STEPS, guidance=1.0)

    pixels = advice(
        "its decoder {} outputs NaN or infinity, which would be white or black: lower train.lr, "
        "or decode in float32 (model.dtype: float32)",
        lambda: media(torch.float16),
        lambda: media(torch.float32),
    )
    assert pixels.isfinite().all()


def test_encodings_in_place_of_prompts_are_refused_without_their_numbers() -> None:
    said: list[str] = []

    def refused() -> None:
        try:
            policy(SQUARE | {"prompt_embeds": torch.randn(1, 7, 32)})
        except UserError as error:
            said.append(str(error))
            raise

    made = advice(
        "in `call` would apply to every prompt: leave it out, and write each prompt as a text",
        refused,
        policy,
    )
    assert "tensor([[" not in said[0]
    made.check_rows([{}, {}])
    assert len(made.encode(PROMPTS).prompts) == 2


def test_several_states_or_loops_are_refused() -> None:
    def stepped(*rows: int) -> list[Received]:
        return [Received(torch.zeros(n, 4), 0, torch.zeros(n, 4)) for n in rows]

    check_states("P", stepped(3, 3), steps=2, visits=2, rows=3)
    with pytest.raises(UserError, match=r"P steps \[3, 6\] states for 3 prompts"):
        check_states("P", stepped(3, 6), steps=2, visits=2, rows=3)
    with pytest.raises(UserError, match="4 times in 2 steps, but its loop 2 times"):
        check_states("P", stepped(3, 3, 3, 3), steps=2, visits=2, rows=3)
