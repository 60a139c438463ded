"""Score of a text by a transformers sequence-classification model: the reward models of RLHF.

The prompt and the text are the two turns of the tokenizer's chat template, or without a template
the two parts of a pair (BERT's [SEP] between them, nothing for GPT-2). The score is the model's
only logit, or the logit of a `label`. Rows are padded on the right and masked, so the batch has no
effect. Weights without a trained head are an error: their scores would be random.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.perception.chat_frame import templated
from rewards.perception.embedding import DtypeName, Placement, loaded_with_info
from rewards.perception.hub import HubName, model_path
from rewards.perception.media import expect
from rewards.types import Kind, OneOrMore, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("text",)

HeadKind = Literal["logit", "softmax", "sigmoid"]
Long = Literal["unscored", "cut_start", "cut_end"]
Encoded = dict[str, list[int]]  # input_ids, and token_type_ids where the model has them


@dataclass
class SequenceClassifier:
    model: Any
    tokenizer: Any
    placement: Placement
    label: int
    kind: HeadKind
    most: int | None  # tokens of prompt and text together
    long: Long
    batch: int
    met: dict[str, int] = field(default_factory=lambda: {"long": 0})

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "sequence_classifier", "text")
        rows = [self._encode(*pair) for pair in zip(samples.prompts, samples.media, strict=True)]
        scores = torch.full((len(rows),), torch.nan)
        readable = [i for i, row in enumerate(rows) if row is not None]
        readable.sort(key=lambda i: len(rows[i]["input_ids"]))  # type: ignore[index]
        for start in range(0, len(readable), self.batch):
            part = readable[start : start + self.batch]
            scores[part] = self._scores([row for i in part if (row := rows[i]) is not None])
        return scores

    def _encode(self, prompt: str, text: str) -> Encoded | None:
        """The tokens, or None for a text that cannot be scored: empty or too long."""
        if self.tokenizer.chat_template is None:
            types = getattr(self.model.config, "type_vocab_size", 0) > 1
            # lists, since an empty text alone is not taken for the second part of a pair
            pair = self.tokenizer([prompt], [text], return_token_type_ids=types, verbose=False)
            encoded = {name: ids[0] for name, ids in pair.items()}
        else:
            pairs = zip(("user", "assistant"), (prompt, text), strict=True)
            turns = [{"role": role, "content": content} for role, content in pairs]
            written = templated(self.tokenizer, turns)
            encoded = self.tokenizer(written, add_special_tokens=False)
        row = {k: list(v) for k, v in encoded.items() if k in ("input_ids", "token_type_ids")}
        length = len(row["input_ids"])
        if self.most is not None and length > self.most:
            self.met["long"] += 1
            if self.long == "unscored":
                return None
            part = slice(-self.most, None) if self.long == "cut_start" else slice(self.most)
            row = {name: ids[part] for name, ids in row.items()}
        return row if length else None

    @torch.no_grad()
    def _scores(self, rows: Sequence[Encoded]) -> Float[Tensor, " m"]:
        config = self.model.config.get_text_config()
        published = config.pad_token_id
        pad = _unused(rows) if published is None else published
        width = max(len(row["input_ids"]) for row in rows)
        padded = {
            name: [
                row[name] + [pad * (name == "input_ids")] * (width - len(row[name])) for row in rows
            ]
            for name in rows[0]
        }
        padded["attention_mask"] = [
            [1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows
        ]
        tensors = {k: torch.tensor(v, device=self.placement.device) for k, v in padded.items()}
        config.pad_token_id = pad  # decoders look for the last token that is not this one
        try:
            logits = self.model(**tensors).logits.float().cpu()
        finally:
            config.pad_token_id = published
        if self.kind == "softmax":
            return logits.softmax(-1)[:, self.label]
        return logits[:, self.label].sigmoid() if self.kind == "sigmoid" else logits[:, self.label]

    def report(self) -> dict[str, float]:
        """`long`: number of samples with more tokens than the model reads."""
        long, self.met["long"] = self.met["long"], 0
        return {"long": float(long)}


def _unused(rows: Sequence[Encoded]) -> int:
    """A token that does not occur in any row and can therefore pad them."""
    used = {token for row in rows for token in row["input_ids"]}
    return next(token for token in range(len(used) + 1) if token not in used)


def limit_of(model: Any, tokenizer: Any, most: int | None) -> int | None:
    """Maximum number of tokens that the model reads; None if neither the model nor its tokenizer
    has a limit.

    ValueError for a `most` beyond that.
    """
    limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None)]
    limits += [tokenizer.model_max_length if tokenizer.model_max_length < 10**9 else None]
    limits = [size for size in limits if size is not None and size > 0]
    own_limit = min(limits, default=None)
    if most is not None and own_limit is not None and most > own_limit:
        raise ValueError(
            f"sequence_classifier: `most` must be at most {own_limit} tokens, not {most}"
        )
    return own_limit if most is None else most


def label_index(model: Any, label: int | str | None, reward: str = "sequence_classifier") -> int:
    """Index of a label's logit. ValueError if a label is required, or the model does not have
    it."""
    names = model.config.id2label
    if label is None and len(names) == 1:
        return 0
    places = {str(name).casefold(): int(place) for place, name in names.items()}
    if isinstance(label, int) and 0 <= label < len(names):
        return label
    if isinstance(label, str) and label.casefold() in places:
        return places[label.casefold()]
    listed = ", ".join(f"{place} ({name})" for place, name in names.items())
    raise ValueError(f"{reward}: `label` must be one of {listed}, not {label!r}")


def load(
    model: HubName,
    label: int | str | None = None,
    kind: HeadKind = "logit",
    most: OneOrMore | None = None,
    long: Long = "unscored",
    batch: OneOrMore = 16,
    device: str = "auto",
    dtype: DtypeName = "float32",
) -> Reward:
    """model  sequence classifier with its tokenizer: a folder or a name on the hub
    label  logit that counts: its index or its label's name; null for a model with one logit;
           written within `settings: {...}`, since beside `name` it names the scores
    kind   the logit, its softmax over the labels, or its sigmoid
    most   tokens of prompt, text and template together that are read, at least 1 and at most the
           model's limit; null takes that limit
    long   longer samples are unscored, or cut at the start (which loses the prompt and the template
           first) or at the end (useless for decoders, which score at the last token)
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    placement, source = Placement.of(device, dtype), model_path(model)
    loaded, info = loaded_with_info(AutoModelForSequenceClassification.from_pretrained, source)
    if info["missing_keys"]:
        raise ValueError(
            f"sequence_classifier: {model} has no trained "
            f"{', '.join(sorted(info['missing_keys']))}: it is not a classifier, and its scores "
            "would be random"
        )
    tokenizer = AutoTokenizer.from_pretrained(source)
    limit = limit_of(loaded, tokenizer, most)
    return SequenceClassifier(
        model=placement.put(loaded),
        tokenizer=tokenizer,
        placement=placement,
        label=label_index(loaded, label),
        kind=kind,
        most=limit,
        long=long,
        batch=batch,
    )
