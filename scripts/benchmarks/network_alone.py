"""Calls of a run's network with the arguments of a driven call, and nothing of flowrl around it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.models.diffusers.call.drive.patches import Patch, patched
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.session.session import Session

Call = Callable[[], Any]


def denoiser_calls(policy: PipelinePolicy, drive: Call) -> list[Call]:
    """The calls of the first denoiser that `drive` makes, each with its own arguments: several if
    guidance asks for the prompt and for its absence one after the other."""
    denoiser = policy.denoisers[0]
    real, seen = denoiser.forward, list[tuple[Any, Any]]()

    def forward(*args: Any, **named: Any) -> Any:
        seen.append((args, named))
        return real(*args, **named)

    with patched([Patch(denoiser, "forward", forward)]):
        drive()
    return [lambda a=args, n=named: denoiser(*a, **n) for args, named in seen]


def network_alone(session: Session, rows: int) -> tuple[Call, Call]:
    """All network calls of one velocity of so many rows: without gradients, and with a backward
    pass, after which gradients are dropped."""
    policy: Any = session.learner.policy
    steps = session.algorithm.steps
    batch = policy.open(["a red ball"], [{}], steps)
    x = torch.randn(rows, *policy.shape(steps)).to(session.accelerator.device)
    sigma = torch.full((rows,), policy.schedule(steps).sigmas[1])
    prompt = torch.zeros(rows, dtype=torch.long)
    with torch.no_grad():
        batch.policy(x, sigma, prompt)  # the first call tries how the pipeline can be driven
        calls = denoiser_calls(policy, lambda: batch.policy(x, sigma, prompt))

    def frozen() -> None:
        with torch.no_grad():
            for call in calls:
                call()

    def graded() -> None:
        outputs = [call() for call in calls]
        firsts: list[Tensor] = [out[0] if isinstance(out, tuple) else out.sample for out in outputs]
        torch.stack([each.float().square().mean() for each in firsts]).mean().backward()
        session.learner.policies.forget_gradients()

    return frozen, graded
