"""Prompts of a language model, encoded once, and the completions that are drawn of them.

transformers' `generate` draws, with its cache and left padding. It has no noise a row; Gumbel noise
keyed by the row, as the last processor of its logits, and then the likeliest token, has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from flowrl.meter import Meter
from flowrl.models.token_scores import Reader
from flowrl.statistics import text_statistics
from samplers.completions import TextPlan, TextPlanner, TextRollout
from samplers.tokens import gumbel, nucleus, pack, row_keys, warp


class Keyed(LogitsProcessor):
    """Adds each row's own noise to its warped log-probabilities, and keeps what was said."""

    def __init__(self, rows: Int[Tensor, " n"], plan: TextPlan, first: int) -> None:
        self.rows, self.plan, self.position = rows, plan, first
        self.logp: list[Tensor] = []
        self.kept: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        cold = self.plan.temperature == 0
        logp = warp(scores, 1.0 if cold else self.plan.temperature)
        if self.plan.top_p < 1:
            kept = nucleus(logp, self.plan.top_p)
            logp = logp.masked_fill(~kept, -torch.inf).log_softmax(-1)
            self.kept.append(pack(kept))
        noisy = logp if cold else logp + gumbel(self.rows, self.position, logp.shape[-1])
        self.position += 1
        token = noisy.argmax(-1, keepdim=True)  # what generate takes
        self.logp.append(logp.gather(1, token)[:, 0])
        return noisy


@dataclass
class Draft:
    """Completions on the way, one a node [m]. Entries that are not written are 0."""

    ids: Int[Tensor, "m t"]
    logp: Float[Tensor, "m t"]
    lengths: Int[Tensor, " m"]
    stopped: Bool[Tensor, " m"]
    kept: UInt8[Tensor, "m t bytes"] | None

    def children(self, times: int) -> "Draft":
        return Draft(
            self.ids.repeat_interleave(times, 0),
            self.logp.repeat_interleave(times, 0),
            self.lengths.repeat_interleave(times, 0),
            self.stopped.repeat_interleave(times, 0),
            None if self.kept is None else self.kept.repeat_interleave(times, 0),
        )


@dataclass(frozen=True)
class Writing:
    """A `flowrl.models.policy.Batch` of texts.

    contexts  the prompts' tokens
    stop      tokens that end a completion
    apart     see `flowrl.models.token_scores.Reader`
    """

    model: Any
    tokenizer: Any
    contexts: Sequence[Sequence[int]]
    stop: Sequence[int]
    steps: int
    apart: bool
    rows_per_call: int | None = None
    meter: Meter = field(default_factory=Meter)

    @property
    def policy(self) -> Reader:
        return Reader(self.model, self.contexts, self.apart)

    def rollouts(
        self,
        plan: TextPlanner,
        draws: Sequence[int],
        *,
        seed: int,
        iteration: int,
        keep_mean: bool = False,
        score: Callable[[TextRollout], Tensor] | None = None,
    ) -> tuple[TextRollout, ...]:
        """Noise is keyed by (seed, iteration, draw, plan, segment, node) and the position. Plans of
        texts do not steer, so `score` is not asked."""
        assert not keep_mean, "texts have no means"
        plans = plan([0.0] * (self.steps + 1), iteration, seed)
        return tuple(
            self._rollout(p, (seed, iteration, i), tuple(draws)) for i, p in enumerate(plans)
        )

    @torch.no_grad()
    def _rollout(
        self, plan: TextPlan, key: tuple[int, int, int], draws: tuple[int, ...]
    ) -> TextRollout:
        seed, iteration, index = key
        draft, nodes = self._blank(len(draws), plan), 1
        for k, count in enumerate(plan.nodes):
            draft, nodes = draft.children(count // nodes), count
            keys = [
                (seed, iteration, draw, "token", index, k, node)
                for draw in draws
                for node in range(nodes)
            ]
            noise = row_keys(keys).to(draft.ids.device)
            live = (~draft.stopped).nonzero()[:, 0]
            for part in live.split(self.rows_per_call or max(len(live), 1)):
                if len(part):
                    self._extend(draft, part, noise[part], plan, k)
        prompt = torch.arange(len(draws), device=draft.ids.device).repeat_interleave(plan.group)
        return TextRollout(
            plan, draft.ids, draft.logp, draft.lengths, draft.stopped, draft.kept,
            prompt, draws, seed, iteration, index,
        )  # fmt: skip

    def _blank(self, draws: int, plan: TextPlan) -> Draft:
        device, shape = self.model.device, (draws, plan.length)
        ids = torch.zeros(shape, dtype=torch.int64, device=device)
        lengths = torch.zeros(draws, dtype=torch.int64, device=device)
        stopped = torch.zeros(draws, dtype=torch.bool, device=device)
        width = -(-self.model.config.get_text_config().vocab_size // 8)
        kept = torch.zeros(*shape, width, dtype=torch.uint8, device=device)
        logp = torch.zeros(shape, device=device)
        return Draft(ids, logp, lengths, stopped, kept if plan.top_p < 1 else None)

    def _extend(
        self, draft: Draft, rows: Tensor, noise: Tensor, plan: TextPlan, segment: int
    ) -> None:
        """Write a segment of some rows, none of which has stopped, into the draft."""
        first, end = plan.segments[segment]
        nodes = plan.nodes[segment]
        begun = zip(rows.tolist(), draft.ids[rows, :first].tolist(), strict=True)
        contexts = [[*self.contexts[row // nodes], *ids] for row, ids in begun]
        keyed = Keyed(noise, plan, first)
        ids = self.generated(contexts, keyed, end - first)
        done = ids.new_zeros(ids.shape, dtype=torch.bool)
        if self.stop:
            done = torch.isin(ids, torch.tensor(self.stop, device=ids.device))
        before = done.cumsum(1) - done.long()  # stop tokens before this one
        written = before == 0
        here = slice(first, first + ids.shape[1])
        draft.ids[rows, here] = ids * written
        draft.logp[rows, here] = torch.stack(keyed.logp, 1) * written
        if draft.kept is not None:
            draft.kept[rows, here] = torch.stack(keyed.kept, 1) * written[..., None]
        draft.lengths[rows] += written.sum(1)
        draft.stopped[rows] = done.any(1)
        self.meter.add(int(written.sum()))

    def generated(
        self, contexts: Sequence[Sequence[int]], processor: LogitsProcessor, length: int
    ) -> Int[Tensor, "n u"]:
        """At most `length` tokens after each context; none where a row has stopped matters."""
        ids, mask = left_padded(contexts, self.model.device)
        settings = GenerationConfig(
            max_new_tokens=length,
            do_sample=False,
            use_cache=True,
            eos_token_id=list(self.stop) or None,
            pad_token_id=0,  # what comes after a stop token is never read
        )
        found = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=settings,
            logits_processor=LogitsProcessorList([processor]),
        )
        return found[:, ids.shape[1] :]

    def media(self, rollout: TextRollout) -> list[str]:
        """Texts without the token that ended them, and without special tokens."""
        ends = (rollout.lengths - rollout.stopped.long()).tolist()
        rows = [row[:end] for row, end in zip(rollout.ids.tolist(), ends, strict=True)]
        return self.tokenizer.batch_decode(
            rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def statistics(self, rollout: TextRollout, media: Sequence[str]) -> dict[str, float]:
        """And `surprise`: minus the mean log-probability of a token under the sampler, in nats."""
        found = text_statistics(media, rollout.prompt.cpu(), rollout.lengths, rollout.stopped)
        tokens = max(int(rollout.lengths.sum()), 1)
        found["surprise"] = -float(rollout.logp.double().sum()) / tokens
        return {f"text/{name}": value for name, value in found.items()}


def left_padded(
    contexts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "n w"], Int[Tensor, "n w"]]:
    """Tokens and their mask."""
    width = max(map(len, contexts))
    ids = [[0] * (width - len(context)) + list(context) for context in contexts]
    mask = [[0] * (width - len(context)) + [1] * len(context) for context in contexts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
