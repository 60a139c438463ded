"""P(right) of a text's last step, by a transformers token classifier: process reward models.

The text is cut into steps at `separator`. The classifier reads the prompt and the steps, each
followed by the tokens of `mark`, and its label at the last token of a mark is the verdict on that
step: the layout in which TRL's PRMTrainer trains. As a reward of whole texts, `reduce` joins the
verdicts of the steps. A causal classifier (found by trial) reads the beginnings of one text in one
call. Published models with heads of their own code (Qwen2.5-Math-PRM) are not supported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.catalogue.sequence_classifier import label_index, limit_of
from rewards.perception.chat_frame import templated
from rewards.perception.embedding import DtypeName, Placement, loaded_with_info
from rewards.perception.hub import HubName, model_path
from rewards.perception.media import expect
from rewards.perception.strings import step_ends
from rewards.perception.unended import unended_tokens
from rewards.types import Kind, OneOrMore, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("text",)

Reduce = Literal["last", "least", "mean", "product"]


@dataclass(frozen=True)
class ProcessReward:
    model: Any
    tokenizer: Any
    placement: Placement
    label: int
    separator: str
    mark: tuple[int, ...]  # tokens behind a step
    reduce: Reduce
    most: int | None  # tokens that the model reads
    causal: bool
    batch: int

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "process_reward", "text")
        cut = [
            (p, step_texts(t, self.separator))
            for p, t in zip(samples.prompts, samples.media, strict=True)
        ]
        reader = readers(cut) if self.causal else list(range(len(cut)))
        read = sorted({*reader}, key=lambda i: sum(map(len, cut[i][1])))
        verdicts: dict[int, list[float]] = {}
        for start in range(0, len(read), self.batch):
            part = read[start : start + self.batch]
            verdicts |= zip(part, self._verdicts([cut[i] for i in part]), strict=True)
        scores = [
            self._reduced(verdicts[by], len(steps))
            for by, (_, steps) in zip(reader, cut, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float64)

    def _reduced(self, verdicts: Sequence[float], steps: int) -> float:
        """One number of the verdicts on a text's first steps; NaN where the last were not read."""
        if len(verdicts) < steps:
            return torch.nan
        steps_right = torch.tensor(verdicts[:steps], dtype=torch.float64)
        match self.reduce:
            case "last":
                return float(steps_right[-1])
            case "least":
                return float(steps_right.min())
            case "mean":
                return float(steps_right.mean())
            case "product":
                return float(steps_right.prod())

    @torch.no_grad()
    def _verdicts(self, rows: Sequence[tuple[str, tuple[str, ...]]]) -> list[list[float]]:
        """P(label) at the steps of texts. Of a text beyond the model's length a causal model reads
        the first steps, and another none."""
        encoded = [self._encode(*row) for row in rows]
        most = self.most or max(len(ids) for ids, _ in encoded)
        places = [[at for at in ends if at < most] for _, ends in encoded]
        if not self.causal:
            places = [
                at if len(ids) <= most else [] for (ids, _), at in zip(encoded, places, strict=True)
            ]
        width = min(most, max(len(ids) for ids, _ in encoded))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (row_ids, _) in enumerate(encoded):
            ids[row, : len(row_ids)], mask[row, : len(row_ids)] = torch.tensor(row_ids[:width]), 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        inputs = {name: part.to(self.placement.device) for name, part in inputs.items()}
        shares = self.model(**inputs).logits.double().softmax(-1)[..., self.label].cpu()
        return [shares[row, at].tolist() for row, at in enumerate(places)]

    def _encode(self, prompt: str, steps: Sequence[str]) -> tuple[list[int], list[int]]:
        """Tokens of a prompt and steps, and the places of the verdicts."""
        if self.tokenizer.chat_template is None:
            ids = unended_tokens(self.tokenizer, prompt)
        else:
            turn = [{"role": "user", "content": prompt}]
            text = templated(self.tokenizer, turn, add_generation_prompt=True)
            ids = list(self.tokenizer(text, add_special_tokens=False).input_ids)
        places: list[int] = []
        for step in steps:
            ids += [*self.tokenizer(step, add_special_tokens=False).input_ids, *self.mark]
            places.append(len(ids) - 1)
        return ids, places


def step_texts(text: str, separator: str) -> tuple[str, ...]:
    """A text's steps without separators and whitespace around them."""
    ends = step_ends(text, separator)
    starts = [0, *ends[:-1]]
    strip = separator + " \n\t"
    return tuple(text[a:b].strip(strip) for a, b in zip(starts, ends, strict=True))


def readers(cut: Sequence[tuple[str, tuple[str, ...]]]) -> list[int]:
    """For each text the one to read: the longest text of the same prompt that begins with the same
    steps."""
    longest: dict[tuple[str, tuple[str, ...]], int] = {}
    order = sorted(range(len(cut)), key=lambda i: -len(cut[i][1]))
    read_by = [0] * len(cut)
    for i in order:
        prompt, steps = cut[i]
        read_by[i] = longest.setdefault((prompt, steps), i)
        for k in range(1, len(steps)):
            longest.setdefault((prompt, steps[:k]), read_by[i])
    return read_by


@torch.no_grad()
def is_causal(model: Any) -> bool:
    """Whether a model's logits at a token depend on tokens before it alone, by a trial."""
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]], device=model.device)
    first, other = model(input_ids=ids).logits[:, :3].float()
    return torch.allclose(first, other, rtol=1e-4, atol=1e-4)


def load(
    model: HubName,
    label: int | str = 1,
    separator: str = "\n\n",
    mark: str | None = None,
    reduce: Reduce = "last",
    batch: OneOrMore = 16,
    device: str = "auto",
    dtype: DtypeName = "float32",
) -> Reward:
    """model      token classifier with its tokenizer: a folder or a name on the hub
    label      label of a right step: its index or its name; written within `settings: {...}`, since
               beside `name` it names the scores
    separator  text between steps, not empty
    mark       text behind each step, at whose last token the verdict is; null: the separator
    reduce     score of a text: the verdict on its last step, the least, their mean or their product
    """
    if not separator:
        raise ValueError("process_reward: `separator` is empty: name the text between steps")
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    placement, source = Placement.of(device, dtype), model_path(model)
    loaded, info = loaded_with_info(AutoModelForTokenClassification.from_pretrained, source)
    if info["missing_keys"]:
        raise ValueError(
            f"process_reward: {model} has no trained {', '.join(sorted(info['missing_keys']))}: "
            "it is not a token classifier, and its scores would be random"
        )
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(separator if mark is None else mark, add_special_tokens=False).input_ids
    if not ids:
        raise ValueError(f"process_reward: {mark or separator!r} has no tokens of {model}")
    loaded = placement.put(loaded)
    place_of_label = label_index(loaded, label, "process_reward")
    limit = limit_of(loaded, tokenizer, None)
    return ProcessReward(
        model=loaded,
        tokenizer=tokenizer,
        placement=placement,
        label=place_of_label,
        separator=separator,
        mark=tuple(ids),
        reduce=reduce,
        most=limit,
        causal=is_causal(loaded),
        batch=batch,
    )
