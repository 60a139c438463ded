"""Chat templates in their confined process: the same texts as without it, in bounded time."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rewards.sandbox import templates
from rewards.sandbox.templates import TemplateLate, TemplateRefused, render_chat
from tests.support import tiny_lm

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{{ extra }}"
)
NESTED = "{% for a in range(99999) %}" * 6 + "x" + "{% endfor %}" * 6
TURNS = [{"role": "user", "content": "hi ☃ \ud800"}, {"role": "system", "content": None}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("language")
    tiny_lm.write(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("template", [
    CHATML,
    "{{ messages | tojson }}{{ messages[0].content | length }}",
    "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}",
    "{{ strftime_now('%Y') }}{{ bos_token }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m }}{% endfor %}",
])  # fmt: skip
def test_texts_are_those_of_transformers(template, tokenizer):
    tokenizer.chat_template = template
    further = {"add_generation_prompt": True, "extra": "more", "documents": [{"title": "t"}]}
    wanted = tokenizer.apply_chat_template(TURNS, tokenize=False, **further)
    assert render_chat(tokenizer, TURNS, **further) == wanted
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: render_chat(tokenizer, TURNS, **further), range(9))) == {
            wanted
        }


@pytest.mark.slow
def test_a_template_that_does_not_end_is_ended(tokenizer, monkeypatch):
    monkeypatch.setattr(templates, "RENDER_SECONDS", 0.5)
    tokenizer.chat_template = NESTED
    began = time.monotonic()
    with pytest.raises(TemplateLate, match=r"did not end within 0\.5 s"):
        render_chat(tokenizer, TURNS)
    assert time.monotonic() - began < 8
    tokenizer.chat_template = "{{ messages | length }}"
    assert render_chat(tokenizer, TURNS) == "2"


@pytest.mark.parametrize(("template", "said"), [
    ("{{ raise_exception('one user only') }}", "one user only"),
    ("{% include 'other.jinja' %}", "includes or imports another template"),
    ("{% import 'other.jinja' as o %}", "includes or imports another template"),
    ("{{ 1 // 0 }}", "division"),
    ("{% for %}", "Expected"),
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ("{{ ('x' * 9**10)[:1] }}", "MemoryError"),
])  # fmt: skip
def test_a_template_that_raises_is_refused(template, said, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(TemplateRefused, match=said):
        render_chat(tokenizer, TURNS)


@pytest.mark.slow
def test_a_killed_process_and_a_fork_begin_again(tokenizer):
    tokenizer.chat_template = CHATML
    wanted = render_chat(tokenizer, TURNS)
    process = templates._renderer.process
    assert process is not None
    os.kill(process.process.pid, signal.SIGKILL)
    process.process.wait()
    with pytest.raises(TemplateRefused, match="ended its process"):
        while True:  # its keeper is gone; the kernel ends it a moment later
            render_chat(tokenizer, TURNS)
    assert render_chat(tokenizer, TURNS) == wanted
    child = os.fork()
    if not child:
        same = render_chat(tokenizer, TURNS) == wanted
        templates._renderer.close()
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert render_chat(tokenizer, TURNS) == wanted
