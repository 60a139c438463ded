"""Tests of reward gradients before a run: the decoder's and each reward's."""

from collections.abc import Iterator

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.iteration.features.reward_gradient import NO_GRADIENT, differentiable_rewards
from flowrl.models.diffusers.batch import Driven, MediaBatch
from flowrl.session.session import Session
from rewards import Samples
from rewards.checks.gradient_test import gradient_test, slope_error
from rewards.checks.self_test import Prompts
from rewards.types import MediaForm


def prove_gradients(session: Session, form: MediaForm) -> Iterator[str]:
    """Test the gradients of the decoder and the rewards before a run; returns a sentence for each.

    UserError for tests that fail, or a warning with `train.self_test: warn`.
    """
    run, algorithm = session.run, session.algorithm
    all_rewards = session.rewards if algorithm.reward_gradient else session.intermediate_rewards
    rewards = differentiable_rewards(all_rewards)
    yield decoder_test(session)
    if run.train.self_test == "off":
        return
    samples = Prompts(session.prompts.texts, session.prompts.meta, *form)
    for name in rewards:
        try:
            yield f"reward {gradient_test(name, all_rewards[name], samples)}"
        except ValueError as error:
            if run.train.self_test == "raise":
                raise UserError(f"{error}; train.self_test: warn makes this a warning") from error
            yield f"warning: {error}"


def decoder_test(session: Session) -> str:
    """Decode one sample of noise with gradients. UserError if there is no gradient, or if it
    differs from finite differences."""
    policy, steps = session.learner.policy, session.algorithm.steps
    assert isinstance(policy, Driven)
    batch = MediaBatch(policy, policy.encode(*session.prompts.take([0])), steps)
    noise = torch.randn(1, *policy.shape(steps), generator=torch.Generator().manual_seed(0))
    x0 = (0.5 * noise).to(policy.device, policy.arithmetic).requires_grad_()
    prompt = torch.zeros(1, dtype=torch.long)
    with torch.enable_grad():
        media = batch.decode(x0, prompt, graded=True)
        if not media.requires_grad:
            raise UserError(f"{policy.name}: {NO_GRADIENT}")
        weights = torch.linspace(-1, 1, media.numel(), device=media.device).view_as(media)
        (slope,) = torch.autograd.grad((media * weights).sum(), x0, allow_unused=True)

    def score(x: Tensor, _: Samples) -> Tensor:
        return (batch.decode(x.to(x0), prompt) * weights).flatten(1).sum(1)

    samples = Samples(x0.detach(), ["noise"], prompt)
    error = slope_error(score, samples, slope)
    if not error <= 0.1:
        raise UserError(
            f"{policy.name}: the gradient of its decoder differs from finite differences by "
            f"{error:.0%}: {NO_GRADIENT}"
        )
    return f"decoder with gradients: its gradient agrees with finite differences to {error:.1%}"
