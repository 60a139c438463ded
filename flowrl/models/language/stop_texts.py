"""Texts of several tokens that end a completion at their first occurrence.

Such a text has no fixed tokens: " END" may be " E" + "ND" or " EN" + "D", so the decoded text is
searched. Its tokens belong to the completion and are trained on, like a stop token; rewards see the
text before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import StoppingCriteria

from flowrl.errors import UserError
from samplers.host import uploaded

_SPARE = 4  # further tokens that are decoded: the first ones may be parts of a letter


@dataclass(frozen=True)
class StopTexts:
    """Stop texts of a model. UserError for a text with a special token, which decoded text never
    contains."""

    texts: tuple[str, ...]
    tokenizer: Any

    def __post_init__(self) -> None:
        for text in self.texts:
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
            if text.strip() not in self.decoded([ids])[0]:
                raise UserError(
                    f"model.stop: {text!r} contains a special token, which decoded texts leave "
                    "out: use only that token"
                )

    @property
    def tail(self) -> int:
        """Upper bound on the number of tokens of a stop text, since each token has at least one
        byte."""
        return max(len(text.encode()) for text in self.texts) + _SPARE

    def decoded(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Decode rows of tokens without special tokens."""
        return self.tokenizer.batch_decode(
            rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def found(self, rows: Sequence[Sequence[int]]) -> list[bool]:
        """Whether the last tokens of each row contain one of the texts."""
        tails = self.decoded([row[-self.tail :] for row in rows])
        return [any(text in tail for text in self.texts) for tail in tails]

    def before(self, text: str) -> str:
        """Text of a completion before the stop text that ended it."""
        at = max(text.rfind(stop) for stop in self.texts)
        return text if at < 0 else text[:at]


class StopAtTexts(StoppingCriteria):
    """Ends rows of `generate` at stop texts. `ends` is the number of new tokens up to the stop
    text, 0 without one."""

    def __init__(self, stop: StopTexts, width: int, begun: Int[Tensor, " m"]) -> None:
        self.stop, self.width, self.begun = stop, width, begun.tolist()
        self.ends = torch.zeros_like(begun)

    def __call__(self, input_ids: Tensor, _scores: Any, **_: Any) -> Any:
        new = input_ids.shape[1] - self.width
        live = (self.ends == 0).nonzero()[:, 0].tolist()
        tails = input_ids[:, -self.stop.tail :].tolist()
        texts = [tails[row][-min(self.begun[row] + new, self.stop.tail) :] for row in live]
        for row, ended in zip(live, self.stop.found(texts) if live else [], strict=True):
            self.ends[row] = new if ended else 0
        return uploaded(self.ends > 0, input_ids.device)
