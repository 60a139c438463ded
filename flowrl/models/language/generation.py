"""transformers' `generate` as a sampler of tokens, with its cache and left padding.

It has no noise a row; Gumbel noise keyed by the row, as the last processor of its logits, and then
the likeliest token, has. m rows, u new tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from samplers.generate import TokenRequest, WrittenTokens
from samplers.tokens import entropy, gumbel, nucleus, pack, warp


class Keyed(LogitsProcessor):
    """Adds each row's own noise to its warped log-probabilities, and keeps what was said."""

    def __init__(self, asked: TokenRequest) -> None:
        self.asked, self.position = asked, asked.first
        self.logp: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.spread: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        asked = self.asked
        cold = asked.temperature == 0
        logp = warp(scores, 1.0 if cold else asked.temperature)
        if asked.top_p < 1:
            kept = nucleus(logp, asked.top_p)
            logp = logp.masked_fill(~kept, -torch.inf).log_softmax(-1)
            self.kept.append(pack(kept))
        if asked.spread:
            self.spread.append(entropy(logp))
        noisy = logp if cold else logp + gumbel(asked.noise, self.position, logp.shape[-1])
        self.position += 1
        token = noisy.argmax(-1, keepdim=True)  # what generate takes
        self.logp.append(logp.gather(1, token)[:, 0])
        return noisy


@dataclass(frozen=True)
class Generation:
    """The model itself as a `samplers.generate.Sampler`, `rows_per_call` rows at a time."""

    model: Any
    stop: Sequence[int]
    rows_per_call: int | None = None

    @property
    def exact(self) -> bool:
        return True

    @property
    def elsewhere(self) -> bool:
        return False

    def __call__(self, asked: TokenRequest) -> WrittenTokens:
        rows = torch.arange(len(asked.contexts), device=asked.noise.device)
        parts = [self._part(asked.take(some)) for some in rows.split(self.rows_per_call or 2**31)]
        return joined_rows(parts)

    def _part(self, asked: TokenRequest) -> WrittenTokens:
        keyed = Keyed(asked)
        ids = self.generated(asked.contexts, keyed, int(asked.room.max()))
        done = ids.new_zeros(ids.shape, dtype=torch.bool)
        if self.stop:
            done = torch.isin(ids, torch.tensor(self.stop, device=ids.device))
        places = torch.arange(ids.shape[1], device=ids.device)
        before = done.cumsum(1) - done.long()  # stop tokens before this one
        written = (before == 0) & (places < asked.room[:, None])
        kept, spread = (
            torch.stack(said, 1) if said else None for said in (keyed.kept, keyed.spread)
        )
        logp, stopped = torch.stack(keyed.logp, 1), (done & written).any(1)
        return WrittenTokens(ids, logp, written.sum(1), stopped, kept, spread)

    def generated(
        self, contexts: Sequence[Sequence[int]], processor: LogitsProcessor, length: int
    ) -> Int[Tensor, "m u"]:
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


def joined_rows(parts: Sequence[WrittenTokens]) -> WrittenTokens:
    """Rows of several requests, filled up with zeros to the widest."""
    width = max(part.ids.shape[1] for part in parts)

    def whole(name: str) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        if found[0] is None or found[0].ndim == 1:
            return None if found[0] is None else torch.cat(found)
        blank = (0, 0) * (found[0].ndim - 2)
        return torch.cat([F.pad(part, (*blank, 0, width - part.shape[1])) for part in found])

    return WrittenTokens(*(whole(name) for name in WrittenTokens._fields))  # type: ignore[arg-type]


def left_padded(
    contexts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "n w"], Int[Tensor, "n w"]]:
    """Tokens and their mask."""
    width = max(map(len, contexts))
    ids = [[0] * (width - len(context)) + list(context) for context in contexts]
    mask = [[0] * (width - len(context)) + [1] * len(context) for context in contexts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
