"""The proof over a whole sample: flowrl's latents and media against the pipeline's own.

The proof at load compares every step by itself, from the pipeline's own states. Here errors can
accumulate over all steps, as they do in a run. Two claims, kept separate:

(a)  the pipeline's own scheduler, stepped with flowrl's velocities from flowrl's first state,
     reproduces its latents and media;
(b)  flowrl's own Euler steps do, if the scheduler's steps are Euler's (`Replay.own_steps`).

The effect of rounding is measured: the pipeline's own call is repeated from a first state that
differs by one rounding unit of the network.

Not covered: claim (a) of a scheduler that draws noise, in a pipeline that takes no `latents` (one
generator serves both draws, so they cannot be repeated); claim (b) for schedulers whose steps
flowrl's steps replace: the difference is printed, without a bound.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.call.inputs.columns import Extra
from flowrl.models.diffusers.call.results.proof_checks import largest_difference
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.replay.proof_neighbours import ROUNDING_MARGIN, rounding_unit
from flowrl.models.diffusers.replay.replay import Replay
from flowrl.models.diffusers.whole.whole_sample import WholeSample

WHOLE_FLOOR = 1e-4  # of the latents' size, and of media in 0..1: rounding in no dtype is finer
LARGEST_ROUNDING = 0.01  # of the latents' size and of media: beyond it nothing is shown
LEGEND = (
    "largest differences from the pipeline's own call, of latents as a share of their size, of "
    "media in 0..1: (a) its own scheduler with flowrl's velocities; (b) flowrl's steps; alone: a "
    "row sampled alone, from the same in its batch; rounding: of one unit in the first state"
)
HEADER = ("steps", "guidance", "quantity", "(a)", "(b)", "alone", "rounding")


@dataclass(frozen=True)
class Deviation:
    """Largest differences: of latents relative to their size, of media in 0..1."""

    latents: float
    media: float

    @classmethod
    def between(cls, ours: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> "Deviation":
        latents, media = (largest_difference(a, b) for a, b in zip(ours, reference, strict=True))
        return cls(latents / float(reference[0].abs().max()), media)


@dataclass(frozen=True)
class WholeProof:
    """Proof of a whole sample at one number of steps and one guidance scale.

    own       claim (a); None if the scheduler's draws are unknown
    flowrl    claim (b)
    own_steps whether flowrl's steps are the scheduler's own; otherwise (b) is printed without a
    bound
    alone     a row sampled alone, compared with the same row in the batch; None for a single row
    rounding  effect of one rounding unit in the first state on the pipeline's own call
    unit      that unit
    repeated  whether the pipeline's own call, made twice, is equal to the bit
    """

    steps: int
    guidance: float | None
    own: Deviation | None
    flowrl: Deviation
    own_steps: bool
    alone: Deviation | None
    rounding: Deviation
    unit: float
    repeated: bool = True

    @property
    def unshown(self) -> str | None:
        """Why neither claim can be shown; None if they can."""
        if not self.repeated:
            return "the pipeline's own call, made twice, differs from itself"
        for away in (self.rounding.latents, self.rounding.media):
            if not away <= LARGEST_ROUNDING:  # nor where it is not a number
                return f"one rounding unit in the first state changes its own call by {away:.2g}"
        return None

    def failure(self) -> str | None:
        """A sentence on a claim that does not hold; None if all claims hold, or no claim can be
        tested."""
        if self.unshown is not None:
            return None
        claims = {"its own scheduler with flowrl's velocities makes": (self.own, 1.0)}
        if self.own_steps:  # the scheduler may round its state at every step
            claims["flowrl's own steps make"] = (self.flowrl, math.sqrt(self.steps))
        for name, (away, times) in claims.items():
            for output in ("latents", "media") if away is not None else ():
                ours, rounding = getattr(away, output), getattr(self.rounding, output)
                if not ours <= times * (ROUNDING_MARGIN * rounding + max(WHOLE_FLOOR, self.unit)):
                    return (
                        f"over {self.steps} steps at guidance {self.guidance}, {name} {output} "
                        f"that are {ours:.3g} away from the pipeline's own, while rounding "
                        f"explains only {rounding:.3g}"
                    )
        return None

    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table below HEADER."""
        rows = []
        for output in ("latents", "media"):
            cells = [
                "-" if d is None else f"{getattr(d, output):.1e}"
                for d in (self.own, self.flowrl, self.alone, self.rounding)
            ]
            cells[1] += "" if self.own_steps else " (stands in)"
            if self.unshown is not None:
                cells[:3] = ["not shown"] * 3
            rows.append((str(self.steps), str(self.guidance), output, *cells))
        return rows


def prove_whole(
    policy: PipelinePolicy,
    prompts: Sequence[str],
    meta: Sequence[Mapping[str, object]],
    replay: Replay,
) -> WholeProof:
    """Sample some prompts in one batch both ways, with the first prompt's images.

    `replay` is the proof for these steps and this guidance.
    """
    prompts, meta = (prompts[:1], meta[:1]) if policy.loop.traits.single else (prompts, meta)
    extras = _extras(policy, meta, prompts)

    def sample(rows: int) -> WholeSample:
        conditioning = policy.loop.encode(prompts[:rows], extras[:rows])
        batch = MediaBatch(policy, conditioning, replay.steps)
        return WholeSample(policy, batch, 0, replay.guidance)

    whole = sample(len(prompts))
    reference, again, flowrl = whole.own(), whole.own(), whole.flowrl()
    ours = flowrl, whole.media(flowrl)
    comparable = whole.given is not None or not replay.noisy or replay.sampler
    stepped = whole.stepped() if comparable else None
    alone = None
    if whole.given is not None and len(prompts) > 1:
        single = sample(1)
        latents = single.flowrl()
        among = whole.media(flowrl, together=False) if replay.drawn else ours[1]
        alone = Deviation.between((latents, single.media(latents)), (flowrl[:1], among[:1]))
    unit = rounding_unit(policy.loop)
    policy.frozen.rest()
    return WholeProof(
        steps=replay.steps,
        guidance=replay.guidance,
        own=None
        if stepped is None
        else Deviation.between((stepped, whole.media(stepped)), reference),
        flowrl=Deviation.between(ours, reference),
        own_steps=replay.own_steps,
        alone=alone,
        rounding=Deviation.between(whole.own(unit), reference),
        unit=unit,
        repeated=all(torch.equal(*pair) for pair in zip(reference, again, strict=True)),
    )


def deviations(proofs: Sequence[WholeProof]) -> str:
    """Deviations as text, a line for latents and a line for media of each proof."""
    lines = [HEADER, *(row for proof in proofs for row in proof.rows())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _extras(
    policy: PipelinePolicy, meta: Sequence[Mapping[str, object]], prompts: Sequence[str]
) -> tuple[Extra, ...]:
    loop = policy.loop
    extras = loop.extras(meta, prompts) if loop.row_extras(meta) else ()
    tried = loop.tried(extras)
    return tried if extras else tried[:1] * len(prompts)
