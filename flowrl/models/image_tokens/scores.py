"""Log-probabilities of images' codes, with gradients.

b rows, r rows of guidance (1 or 2), s tokens, m codes of all rows, d hidden width, v codebook
entries.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.likelihoods.rows import Evaluation, TokenRows, restored
from flowrl.models.image_tokens.family import GuidedCodes, PromptTokens
from flowrl.models.language.token_scores import scores_of_tokens
from flowrl.models.shards import directly
from samplers.host import on_host, sent_together, uploaded
from samplers.untyped import integer_rows, integers


@dataclass(frozen=True)
class CodeScores:
    """A `TokenPolicy`: scores images' codes behind `prompts` under the model's current weights.

    The logits are guided as in sampling, so each row of a call takes as many rows of the model as
    `guided.rows`. Rows are padded on the right, which a causal model does not attend to. `calls`:
    runs a function of the model (`flowrl.models.shards.GatheredCalls`).
    """

    guided: GuidedCodes
    prompts: Sequence[PromptTokens]
    device: torch.device
    calls: Callable[..., Any] = directly

    def __call__(self, rows: TokenRows, entropies: bool = False) -> Evaluation:
        family = self.guided.family
        rows = restored(rows, self.device)
        written = rows.written
        prompts = [self.prompts[i] for i in integers(on_host(rows.prompt))]
        contexts = self.guided.contexts(prompts)
        ends = integers(on_host(rows.ends))
        images = [
            family.layout.tokens(ids[: max(end - 1, 0)])
            for ids, end in zip(integer_rows(on_host(rows.ids)), ends, strict=True)
        ]
        inputs = joined(contexts, images * self.guided.rows, self.device)
        row, code = on_host(written).nonzero(as_tuple=True)
        starts = torch.tensor([len(context) for context in contexts]).view(self.guided.rows, -1)
        # the state before a code predicts it, in each row of guidance
        before = (starts[:, row] + family.layout.offset(code) - 1).T
        of_model = (torch.arange(self.guided.rows) * len(prompts)) + row[:, None]
        before, of_model, row, code = sent_together([before, of_model, row, code], self.device)
        support = None if rows.kept is None else rows.kept[row, code]
        ids = rows.ids[row, code]

        def work(inputs: Mapping[str, Tensor]) -> list[Float[Tensor, " m"]]:
            embeddings = family.embedded(inputs["ids"], inputs["codes"])
            last = family.states(embeddings, use_cache=False).last_hidden_state
            return scores_of_tokens(
                last=last[of_model, before],
                ids=ids,
                support=support,
                temperature=rows.temperature,
                entropies=entropies,
                head=self.guided.logits,
                vocabulary=family.codebook,
            )

        columns = self.calls(work, inputs)
        zeros = columns[0].new_zeros(written.shape)
        logp, *spread = (zeros.masked_scatter(written, column) for column in columns)
        return Evaluation(logp, spread[0] if spread else None)


def joined(
    contexts: Sequence[Sequence[int]],
    images: Sequence[tuple[Sequence[int], Sequence[bool]]],
    device: torch.device,
    *,
    left: bool = False,
) -> dict[str, Int[Tensor, "b s"] | Bool[Tensor, "b s"]]:
    """Text tokens, and behind them tokens of an image with whether each is a code, padded on the
    right, or on the `left`: the tokens `ids`, their kind `codes`, and the `mask` without
    padding."""
    rows = [
        ([*context, *ids], [*[False] * len(context), *codes])
        for context, (ids, codes) in zip(contexts, images, strict=True)
    ]
    width = max((len(ids) for ids, _ in rows), default=0)

    def padded(values: Sequence[int | bool], of: int | bool) -> list[int | bool]:
        empty = [of] * (width - len(values))
        return [*empty, *values] if left else [*values, *empty]

    columns = {
        "ids": torch.tensor([padded(ids, 0) for ids, _ in rows], dtype=torch.int64),
        "codes": torch.tensor([padded(codes, False) for _, codes in rows], dtype=torch.bool),
        "mask": torch.tensor([padded([True] * len(ids), False) for ids, _ in rows]),
    }
    return {
        name: uploaded(column, device).view(len(rows), width) for name, column in columns.items()
    }
