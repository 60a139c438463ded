"""Rows that hold whole conversations in place of a prompt, as preference data and chats do.

chosen and rejected, no prompt   two conversations with one beginning: lists of messages that end
                                 with the assistant's (UltraFeedback's and TRL's form), or texts of
                                 turns `\\n\\nHuman: ...\\n\\nAssistant: ...` (hh-rlhf's form). The
                                 beginning is the prompt
messages or conversations,       a list of messages that ends with the assistant's, the completion
no prompt
"""

import re
import warnings
from collections.abc import Sequence
from typing import Any

from flowrl.errors import UserError
from flowrl.prompts.chat import of_sharegpt
from flowrl.prompts.source import PromptRows, Row

_TURN = re.compile(r"\n\n(Human|Assistant):[ ]?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def with_prompts_found(table: PromptRows, at: str) -> PromptRows:
    """The rows with the columns prompt, chosen and rejected, or prompt and completion, where they
    hold conversations alone; other tables unchanged.

    Two conversations that differ in more than their last turn have no prompt in common: these rows
    are left out, with a warning. UserError if no row is left."""
    if not table.rows or any("prompt" in row for row in table.rows):
        return table
    if all(_is_talk(row.get("chosen")) and _is_talk(row.get("rejected")) for row in table.rows):
        return _pairs(table, at)
    for column in ("messages", "conversations"):
        if all(_answered(row.get(column)) for row in table.rows):
            return PromptRows([_answer(row, column) for row in table.rows], table.places)
    return table


def _is_talk(value: Any) -> bool:
    return _answered(value) or (
        isinstance(value, str) and len(_TURN.findall(value)) > 1 and not _turns(value)[0]
    )


def _answered(value: Any) -> bool:
    """Whether a value is a list of at least two messages that ends with the assistant's."""
    talk = isinstance(value, list) and len(value) > 1 and all(isinstance(m, dict) for m in value)
    return talk and of_sharegpt(value[-1]).get("role") == "assistant"


def _turns(text: str) -> tuple[str, list[dict[str, str]]]:
    """The text before the first turn, and the turns as messages."""
    before, *rest = _TURN.split(text)
    roles, contents = rest[::2], rest[1::2]
    turns = zip(roles, contents, strict=True)
    return before.strip(), [{"role": _ROLES[role], "content": text} for role, text in turns]


def _pairs(table: PromptRows, at: str) -> PromptRows:
    made = [(_pair(row), where) for row, where in zip(table.rows, table.places, strict=True)]
    kept = [(row, where) for row, where in made if row is not None]
    why = "chosen and rejected differ in more than the assistant's last turn"
    if not kept:
        raise UserError(f"{at}: {why} in every row; add the column prompt")
    if len(kept) < len(made):
        first = next(where for row, where in made if row is None)
        out = len(made) - len(kept)
        warnings.warn(f"{at}: {out} of {len(made)} rows left out: {why} ({first})", stacklevel=2)
    return PromptRows([row for row, _ in kept], [where for _, where in kept])


def _pair(row: Row) -> Row | None:
    """The row with the prompt that its conversations share; None if they share none."""
    chosen, rejected = (
        [of_sharegpt(m) for m in value] if isinstance(value, list) else _turns(value)[1]
        for value in (row["chosen"], row["rejected"])
    )
    if len(chosen) != len(rejected) or chosen[:-1] != rejected[:-1]:
        return None
    if any(talk[-1]["role"] != "assistant" for talk in (chosen, rejected)):
        return None
    answers = {"chosen": chosen[-1]["content"], "rejected": rejected[-1]["content"]}
    return {**row, "prompt": _prompt(chosen[:-1]), **answers}


def _answer(row: Row, column: str) -> Row:
    *before, last = map(of_sharegpt, row[column])
    return {**row, "prompt": _prompt(before), "completion": last.get("content")}


def _prompt(messages: Sequence[Any]) -> Any:
    """A single user's message as a text, which needs no chat template; several as they are."""
    only = messages[0] if len(messages) == 1 else {}
    text = only.get("role") == "user" and isinstance(only.get("content"), str)
    return only["content"] if text else list(messages)
