"""A game of several turns for a tiny language model: guess a letter, and be told where it is."""

import torch

from flowrl.likelihoods.rows import TokenRows
from flowrl.likelihoods.token import Token
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.language.use import TextUse
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings import EnvironmentSettings
from flowrl.settings.read import run_from
from samplers.completions import Completions, TextRollout
from tests.support import text_runs, tiny_lm

GUESS = '''
"""Guess a letter: the model's last letter is its guess."""

import asyncio


def reply(prompt, meta, turns, secret="e", low="dig ", high="hi "):
    guess = turns[-1].strip()[-1:]
    secret = meta.get("answer", secret)
    return None if guess == secret else high if guess < secret else low


def at_once(prompt, meta, turns):
    return None


def named(prompt, meta, turns):
    """The state is what is known of the letter; one state is called as the prompt."""
    said = reply(prompt, meta, turns)
    if said is None:
        return {"reply": None, "state": "over"}
    return {"reply": said, "state": prompt if len(turns) == 2 else said.strip()}


def broken(prompt, meta, turns):
    return {"a:": "hi", "cab :": "hi"}[prompt]


def leaves(prompt, meta, turns):
    raise SystemExit(0)


async def later(prompt, meta, turns):
    await asyncio.sleep(0)
    return reply(prompt, meta, turns)


async def streams(prompt, meta, turns):
    yield None


def yields(prompt, meta, turns):
    yield None


def number(prompt, meta, turns):
    return 7


def nothing(prompt, meta, turns):
    return ""


def short(prompt):
    return None


def found(samples):
    """Was the last letter the secret one?"""
    pairs = zip(samples.media, samples.meta)
    return [float(text.strip()[-1:] == meta.get("answer")) for text, meta in pairs]
'''
PROMPTS = ["a:", "cab dig:", "bead :", "hi"]
META = [{"answer": letter} for letter in "egbd"]
WARPED = {"temperature": 0.7, "top_p": 0.9}
RECIPE = {"name": "text_grpo", "length": 24, "group": 6, "kl": 0.0}


def made(
    folder, function="reply", chat=False, rows=None, file="guess.py", stop=(), **settings
) -> CausalPolicy:
    (folder / "guess.py").write_text(GUESS)
    how = EnvironmentSettings(name=f"{folder / file}:{function}", turns=3, **settings)
    use = TextUse(environment=how, stop=stop)
    return CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer(chat=chat), use=use, rows_per_call=rows)


def rollout(policy, plan=None, steps=24, draws=range(4), prompts=PROMPTS, meta=META):
    batch = policy.open(prompts, meta, steps)
    (found,) = batch.rollouts(plan or Completions(6, **WARPED), draws, seed=0, iteration=0)
    return found, batch


def by_hand(
    policy, found: TextRollout, row: int, function: str = "reply"
) -> list[tuple[list[int], bool]]:
    """The turns of a completion, replayed: its tokens are cut at stop tokens, and the function says
    what must follow each."""
    prompt = int(found.prompt[row])
    ids, parts, texts = found.ids[row, : int(found.ends[row])].tolist(), [], []
    names = {}
    exec(GUESS, names)
    while ids:
        end = ids.index(1) + 1 if 1 in ids else len(ids)
        parts.append((ids[:end], False))
        texts.append(policy.tokenizer.decode(ids[:end], skip_special_tokens=True))
        if ids := ids[end:]:
            reply = names[function](PROMPTS[prompt], META[prompt], texts)
            reply = reply["reply"] if isinstance(reply, dict) else reply
            told = policy.tokenizer(reply).input_ids
            assert ids[: len(told)] == told
            parts.append((told, True))
            ids = ids[len(told) :]
    return parts


def rows_of(found: TextRollout, **likelihood) -> TokenRows:
    credit = torch.linspace(-1, 1, len(found.ids), dtype=torch.float64)[:, None]
    credit = credit.expand(-1, found.plan.turns)
    (rows,) = Token(**likelihood).rows(found, credit, torch.ones_like(credit, dtype=torch.bool))
    return rows


def session(model, folder, function="reply", recipe=RECIPE, **train) -> Session:
    run = run_from(tree(model, folder, function, recipe, **train), "test")
    return open_session(run, folder, open_accelerator(run, folder))


def tree(model, folder, function="reply", recipe=RECIPE, **train):
    settings = text_runs.tree(model, folder, recipe, **train)
    (folder / "guess.py").write_text(GUESS)
    settings["rewards"] = [{"name": f"{folder / 'guess.py'}:found"}]
    if function is not None:
        name = f"{folder / 'guess.py'}:{function}"
        settings["model"]["environment"] = {"name": name, "turns": 3}
    return settings
