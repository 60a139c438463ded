"""transformers' `generate` as a sampler of tokens, with its cache and left padding.

`generate` itself has no per-row noise, so a final logits processor draws each row's token with
noise keyed by the row, and makes it the most likely one. Once half of a call's rows have ended, the
call ends, and the next one continues the other rows from their part of the cache. m rows, u new
tokens, v tokens of a vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import utils as generating

from flowrl.models.language.growing_cache import growing_cache, rows_can_leave
from flowrl.models.language.stop_texts import StopAtTexts, StopTexts
from flowrl.models.language.vision import PromptImages, call_inputs
from samplers.generate import Draft, TokenRequest, WrittenTokens
from samplers.host import uploaded
from samplers.token_support import TokenSupport, joined_column, joined_kept
from samplers.tokens import draw_tokens, token_noise, token_support, warped

FEWEST, LEAVING = 16, 4  # new tokens of a call that rows leave, and rows that leave it


class Keyed(LogitsProcessor):
    """Draws each row's next token with the row's own noise, and records its log-probability.
    `done`: number of tokens from earlier calls."""

    def __init__(self, asked: TokenRequest, done: int = 0) -> None:
        self.asked, self.position = asked, asked.first + done
        self.noise = asked.noise
        self.logp: list[Tensor] = []
        self.kept: list[TokenSupport] = []
        self.spread: list[Tensor] = []
        self.last = asked.first + int(asked.room.max()) if len(asked.room) else 0
        self.ahead: list[Tensor] = []  # noise of the next tokens

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores of which `generate` picks the token that was drawn."""
        token, probabilities = self.drawn(scores)
        return probabilities.scatter_(1, token[:, None], 2.0)  # above every probability

    def drawn(self, scores: Float[Tensor, "m v"]) -> tuple[Int[Tensor, " m"], Float[Tensor, "m v"]]:
        """Draw a token of each row. Returns them, and the probabilities of all tokens."""
        asked = self.asked
        cold = asked.temperature == 0
        logits = warped(scores, 1.0 if cold else asked.temperature)
        support = token_support(logits, asked.top_p, asked.top_k, asked.min_p)
        if support is not None:
            logits = logits.masked_fill(~support, -torch.inf)
            self.kept.append(TokenSupport.of(support))
        probabilities = logits.softmax(-1)
        if asked.spread:
            self.spread.append(-torch.xlogy(probabilities, probabilities).sum(-1))
        if cold:
            token = logits.argmax(-1)
        else:
            token = draw_tokens(probabilities, self._noise(scores.device, scores.shape[-1]))
        self.position += 1
        self.logp.append(probabilities.gather(1, token[:, None])[:, 0].log())
        return token, probabilities

    def _noise(self, device: torch.device, vocabulary: int) -> Tensor:
        if not self.ahead:
            self.noise = uploaded(self.noise, device)
            most = self.last - self.position
            self.ahead = list(token_noise(self.noise, self.position, vocabulary, most))
        return self.ahead.pop(0)


@dataclass(frozen=True)
class Generation:
    """A `samplers.generate.Sampler` that runs the model, `rows_per_call` rows at a time. `stop`:
    tokens that end a completion; `texts`: texts that end one; `images`: images of each prompt."""

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
        parts = [self._part(asked.take(index)) for index in rows.split(self.rows_per_call or 2**31)]
        return joined_rows(parts)

    def _part(self, asked: TokenRequest) -> WrittenTokens:
        """Draw all tokens of these rows, in one call or in several calls with fewer and fewer
        rows."""
        device, cuts = self.model.device, rows_can_leave(self.model)
        tokens = _Tokens(*left_padded(asked.contexts, device))
        live, done, draft = torch.arange(len(asked.contexts)), 0, None
        while True:
            live_rows = asked if draft is None else asked.take(live)
            part, tokens = self._call(live_rows, tokens, done, cuts)
            if draft is None and len(part.lengths) == int(self._over(part, live_rows, done).sum()):
                return part
            draft = draft or Draft.blank(len(asked.contexts), int(asked.room.max()))
            draft = draft.extended(live, part)
            left = (~self._over(part, live_rows, done)).nonzero()[:, 0]
            if len(left) == 0:
                return WrittenTokens(*draft)
            done += part.ids.shape[1]
            live, tokens = live[left], tokens.take(left)

    @staticmethod
    def _over(part: WrittenTokens, asked: TokenRequest, done: int) -> Tensor:
        return part.stopped | (part.lengths + done >= asked.room)

    def _call(
        self, asked: TokenRequest, tokens: "_Tokens", done: int, cuts: bool
    ) -> tuple[WrittenTokens, "_Tokens"]:
        """One call of `generate`, and the state that continues it. `done`: new tokens of earlier
        calls."""
        keyed, at_texts, width = Keyed(asked, done), None, tokens.ids.shape[1]
        if self.texts is not None:
            begun = torch.zeros_like(asked.room) if asked.begun is None else asked.begun
            at_texts = StopAtTexts(self.texts, width, begun + done)
        room = asked.room - done
        criteria: list[StoppingCriteria] = [] if at_texts is None else [at_texts]
        if cuts and len(asked.contexts) > LEAVING:
            criteria.append(_HalfEnded(self.stop, width, room, at_texts, self.model.device))
        more = {} if tokens.cache is not None else self._images_of(asked, width)
        tokens = self._generated(tokens, keyed, int(room.max()), criteria, more, cuts)
        columns = [column for column in (keyed.logp, keyed.spread) if column]
        new = tokens.ids[:, width:]
        seen = new.shape[1]  # less than the processor has seen, where `read_late` went on
        ids, logp, *spread = downloaded(new, [torch.stack(column[:seen], 1) for column in columns])
        ended = torch.isin(ids, torch.tensor(self.stop, dtype=torch.int64))
        positions = torch.arange(ids.shape[1])
        if at_texts is not None:
            ended |= positions == at_texts.ends[:, None] - 1
        before = ended.cumsum(1) - ended.long()  # ends before this token
        written = (before == 0) & (positions < room[:, None])
        support = None
        if keyed.kept:
            stack = partial(torch.stack, dim=1)
            support = joined_kept(keyed.kept[:seen], stack).to("cpu").only(written)
        stopped = (ended & written).any(1)
        return WrittenTokens(ids, logp, written.sum(1), stopped, support, *spread), tokens

    def _images_of(self, asked: TokenRequest, width: int) -> dict[str, Tensor]:
        """Inputs of a first call besides its tokens, which are `width` wide."""
        if not self.images:
            return {}
        assert asked.prompt is not None, "a writer sets its prompts"
        images = [self.images[i] for i in asked.prompt.tolist()]
        return _image_inputs(images, asked.contexts, width, self.model)

    def generated(
        self,
        contexts: Sequence[Sequence[int]],
        processor: LogitsProcessor,
        length: int,
        images: Sequence[PromptImages | None] = (),
    ) -> Int[Tensor, "m u"]:
        """Up to `length` tokens per context, for prompts with these images; tokens after a row's
        end are arbitrary."""
        tokens = _Tokens(*left_padded(contexts, self.model.device))
        width = tokens.ids.shape[1]
        more = _image_inputs(images, contexts, width, self.model)
        return self._generated(tokens, processor, length, more=more).ids[:, width:]

    def _generated(
        self,
        tokens: "_Tokens",
        processor: LogitsProcessor,
        length: int,
        criteria: Sequence[StoppingCriteria] = (),
        more: Mapping[str, Any] | None = None,
        cuts: bool = False,
    ) -> "_Tokens":
        """Up to `length` further tokens. `more`: images of prompts. `cuts`: also return the cache
        that continues them."""
        settings = GenerationConfig(
            max_new_tokens=length,
            do_sample=False,
            use_cache=True,
            return_dict_in_generate=cuts,
            eos_token_id=list(self.stop) or None,
            pad_token_id=0,  # tokens after a stop token are never read
        )
        cache, most = tokens.cache, tokens.ids.shape[1] + length
        if cache is None:
            _forget_states(self.model, len(tokens.ids))
        if cuts and cache is None:
            cache = growing_cache(self.model, most)
        cached = {} if cache is None else {"past_key_values": cache}
        with read_late(tokens.ids.device):
            output = self.model.generate(
                input_ids=tokens.ids,
                attention_mask=tokens.mask,
                generation_config=settings,
                synced_gpus=False,  # processes under FSDP2 sample by themselves, with whole weights
                logits_processor=LogitsProcessorList([processor]),
                stopping_criteria=StoppingCriteriaList(criteria),
                **cached,
                **(more or {}),
            )
        if not cuts:
            return _Tokens(output, tokens.mask)
        new = output.sequences.shape[1] - tokens.ids.shape[1]
        mask = F.pad(tokens.mask, (0, new), value=1)
        return _Tokens(output.sequences, mask, output.past_key_values)


@dataclass(frozen=True)
class _Tokens:
    """Texts so far, padded on the left, with the cache of all tokens except the last."""

    ids: Int[Tensor, "m w"]
    mask: Int[Tensor, "m w"]
    cache: Any = None

    def take(self, rows: Int[Tensor, " r"]) -> "_Tokens":
        """Select rows; the cache itself is cut."""
        rows = uploaded(rows, self.ids.device)
        self.cache.batch_select_indices(rows)
        return _Tokens(self.ids[rows], self.mask[rows], self.cache)


class _HalfEnded(StoppingCriteria):
    """Ends a call of `generate` once at most half of its rows are unfinished and at least LEAVING
    have ended, after at least FEWEST new tokens. It does not wait for the device."""

    def __init__(
        self,
        stop: Sequence[int],
        width: int,
        room: Int[Tensor, " m"],
        at_texts: StopAtTexts | None,
        device: torch.device,
    ) -> None:
        self.width, self.at_texts, self.device = width, at_texts, device
        self.stop = uploaded(torch.tensor(list(stop), dtype=torch.int64), device)
        self.room = uploaded(room, device)
        self.ended = torch.zeros_like(self.room, dtype=torch.bool)
        self.most = min(len(room) // 2, len(room) - LEAVING)

    def __call__(self, input_ids: Tensor, _scores: Any, **_: Any) -> Any:
        new = input_ids.shape[1] - self.width
        self.ended = self.ended | torch.isin(input_ids[:, -1], self.stop) | (self.room <= new)
        if self.at_texts is not None:
            self.ended = self.ended | uploaded(self.at_texts.ends > 0, self.device)
        if new < FEWEST:
            return self.ended
        return self.ended | ((~self.ended).sum() <= self.most)


def _image_inputs(
    images: Sequence[PromptImages | None],
    contexts: Sequence[Sequence[int]],
    width: int,
    model: Any,
) -> dict[str, Tensor]:
    starts = [width - len(context) for context in contexts] if images else []
    return call_inputs(images, starts, width, model)


def _forget_states(model: Any, rows: int) -> None:
    """Reset the states that a recurrent model keeps between calls (RecurrentGemma): it does so
    itself only for prompts of several tokens."""
    reset: Any = getattr(model.base_model, "_setup_cache", None)
    if model._is_stateful and reset is not None:
        reset(model.config, rows, model.device, model.dtype)


@contextmanager
def read_late(device: torch.device) -> Iterator[None]:
    """On CUDA, check one token late whether all texts have ended, so that the next token is queued
    meanwhile: transformers 5.23 does so only on MPS, and older versions wait for every token.
    `generate` drops the token beyond the end, also from the cache if it continues."""
    check: Any = vars(generating).get("DeferredStopCheck")
    if check is None or device.type != "cuda":
        yield
        return
    original = vars(check)["is_supported"]

    def supported(_device: Any, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        return not is_assistant and (not cache_is_returned or cache.is_croppable)

    check.is_supported = staticmethod(supported)
    try:
        yield
    finally:
        check.is_supported = original


def downloaded(ids: Int[Tensor, "m u"], columns: Sequence[Float[Tensor, "m u"]]) -> list[Tensor]:
    """Copy tokens and their float32 numbers to the CPU in one transfer, so that the CPU waits for
    the GPU only once."""
    if ids.device.type == "cpu":
        return [ids, *columns]
    joined = torch.stack([ids.int(), *(column.view(torch.int32) for column in columns)]).cpu()
    return [joined[0].long(), *(column.view(torch.float32) for column in joined[1:])]


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
