"""Log-probabilities of completions, with gradients, without a whole batch's logits in memory.

b rows, t tokens, m tokens of all rows, d hidden width, v vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from flowrl.likelihoods.rows import Evaluation, TokenRows, restored
from flowrl.models.language.prefixes import Packing
from flowrl.models.language.vision import PromptImages, call_inputs, reads_images
from flowrl.models.shards import directly
from samplers.host import on_host, sent_together, uploaded
from samplers.token_support import TokenSupport
from samplers.tokens import entropy, warp
from samplers.untyped import integer_rows, integers

LOGITS_HELD = 2**24  # logits that are held at once: 64 MB in float32
AT_ONCE = 2**22  # logits that a CPU makes at once: it keeps freed memory of that size
Arranged = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ScoringPolicy:
    """A `TokenPolicy`: scores completions of `contexts` under the model's current weights.

    Rows are padded on the right, which a causal model does not attend to. `separate_head`: the
    logits are the head applied to the last hidden states, and nothing more (`has_separate_head`
    proves it). Then only completion tokens get logits, a part of them at a time, and backward
    recomputes all but the last `LOGITS_HELD`. `packing`: evaluates shared prefixes of a call's rows
    once; None: every row by itself. `images`: images of each prompt; empty if no prompt has images.
    `calls`: runs a function of the model (`flowrl.models.shards.GatheredCalls`).
    """

    model: Any
    contexts: Sequence[Sequence[int]]
    separate_head: bool
    packing: Packing | None = None
    images: Sequence[PromptImages | None] = ()
    calls: Callable[..., Any] = directly

    def __call__(self, rows: TokenRows, entropies: bool = False) -> Evaluation:
        rows = restored(rows, self.model.device)
        written, device = rows.written, self.model.device
        prompts = integers(on_host(rows.prompt))
        contexts = [self.contexts[i] for i in prompts]
        images = [self.images[i] for i in prompts] if self.images else []
        starts = torch.tensor([len(c) for c in contexts])
        row, position = on_host(written).nonzero(as_tuple=True)
        texts = [
            [*context, *ids[: end - 1]]
            for context, ids, end in zip(
                contexts, integer_rows(on_host(rows.ids)), integers(on_host(rows.ends)), strict=True
            )
        ]
        row, position, behind = sent_together([row, position, starts[row] + position - 1], device)
        inputs, arranged = self._inputs(texts, device, images)
        support = None if rows.kept is None else rows.kept[row, position]
        ids = rows.ids[row, position]

        def work(inputs: Mapping[str, Tensor]) -> list[Float[Tensor, " m"]]:
            last = arranged(self._called(inputs))[row, behind]
            return self._scores(last, ids, support, rows.temperature, entropies)

        columns = self.calls(work, inputs)
        zeros = columns[0].new_zeros(written.shape)
        logp, *spread = (zeros.masked_scatter(written, column) for column in columns)
        return Evaluation(logp, spread[0] if spread else None)

    def last_states(
        self,
        texts: Sequence[Sequence[int]],
        device: torch.device,
        images: Sequence[PromptImages | None] = (),
    ) -> Float[Tensor, "b s _"]:
        """Last hidden states of texts, or logits if there is no separate head."""
        inputs, arranged = self._inputs(texts, device, images)
        return arranged(self._called(inputs))

    def _inputs(
        self,
        texts: Sequence[Sequence[int]],
        device: torch.device,
        images: Sequence[PromptImages | None],
    ) -> tuple[dict[str, Tensor], Arranged]:
        """Inputs of the call for these texts, and the function that makes its result [b s _]."""
        if self.packing is None and takes_lengths(self.model):
            return _in_one_row(texts, device)
        packed = None if self.packing is None else self.packing(texts, device)
        if packed is None:
            ids = padded_texts(texts, device)
            shown = call_inputs(images, [0] * len(images), ids.shape[1], self.model)
            return {"input_ids": ids, **shown}, _as_it_is
        return packed.inputs(self.model.dtype), packed.of_texts

    def _called(self, inputs: Mapping[str, Tensor]) -> Tensor:
        if self.separate_head:
            return self.model.base_model(**inputs, use_cache=False)[0]
        return self.model(**inputs, use_cache=False).logits

    def _scores(
        self,
        last: Float[Tensor, "m _"],
        ids: Int[Tensor, " m"],
        support: TokenSupport | None,
        temperature: float,
        entropies: bool,
    ) -> list[Float[Tensor, " m"]]:
        """Log-probabilities of the tokens `ids`, and entropies if they are asked for."""
        head = self.model.get_output_embeddings() if self.separate_head else _as_it_is
        vocabulary = self.model.config.get_text_config().vocab_size
        return scores_of_tokens(
            last=last,
            ids=ids,
            support=support,
            temperature=temperature,
            entropies=entropies,
            head=head,
            vocabulary=vocabulary,
        )


def scores_of_tokens(
    last: Float[Tensor, "m *d"],
    ids: Int[Tensor, " m"],
    support: TokenSupport | None,
    temperature: float,
    entropies: bool,
    head: Callable[[Tensor], Tensor],
    vocabulary: int,
) -> list[Float[Tensor, " m"]]:
    """Log-probabilities of the tokens `ids`, and entropies if they are asked for.

    `head` makes the logits [m v] over `vocabulary` entries of the states `last`, for some tokens
    at a time; `backward` computes all but the last LOGITS_HELD again.
    """

    def score(part: Tensor, token: Tensor, support: TokenSupport | None) -> tuple[Tensor, ...]:
        logits = head(part)
        allowed = None if support is None else support.mask(logits.shape[-1])
        logp = warp(logits, temperature, allowed)
        token_logp = logp.gather(1, token[:, None])[:, 0]
        return (token_logp, entropy(logp)) if entropies else (token_logp,)

    most = min(LOGITS_HELD, AT_ONCE) if last.device.type == "cpu" else LOGITS_HELD
    size = max(1, most // vocabulary)
    count = -(-len(ids) // size) or 1  # without tokens, too: FSDP2 awaits all
    parts = []
    for i, part in enumerate(even_parts(len(ids), count)):
        arguments = (last[part], ids[part], None if support is None else support[part])
        # backward begins with the last parts, so that it may as well find theirs
        again = torch.is_grad_enabled() and i < count - LOGITS_HELD // most
        parts.append(
            checkpoint(score, *arguments, use_reentrant=False) if again else score(*arguments)
        )
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def even_parts(size: int, count: int) -> Iterator[slice]:
    """Cut `size` places into `count` parts whose lengths differ by at most 1."""
    ends = [size * i // count for i in range(count + 1)]
    return (slice(start, end) for start, end in pairwise(ends))


def _as_it_is(states: Tensor) -> Tensor:
    return states


def _in_one_row(
    texts: Sequence[Sequence[int]], device: torch.device
) -> tuple[dict[str, Tensor], Arranged]:
    """Texts concatenated without padding: restarting positions separate them."""
    lengths = [len(text) for text in texts]
    ids = torch.tensor([[token for text in texts for token in text]])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    inputs = {"input_ids": uploaded(ids, device), "position_ids": uploaded(positions, device)}
    return inputs, partial(_cut, lengths)


def _cut(lengths: Sequence[int], states: Float[Tensor, "1 s _"]) -> Float[Tensor, "b w _"]:
    return pad_sequence(list(states[0].split(list(lengths))), batch_first=True)


def takes_lengths(model: Any) -> bool:
    """Whether the attention takes texts of any length in one row (flash attention), where their
    positions are those of tokens, not of images."""
    if reads_images(model.config):
        return False
    kind: str = model.config.get_text_config()._attn_implementation
    return kind.startswith(("flash_attention", "kernels-community/"))


def padded_texts(texts: Sequence[Sequence[int]], device: torch.device) -> Int[Tensor, "b s"]:
    """Tokens of texts padded with zeros on the right."""
    width = max(map(len, texts), default=0)
    padded = [[*text, *[0] * (width - len(text))] for text in texts]
    return uploaded(torch.tensor(padded, dtype=torch.int64), device).view(len(texts), width)


TRIED_TOKENS = 32  # tokens of the trial, spread over the vocabulary
LARGE_LOGIT = 1e3  # the largest logit of the trial: a cap of logits shows only where they are large


@torch.no_grad()
def has_separate_head(model: Any) -> bool:
    """Whether the logits are just the head applied to the last hidden states: by a trial with the
    head's own logits, and with the same made large by a factor, so that caps (Gemma 2) show."""
    head = model.get_output_embeddings()
    if head is None:
        return False
    size = model.get_input_embeddings().weight.shape[0]
    spread = torch.linspace(0, size - 1, min(TRIED_TOKENS, size), device=head.weight.device)
    tokens, factor = spread.long()[None], 1.0

    def grown(_module: Any, _inputs: Any, logits: Tensor) -> Tensor:
        return logits * factor

    with head.register_forward_hook(grown):
        for _ in range(2):
            logits = model(input_ids=tokens, use_cache=False).logits.float()
            head_logits = head(model.base_model(input_ids=tokens, use_cache=False)[0]).float()
            same = head_logits.shape == logits.shape
            if not same or not torch.allclose(head_logits, logits, rtol=1e-4, atol=1e-4 * factor):
                return False
            shown = head_logits[
                head_logits > torch.finfo(torch.float16).min
            ]  # not those that a hook has excluded
            factor = LARGE_LOGIT / max(float(shown.abs().max()), 1e-6)
    return True
