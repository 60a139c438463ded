"""Texts that some rows of a prompt file lack, such as a negative prompt.

If some rows have such a text, a call needs one for every row. A row's sample must not depend on the
other rows, so it gets the text that the pipeline uses by default: the one in `model.call`, or else
a text that encodes to the same numbers as a call without it. No name is hard-coded.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.driver import Driver
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES
from flowrl.models.diffusers.call.inputs.columns import TEXT_COLUMNS, Extra, places, texts_of
from flowrl.models.diffusers.call.inputs.conditioning import LONG_PROMPT, Calls, flatten
from flowrl.models.diffusers.call.traits.discovery import Traits, encoded
from flowrl.models.out_of_memory import raise_memory

EMPTY, PROMPT = "", "prompt"  # beside the names of other texts of the row


class MissingTexts:
    """Texts for rows that lack them, chosen once for each set of texts."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._known: dict[tuple[tuple[str, ...], str], str | None] = {}

    def check(self, traits: Traits, rows: Sequence[Mapping[str, Any]]) -> None:
        """UserError for a row whose missing text is not equivalent to any given text."""
        names = texts_of(self.driver.parameters, rows)
        seen: set[tuple[bool, ...]] = set()
        for row, place in zip(rows, places(rows), strict=True):
            has = tuple(bool(row.get(name)) for name in names)
            if has not in seen:
                seen.add(has)
                self.filled(traits, {name: row.get(name) or None for name in names}, "", place)

    def filled(self, traits: Traits, extra: Extra, prompt: str, place: str) -> Extra:
        """The row's arguments with a text in place of each None."""
        lacking = [name for name, value in extra.items() if value is None]
        if not lacking:
            return extra
        texts = {**_texts(traits.call), **_texts(extra)}
        for name in lacking:
            if name in texts:  # in the call
                continue
            key = tuple(texts), name
            if key not in self._known:
                self._known[key] = self._source(traits, tuple(texts), name)
            if (source := self._known[key]) is None:
                raise UserError(
                    f"{place} has no {name}, but other rows have one, and {traits.name} does "
                    "not treat a missing text as an empty one: add one to every row, or set "
                    f"model.call.{name}"
                )
            texts[name] = {EMPTY: EMPTY, PROMPT: prompt, **texts}[source]
        return {**extra, **{name: texts[name] for name in lacking}}

    def _source(self, traits: Traits, names: Sequence[str], name: str) -> str | None:
        """The text that encodes like a missing one: EMPTY, PROMPT, or one of `names`.
        None if unknown."""
        words = LONG_PROMPT.split()
        texts = {other: " ".join(words[: i + 2]) for i, other in enumerate(names)}
        tried = {EMPTY: EMPTY, PROMPT: LONG_PROMPT, **texts}

        def calls(row: Extra) -> Calls:
            extra = {**traits.required, **row}
            with_row = traits.knowing(extra, traits.encodings[tuple(traits.required)])
            return encoded(self.driver, with_row, [LONG_PROMPT], (extra,) if extra else ())

        def same() -> Iterator[str]:
            without = calls(texts)
            for source, text in tried.items():
                try:
                    if _equal(calls({**texts, name: text}), without):
                        yield source
                except FAILURES as error:  # it cannot be called so
                    raise_memory(error)
                    continue

        sources = list(same())
        if len(sources) == len(tried):  # it has no effect
            return EMPTY
        return sources[0] if len(sources) == 1 else None


def _texts(arguments: Mapping[str, Any]) -> dict[str, str]:
    named = arguments.items()
    return {n: v for n, v in named if TEXT_COLUMNS.fullmatch(n) and isinstance(v, str)}


def _equal(a: Calls, b: Calls) -> bool:
    (counts, values), (other_counts, against) = flatten(a), flatten(b)
    return counts == other_counts and all(map(_same, values, against))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and not isinstance(a, Tensor) and a == b
