"""Prompts of chat messages through a tokenizer's own template."""

import pytest

from flowrl.errors import UserError
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.language.use import TextUse
from flowrl.prompts import Chat
from tests.support import tiny_lm

SYSTEM = {"role": "system", "content": "be a cab"}
SHOTS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LAST = {"role": "user", "content": "c"}
ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


def policy(system: str | None = None, chat: bool = True) -> CausalPolicy:
    return CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer(chat=chat), use=TextUse(system=system))


@pytest.mark.parametrize(
    ("messages", "system", "text"),
    [
        ([LAST], None, "u:c a:"),
        ([LAST], "hi", "s:hi u:c a:"),
        ([SYSTEM, LAST], "hi", "s:be a cab u:c a:"),
        ([SYSTEM, *SHOTS, LAST], None, "s:be a cab u:a a:b u:c a:"),
    ],
)
def test_the_template_renders_all_messages(messages, system, text):
    made = policy(system)
    assert made.encode(Chat("c", messages)) == made.tokenizer(text).input_ids
    assert made.encode("c") == policy(system).encode(Chat("c", [LAST]))


def test_what_a_template_or_its_absence_refuses_names_the_row():
    chat = Chat("c", [SYSTEM, LAST], "data.jsonl, line 3")
    with pytest.raises(UserError, match=r"data.jsonl, line 3: .* has no chat template: name a"):
        policy(chat=False).encode(chat)
    made = policy()
    made.tokenizer.chat_template = ALTERNATE
    with pytest.raises(UserError, match=r"line 3: .* rejects messages of system, user .roles must"):
        made.encode(chat)
    assert made.encode(Chat("c", [*SHOTS, LAST])) == made.tokenizer("abc").input_ids
