"""Hybrid inference: the last steps of a sample are the base's."""

from pathlib import Path

import pytest
import torch

from flowrl.models.diffusers.hybrid import HybridPolicy
from flowrl.models.diffusers.policy import PipelinePolicy
from tests.support.advice import advice
from tests.support.driving import PROMPTS, policy
from tests.support.runs import flowrl
from tests.support.tiny_pipelines import SQUARE, sd3

STEPS = 4


def changed(lora: bool) -> PipelinePolicy:
    made = policy()
    if lora:
        made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    with torch.no_grad():
        for name, p in made.trainable().items():
            if not lora or "lora_B" in name:
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return made


def latents(made: HybridPolicy | PipelinePolicy) -> torch.Tensor:
    with torch.no_grad():
        batch = made.open(PROMPTS, [{}, {}], STEPS)
        (rollout,) = batch.rollouts(made.plain(1), (0, 1), seed=0, iteration=0)
    return rollout.x0


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "all weights"])
def test_the_last_steps_are_the_bases(lora):
    """By hand: Euler steps with the trained velocity, and from the level on with the base's."""
    trained, base = changed(lora), PipelinePolicy(sd3(), call=SQUARE)
    for last in (1, 3):
        mixed = latents(HybridPolicy(trained, None if lora else base, last))
        ways = [m.bind(m.encode(PROMPTS), steps=STEPS, guidance=1.0) for m in (trained, base)]
        sigmas = trained.schedule(STEPS).sigmas
        with torch.no_grad():
            batch = trained.open(PROMPTS, [{}, {}], STEPS)
            noises: list[torch.Tensor] = []

            def kept(x, sigma, prompt, noises=noises, way=ways[0]):
                noises.append(x.clone())
                return way(x, sigma, prompt)

            object.__setattr__(batch, "ending", lambda painting, velocity, kept=kept: kept)
            batch.rollouts(trained.plain(1), (0, 1), seed=0, iteration=0)
            x = noises[0]
            for i in range(STEPS):
                way = ways[1] if i >= STEPS - last else ways[0]
                v = way(x, torch.full((2,), sigmas[i]), torch.tensor([0, 1]))
                x = x + (sigmas[i + 1] - sigmas[i]) * v
        torch.testing.assert_close(mixed, x, rtol=1e-5, atol=1e-5)
    assert not torch.equal(latents(trained), latents(base))  # and the adapters are on again


def test_as_many_steps_as_there_are_is_refused():
    made = changed(True)
    mixed = advice(
        "--base-steps {}: at least one of the {} steps of a sample must use the trained weights; "
        "use --weights base to sample with the base alone",
        lambda: latents(HybridPolicy(made, None, STEPS)),
        lambda: latents(HybridPolicy(made, None, STEPS - 1)),
    )
    assert not torch.equal(mixed, latents(made))


def test_texts_and_the_base_have_no_hybrid(capsys, tmp_path: Path):
    words = ("--model", "flowrl/demo/shapes-sd3", "--rewards", "brightness", "--base-steps", "2")
    assert flowrl("sample", *words, "a red circle", "--out", tmp_path / "out") == 2
    assert "--base-steps needs trained weights" in capsys.readouterr().err
    assert flowrl("sample", *words, "a red circle", "--steer", "best") == 2
    assert "exclude each other" in capsys.readouterr().err
