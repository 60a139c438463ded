"""Prompts of a tokenizer that adds an end to every text: the model goes on with the prompt."""

import json

import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer

from flowrl.models.image_tokens.policy import ImageTokenPolicy
from flowrl.models.language.policy import CausalPolicy
from flowrl.session import start_record
from flowrl.session.start_record import StartRecord
from flowrl.settings.read import run_from
from rewards import load
from tests.image_tokens import test_image_tokens as image_tokens
from tests.rewards import test_process_reward as process_rewards
from tests.support import environments, tiny_image_tokens, tiny_lm
from tests.support.environments import RECIPE as GAME

BEGIN, END = 2, 1  # `a` stands for the beginning


def adding(begin: bool, end: bool, chat: bool = False):
    """A tokenizer that puts these tokens around a text."""
    made = tiny_lm.tokenizer(chat=chat)
    parts = ["a" * begin, "$A", "<end>" * end]
    made._tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(filter(None, parts)), special_tokens=[("a", BEGIN), ("<end>", END)]
    )
    return made


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("end", [False, True])
def test_a_prompt_has_the_tokenizer_s_beginning_and_not_its_end(begin, end):
    tokenizer = adding(begin, end)
    policy = CausalPolicy(tiny_lm.llama(), tokenizer)
    own = tokenizer("cab", add_special_tokens=False).input_ids
    assert tokenizer("cab").input_ids == [BEGIN] * begin + own + [END] * end
    assert policy.encode("cab") == [BEGIN] * begin + own


def test_an_end_that_the_prompt_itself_has_stays():
    policy = CausalPolicy(tiny_lm.llama(), adding(True, False))
    assert policy.encode("cab<end>")[-1] == END


def test_the_template_s_prompt_has_neither():
    policy = CausalPolicy(tiny_lm.llama(), adding(True, True, chat=True))
    assert policy.encode("c") == tiny_lm.tokenizer()("u:c a:").input_ids


@pytest.mark.parametrize("end", [False, True])
def test_steps_of_a_process_reward_follow_the_prompt(tmp_path, end):
    """As in the layout of its training, which has no end between them."""
    folder = process_rewards.written(tmp_path / "prm")
    reward = load("process_reward", model=folder, **process_rewards.SETTINGS)
    plain = reward(process_rewards.of([process_rewards.WHOLE]))
    adding(False, end).save_pretrained(folder)
    ending = load("process_reward", model=folder, **process_rewards.SETTINGS)
    assert ending.tokenizer("a").input_ids[-1:] == [END] * end or not end
    assert torch.equal(ending(process_rewards.of([process_rewards.WHOLE])), plain)


@pytest.mark.parametrize("kind", ["janus", "emu3"])
def test_the_image_of_a_model_that_writes_images_follows_the_prompt(kind, tmp_path):
    settings = {"chat": False} if kind == "janus" else {}
    folder = tiny_image_tokens.write(tmp_path / kind, kind, **settings)

    def prompt() -> list[int]:
        cpu = torch.device("cpu")
        policy = ImageTokenPolicy.load(
            str(folder), image_tokens.SETTINGS[kind], dtype=torch.float32, device=cpu
        )
        return list(policy.encode("cab")[0])

    plain = prompt()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begin, stop = tokenizer.bos_token, tokenizer.eos_token
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {stop}" if kind == "janus" else f"$A {stop}",
        special_tokens=[(begin, tokenizer.bos_token_id), (stop, tokenizer.eos_token_id)],
    )
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("c").input_ids[-1] == tokenizer.eos_token_id
    assert prompt() == plain


@pytest.mark.parametrize(
    ("end", "chat", "says"), [(True, False, 1), (False, False, 0), (True, True, 0)]
)
def test_a_run_of_an_older_version_names_the_rule(tmp_path, end, chat, says):
    folder = tiny_lm.write(tmp_path / "lm")
    adding(True, end, chat).save_pretrained(folder)
    run = run_from(environments.tree(folder, tmp_path, None, GAME), "test")
    record = StartRecord.of(run, 1).state()
    del record["prompts_go_on"]
    at = tmp_path / "000001"
    at.mkdir()
    (at / "state.json").write_text(json.dumps({"origin": record}))
    found = start_record.changes(run, tmp_path, at, 1)
    assert len(found) == says and all("no longer end with '<end>'" in line for line in found)
