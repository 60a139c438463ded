"""Chat templates decide where turns begin and end: the conversation that the model sees is the one
that the template writes, for all templates of TRL's wheel."""

import json
import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.models.language.chat import chat_tokens
from flowrl.models.language.environment import Replies
from flowrl.models.language.given_texts import completion_tokens
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.language.turns import turn_template
from flowrl.models.language.use import TextUse
from flowrl.session import start_record
from flowrl.session.start_record import StartRecord
from flowrl.settings import EnvironmentSettings
from flowrl.settings.read import run_from
from rewards.sandbox.templates import TemplateRefused
from tests.support import environments, tiny_lm
from tests.support.environments import RECIPE as GAME
from tests.support.environments import tree as game

trl = pytest.importorskip("trl")
TEMPLATES = {
    file.stem: file.read_text()
    for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    if not file.stem.endswith("_training")
}
MARK = re.compile(
    r"<\|?[A-Za-z_/][A-Za-z_ ]*\|?>|<\uff5c[^\uff5c]+\uff5c>|\[/?[A-Za-z]+\]"
)  # ASCII's and DeepSeek's bars
# The tokenizer's own end, as published with the model; others have the end of their template.
OWN_ENDS = {
    "gemma": "<eos>", "gemma3": "<eos>", "glm4moe": "<|endoftext|>", "gptoss": "<|return|>",
    "phi3": "<|endoftext|>", "phi3_5": "<|endoftext|>",
}  # fmt: skip
QUESTIONS = ("red or blue?", "and now?", "the last: \u00e9", "bye")
ANSWERS = ("green", "it is blue, I think", "both\n\nof them")


def byte_tokenizer(template: str, end: str) -> PreTrainedTokenizerFast:
    """A token a byte, and one for each mark of a template."""
    letters = {word: i for i, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(letters, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token=end)
    marks = [mark for mark in dict.fromkeys(MARK.findall(template)) if mark not in (end, "<bos>")]
    made.add_special_tokens({"additional_special_tokens": marks})
    made.chat_template = template
    return made


# What these show of earlier turns is not what the model wrote; the reason stands in TRL's README.
REWRITE = {
    "deepseek_r1_distill", "deepseekv3", "gptoss", "nemotron_3_5_lightning", "nemotron_3_nano",
    "nemotron_3_super", "nemotron_3_ultra", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A tokenizer, the tokens at which its model stops, and replies of an environment."""

    tokenizer: PreTrainedTokenizerFast
    stop: list[int]
    replies: Replies

    @classmethod
    @cache  # several tests read it, and none writes
    def of(cls, name: str, role: str = "user", stop: tuple[str, ...] = ()) -> "Model":
        made = byte_tokenizer(TEMPLATES[name], OWN_ENDS.get(name, "<EOS>"))
        how = EnvironmentSettings(name="own.py:reply", role=role)
        use = TextUse(stop=stop, environment=how)
        policy = CausalPolicy(tiny_lm.llama(), made, use=use, weights=False)  # none is called
        assert policy.environment is not None
        return cls(made, policy.stops.tokens, policy.environment)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def rendered(self, turns, opens=False, parts=False) -> str:
        """The template's own words, without a word of ours."""
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
            for role, text in turns
        ]
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=opens, tokenize=False
        )


def conversation(count: int, role: str = "user") -> list[tuple[str, str]]:
    turns = [("user", QUESTIONS[0])]
    for k in range(count):
        turns += [("assistant", ANSWERS[k]), (role, QUESTIONS[k + 1])]
    return turns


def fed(model: Model, count: int, system: str | None = None) -> list[int]:
    """Tokens of a conversation as a run has them: the prompt, given completions as the model's
    turns, and replies."""
    role = model.replies.how.role
    ids = list(chat_tokens(model.tokenizer, QUESTIONS[0], system, {}))
    for k in range(count):
        turn = turn_template(model.tokenizer, {}).completion(ANSWERS[k], model.stop, role)
        ids += [*turn, *model.replies.encode(QUESTIONS[k + 1], turn)]
    return ids


def takes(tokenizer, turns) -> bool:
    """Whether a template shows all texts of these turns."""
    try:
        text = turn_template(tokenizer, {}).text(turns, True)
    except TemplateRefused:
        return False
    return all(part.strip() in text for _, part in turns)


def test_the_table_has_the_templates_of_the_wheel():
    assert len(TEMPLATES) >= 38 and set(TEMPLATES) > REWRITE


@pytest.mark.quick_cases(
    "gemma4_v5", "diffusion_gemma", "glm4moe", "lfm2_2_5_v2", "muse_glimmer", "qwen3_8"
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_model_sees_the_conversation_that_its_template_writes(name):
    """Where k turns are the beginning of k + 1 turns; elsewhere the start says what differs."""
    for role, system in (("user", None), ("user", "be short"), ("tool", None)):
        first = [] if system is None else [("system", system)]
        turns = [*first, *conversation(3, role)]
        if not takes(byte_tokenizer(TEMPLATES[name], "<EOS>"), turns):
            assert (role, system) != ("user", None)
            continue
        model = Model.of(name, role)
        parts, size = model.replies.turns.parts, len(first)
        steps = [model.rendered(turns[: size + k], k % 2 == 1, parts) for k in range(1, 8)]
        said = [text for text in model.replies.described()[1:] if "as it wrote them" in text]
        same = fed(model, 3, system) == model.ids(steps[-1])
        if all(after.startswith(before) for before, after in pairwise(steps)):
            assert same
        assert same != bool(said) and (role == "tool" or same != (name in REWRITE))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_given_text_is_the_turn_that_the_template_writes_behind_the_prompt(name):
    model = Model.of(name)
    parts = model.replies.turns.parts
    for answer in ANSWERS:
        turns = [("user", QUESTIONS[0]), ("assistant", answer)]
        prompt, whole = model.rendered(turns[:1], True, parts), model.rendered(turns, False, parts)
        tokens = completion_tokens(model, answer, 10**6)
        assert tokens[-1] in model.stop
        if not whole.startswith(prompt):
            assert model.replies.turns.given_otherwise() and name in REWRITE
            assert tokens[: len(model.ids(answer))] == model.ids(answer)
            continue
        text = model.tokenizer.decode(tokens)
        added = whole.removeprefix(prompt)
        assert model.replies.turns.given_otherwise() is None
        if name == "glm4moe":  # whose turns end where the next one begins
            assert text == added + "<|user|>"
        else:
            assert added.startswith(text) and answer in text
            assert set(added.removeprefix(text)) <= set("\n ") or name.startswith("phi3")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_that_ended_at_another_token_or_text_gets_the_template_s_end(name):
    """model.stop ends a turn whose end of turn the model has not written."""
    model = Model.of(name, stop=("!", "\n\n?"))
    assert model.ids("!")[0] in model.stop and model.replies.stop_texts is not None
    parts = model.replies.turns.parts
    whole = model.rendered(conversation(1), True, parts)
    rest = model.ids(whole.partition(ANSWERS[0])[2])
    assert rest[0] != model.ids("!")[0]
    for ending in ("!", "\n\n?"):
        assert model.replies.encode(QUESTIONS[1], model.ids(ANSWERS[0] + ending)) == rest
    turn = completion_tokens(model, ANSWERS[0], 10**6)
    own = model.replies.encode(QUESTIONS[1], turn)
    assert own == rest[-len(own) :] and 0 < len(rest) - len(own) <= 13


REASONED = "<think>\nwhy not\n</think>\n\nred"


@pytest.mark.parametrize("name", [n for n, text in TEMPLATES.items() if "</think>" in text])
def test_no_reasoning_of_a_given_text_is_lost_or_opened_twice(name):
    model = Model.of(name)
    prompt = model.tokenizer.decode(chat_tokens(model.tokenizer, QUESTIONS[0], None, {}))
    text = model.tokenizer.decode(completion_tokens(model, REASONED, 10**6))
    assert (prompt + text).partition(QUESTIONS[0])[2].count("why not") == 1
    assert text.count("<think>") == (0 if prompt.endswith("<think>\n") else 1)


def test_what_a_template_drops_of_a_text_stays_in_the_prompt():
    """SmolVLM's template leaves out messages that are not lists of parts."""
    model = Model.of("smolvlm")
    ids = chat_tokens(model.tokenizer, QUESTIONS[0], None, {})
    assert QUESTIONS[0] in model.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", None),
        ("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}", None),
        ("{% for m in messages %}{{ bos_token }}{{ m['content'] }}{% endfor %}", None),
        ("{% for m in messages %}<|x|>{{ m['content'] }}{% endfor %}", "<|x|>"),
        ("{% for m in messages %}{{ m['content'] }}\n<|x|>\n{% endfor %}", "<|x|>"),
        ("{{ messages[0]['content'] }}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_a_template_s_end_of_turn_is_a_mark_that_follows_the_text(template, end):
    made = byte_tokenizer(template, "<EOS>")
    found = turn_template(made, {}).end
    assert found == (None if end is None else made.convert_tokens_to_ids(end))
    stop = [made.eos_token_id] if found is None else [made.eos_token_id, found]
    assert turn_template(made, {}).completion("red", stop)[-1] == stop[-1]


GLM = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GEMMA = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EOS = GEMMA.replace("<|eot|>", "<end>")


def written(folder: Path, template: str) -> Path:
    """The folder of a tiny model with another template, whose stop token is the tokenizer's."""
    tiny_lm.write(folder)
    made = tiny_lm.tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|eot|>"]})
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


RULES = {"stop": "completions now also end", "given": "given texts now", "turn": "before a reply"}


@pytest.mark.parametrize(
    ("template", "kind", "rules"),
    [
        (None, "given", []),
        (EOS, "given", []),
        (EOS, "turns", []),
        (GEMMA, "given", ["stop", "given"]),
        (GEMMA, "turns", ["stop"]),
        (EOS, "turns that stop at a", ["turn"]),
        (GEMMA, "drawn", ["stop"]),
        (GLM, "given", ["stop", "given"]),
    ],
)
def test_a_run_of_an_older_version_names_the_rule_that_changed(tmp_path, template, kind, rules):
    folder = written(tmp_path / "lm", template)
    recipe = {"name": "text", "loss": "reinforce", "length": 8} if kind == "given" else GAME
    tree = game(folder, tmp_path, "reply" if "turns" in kind else None, recipe)
    if kind == "given":
        (tmp_path / "given.jsonl").write_text('{"prompt": "a", "completion": "cab"}\n' * 4)
        tree["given"] = {"file": str(tmp_path / "given.jsonl"), "kind": "texts"}
        tree["prompts"].pop("train")
        tree["prompts"]["per_iteration"] = 2
    tree["model"]["stop"] = ["a"] if "stop" in kind else []
    run = run_from(tree, "test")
    record = StartRecord.of(run, 1).state()
    at = tmp_path / "000001"
    at.mkdir()

    def lines() -> list[str]:
        (at / "state.json").write_text(json.dumps({"origin": record}))
        return start_record.changes(run, tmp_path, at, 1)

    assert lines() == []
    del record["turns_by_template"]
    found = lines()
    assert len(found) == len(rules)
    assert all(RULES[rule] in line for rule, line in zip(rules, found, strict=True))


def test_a_reward_of_turns_sees_no_stop_token_or_text_at_a_turn_s_end(tmp_path):
    made = environments.made(tmp_path, stop=["a", "be"])
    found, batch = environments.rollout(made)
    rows = batch.beginnings(found, batch.media(found))
    texts = [text for row in rows for text in row[:-1]]
    assert len(texts) > 9 and not any(text.endswith(("a", "be")) for text in texts)
