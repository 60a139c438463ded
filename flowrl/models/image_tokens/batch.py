"""Encoded prompts of images by tokens: rollouts of their codes, and decoded images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.media.statistics import Statistics, WeightedMean, image_statistics
from flowrl.models.call_sizes import CallSizes
from flowrl.models.evaluation_counter import Meter
from flowrl.models.image_tokens.drawing import CodeSampler
from flowrl.models.image_tokens.family import GuidedCodes, PromptTokens
from flowrl.models.image_tokens.scores import CodeScores
from flowrl.models.shards import directly
from samplers import Sampling
from samplers.completions import TextPlan, TextPlanner, TextRollout
from samplers.generate import Writer
from samplers.host import uploaded
from samplers.slices import DrawsSlice, draw_slices, joined_texts


@dataclass(frozen=True)
class CodeBatch:
    """A `flowrl.models.policy.Batch` of images whose completions are the codes of their pixels.

    prompts  the prompts' tokens
    sizes    limits of the rows per call
    calls    runs a function of the model
    """

    guided: GuidedCodes
    model: Any
    prompts: Sequence[PromptTokens]
    steps: int
    sizes: CallSizes
    calls: Callable[..., Any] = directly
    meter: Meter = field(default_factory=Meter)

    @property
    def policy(self) -> CodeScores:
        return CodeScores(self.guided, self.prompts, self.model.device, self.calls)

    @torch.no_grad()
    def rollouts(
        self,
        plan: TextPlanner,
        draws: Sequence[int],
        *,
        seed: int,
        iteration: int,
        sampling: Sampling[TextRollout] = Sampling(),
    ) -> tuple[TextRollout, ...]:
        """Sample the images' codes. Noise is keyed as in `samplers.generate.Writer`, and by
        position."""
        assert not sampling.keep_mean, "codes have no means"
        rollouts: list[TextRollout] = []
        plans = plan([0.0] * (self.steps + 1), iteration, seed)
        whole = DrawsSlice(0, tuple(draws))
        for index, text_plan in enumerate(plans):
            slices = self._slices(text_plan, whole, sampling) if len(plans) == 1 else [whole]
            written: list[TextRollout] = []
            for piece in slices:
                prompts = self.prompts[piece.first : piece.first + len(piece.draws)]
                sampler = CodeSampler(self.guided, self.model, prompts, self.sizes.sampling)
                # a request's contexts are codes alone, since codes and text tokens share numbers
                writer = Writer(sampler, [()] * len(prompts), piece.draws, seed, iteration)
                rollout = writer.write(text_plan, index)
                self.meter.add(int(rollout.own.sum()))
                written.append(replace(rollout, prompt=rollout.prompt + piece.first))
                if sampling.on_slice is not None and len(slices) > 1:
                    sampling.on_slice(written[-1])
            rollouts.append(written[0] if len(slices) == 1 else joined_texts(written, whole.draws))
            sampling.announce(rollouts, len(plans))
        return tuple(rollouts)

    def _slices(
        self, plan: TextPlan, whole: DrawsSlice, sampling: Sampling[TextRollout]
    ) -> list[DrawsSlice]:
        rows = self.sizes.sampling
        if sampling.on_slice is None or rows is None:
            return [whole]
        return list(draw_slices(plan, whole.draws, rows, self.sizes.decoding))

    @torch.no_grad()
    def media(self, rollout: TextRollout) -> Float[Tensor, "n 3 h w"]:
        """Decode codes to images in 0..1, some at a time."""
        ids = uploaded(rollout.ids, self.model.device)
        size = self.sizes.rows("decoding", len(ids))
        return torch.cat([self.guided.family.decode(part) for part in ids.split(size)])

    def statistics(self, rollout: TextRollout, media: Float[Tensor, "n 3 h w"]) -> Statistics:
        """Image statistics, and `surprise`: minus the sampler's mean log-probability per code, in
        nats."""
        statistics = image_statistics(media, rollout.prompt)
        codes = int(rollout.lengths.sum())
        surprise = -float(rollout.logp.double().sum()) / max(codes, 1)
        statistics.means["surprise"] = WeightedMean.of(surprise, codes)
        return statistics.named("image/")
