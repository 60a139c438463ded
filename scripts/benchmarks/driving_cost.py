"""The cost of driving a pipeline from outside, compared with its bare denoiser call.

    python scripts/benchmarks/driving_cost.py --repeats 30

The two calls of a pair follow each other, in alternating order: the velocity that a run uses, and
the denoiser with the arguments that the pipeline gives it. Figures are seconds of the calling
thread (on a GPU: of the clock, synchronised), medians with quartiles. `mixed` is the velocity at a
level per row, compared with the velocity at one level.

demo      the demo's Stable Diffusion 3
kontext   FLUX.1-Kontext at the demo's width, with a conditioning image: random weights
slow      the demo's at so many rows that its denoiser takes 100 ms or more
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from diffusers import FluxKontextPipeline, FluxTransformer2DModel

from flowrl.cli.commands import quiet
from flowrl.models.diffusers.call import columns
from flowrl.models.diffusers.call.scheduler_standin import Patch, patched
from flowrl.models.diffusers.policy import PipelinePolicy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.tiny_pipelines import NAMED

PROMPT = "a red circle above a blue square"
STEPS = 8


@dataclass
class Arguments:
    repeats: int = 30
    rows: int = 32
    """Of demo and kontext."""
    slow_rows: int = 96
    cases: tuple[str, ...] = ("demo", "kontext", "slow")
    device: str = "cpu"


class Case(NamedTuple):
    policy: PipelinePolicy
    rows: int
    image: bool = False


def demo(rows: int, device: str) -> Case:
    policy = PipelinePolicy.load(
        "flowrl/demo/shapes-sd3",
        dtype=torch.float32,
        device=device,
        call={"max_sequence_length": 1},
    )
    return Case(policy, rows)


def kontext(rows: int, device: str) -> Case:
    """The width, layers and latents of the demo's model; twice its image tokens."""
    tiny = NAMED["FLUX.1-Kontext"]
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32,
        num_attention_heads=3, joint_attention_dim=16, pooled_projection_dim=16,
        axes_dims_rope=(8, 12, 12), guidance_embeds=True,
    )  # fmt: skip
    pipe = tiny.build()
    parts = {**pipe.components, "transformer": transformer.eval()}
    call = tiny.call | {"height": 32, "width": 32, "max_area": 1024}
    made = FluxKontextPipeline(**parts).to(device)
    policy = PipelinePolicy(made, call=call)
    policy.device = torch.device(device)
    return Case(policy, rows, image=True)


class Measured(NamedTuple):
    """Seconds of a call, by repeat."""

    driven: list[float]
    bare: list[float]
    mixed: list[float]
    outside: list[float]  # of driven calls, without the time in the denoiser


@torch.no_grad()
def measured(case: Case, repeats: int) -> Measured:
    policy, rows = case.policy, case.rows
    meta: list[dict[str, Any]] = []
    if case.image:
        meta = [dict(columns.placeholder_images(["image"], 32, 32))]
    conditioning = policy.encode([PROMPT], meta)
    velocity = policy.bind(conditioning, steps=STEPS, guidance=1.0)
    x = torch.randn(rows, *policy.shape(STEPS), device=policy.device)
    levels = torch.tensor(policy.schedule(STEPS).sigmas[:-1])
    prompt = torch.zeros(rows, dtype=torch.long)
    one = levels[2].expand(rows)
    many = levels[torch.arange(rows) % len(levels)]
    bare = denoiser_call(policy, lambda: velocity(x, one, prompt))
    calls = (lambda: velocity(x, one, prompt), bare, lambda: velocity(x, many, prompt))
    found: tuple[list[float], ...] = ([], [], [], [])
    for repeat in range(repeats + 2):
        order = (0, 1, 2) if repeat % 2 else (2, 1, 0)
        taken = {i: timed(calls[i], policy.device) for i in order}
        taken[3] = outside(policy, calls[0])
        if repeat > 1:  # the first two warm up
            for i, seconds in taken.items():
                found[i].append(seconds)
    return Measured(*found)


def outside(policy: PipelinePolicy, drive: Callable[[], Any]) -> float:
    """Seconds of a driven call less those inside its denoiser: two clocks on one call, so that no
    call is held against another."""
    (denoiser,) = policy.denoisers
    real, inside = denoiser.forward, []

    def forward(*args: Any, **named: Any) -> Any:
        given: list[Any] = []
        inside.append(timed(lambda: given.append(real(*args, **named)), policy.device))
        return given[0]

    with patched([Patch(denoiser, "forward", forward)]):
        return timed(drive, policy.device) - sum(inside)


def denoiser_call(policy: PipelinePolicy, drive: Callable[[], Any]) -> Callable[[], Any]:
    """A call of the denoiser with the arguments of a driven call."""
    (denoiser,) = policy.denoisers
    real, seen = denoiser.forward, []

    def forward(*args: Any, **named: Any) -> Any:
        seen.append((args, named))
        return real(*args, **named)

    with patched([Patch(denoiser, "forward", forward)]):
        drive()
    ((args, named),) = seen
    return lambda: denoiser(*args, **named)


def timed(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cpu":
        began = time.thread_time()
        call()
        return time.thread_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def spread(values: list[float], scale: float, digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle * scale:.{digits}f} ({low * scale:.{digits}f} to {high * scale:.{digits}f})"


def row(name: str, case: Case, found: Measured) -> str:
    over = [a / b - 1 for a, b in zip(found.driven, found.bare, strict=True)]
    mixed = [a / b - 1 for a, b in zip(found.mixed, found.driven, strict=True)]
    more = [a - b for a, b in zip(found.driven, found.bare, strict=True)]
    cells = (
        *(name, str(case.rows), spread(found.bare, 1e3, 1), spread(more, 1e3, 2)),
        *(f"{spread(over, 100, 1)} %", spread(found.outside, 1e3, 2), f"{spread(mixed, 100, 1)} %"),
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Arguments) -> None:
    quiet()
    torch.set_num_threads(1)
    print(
        "| case | rows | denoiser ms | driving adds ms | driving adds | outside the denoiser ms "
        "| a level a row adds |"
    )
    print("|---|---|---|---|---|---|---|")
    build = {
        "demo": lambda: demo(arguments.rows, arguments.device),
        "kontext": lambda: kontext(arguments.rows, arguments.device),
        "slow": lambda: demo(arguments.slow_rows, arguments.device),
    }
    for name in arguments.cases:
        case = build[name]()
        print(row(name, case, measured(case, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
