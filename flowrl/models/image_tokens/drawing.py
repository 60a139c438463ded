"""Draws the codes of images with keyed noise, two rows of the model each where it is guided.

m rows of a call, r rows of guidance (1 or 2), u new codes, d hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.models.image_tokens.family import GuidedCodes, PromptTokens
from flowrl.models.image_tokens.scores import joined
from flowrl.models.language.generation import Keyed, downloaded, joined_rows
from flowrl.models.language.growing_cache import growing_cache
from samplers.generate import TokenRequest, WrittenTokens
from samplers.token_support import joined_kept


@dataclass(frozen=True)
class CodeSampler:
    """A `samplers.generate.Sampler` of images' codes, `rows_per_call` rows at a time. A request's
    contexts are the codes so far alone: `prompts` are the prompts that its `prompt` counts."""

    guided: GuidedCodes
    model: Any
    prompts: Sequence[PromptTokens]
    rows_per_call: int | None = None

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

    @torch.no_grad()
    def _part(self, asked: TokenRequest) -> WrittenTokens:
        assert asked.prompt is not None, "a writer sets its prompts"
        layout, device = self.guided.family.layout, self.model.device
        done = [len(context) for context in asked.contexts]
        images = [layout.tokens(context) for context in asked.contexts]
        contexts = self.guided.contexts([self.prompts[i] for i in asked.prompt.tolist()])
        inputs = joined(contexts, images * self.guided.rows, device, left=True)
        reader = _Reader(self.guided, self.model, int(asked.room.max()))
        keyed = Keyed(asked)
        ids = torch.zeros(len(done), 0, dtype=torch.int64, device=device)
        for number in range(int(asked.room.max())):
            if number:
                inputs = self._behind(ids[:, -1], [count + number for count in done])
            logits = self.guided.logits(reader(inputs))
            ids = torch.cat([ids, keyed.drawn(logits)[0][:, None]], 1)
        columns = [torch.stack(column, 1) for column in (keyed.logp, keyed.spread) if column]
        ids, logp, *spread = downloaded(ids, columns)
        written = torch.arange(ids.shape[1]) < asked.room[:, None]
        support = None
        if keyed.kept:
            stack = partial(torch.stack, dim=1)
            support = joined_kept(keyed.kept, stack).to("cpu").only(written)
        stopped = torch.tensor(done) + asked.room >= layout.codes
        return WrittenTokens(ids, logp, asked.room.clone(), stopped, support, *spread)

    def _behind(
        self, codes: Int[Tensor, " m"], counts: Sequence[int]
    ) -> dict[str, Int[Tensor, "m s"] | Bool[Tensor, "m s"]]:
        """Inputs of the next call: each row's newest code, and the tokens that are forced behind it
        where it ends a row of its image, padded on the left. `counts`: codes of each row."""
        layout = self.guided.family.layout
        ends = [bool(layout.between) and count % layout.width == 0 for count in counts]
        if not any(ends):
            one = codes.repeat(self.guided.rows)[:, None]
            return {"ids": one, "codes": one >= 0, "mask": one >= 0}
        forced = [layout.between if end else () for end in ends] * self.guided.rows
        none: list[tuple[int, ...]] = [()] * len(forced)
        kinds = [([0, *tokens], [True, *[False] * len(tokens)]) for tokens in forced]
        inputs = joined(none, kinds, codes.device, left=True)
        newest = codes.repeat(self.guided.rows)[:, None]
        return {**inputs, "ids": torch.where(inputs["codes"], newest, inputs["ids"])}


class _Reader:
    """Reads tokens with a cache, and returns the last states [m r d]."""

    def __init__(self, guided: GuidedCodes, model: Any, room: int) -> None:
        self.guided, self.model, self.room = guided, model, room
        self.cache: Any = None
        self.mask: Bool[Tensor, "b s"] | None = None

    def __call__(self, inputs: dict[str, Tensor]) -> Float[Tensor, "m r d"]:
        family, mask = self.guided.family, inputs["mask"]
        if self.cache is None:
            most = mask.shape[1] + self.room * (1 + len(family.layout.between))
            self.cache = growing_cache(self.model, most)
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], 1)
        positions = self.mask.cumsum(1)[:, -mask.shape[1] :] - 1
        states = family.states(
            family.embedded(inputs["ids"], inputs["codes"]),
            attention_mask=self.mask.long(),
            position_ids=positions.clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        return states.view(self.guided.rows, -1, states.shape[-1]).transpose(0, 1)
