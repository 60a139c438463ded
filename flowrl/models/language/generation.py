"""transformers' `generate` as a sampler of tokens, with its cache and left padding.

`generate` itself has no noise per row, so a last logits processor adds Gumbel noise keyed by the
row; the most likely token is then a sample. m rows, u new tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation import utils as generating

from flowrl.models.language.stop_texts import StopAtTexts, StopTexts
from flowrl.models.language.vision import PromptImages, call_inputs
from samplers.generate import TokenRequest, WrittenTokens
from samplers.host import uploaded
from samplers.token_support import TokenSupport, joined_column, joined_kept
from samplers.tokens import entropy, gumbel, token_support, warp


class Keyed(LogitsProcessor):
    """Adds each row's own noise to its warped log-probabilities, and records these."""

    def __init__(self, asked: TokenRequest) -> None:
        self.asked, self.position = asked, asked.first
        self.noise = asked.noise
        self.logp: list[Tensor] = []
        self.kept: list[TokenSupport] = []
        self.spread: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        asked = self.asked
        self.noise = uploaded(self.noise, input_ids.device)
        cold = asked.temperature == 0
        logp = warp(scores, 1.0 if cold else asked.temperature)
        kept = token_support(logp, asked.top_p, asked.top_k, asked.min_p)
        if kept is not None:
            logp = logp.masked_fill(~kept, -torch.inf).log_softmax(-1)
            self.kept.append(TokenSupport.of(kept))
        if asked.spread:
            self.spread.append(entropy(logp))
        noisy = logp if cold else logp + gumbel(self.noise, self.position, logp.shape[-1])
        self.position += 1
        token = noisy.argmax(-1, keepdim=True)  # the token that generate picks
        self.logp.append(logp.gather(1, token)[:, 0])
        return noisy


@dataclass(frozen=True)
class Generation:
    """A `samplers.generate.Sampler` that runs the model, `rows_per_call` rows at a time. `stop`:
    tokens that end a completion; `texts`: texts that do so; `images`: those of each prompt."""

    model: Any
    stop: Sequence[int]
    rows_per_call: int | None = None
    texts: StopTexts | None = None
    images: Sequence[PromptImages | None] = ()

    @property
    def exact(self) -> bool:
        return True

    @property
    def elsewhere(self) -> bool:
        return False

    def __call__(self, asked: TokenRequest) -> WrittenTokens:
        rows = torch.arange(len(asked.contexts))
        parts = [self._part(asked.take(some)) for some in rows.split(self.rows_per_call or 2**31)]
        return joined_rows(parts)

    def _part(self, asked: TokenRequest) -> WrittenTokens:
        keyed, at_texts = Keyed(asked), None
        if self.texts is not None:
            begun = torch.zeros_like(asked.room) if asked.begun is None else asked.begun
            at_texts = StopAtTexts(self.texts, max(map(len, asked.contexts)), begun)
        images: list[PromptImages | None] = []
        if self.images:
            assert asked.prompt is not None, "a writer knows its prompts"
            images = [self.images[i] for i in asked.prompt.tolist()]
        there = self.generated(asked.contexts, keyed, int(asked.room.max()), at_texts, images)
        columns = [each for each in (keyed.logp, keyed.spread) if each]
        width = there.shape[1]  # less than the processor has seen, where `read_late` went on
        ids, logp, *spread = downloaded(there, [torch.stack(each[:width], 1) for each in columns])
        done = torch.isin(ids, torch.tensor(self.stop, dtype=torch.int64))
        places = torch.arange(ids.shape[1])
        if at_texts is not None:
            done |= places == at_texts.ends[:, None] - 1
        before = done.cumsum(1) - done.long()  # ends before this token
        written = (before == 0) & (places < asked.room[:, None])
        kept = None
        if keyed.kept:
            stack = partial(torch.stack, dim=1)
            kept = joined_kept(keyed.kept[:width], stack).to("cpu").only(written)
        stopped = (done & written).any(1)
        return WrittenTokens(ids, logp, written.sum(1), stopped, kept, *spread)

    def generated(
        self,
        contexts: Sequence[Sequence[int]],
        processor: LogitsProcessor,
        length: int,
        at_texts: StopAtTexts | None = None,
        images: Sequence[PromptImages | None] = (),
    ) -> Int[Tensor, "m u"]:
        """Up to `length` tokens per context, whose prompts have these images; tokens after a row's
        end are arbitrary."""
        ids, mask = left_padded(contexts, self.model.device)
        starts = [ids.shape[1] - len(context) for context in contexts] if images else []
        settings = GenerationConfig(
            max_new_tokens=length,
            do_sample=False,
            use_cache=True,
            eos_token_id=list(self.stop) or None,
            pad_token_id=0,  # tokens after a stop token are never read
        )
        with read_late(ids.device):
            sequences = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=LogitsProcessorList([processor]),
                stopping_criteria=StoppingCriteriaList([] if at_texts is None else [at_texts]),
                **call_inputs(images, starts, ids.shape[1], self.model),
            )
        return sequences[:, ids.shape[1] :]


@contextmanager
def read_late(device: torch.device) -> Iterator[None]:
    """Read on CUDA, one token late, whether all texts have ended, so that the next token is queued
    meanwhile: transformers 5.23 does so on MPS alone, and older versions wait for every token. The
    token beyond the end is dropped by `generate`."""
    check: Any = vars(generating).get("DeferredStopCheck")
    if check is None or device.type != "cuda":
        yield
        return
    own = vars(check)["is_supported"]

    def supported(_device: Any, _cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        return not cache_is_returned and not is_assistant

    check.is_supported = staticmethod(supported)
    try:
        yield
    finally:
        check.is_supported = own


def downloaded(ids: Int[Tensor, "m u"], columns: Sequence[Float[Tensor, "m u"]]) -> list[Tensor]:
    """Copy tokens and their float32 numbers to the CPU in one transfer, so that a GPU is waited for
    only once."""
    if ids.device.type == "cpu":
        return [ids, *columns]
    whole = torch.stack([ids.int(), *(each.view(torch.int32) for each in columns)]).cpu()
    return [whole[0].long(), *(each.view(torch.float32) for each in whole[1:])]


def joined_rows(parts: Sequence[WrittenTokens]) -> WrittenTokens:
    """Join rows of several requests, padded with zeros to the widest."""
    width = max(part.ids.shape[1] for part in parts)

    def widened(columns: list[Tensor]) -> Tensor:
        if columns[0].ndim == 1:
            return torch.cat(columns)
        return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in columns])

    columns = ([getattr(part, name) for part in parts] for name in WrittenTokens._fields)
    return WrittenTokens(*(joined_column(column, widened) for column in columns))


def left_padded(
    contexts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "n w"], Int[Tensor, "n w"]]:
    """Tokens padded with zeros on the left, and their attention mask."""
    width = max(map(len, contexts))
    ids = [[0] * (width - len(context)) + list(context) for context in contexts]
    mask = [[0] * (width - len(context)) + [1] * len(context) for context in contexts]
    return uploaded(torch.tensor(ids), device), uploaded(torch.tensor(mask), device)
