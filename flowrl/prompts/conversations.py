"""Rows that hold whole conversations in place of a prompt, as preference data and chats do.

chosen and rejected, no prompt   two conversations with one beginning: lists of messages that end
                                 with the assistant's (UltraFeedback's and TRL's form), or texts of
                                 turns `\\n\\nHuman: ...\\n\\nAssistant: ...` (hh-rlhf's form). The
                                 beginning is the prompt
messages or conversations,       a list of messages. It ends with the assistant's, the completion,
no prompt                        or with another one's, and the answers are in chosen and rejected
                                 (pairs of LLaMA-Factory's sharegpt form)
instruction, no prompt           Alpaca's form: the prompt is the instruction, and `input` below it;
                                 `history` has earlier turns in pairs. `output` is the answer, or
                                 the answers are in chosen and rejected
caption, jpg_0 and jpg_1         Pick-a-Pic's pairs: the caption is the prompt

A column `system` has the system message of such rows, as in LLaMA-Factory's data/README.md; one
within the messages comes before it.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flowrl.errors import UserError
from flowrl.prompts.chat import ChatMessage, message_of, with_system
from flowrl.prompts.source import PromptRows, Row
from rewards.types import cell

_TURN = re.compile(r"\n\n(Human|Assistant):[ ]?")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_LISTS = ("messages", "conversations")
_SIDES = ("chosen", "rejected")
_MEDIA = re.compile(r"\.(png|jpe?g|webp|bmp|tiff?|gif|mp4|mov|webm|mkv|avi)\s*$", re.IGNORECASE)


def with_prompts_found(table: PromptRows, at: str) -> PromptRows:
    """The rows with the columns prompt, chosen and rejected, or prompt and completion, where they
    hold conversations or Alpaca's columns alone; other tables unchanged.

    Two conversations that differ in more than their last turn have no prompt in common: these rows
    are left out, with a warning. UserError if no row is left."""
    if not table.rows or any("prompt" in row for row in table.rows):
        return table
    if all(all(_is_talk(row.get(side)) for side in _SIDES) for row in table.rows):
        return _pairs(table, at)
    table = _with_outputs(_with_answers(table, at), at)
    for fits, read in _FORMS:
        if all(fits(row) for row in table.rows):
            return replace(table, rows=[read(row) for row in table.rows])
    return table


def spoken_in(row: Row, column: str) -> Any:
    """The prompt in a column of a row. A conversation of ShareGPT's form gets the system message of
    its row's column `system`."""
    value = cell(row, column)
    theirs = isinstance(value, list) and any(isinstance(m, dict) and "from" in m for m in value)
    return with_system(value, row.get("system")) if theirs else value


def _with_answers(table: PromptRows, at: str) -> PromptRows:
    """A table of conversations, some of which end with the assistant's message, without the others,
    which a warning counts; any other table unchanged."""
    lists = all(any(isinstance(row.get(name), list) for name in _LISTS) for row in table.rows)
    answered = [i for i, row in enumerate(table.rows) if _is_answered(row)]
    if (
        not lists
        or not answered
        or len(answered) == len(table.rows)
        or all(map(_has_sides, table.rows))
    ):
        return table
    first = next(where for i, where in enumerate(table.places) if i not in answered)
    warnings.warn(
        f"{at}: {len(table.rows) - len(answered)} of {len(table.rows)} rows left out: the "
        f"conversation does not end with an assistant's message behind another one ({first})",
        stacklevel=2,
    )
    return table.taken([table.rows[i] for i in answered], answered)


def _with_outputs(table: PromptRows, at: str) -> PromptRows:
    """A table of Alpaca's columns without the rows whose output is empty or no text, which a
    warning counts; any other table unchanged. UserError if no row is left.

    One such row, of which Alpaca's own file has some, must not make the others another form."""
    if any("output" not in row or _has_sides(row) for row in table.rows):
        return table
    if not all(isinstance(row.get("instruction"), str) for row in table.rows):
        return table
    spoken = [i for i, row in enumerate(table.rows) if _is_text(row["output"])]
    if len(spoken) == len(table.rows) or not all(_is_alpaca(table.rows[i]) for i in spoken):
        return table
    if not any(row["output"] for row in table.rows):
        return table  # prompts without answers, or edits of images that are yet to be made
    first = next(i for i in range(len(table.rows)) if i not in set(spoken))
    fault = f"output is {table.rows[first]['output']!r:.50}, not a text"
    if not spoken:
        raise UserError(
            f"{at}, {table.places[first]}: {fault}: write the answers as texts, or read the "
            "prompts alone, by column: instruction"
        )
    warnings.warn(
        f"{at}: {len(table.rows) - len(spoken)} of {len(table.rows)} rows left out: {fault} "
        f"({table.places[first]})",
        stacklevel=2,
    )
    return table.taken([table.rows[i] for i in spoken], spoken)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def answer_in(value: Any) -> str | None:
    """The text of an answer: a text itself, the assistant's message, or a conversation that ends
    with it; None for anything else."""
    last = value[-1] if isinstance(value, list) and value else value
    message = message_of(last)
    if message is None or message["role"] != "assistant":
        return value if isinstance(value, str) else None
    return _text_in(message.get("content"))


def _text_in(content: Any) -> str | None:
    """The text of a message's content, which may come in parts; None if some are no texts."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None


def _is_talk(value: Any) -> bool:
    return _answered(value) or (
        isinstance(value, str) and len(_TURN.findall(value)) > 1 and not _turns(value)[0]
    )


def _messages(value: Any) -> list[ChatMessage] | None:
    """A list of messages of either form; None for anything else."""
    if not isinstance(value, list) or not value:
        return None
    messages = [message for one in value if (message := message_of(one)) is not None]
    return messages if len(messages) == len(value) else None


def _answered(value: Any) -> bool:
    """Whether a value is a list of at least two messages that ends with the assistant's."""
    talk = isinstance(value, list) and len(value) > 1 and all(isinstance(m, dict) for m in value)
    return talk and (message_of(value[-1]) or {}).get("role") == "assistant"


def _turns(text: str) -> tuple[str, list[dict[str, str]]]:
    """The text before the first turn, and the turns as messages."""
    before, *rest = _TURN.split(text)
    roles, contents = rest[::2], rest[1::2]
    turns = zip(roles, contents, strict=True)
    return before.strip(), [{"role": _ROLES[role], "content": text} for role, text in turns]


def _pairs(table: PromptRows, at: str) -> PromptRows:
    pairs = [_pair(row) for row in table.rows]
    usable = [i for i, row in enumerate(pairs) if row is not None]
    reason = "chosen and rejected differ in more than the assistant's last turn"
    if not usable:
        raise UserError(f"{at}: {reason} in every row; add the column prompt")
    if len(usable) < len(pairs):
        first = table.places[pairs.index(None)]
        out = len(pairs) - len(usable)
        warnings.warn(
            f"{at}: {out} of {len(pairs)} rows left out: {reason} ({first})", stacklevel=2
        )
    return table.taken([row for row in pairs if row is not None], usable)


def _pair(row: Row) -> Row | None:
    """The row with the prompt that its conversations share; None if they share none."""
    chosen, rejected = (
        [message_of(m) or m for m in value] if isinstance(value, list) else _turns(value)[1]
        for value in (row["chosen"], row["rejected"])
    )
    if len(chosen) != len(rejected) or chosen[:-1] != rejected[:-1]:
        return None
    if any(talk[-1]["role"] != "assistant" for talk in (chosen, rejected)):
        return None
    answers = {"chosen": _spoken(chosen[-1]), "rejected": _spoken(rejected[-1])}
    return {**row, "prompt": _prompt(row, chosen[:-1]), **answers}


def _list_in(row: Row, fits: Callable[[Any], bool]) -> Any:
    """The conversation of a row that fits; None without one."""
    return next((row[name] for name in _LISTS if fits(row.get(name))), None)


def _asked(value: Any) -> bool:
    """Whether a value is a list of messages whose answer is missing."""
    messages = _messages(value)
    return messages is not None and messages[-1]["role"] not in ("assistant", "system")


def _has_sides(row: Row) -> bool:
    return all(answer_in(row.get(side)) is not None for side in _SIDES)


def _sides(row: Row) -> dict[str, Any]:
    return {side: answer_in(row[side]) for side in _SIDES}


def _is_asked_pair(row: Row) -> bool:
    return _list_in(row, _asked) is not None and _has_sides(row)


def _asked_pair(row: Row) -> Row:
    return {**row, "prompt": _prompt(row, _messages(_list_in(row, _asked)) or ()), **_sides(row)}


def _is_answered(row: Row) -> bool:
    return _list_in(row, _answered) is not None


def _answer(row: Row) -> Row:
    *before, last = (message_of(m) or m for m in _list_in(row, _answered))
    return {**row, "prompt": _prompt(row, before), "completion": _spoken(last)}


def _is_alpaca(row: Row) -> bool:
    """Whether a row is one of Alpaca's. Edits of images have such columns too, with files."""
    texts = [row.get("instruction"), row.get("input") or "", row.get("output") or ""]
    spoken = all(isinstance(text, str) and not _MEDIA.search(text) for text in texts)
    past = row.get("history") or []
    turns = isinstance(past, list) and all(isinstance(t, list) and len(t) == 2 for t in past)
    return spoken and turns and (bool(row.get("output")) or _has_sides(row))


def _alpaca(row: Row) -> Row:
    asked = "\n".join(filter(None, (row["instruction"], row.get("input"))))
    past = [
        {"role": role, "content": text}
        for turn in row.get("history") or []
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    answers = {"completion": row["output"]} if row.get("output") else _sides(row)
    return {**row, "prompt": _prompt(row, [*past, {"role": "user", "content": asked}]), **answers}


def _is_pick(row: Row) -> bool:
    """Whether a row is one of Pick-a-Pic's, whose prompt is called caption."""
    return isinstance(row.get("caption"), str) and {"jpg_0", "jpg_1"} <= {*row}


def _pick(row: Row) -> Row:
    return {**row, "prompt": row["caption"]}


_FORMS = (
    (_is_asked_pair, _asked_pair),
    (_is_answered, _answer),
    (_is_alpaca, _alpaca),
    (_is_pick, _pick),
)


def _spoken(message: ChatMessage) -> Any:
    """The text of a message, or its content where that is none."""
    content = message.get("content")
    text = _text_in(content)
    return content if text is None else text


def _prompt(row: Row, messages: Sequence[Any]) -> Any:
    """A single user's message as a text, which needs no chat template; several as they are."""
    messages = with_system(messages, row.get("system"))
    only = messages[0] if len(messages) == 1 else {}
    text = _text_in(only.get("content")) if only.get("role") == "user" else None
    return list(messages) if text is None else text
