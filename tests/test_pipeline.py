"""A driven pipeline is the pipeline: the same bits, gradients, files, and nothing left behind."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    StableDiffusion3Pipeline,
)
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models import lora
from flowrl.models.conditioning import Conditioning, learn
from flowrl.models.drive import PerRow
from flowrl.models.pipeline import PipelinePolicy
from tests.tiny_pipelines import FAMILIES, SQUARE, flux, qwen_image, sd3

PROMPTS = ["a red cube", "two blue cat on the table"]
STEPS = 4
EXPECTED = {  # (way, rows of several sigmas share a call) with guidance
    "sd3": ("pinned", True),
    "sd3 with a negative prompt": ("pinned", True),
    "sd3 with skipped layers": ("forward", False),
    "flux": ("pinned", True),
    "lumina2": ("pinned", True),
    "lumina2 with truncated guidance": ("forward", False),
    "qwen": ("pinned", True),
    "wan 2.1": ("pinned", True),
    "wan 2.2": ("pinned", False),
}


def policy(call: Mapping[str, Any] = SQUARE, rows: int | None = None) -> PipelinePolicy:
    return PipelinePolicy(sd3(), call=call, rows_per_call=rows)


def own(pipe: Any, latents: Tensor, call: Mapping[str, Any], **more: Any) -> Tensor:
    """The pipeline's own call, without any of flowrl."""
    prompts = PROMPTS[: len(latents)]
    texts = {k: [v] * len(prompts) for k, v in call.items() if k == "negative_prompt"}
    given = dict(call) | texts | {"prompt": prompts, "latents": latents} | more
    return pipe(**given, num_inference_steps=STEPS, output_type="pt", return_dict=False)[0]


def sample(made: PipelinePolicy, latents: Tensor, guidance: float | None) -> Tensor:
    """Step the real scheduler's class with our velocity, then decode."""
    conditioning = made.encode(PROMPTS[: len(latents)])
    velocity = made.bind(conditioning, steps=STEPS, guidance=guidance)
    schedule, rows = made.schedule(STEPS), torch.arange(len(latents))
    stepper = copy.deepcopy(made.pipe.scheduler)
    # shifted already, so that they are set as they are
    stepper.set_timesteps(
        STEPS, **({"mu": 1.0} if stepper.config.get("use_dynamic_shifting") else {})
    )
    stepper.sigmas, stepper.timesteps = torch.tensor(schedule.sigmas), schedule.timesteps
    x = latents
    with torch.no_grad():
        for t, sigma in zip(schedule.timesteps, schedule.sigmas, strict=False):
            v = velocity(x, torch.full((len(x),), sigma), rows)
            x = stepper.step(v, t, x, return_dict=False)[0]
    return made.decode(x, conditioning, steps=STEPS, guidance=guidance)


@pytest.mark.parametrize("guidance", [None, 1.0, 4.5])
@pytest.mark.parametrize("family", FAMILIES)
def test_driven_is_the_pipelines_own_call_to_the_bit(family: str, guidance: float | None) -> None:
    """The scheduler stepped with our velocity, and decode, against `pipe(...)`."""
    build, call = FAMILIES[family]
    pipe = build()
    plain = copy.deepcopy(pipe)
    made = PipelinePolicy(pipe, call=call)
    latents = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    name = "true_cfg_scale" if family == "qwen" else "guidance_scale"
    more = {} if guidance is None else {name: guidance}
    theirs = own(plain, latents, call, **more)
    assert torch.equal(sample(made, latents, guidance), theirs)
    assert theirs.std() > 1e-3
    proof = made.prove(PROMPTS, steps=STEPS, guidance=guidance)
    if guidance == 4.5:
        assert (proof.way, proof.mixed) == EXPECTED[family]
    assert proof.euler == (None if family.startswith("wan") else 0.0)
    if family.startswith("wan"):
        assert theirs.shape == (2, 5, 3, 16, 16)


def test_guidance_and_arguments_change_the_velocity() -> None:
    """Equal bits would mean little if nothing mattered."""
    seen = []
    for call, guidance in (
        (SQUARE, None),  # SD3's default, 7
        (SQUARE, 1.0),
        (SQUARE, 4.5),
        (SQUARE | {"negative_prompt": "bad blurry"}, 4.5),
        (FAMILIES["sd3 with skipped layers"][1], 4.5),
    ):
        made = policy(call)
        velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=guidance)
        sigma = torch.full((2,), made.schedule(STEPS).sigmas[1])
        x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
        seen.append(velocity(x, sigma, torch.tensor([0, 1])).detach())
    gaps = [(a - b).abs().max() for i, a in enumerate(seen) for b in seen[:i]]
    assert min(gaps) > 1e-3


def test_schedule_is_the_schedulers_own() -> None:
    build, call = FAMILIES["flux"]
    made = PipelinePolicy(build(), call=call)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    slope = (1.15 - 0.5) / (4096 - 256)  # FLUX: mu is linear in the 16 packed tokens
    mu = 16 * slope + 0.5 - slope * 256
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25], mu=mu)
    schedule = made.schedule(STEPS)
    assert schedule.sigmas == tuple(scheduler.sigmas.tolist()) and schedule.sigmas[-1] == 0
    assert schedule.timesteps.tolist() == scheduler.timesteps.tolist()
    assert made.schedule(STEPS) is schedule and len(made.schedule(6).sigmas) == 7


def test_timesteps_of_sigmas() -> None:
    build, call = FAMILIES["wan 2.1"]
    schedule = PipelinePolicy(build(), call=call).schedule(STEPS)
    sigma = torch.tensor([schedule.sigmas[2], 0.4567, schedule.sigmas[0]], dtype=torch.float64)
    assert schedule.index(sigma).tolist() == [2, -1, 0]
    # UniPC truncates, so 999.999 is 999 there and a free sigma's timestep is truncated too
    assert schedule.times(sigma).tolist() == [schedule.timesteps[2].item(), 456, 999]
    free = policy().schedule(STEPS).times(torch.tensor([0.4567]))
    assert free.item() == pytest.approx(456.7, abs=1e-4)


def test_a_scheduler_that_was_changed_after_loading_keeps_its_shift() -> None:
    pipe = sd3(shift=1.0)
    pipe.scheduler.set_shift(5.0)
    expected = FlowMatchEulerDiscreteScheduler(shift=1.0)
    expected.set_shift(5.0)
    expected.set_timesteps(STEPS)
    made = PipelinePolicy(pipe, call=SQUARE)
    assert made.schedule(STEPS).sigmas == tuple(expected.sigmas.tolist())


def test_several_sigmas_in_one_call_are_one_by_one() -> None:
    for family in ("sd3", "wan 2.2"):
        build, call = FAMILIES[family]
        made = PipelinePolicy(build(), call=call)
        velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=4.5)
        x = torch.randn(4, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
        sigma = torch.tensor([made.schedule(STEPS).sigmas[i] for i in (3, 0, 2)] + [0.3333])
        prompt = torch.tensor([1, 0, 0, 1])
        single = [velocity(x[i : i + 1], sigma[i : i + 1], prompt[i : i + 1]) for i in range(4)]
        torch.testing.assert_close(
            velocity(x, sigma, prompt), torch.cat(single), rtol=1e-5, atol=1e-5
        )


def test_chunked_is_whole_to_rounding() -> None:
    whole, parts = policy(), policy(rows=2)
    x = torch.randn(5, *whole.shape(STEPS), generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor([1.0, 0.9, 0.5, 0.5, 0.1])
    prompt = torch.tensor([0, 1, 2, 1, 0])
    results = []
    for made in (whole, parts):
        conditioning = made.encode([*PROMPTS, "a dog"])
        velocity = made.bind(conditioning, steps=STEPS, guidance=4.5)
        media = made.decode(x, conditioning.take(prompt), steps=STEPS, guidance=4.5)
        assert media.dtype == torch.float32 and media.min() >= 0 and media.max() <= 1
        assert not media.requires_grad
        results.append((velocity(x, sigma, prompt), media))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_gradients_reach_adapters_and_full_weights() -> None:
    """And are those of the bare denoiser, called by hand."""
    made = policy()
    made.train_all()
    conditioning = made.encode(PROMPTS)
    velocity = made.bind(conditioning, steps=STEPS, guidance=1.0)
    x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    sigma = torch.full((2,), made.schedule(STEPS).sigmas[1])
    velocity(x, sigma, torch.tensor([0, 1])).square().mean().backward()
    seen = {name: p.grad for name, p in made.trainable().items()}
    transformer = made.pipe.transformer
    transformer.zero_grad()
    prompt, _, pooled, _ = conditioning.calls()[0]
    time = made.schedule(STEPS).timesteps[1].expand(2)
    bare = transformer(
        hidden_states=x, timestep=time, encoder_hidden_states=prompt, pooled_projections=pooled
    ).sample
    bare.square().mean().backward()
    for name, parameter in transformer.named_parameters():
        theirs = seen[f"transformer.{name}"]
        assert (theirs is None) == (parameter.grad is None)
        if theirs is not None:
            assert torch.equal(theirs, parameter.grad)

    made = policy()
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=4.5)
    velocity(x, sigma, torch.tensor([0, 1])).square().mean().backward()
    trainable = made.trainable()
    assert all(".lora_" in name and p.requires_grad for name, p in trainable.items())
    moved = [name for name, p in trainable.items() if p.grad is not None and p.grad.any()]
    # B is 0, so A gets none; the last block's prompt queries go nowhere in SD3
    nowhere = "transformer.transformer_blocks.1.attn.add_q_proj"
    ends = {name for name in trainable if ".lora_B." in name}
    assert {name for name in ends if not name.startswith(nowhere)} == set(moved)
    others = [p for p in made.pipe.transformer.parameters() if not p.requires_grad]
    assert others and all(p.grad is None for p in others)


def test_adapters_are_drawn_from_the_seed_alone() -> None:
    def drawn(seed: int, noise: int) -> dict[str, Tensor]:
        made = policy()
        torch.manual_seed(noise)
        before = torch.random.get_rng_state()
        made.add_lora(rank=8, alpha=8, targets=None, seed=seed)
        assert torch.equal(before, torch.random.get_rng_state())
        return {name: p.detach() for name, p in made.trainable().items()}

    one, same, other = drawn(0, 1), drawn(0, 2), drawn(1, 1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    starts = [name for name in one if ".lora_A." in name]
    assert not any(torch.equal(one[name], other[name]) for name in starts)
    assert not any(one[name].any() for name in one if ".lora_B." in name)
    values = torch.cat([one[name].flatten() for name in starts])
    assert values.std().item() == pytest.approx(1 / 8, rel=4 / math.sqrt(2 * len(values)))


def test_targets() -> None:
    found = lora.default_targets(sd3().transformer)
    assert {"attn.to_q", "attn.add_k_proj", "attn.to_out.0", "ff.net.0.proj", "ff.net.2"} <= set(
        found
    )
    assert not any("norm" in name or "embed" in name for name in found)
    made = policy()
    made.add_lora(rank=2, alpha=4, targets=["to_q"], seed=0)
    assert len(made.trainable()) == 2 * 2  # A and B in two blocks
    with pytest.raises(UserError, match="did you mean to_q"):
        policy().add_lora(rank=2, alpha=4, targets=["to_k", "to_qq"], seed=0)
    with pytest.raises(UserError, match="already"):
        made.add_lora(rank=2, alpha=4, targets=None, seed=0)


def nudge(made: PipelinePolicy) -> None:
    """What training would do, large enough to be seen."""
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.1)


@pytest.mark.parametrize("alpha", [4, 8])
def test_saved_adapter_in_a_plain_pipeline(alpha: int, tmp_path: Path) -> None:
    made = policy()
    latents = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    before = sample(made, latents, 4.5)
    made.add_lora(rank=4, alpha=alpha, targets=None, seed=0)
    assert torch.equal(sample(made, latents, 4.5), before)  # B = 0
    nudge(made)
    made.save(tmp_path)
    plain = sd3()
    plain.load_lora_weights(tmp_path)
    theirs = own(plain, latents, SQUARE, guidance_scale=4.5)
    ours = sample(made, latents, 4.5)
    assert torch.equal(ours, theirs) and (ours - before).abs().max() > 1e-2

    again = policy()
    again.load_weights(tmp_path)
    assert torch.equal(sample(again, latents, 4.5), theirs)
    assert again.trainable().keys() == made.trainable().keys()
    again.load_weights(tmp_path)  # once more, over adapters that are there
    assert torch.equal(sample(again, latents, 4.5), theirs)


def test_saved_full_weights_by_from_pretrained(tmp_path: Path) -> None:
    made = policy()
    latents = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    made.train_all()
    nudge(made)
    made.save(tmp_path)
    ours = sample(made, latents, 4.5)
    parts: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}  # as diffusers wants it
    plain = StableDiffusion3Pipeline.from_pretrained(tmp_path, **parts)
    assert torch.equal(ours, own(plain, latents, SQUARE, guidance_scale=4.5))
    again = policy()
    again.load_weights(tmp_path)
    assert torch.equal(ours, sample(again, latents, 4.5))
    with pytest.raises(UserError, match="no saved weights"):
        again.load_weights(tmp_path / "vae")

    index = tmp_path / "model_index.json"  # a component that is not even listed
    text = index.read_text()
    start = text.index('"text_encoder_3"')
    index.write_text(text[:start] + text[text.index('"', text.index("]", start)) :])
    loaded = PipelinePolicy.load(
        str(tmp_path), dtype=torch.float32, device="cpu", call=SQUARE, rows_per_call=2
    )
    assert torch.equal(ours, sample(loaded, latents, 4.5))
    assert not any(p.requires_grad for p in loaded.trainable().values())
    with pytest.raises(UserError, match="no diffusers pipeline"):
        PipelinePolicy.load(str(tmp_path / "x"), dtype=torch.float32, device="cpu", call=SQUARE)


def test_half_precision_keeps_the_states_and_says_its_dtype() -> None:
    made = PipelinePolicy(sd3().to(torch.bfloat16), call=SQUARE)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=4.5)
    assert proof.dtype == "bfloat16" and "bfloat16" in str(proof)
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    assert {p.dtype for p in made.trainable().values()} == {torch.float32}
    velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=4.5)
    v = velocity(torch.randn(2, *made.shape(STEPS)), torch.ones(2), torch.tensor([0, 1]))
    assert v.dtype == torch.float32 and v.requires_grad


def test_conditioning_rows_are_the_pipelines_own_encoding() -> None:
    made = policy(SQUARE | {"negative_prompt": "bad blurry"}, rows=1)
    conditioning = made.encode([*PROMPTS, PROMPTS[0]])
    assert len(conditioning) == 3
    theirs = sd3().encode_prompt(
        PROMPTS, PROMPTS, PROMPTS, negative_prompt="bad blurry", max_sequence_length=16
    )
    taken = conditioning.take(torch.tensor([2, 1]))
    for ours, expected in zip(taken.calls()[0], theirs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    both = Conditioning.cat([taken, conditioning.take([0])])
    assert len(both) == 3 and torch.equal(both.calls()[0][0][2], taken.calls()[0][0][0])
    with pytest.raises(IndexError):
        conditioning.take([3])


def test_lengths_are_padded_only_where_they_differ() -> None:
    """Qwen-Image leaves the mask out where nothing is padded; joining brings it back."""
    call = FAMILIES["qwen"][1] | {"max_sequence_length": 64}
    made = PipelinePolicy(qwen_image(), call=call, rows_per_call=1)
    joined = made.encode(PROMPTS)
    embeds, mask = joined.calls()[0]
    theirs, their_mask = qwen_image().encode_prompt(PROMPTS)
    torch.testing.assert_close(embeds, theirs, rtol=1e-5, atol=1e-6)
    assert mask.dtype == their_mask.dtype and torch.equal(mask, their_mask)
    assert made.encode([PROMPTS[0]] * 3).calls()[0][1] is None


def test_learn_takes_lists_and_refuses_what_has_no_rows() -> None:
    def lists(prompts: Any) -> tuple[Any, ...]:
        rows = [torch.full((len(p.split()), 2), float(len(p))) for p in prompts]
        return ((rows, None, torch.arange(3)),)

    layout = learn(lists, "Some")
    joined = Conditioning.cat(
        [Conditioning(layout, lists(p)[0], len(p)) for p in (["a b", "c"], ["d e f"])]
    )
    rows, nothing, same = joined.take([2, 0]).calls()[0]
    assert [len(row) for row in rows] == [3, 2] and nothing is None
    assert torch.equal(same, torch.arange(3))
    for bad in (
        lambda prompts: (torch.zeros(2 * len(prompts), 3),),
        lambda prompts: (torch.zeros(4, len(prompts[0])),),
        lambda prompts: (len(prompts),),
    ):
        with pytest.raises(UserError, match="Some"):
            learn(bad, "Some")

    def unmasked(prompts: Any) -> tuple[Any, ...]:
        return (torch.zeros(len(prompts), max(len(p) for p in prompts), 3),)

    layout = learn(unmasked, "Some")
    parts = [Conditioning(layout, unmasked([p]), 1) for p in ("a", "bc")]
    with pytest.raises(UserError, match="no mask"):
        Conditioning.cat(parts)


def test_one_timestep_a_row_is_repeated_for_guidance() -> None:
    times = PerRow(torch.tensor([3.0, 5.0]))
    assert times.expand(4).tolist() == [3, 5, 3, 5]
    assert (1 - times / 10).expand(2).tolist() == pytest.approx([0.7, 0.5])
    with pytest.raises(ValueError, match="expanded"):
        times.expand(3)


@pytest.mark.parametrize("family", ["sd3", "sd3 with skipped layers"])
def test_nothing_is_left_behind(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After driving, and after an error in the middle of it, the pipeline is as it was."""
    build, call = FAMILIES[family]
    pipe = build()
    made = PipelinePolicy(pipe, call=call)
    latents = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    scheduler, config = pipe.scheduler, dict(pipe.config)
    velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=4.5)
    cleanings = []
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
    with pytest.raises(UserError, match=r"'guidance_scale'.*set by guidance"):
        policy({"guidance_scale": 3.0})
    with pytest.raises(UserError, match=r"refuses its arguments.*divisible"):
        policy({"height": 17, "width": 16})
    with pytest.raises(UserError, match="not supported"):
        policy({"ip_adapter_image": None})
    plain = {key: value for key, value in FAMILIES["qwen"][1].items() if key != "negative_prompt"}
    with pytest.raises(UserError, match=r"no effect.*negative_prompt"):
        PipelinePolicy(qwen_image(), call=plain).prove(PROMPTS, steps=STEPS, guidance=4.5)
    with pytest.raises(UserError, match="cannot save adapters of its transformer_2"):
        build, call = FAMILIES["wan 2.2"]
        PipelinePolicy(build(), call=call).add_lora(rank=2, alpha=2, targets=None, seed=0)


def test_refused_pipelines() -> None:
    pipe = sd3()
    pipe.scheduler = DDIMScheduler()
    with pytest.raises(UserError, match="DDIMScheduler, which is not flow matching"):
        PipelinePolicy(pipe, call=SQUARE)
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    with pytest.raises(UserError, match="7 timesteps"):
        PipelinePolicy(pipe, call=SQUARE).schedule(STEPS)
    pipe = flux()
    pipe.transformer.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(UserError, match="disable_cache"):
        PipelinePolicy(pipe, call=SQUARE)

    class NoLatents(StableDiffusion3Pipeline):
        def __call__(self, prompt: Any, num_inference_steps: int, output_type: str) -> None: ...

    class NoStep:
        config: Any = {}  # noqa: RUF012

    pipe = sd3()
    pipe.__class__ = NoLatents
    with pytest.raises(UserError, match="no `latents`"):
        PipelinePolicy(pipe, call=SQUARE)
    pipe = sd3()
    vars(pipe)["scheduler"] = NoStep()
    with pytest.raises(UserError, match="no scheduler with a `step`"):
        PipelinePolicy(pipe, call=SQUARE)
