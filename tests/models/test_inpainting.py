"""Inpainting with weights that know no mask: whole samples, densities over free entries."""

import math
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import MatchingRows
from flowrl.likelihoods.transition import Transition
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from samplers import Chain, FlowSDE, Latents, Ode, Rollout, Tree, roll
from samplers.held import Held
from tests.support.advice import advice
from tests.support.driving import PROMPTS
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.pipelines import Special, tiny

torch.set_num_threads(1)
STEPS = 4
ORDINARY = {  # weights without channels for a mask
    "StableDiffusion(XL)?InpaintPipeline": Special({"unet": {"in_channels": 4}}),
    "StableDiffusion3InpaintPipeline": Special(
        {"transformer": {"in_channels": 16, "out_channels": 16}, "vae": {"latent_channels": 16}}
    ),
}
QUICK = ("StableDiffusionInpaintPipeline", "FluxInpaintPipeline")
SLOW = (
    "StableDiffusionXLInpaintPipeline", "StableDiffusion3InpaintPipeline",
    "FluxControlInpaintPipeline", "FluxControlNetInpaintPipeline", "FluxKontextInpaintPipeline",
    "Flux2KleinInpaintPipeline", "QwenImageInpaintPipeline", "QwenImageEditInpaintPipeline",
    "ZImageInpaintPipeline", "StableDiffusionXLControlNetUnionInpaintPipeline",
)  # fmt: skip


def inpainting(name: str, strength: float, **call: Any) -> PipelinePolicy:
    made = tiny(getattr(diffusers, name), SPECIALS | ORDINARY, SIZES)
    return PipelinePolicy(made.pipe, call={**made.call, "strength": strength, **call})


@pytest.mark.quick_cases("FluxInpaintPipeline-0.75")
@pytest.mark.parametrize("strength", [1.0, 0.75])
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_whole_samples_are_the_pipelines_own(name: str, strength: float) -> None:
    """The blend after each step is in the walk: latents and media, over all steps."""
    policy = inpainting(name, strength)
    guidance = None if policy.loop.guidance is None else 4.5
    replay = policy.prove(PROMPTS, steps=STEPS, guidance=guidance, gradient=False)
    held = policy.held(policy.loop.encode(PROMPTS, policy.loop.tried(())), STEPS)
    assert held is not None and 0.1 < float(held.free.float().mean()) < 0.9
    assert name not in QUICK or (held.begun is None) == (strength == 1.0)
    proof = prove_whole(policy, [*PROMPTS, "two blue cat"], (), replay)
    assert proof.failure() is None and proof.own_steps and proof.own is not None
    assert max(proof.own.latents, proof.flowrl.latents, proof.flowrl.media) < 2e-5


def rows_of_images() -> list[dict[str, Any]]:
    """Two prompts with an image and a mask of their own."""
    rows = []
    for i, colour in enumerate(("red", "blue")):
        mask = Image.new("L", (16, 16), 0)
        mask.paste(255, (0, 0, 16, 8) if i == 0 else (8, 0, 16, 16))
        image = Image.new("RGB", (16, 16), colour)
        rows.append({"prompt": PROMPTS[i], "image": image, "mask_image": mask})
    return rows


def opened(strength: float = 1.0) -> MediaBatch:
    policy = inpainting("FluxInpaintPipeline", strength).guided(None, None)
    return policy.open(PROMPTS, rows_of_images(), STEPS)


def test_soft_masks_give_way_to_black_and_white_ones() -> None:
    """Most pipelines round masks themselves; this one's processor is told not to."""
    policy, rows = inpainting("FluxInpaintPipeline", 1.0).guided(None, None), rows_of_images()
    policy.pipe.mask_processor.register_to_config(do_binarize=False)
    blurred = ImageFilter.GaussianBlur(2)
    soft = [{**row, "mask_image": row["mask_image"].filter(blurred)} for row in rows]
    advice(
        "the mask has soft edges, where the loop would mix the image into the state: use "
        "black-and-white masks with edges on the grid of the latents",
        lambda: sampled(policy.open(PROMPTS, soft, STEPS), Ode(1)),
        lambda: sampled(policy.open(PROMPTS, rows, STEPS), Ode(1)),
    )


def sampled(batch: MediaBatch, planner: Any) -> Rollout:
    (rollout,) = batch.rollouts(planner, (0, 1), seed=0, iteration=0)
    return rollout


@pytest.mark.quick_cases("0.75")
@pytest.mark.parametrize("strength", [1.0, 0.75])
def test_held_entries_follow_the_image_and_densities_leave_them_out(strength: float) -> None:
    """Plain loops over each row's entries, its own mask, in float64."""
    batch = opened(strength)
    rollout = sampled(batch, Chain(FlowSDE(0.7), 2))
    held = batch.owner.held(batch.conditioning, STEPS)
    assert held is not None and not torch.equal(held.free[0], held.free[1])
    for i, prompt in enumerate(rollout.prompt.tolist()):
        kept = ~held.free[prompt]
        torch.testing.assert_close(rollout.x0[i][kept], held.clean[prompt][kept])
    likelihood = Transition()
    credit = torch.ones(4, STEPS)
    for rows in likelihood.rows(rollout, credit, torch.ones(4, STEPS, dtype=torch.bool)):
        with torch.no_grad():
            found = likelihood.evaluate(batch.policy, rows).logp[:, 0]
            v = batch.policy(rows.x, rows.sigma, rows.prompt).double()
        s, to = float(rows.sigma[0]), float(rows.sigma_next[0])
        h, g = s - to, 0.7 * math.sqrt(s / (1 - (to if s > 0.9989 else s)))
        for i in range(4):
            total, count = 0.0, 0
            flat = [each[i].double().flatten().tolist() for each in (rows.x, v, rows.x_next)]
            for x, slope, after, free in zip(
                *flat, held.free[int(rows.prompt[i])].flatten().tolist(), strict=True
            ):
                if free:
                    noise = x + (1 - s) * slope
                    mean = x - h * (slope + g**2 * noise / (2 * s))
                    std = g * math.sqrt(h)
                    total += -0.5 * ((after - mean) / std) ** 2 - math.log(std)
                    total -= 0.5 * math.log(2 * math.pi)
                    count += 1
            assert float(found[i]) == pytest.approx(total / count, rel=1e-4)
        assert rows.old is not None
        torch.testing.assert_close(found, rows.old.logp[:, 0], atol=1e-5, rtol=1e-5)


def test_gradients_and_errors_are_over_free_entries() -> None:
    batch = opened()
    rollout, held = sampled(batch, Ode(2)), batch.owner.held(batch.conditioning, STEPS)
    assert held is not None
    (rows,) = Matching().rows(rollout, torch.ones(4, STEPS), torch.ones(4, STEPS).bool())
    torch.testing.assert_close(
        rows.x, (1 - rows.sigma[0]) * rows.x0 + rows.sigma[0] * rows.noise, atol=1e-5, rtol=1e-5
    )
    v = torch.randn_like(rows.x).requires_grad_()
    error = -Matching().evaluate(lambda *_: v, rows).logp[:, 0]
    error.sum().backward()
    assert v.grad is not None
    for i in range(4):
        free = held.free[int(rows.prompt[i])]
        target = (rows.noise - rows.x0)[i][free].double()
        wanted = (v[i][free].detach().double() - target).square().mean()
        assert float(error[i].detach()) == pytest.approx(float(wanted), rel=1e-5)
        assert not v.grad[i][~free].any() and bool(v.grad[i][free].all())
    with torch.no_grad():  # whatever the policy, a held entry's velocity is its target
        own = batch.policy(rows.x, rows.sigma, rows.prompt)
    kept = ~held.free[rows.prompt]
    torch.testing.assert_close(own[kept], (rows.noise - rows.x0)[kept], atol=1e-4, rtol=1e-4)


def test_weights_with_channels_for_the_mask_hold_nothing() -> None:
    made = tiny(diffusers.StableDiffusionInpaintPipeline, SPECIALS, SIZES)
    policy = PipelinePolicy(made.pipe, call=made.call)
    assert policy.held(policy.loop.encode(PROMPTS, policy.loop.tried(())), STEPS) is None


def test_another_blend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = inpainting("FluxInpaintPipeline", 1.0)
    put = Held.put
    monkeypatch.setattr(Held, "put", lambda self, x, *rest: put(self, x, *rest) + 1e-3 * x)
    with pytest.raises(UserError, match=r"changes its state between steps .* not as inpainting"):
        policy.prove(PROMPTS, steps=STEPS, guidance=None)


def gaussian(x: Tensor, sigma: Tensor, _: Tensor) -> Tensor:
    """The velocity of N(0, 1) data: the score is exact."""
    s = sigma.view(-1, 1)
    return (2 * s - 1) / ((1 - s) ** 2 + s**2) * x


def test_children_of_a_tree_hold_their_own_roots_noise() -> None:
    free = torch.tensor([[True, False]])
    held = Held(free, torch.tensor([[0.0, 3.0]]))
    latents = Latents((2,), held=held)
    (rollout,) = roll(
        Tree(FlowSDE(), (1,), 2, roots=2)((1.0, 0.75, 0.5, 0.25, 0.0), 0, 0),
        gaussian, latents, (0,), seed=0, iteration=0,
    )  # fmt: skip
    assert rollout.x0[:, 1].tolist() == [3.0] * 4 and len(set(rollout.x0[:, 0].tolist())) == 4
    before, after = rollout.edges[0].x[:, 1], rollout.edges[0].x_next[:, 1]
    torch.testing.assert_close(after, 0.25 * torch.full((2,), 3.0) + 0.75 * before)


def test_slopes_are_those_of_plain_loops_over_free_entries() -> None:
    """Flow-GRPO's density (arXiv:2505.05470, eq. 8-9) and a flow's regression, in float64: the
    slope of a row's mean in each entry of its velocity, 0 where the image is given."""
    free = torch.tensor([[True, False, True, True], [False, True, True, False]])
    drawn = torch.Generator().manual_seed(4)
    clean = torch.randn(2, 4, generator=drawn, dtype=torch.float64)
    latents = Latents((4,), dtype=torch.float64, held=Held(free, clean))
    credit = torch.ones(4, 3, dtype=torch.float64)
    for likelihood, plan in ((Transition(), Chain(FlowSDE(0.7), 2)), (Matching(2), Ode(2))):
        steps = plan((1.0, 0.7, 0.4, 0.0), 0, 0)
        (rollout,) = roll(steps, gaussian, latents, (0, 1), seed=0, iteration=0)
        for rows in likelihood.rows(rollout, credit, credit.bool()):
            v = torch.randn(rows.x.shape, generator=drawn, dtype=torch.float64).requires_grad_()
            found = likelihood.evaluate(lambda *_, v=v: v, rows).logp[:, 0]
            found.sum().backward()
            wanted = [log_density_and_slope(rows, i, v.tolist()[i], free) for i in range(len(v))]
            logp = torch.tensor([each for each, _ in wanted], dtype=torch.float64)
            slope = torch.tensor([each for _, each in wanted], dtype=torch.float64)
            torch.testing.assert_close(found.detach(), logp, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(v.grad, slope, rtol=1e-10, atol=1e-12)


def log_density_and_slope(
    rows: Any, row: int, v: list[float], free: Tensor
) -> tuple[float, list[float]]:
    """Of one row, as means over its free entries."""
    mine, s = free[int(rows.prompt[row])].tolist(), float(rows.sigma[row])
    total, slope = 0.0, [0.0] * len(v)
    for i, u in enumerate(v):
        if not mine[i]:
            continue
        if isinstance(rows, MatchingRows):
            error = u - (float(rows.noise[row, i]) - float(rows.x0[row, i]))
            total, slope[i] = total - error**2, -2 * error
            continue
        to, x, after = (
            float(rows.sigma_next[row]),
            float(rows.x[row, i]),
            float(rows.x_next[row, i]),
        )
        h, g = s - to, 0.7 * math.sqrt(s / (1 - (to if s == 1 else s)))
        away = after - (x - h * (u + g**2 * (x + (1 - s) * u) / (2 * s)))
        total -= away**2 / (2 * g**2 * h) + math.log(g * math.sqrt(h) * math.sqrt(2 * math.pi))
        slope[i] = -away / (g**2 * h) * h * (1 + g**2 * (1 - s) / (2 * s))
    return total / sum(mine), [each / sum(mine) for each in slope]
