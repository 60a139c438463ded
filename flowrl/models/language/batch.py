"""Encoded prompts of a language model, and the completions sampled for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.credit.process import Information
from flowrl.media.statistics import Statistics, WeightedMean, text_statistics
from flowrl.models.evaluation_counter import Meter
from flowrl.models.language.environment import Conversation
from flowrl.models.language.generation import Generation
from flowrl.models.language.prefixes import Packing
from flowrl.models.language.steps import Steps, beginnings, information_gains
from flowrl.models.language.stop_texts import StopTexts
from flowrl.models.language.token_scores import ScoringPolicy
from flowrl.models.language.vision import PromptImages
from flowrl.models.shards import directly
from samplers import Sampling
from samplers.completions import StepPoints, TextPlan, TextPlanner, TextRollout, TurnPoints
from samplers.generate import Sampler, Writer
from samplers.slices import DrawsSlice, draw_slices, joined_texts


@dataclass(frozen=True)
class TextBatch:
    """A `flowrl.models.policy.Batch` of texts.

    contexts       the prompts' tokens
    stop           tokens that end a completion
    stop_texts     texts that end one
    separate_head, packing, calls  see `flowrl.models.language.token_scores.ScoringPolicy`
    server         samples in place of the model; None: the model samples
    answers        the environment that replies between turns; None: a single turn
    images         the images of each prompt; empty if no prompt has images
    cut            cuts completions into steps; None: one step
    template       arguments of the chat template
    """

    model: Any
    tokenizer: Any
    contexts: Sequence[Sequence[int]]
    stop: Sequence[int]
    steps: int
    separate_head: bool
    rows_per_call: int | None = None
    server: Sampler | None = None
    answers: Conversation | None = None
    stop_texts: StopTexts | None = None
    packing: Packing | None = None
    images: Sequence[PromptImages | None] = ()
    cut: Steps | None = None
    calls: Callable[..., Any] = directly
    meter: Meter = field(default_factory=Meter)
    template: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def policy(self) -> ScoringPolicy:
        return ScoringPolicy(
            self.model, self.contexts, self.separate_head, self.packing, self.images, self.calls
        )

    def sampler(self, plan: TextPlan, images: Sequence[PromptImages | None] = ()) -> Sampler:
        """The server, or the model with the images of a writer's prompts."""
        if self.server is None or (plan.exact and not self.server.exact):
            return Generation(self.model, self.stop, self.rows_per_call, self.stop_texts, images)
        return self.server

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
        """Sample the completions of the plans. Noise is keyed as in `samplers.generate.Writer`,
        and by position. Text plans do not steer, so `sampling.score` is unused."""
        assert not sampling.keep_mean, "texts have no means"
        rollouts: list[TextRollout] = []
        plans = plan([0.0] * (self.steps + 1), iteration, seed)
        whole = DrawsSlice(0, tuple(draws))
        for index, text_plan in enumerate(plans):
            slices = self._slices(text_plan, whole, sampling) if len(plans) == 1 else [whole]
            written: list[TextRollout] = []
            for piece in slices:
                rows = slice(piece.first, piece.first + len(piece.draws))
                sampler = self.sampler(text_plan, self.images[rows])
                at_once = 1 if self.answers is None else self.answers.by.how.at_once
                writer = Writer(
                    sampler=sampler,
                    contexts=self.contexts[rows],
                    draws=piece.draws,
                    seed=seed,
                    iteration=iteration,
                    environment=self.answers,
                    at_once=at_once,
                )
                rollout = writer.write(text_plan, index)
                self.meter.add(int(rollout.own.sum()))
                written.append(replace(rollout, prompt=rollout.prompt + piece.first))
                if sampling.on_slice is not None and len(slices) > 1:
                    sampling.on_slice(written[-1])
            joined = written[0] if len(slices) == 1 else joined_texts(written, whole.draws)
            rollouts.append(joined if self.cut is None else self.cut.divide(joined))
            sampling.announce(rollouts, len(plans))
        return tuple(rollouts)

    def _slices(
        self, plan: TextPlan, whole: DrawsSlice, sampling: Sampling[TextRollout]
    ) -> list[DrawsSlice]:
        """Slices of the model's own texts; a server gets requests for all texts at once."""
        rows = self.rows_per_call
        if sampling.on_slice is None or rows is None or self.sampler(plan) is self.server:
            return [whole]
        return list(draw_slices(plan, whole.draws, rows))

    def media(self, rollout: TextRollout) -> list[str]:
        """Decode completions without their stop token or text and without special tokens: all
        turns with the replies between them, or only the last turn if the environment says so."""
        last = rollout.ids.gather(1, (rollout.ends - 1).clamp(min=0)[:, None])[:, 0]
        by_token = rollout.stopped & torch.isin(last, last.new_tensor(list(self.stop)))
        by_text = (rollout.stopped & ~by_token).tolist()
        ends = rollout.ends - by_token.long()
        starts = torch.zeros_like(ends)
        if self.answers is not None and self.answers.by.how.shows == "last":
            assert isinstance(rollout.points, TurnPoints)
            positions = torch.arange(1, rollout.ids.shape[1] + 1)
            starts = (positions * rollout.points.from_environment).amax(1)  # after the last reply
        parts = zip(rollout.ids.tolist(), starts.tolist(), ends.tolist(), strict=True)
        rows = [row[start:end] for row, start, end in parts]
        texts = self.tokenizer.batch_decode(
            rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if self.stop_texts is None:
            return texts
        pairs = zip(texts, by_text, strict=True)
        return [self.stop_texts.before(text) if cut else text for text, cut in pairs]

    def beginnings(self, rollout: TextRollout, media: Sequence[str]) -> list[list[str]]:
        """The text of each sample up to the end of each of its turns, without the stop token or
        text there, or of its steps."""
        return beginnings(rollout, media, self._decoded if self.answers is None else self._turns)

    def _decoded(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _turns(self, ids: Sequence[int]) -> str:
        """The text of turns, the last of which has ended."""
        if ids[-1] in self.stop:
            return self._decoded(ids[:-1])
        text = self._decoded(ids)
        return text if self.stop_texts is None else self.stop_texts.before(text)

    def information(
        self, rollout: TextRollout, asked: Information, meta: Sequence[Mapping[str, Any]], rows: int
    ) -> Float[Tensor, "n k"]:
        """IGPO's rewards of turns or steps by the model's current weights, NaN at the last ones;
        `rows` in a call."""
        policy = self.meter(self.policy)
        return information_gains(rollout, asked, meta, self.tokenizer, policy, rows)

    def statistics(self, rollout: TextRollout, media: Sequence[str]) -> Statistics:
        """Text statistics, and `surprise`: minus the sampler's mean log-probability per token, in
        nats. With an environment also `turns`, the model's turns per sample, and `met`, the share
        of turns whose state another turn of the same draw shares; `steps` per sample if they are
        cut."""
        statistics = text_statistics(media, rollout.prompt, rollout.lengths, rollout.stopped)
        tokens, means = int(rollout.lengths.sum()), statistics.means
        surprise = -float(rollout.logp.double().sum()) / max(tokens, 1)
        means["surprise"] = WeightedMean.of(surprise, tokens)
        if isinstance(rollout.points, TurnPoints):
            means["turns"] = 1 + float(rollout.last.double().mean())
            means["met"] = _met(rollout.points.states, rollout.exists, rollout.plan.group)
        if isinstance(rollout.points, StepPoints):
            means["steps"] = 1 + float(rollout.last.double().mean())
        return statistics.named("text/")


def _met(states: Int[Tensor, "n k"], exists: Bool[Tensor, "n k"], group: int) -> WeightedMean:
    draw = (torch.arange(len(states)) // group)[:, None].expand_as(states)
    pairs = torch.stack([draw[exists], states[exists]], 1)
    _, index, counts = pairs.unique(dim=0, return_inverse=True, return_counts=True)
    shared = (counts[index] > 1).cpu().double()
    return WeightedMean.of(float(shared.mean()), len(shared))
