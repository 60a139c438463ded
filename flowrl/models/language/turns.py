"""Find where the model's turns begin and end in its chat template.

Tokenizers name one end token, but a template may end turns otherwise: Gemma's end with
`<end_of_turn>` where the tokenizer has `<eos>`, GLM's with the mark of the next role. So a
conversation is rendered once per tokenizer, and what stands around its turns is read off.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from flowrl.errors import UserError
from rewards.sandbox.templates import TemplateLate, TemplateRefused, render_chat

ASKED = ("a question", "another one", "a last one")
ANSWERED = ("an answer", "one more", "and the last")
THOUGHT = "a thought"
REASONED = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWERED[0]}"
_Said = tuple[str, str]  # role and text


@dataclass(frozen=True)
class TurnTemplate:
    """A tokenizer's chat template, and what it writes around the model's turns.

    further  arguments of the template
    parts    messages have lists of parts, without which this template leaves texts out
    """

    tokenizer: Any
    further: Mapping[str, Any]
    parts: bool = False

    @classmethod
    def of(cls, tokenizer: Any, further: Mapping[str, Any]) -> "TurnTemplate":
        """Probe a template: are messages texts or lists of parts?"""
        plain = cls(tokenizer, further)
        pair = [("user", ASKED[0]), ("assistant", ANSWERED[0])]
        for template in (plain, cls(tokenizer, further, parts=True)):
            text = template.tried(pair)
            if text is not None and ASKED[0] in text and ANSWERED[0] in text:
                return template
        return plain

    def messages(self, turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Messages in the form in which this template takes them."""
        if not self.parts:
            return list(turns)
        return [
            {**turn, "content": [{"type": "text", "text": turn["content"]}]}
            if isinstance(turn["content"], str)
            else turn
            for turn in turns
        ]

    def text(self, turns: Sequence[_Said], opens: bool = False) -> str:
        """A conversation through the template. `opens`: with the start of the model's next turn.
        TemplateRefused from a template that refuses it; UserError from an endless one."""
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            return render_chat(
                self.tokenizer, self.messages(messages), add_generation_prompt=opens, **self.further
            )
        except TemplateLate as error:
            raise UserError(f"model.language: {error}: use a model with another one") from error

    def tried(self, turns: Sequence[_Said], opens: bool = False) -> str | None:
        """`text`, or None if there is no template or it refuses."""
        if self.tokenizer.chat_template is None:
            return None
        try:
            return self.text(turns, opens)
        except TemplateRefused:
            return None

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    @cached_property
    def end(self) -> int | None:
        """The token that ends the model's turn; None if the template has none, as a template of
        plain words.

        It is the last mark of what follows both a last turn and an earlier one; otherwise the first
        one behind a last turn (gpt-oss, whose earlier turns end with another); otherwise the mark
        of the next role, if it follows at once (GLM).
        """
        return self.end_before("user")

    def end_before(self, role: str) -> int | None:
        """`end` of a turn before one of `role`, which may have another mark."""
        last, inner = self.tail, self.between(role)
        shared = _common(last.ids, inner.ids)
        marks = [*reversed(last.ids[:shared]), *last.ids[shared:], *inner.ids[shared : shared + 1]]
        return next((token for token in marks if token in last.marks | inner.marks), None)

    @cached_property
    def tail(self) -> "Stretch":
        """Text behind the model's turn where it is the last one."""
        whole = self.tried([("user", ASKED[0]), ("assistant", ANSWERED[0])])
        return self._stretch("" if whole is None else whole.rpartition(ANSWERED[0])[2])

    def between(self, role: str) -> "Stretch":
        """Text between the end of the model's text and a reply's text. Empty if the template
        refuses such a reply."""
        if role not in self._between:
            whole = self.tried(_conversation(1, role), opens=True) or ""
            inner = whole.partition(ANSWERED[0])[2].partition(ASKED[1])[0]
            self._between[role] = self._stretch(inner)
        return self._between[role]

    @cached_property
    def _between(self) -> dict[str, "Stretch"]:
        return {}

    def _stretch(self, text: str) -> "Stretch":
        """Tokens of a template's text, and those of them that are marks: added to the vocabulary,
        and written out in the text."""
        ids = self.tokens(text)
        added = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        if self.tokenizer.bos_token_id != self.tokenizer.eos_token_id:
            added.discard(self.tokenizer.bos_token_id)  # begins a text, and ends none
        marks = {i for i in ids if i in added and self.tokenizer.convert_ids_to_tokens(i) in text}
        return Stretch(ids, frozenset(marks))

    @cached_property
    def _opening(self) -> str:
        """The end of a prompt, behind the user's text."""
        whole = self.tried([("user", ASKED[0])], opens=True)
        return "" if whole is None else whole.rpartition(ASKED[0])[2]

    def completion(self, text: str, stop: Sequence[int], role: str = "user") -> list[int]:
        """Tokens of a text as the model's turn behind a prompt, up to the first of the tokens
        `stop` behind the text, or its end before a turn of `role`.

        A text that the template shows without a part of it (reasoning), or not behind the prompt's
        end, is taken as it is.
        """
        ids = self._shown(text)
        if ids is None:
            ids = [*self.tokens(self._behind_opening(text)), *self.tail.ids]
        end = self.end_before(role)
        ends = {*stop, end}
        if end is None:  # of plain words, which the model does not write behind its end
            eos = self.tokenizer.eos_token_id
            closing = [eos] if eos in stop else list(stop[:1])
            return [*self.tokens(text), *closing]
        tail = self.tail.ids
        at = next((i for i, token in enumerate(tail) if token in ends), None)
        if at is None:
            return [*ids, end]
        return ids[: len(ids) - (len(tail) - at - 1)]

    def _shown(self, text: str) -> list[int] | None:
        """Tokens that the template adds to a prompt for this turn, or None."""
        asked = ("user", ASKED[0])
        prompt, whole = self.tried([asked], opens=True), self.tried([asked, ("assistant", text)])
        if prompt is None or whole is None or not whole.startswith(prompt):
            return None
        added = whole.removeprefix(prompt)
        rest = self._behind_opening(text)
        if rest != text and not _squeezed(added).startswith(_squeezed(rest)):
            return None  # it opens its reasoning, as the prompt does
        if _squeezed(text) not in _squeezed(self._opening + added):
            return None
        before, all_tokens = self.tokens(prompt), self.tokens(whole)
        return (
            all_tokens[len(before) :] if all_tokens[: len(before)] == before else self.tokens(added)
        )

    def _behind_opening(self, text: str) -> str:
        """A text without its beginning if prompts already end with it, such as `<think>`."""
        opening = self._opening
        for size in range(min(len(opening), len(text)), 0, -1):
            if opening.endswith(text[:size]) and text[:size].strip():
                return text[size:]
        return text

    def reply(self, text: str, role: str, last: int | None, said: str = "") -> list[int]:
        """Tokens between the model's turn and its next one, with a reply.

        last  the token that ended the turn; None: a stop text did
        said  the stop text
        The template's end of a turn is left out only where the model has written it.
        TemplateRefused from a template that refuses the role.
        """
        if self.tokenizer.chat_template is None:
            return self.tokens(text)
        turns = [("user", ASKED[0]), ("assistant", ANSWERED[0]), (role, text)]
        _, turn, rest = self.text(turns, opens=True).partition(ANSWERED[0])
        if not turn:
            raise UserError("model.environment: the chat template leaves out the model's turns")
        if last is None:
            return self.tokens(rest.removeprefix(said))
        return self.tokens(rest)[self._written(role, last) :]

    def _written(self, role: str, last: int) -> int:
        """Count the first tokens behind a turn that the model has written, whose last one is
        `last`."""
        inner = self.between(role)
        if inner.ids[:1] == [last]:
            return 1
        turn_end = self.end_before(role)
        ends = {turn_end}
        if turn_end in self.tail.ids and turn_end not in inner.ids:
            ends = inner.marks  # earlier turns end with another token
        end = next((i for i, token in enumerate(inner.ids) if token in ends), None)
        return 0 if end is None or last != turn_end else end + 1

    def rewritten(self, role: str, stop: Sequence[int]) -> Iterator[str]:
        """Sentences on what a model of several turns sees otherwise than in its template."""
        for system in (None, "a rule"):
            for count in (1, 2):
                wanted, seen = self._both(count, role, stop, system)
                if wanted is not None and seen != wanted:
                    yield (
                        "the chat template rewrites earlier turns, and the model sees them as it "
                        f"wrote them: {_differing(seen, wanted)}"
                    )
                    return
        turns = [("user", ASKED[0]), ("assistant", REASONED), (role, ASKED[1])]
        if "think" in str(self.tokenizer.chat_template):
            last, earlier = self.tried(turns[:2]), self.tried(turns, opens=True)
            if last is not None and THOUGHT in last and THOUGHT not in str(earlier):
                yield (
                    "the chat template leaves out the reasoning (<think>) of earlier turns, and "
                    "the model sees it, as it wrote it"
                )

    def _both(
        self, count: int, role: str, stop: Sequence[int], system: str | None
    ) -> tuple[str | None, str]:
        """A conversation of `count` replies as the template writes it (None: it refuses), and as
        the model sees it."""
        first = [] if system is None else [("system", system)]
        turns = _conversation(count, role)
        wanted = self.tried([*first, *turns], opens=True)
        prompt = self.tried([*first, turns[0]], opens=True)
        if wanted is None or prompt is None:
            return None, ""
        ids = self.tokens(prompt)
        for k in range(count):
            completion = self.completion(ANSWERED[k], stop, role)
            ids += [*completion, *self.reply(ASKED[k + 1], role, completion[-1])]
        same = ids == self.tokens(wanted)
        return wanted, wanted if same else self.tokenizer.decode(ids)

    def given_otherwise(self) -> str | None:
        """A sentence if given texts do not stand behind a prompt as the template shows them."""
        asked = ("user", ASKED[0])
        prompt, whole = self.tried([asked], True), self.tried([asked, ("assistant", ANSWERED[0])])
        if prompt is None or whole is None or whole.startswith(prompt):
            return None
        return (
            f"prompts end with {self._opening!r}, but the chat template shows a turn of the model "
            f"as {whole.partition(ASKED[0])[2]!r}: given texts stand behind the prompt's end"
        )


class Stretch(NamedTuple):
    """Tokens of a piece of a template, and those of them that are marks of turns and roles."""

    ids: list[int]
    marks: frozenset[int]


@dataclass(frozen=True)
class _Key:
    """Everything that a probe depends on."""

    tokenizer: Any
    template: str
    words: str  # of the further arguments
    further: Mapping[str, Any] = field(compare=False)


def turn_template(tokenizer: Any, further: Mapping[str, Any]) -> TurnTemplate:
    """The template of a tokenizer, probed once for each template and further arguments."""
    words = json.dumps(dict(further), sort_keys=True, default=repr)
    return _probed(_Key(tokenizer, json.dumps(tokenizer.chat_template), words, further))


@lru_cache(maxsize=16)
def _probed(key: _Key) -> TurnTemplate:
    return TurnTemplate.of(key.tokenizer, key.further)


def _conversation(replies: int, role: str) -> list[_Said]:
    """A user's turn, and the model's turns with replies of `role` after them."""
    turns = [("user", ASKED[0])]
    for k in range(replies):
        turns += [("assistant", ANSWERED[k]), (role, ASKED[k + 1])]
    return turns


def _common(first: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    pairs = enumerate(zip(first, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(other)))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _differing(seen: str, wanted: str) -> str:
    """The parts in which two texts differ, with a few letters around them."""
    size = min(len(seen), len(wanted))
    begin = next((i for i in range(size) if seen[i] != wanted[i]), size)
    end = next((i for i in range(size - begin) if seen[-1 - i] != wanted[-1 - i]), size - begin)
    shown = (text[max(0, begin - 20) : len(text) - max(0, end - 20)] for text in (seen, wanted))
    return "{!r} where it has {!r}".format(*shown)
