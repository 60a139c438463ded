"""Compare an engine's log-densities with the learner's, and judge the difference.

The engine samples some chains, and the learner evaluates their steps. The difference is held
against the learner's own noise on the same steps: in another batch shape, and in the engine's
precision. n transitions.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import UserError
from flowrl.likelihoods.rows import TransitionRows, stacked, take
from flowrl.likelihoods.transition import Transition
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.engine.rolls import EngineRolls
from flowrl.models.gap import Gap
from samplers import Chain, FlowSDE

_NOISE_BOUND = 10.0  # times the noise
_LEAST_NOISE = 1e-6  # nats: kernels differ by as much in float32
_PROMPTS, _GROUP, _SHAPE = 4, 4, 8  # prompts, samples of each, rows in a call
_PROBED = 2  # samples of a prompt that are compared in each iteration
_HALVES = {
    torch.bfloat16: torch.float16,
    torch.float16: torch.bfloat16,
}  # half precision, otherwise


@dataclass(frozen=True)
class EngineComparison:
    """Steps that an engine took, and the learner's log-densities of them.

    texts, meta  the prompts and their rows, for another encoding of them
    """

    policy: Any
    batch: MediaBatch
    rows: TransitionRows
    texts: Sequence[str]
    meta: Sequence[Mapping[str, Any]]

    @classmethod
    def drawn(
        cls,
        policy: Any,
        texts: Sequence[str],
        meta: Sequence[Mapping[str, Any]],
        steps: int,
        iteration: int = 0,
        group: int = _GROUP,
    ) -> "EngineComparison":
        """Let the engine sample chains of Flow-SDE steps of these prompts."""
        opened = policy.open(texts, meta, steps)
        batch = opened if isinstance(opened, MediaBatch) else opened.by_size[0]
        draws = range(len(batch.conditioning))
        plan = Chain(FlowSDE(), group)
        (rollout,) = batch.rollouts(plan, draws, seed=0, iteration=iteration)
        nodes = len(rollout.prompt), len(rollout.plan.steps)
        blank, mask = torch.zeros(nodes), torch.ones(nodes, dtype=torch.bool)
        rows = stacked(Transition().rows(rollout, blank, mask))
        return cls(policy, batch, rows, texts, meta)

    @property
    def theirs(self) -> Float[Tensor, " n"]:
        assert self.rows.old is not None, "an answer has log-densities"
        return self.rows.old.logp[:, 0].cpu()

    @torch.no_grad()
    def ours(self, shape: int = _SHAPE, dtype: torch.dtype | None = None) -> Float[Tensor, " n"]:
        """Log-densities under the learner's present weights, `shape` rows in a call, or in another
        precision."""
        batch, device = self.batch, self.rows.x_next.device
        cast = nullcontext() if dtype is None else torch.autocast(device.type, dtype)
        with cast:
            if dtype is not None:
                opened = self.policy.open(self.texts, self.meta, batch.steps)
                batch = opened if isinstance(opened, MediaBatch) else opened.by_size[0]
            owner = batch.owner
            velocity = owner.bind(
                batch.conditioning, steps=batch.steps, guidance=owner.guidance.sample
            )
            likelihood = Transition()
            parts = torch.arange(len(self.rows.prompt)).split(shape)
            logp = [likelihood.evaluate(velocity, take(self.rows, at)).logp for at in parts]
        return torch.cat(logp)[:, 0].cpu().to(self.theirs.dtype)

    def noise(
        self, logp: Float[Tensor, " n"], model: torch.dtype, engine: torch.dtype
    ) -> tuple[Gap, str]:
        """The learner's own noise, and its sources. `model`, `engine`: the two precisions."""
        gap, sources = Gap(_LEAST_NOISE, _LEAST_NOISE), ["another batch shape"]
        gap = gap.or_more(Gap.of(logp - self.ours(shape=1)))
        other = engine if engine != model else _HALVES.get(model)
        if other is None or other == torch.float32:  # the same arithmetic, or a finer one
            return gap, " and ".join(sources)
        rounded = self.ours(dtype=other)
        if bool(rounded.isfinite().all()):  # float16 overflows in some networks
            gap = gap.or_more(Gap.of(logp - rounded))
            sources.append(str(other).removeprefix("torch."))
        return gap, " and ".join(sources)


def spread_places(count: int, most: int = _PROMPTS) -> list[int]:
    """Some of `count` places, spread_places evenly."""
    shown = min(most, count)
    return [i * count // shown for i in range(shown)]


def prove_engine(
    rolls: EngineRolls,
    drawn: EngineComparison,
    model: torch.dtype,
    engine: torch.dtype | None,
) -> str:
    """Compare an engine with the learner, and say the difference. UserError for other weights. The
    noise becomes the bound of the run's alarm. `engine`: its precision; None: the model's."""
    logp = drawn.ours()
    gap = Gap.of(logp - drawn.theirs)
    noise, sources = drawn.noise(logp, model, engine or model)
    words = f"{gap}, over {len(logp)} steps; the pipeline's own noise is {noise} ({sources})"
    if not gap.within(noise, _NOISE_BOUND):
        raise UserError(
            f"model.engine: log-densities of {rolls.place} differ from the pipeline's own by "
            f"{words}. More than {_NOISE_BOUND:g} times this noise is another model, another "
            "guidance, or weights that it did not load: start it with the weights of "
            "model.pipeline; if its network computes in half precision, set model.engine.dtype"
        )
    rolls.allow(_NOISE_BOUND * noise.mean)
    return (
        f"{rolls.place} draws the samples; its log-densities differ from the pipeline's own by "
        f"{words}"
    )


def probed(policy: Any, text: str, meta: Mapping[str, Any], steps: int, iteration: int) -> float:
    """Mean difference of log-densities, in nats, on a few chains of one prompt."""
    rows = [meta] if meta else []
    drawn = EngineComparison.drawn(policy, [text], rows, steps, iteration, _PROBED)
    return Gap.of(drawn.ours() - drawn.theirs).mean
