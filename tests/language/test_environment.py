"""Texts of several turns: an environment answers, and only the model's own tokens are learned."""

import re
import time
from dataclasses import replace

import pytest
import torch

from flowrl.errors import UserError
from flowrl.likelihoods.rows import Evaluation, TokenRows
from flowrl.likelihoods.token import Token
from flowrl.losses.ratio import Surrogate
from flowrl.models.language.environment import Replies
from flowrl.models.language.policy import CausalPolicy
from flowrl.paths import PROJECT
from samplers.completions import Completions
from samplers.token_support import TokenSupport
from tests.support.advice import advice
from tests.support.environments import META, PROMPTS, WARPED, by_hand, made, rollout, rows_of


@pytest.fixture
def policy(tmp_path):
    return made(tmp_path)


def test_turns_and_replies_alternate_as_the_function_says(policy):
    found, batch = rollout(policy)
    counts, texts = [], batch.media(found)
    for row in range(len(found.ids)):
        parts = by_hand(policy, found, row)
        flags = [flag for part, flag in parts for _ in part]
        assert found.from_environment[row].tolist() == flags + [False] * (24 - len(flags))
        assert int(found.lengths[row]) == flags.count(False)
        assert int(found.ends[row]) == len(flags)
        turns = [part for part, flag in parts if not flag]
        counts.append(len(turns))
        last = policy.tokenizer.decode(turns[-1], skip_special_tokens=True).strip()
        solved = last[-1:] == META[int(found.prompt[row])]["answer"]
        if found.stopped[row] and not solved:  # whoever has room goes on
            assert len(turns) == 3
        if len(turns) < 3 and not solved:
            assert not found.stopped[row] and len(flags) > 24 - 5
        whole = [token for part, _ in parts for token in part]
        assert texts[row] == policy.tokenizer.decode(whole, skip_special_tokens=True)
    assert {1, 2, 3} == set(counts)
    statistics = batch.statistics(found, texts).means
    assert statistics["text/turns"] == pytest.approx(sum(counts) / len(counts))
    assert not found.logp[found.from_environment].any() and not found.logp[~found.written].any()
    assert (found.logp[found.written] < 0).any()
    assert int(found.own.sum()) == int(found.lengths.sum()) == batch.meter.frozen


def test_nobody_is_asked_after_the_end_or_the_last_turn(policy):
    function, asked = policy.environment.function, []
    policy.environment.__dict__["function"] = lambda *said: asked.append(1) or function(*said)
    found, _ = rollout(policy)
    ended = ((found.ids == 1) & found.written).sum(1)
    assert len(asked) == int(ended.clamp(max=2).sum())


def test_the_function_does_not_hear_the_token_that_ends_a_turn(tmp_path):
    policy, heard = made(tmp_path, stop=["a"]), []
    policy.environment.__dict__["function"] = lambda prompt, meta, turns: heard.extend(turns)
    found, _ = rollout(policy)
    assert ((found.ids == 2) & found.written).any() and any(heard)
    assert not any("a" in text for text in heard)


def test_the_last_turn_can_be_all_that_rewards_see(tmp_path):
    policy = made(tmp_path, shows="last")
    found, batch = rollout(policy)
    for row, text in enumerate(batch.media(found)):
        last, _ = by_hand(policy, found, row)[-1]
        assert text == policy.tokenizer.decode(last, skip_special_tokens=True)


@pytest.mark.parametrize("plan", [Completions(6), Completions(6, **WARPED)])
def test_each_own_token_has_the_probability_of_all_that_stands_before_it(policy, plan):
    """One plain call of the model a token, replies among its context."""
    found, batch = rollout(policy, plan)
    rows = rows_of(found)
    said = batch.policy(rows, True)
    torch.testing.assert_close(said.logp[rows.mask], found.logp[rows.mask], atol=2e-5, rtol=0)
    assert (
        not said.logp[found.from_environment].any() and not said.out[found.from_environment].any()
    )
    row = int(found.from_environment.sum(1).argmax())
    context = batch.contexts[int(found.prompt[row])]
    ids = found.ids[row].tolist()
    for t in range(int(found.ends[row])):
        if found.from_environment[row, t]:
            continue
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*context, *ids[:t]]])).logits[0, -1]
        logp = (logits / plan.temperature).log_softmax(-1)
        if plan.top_p < 1:
            order = logp.argsort(descending=True)
            mass = logp[order].exp().cumsum(0)
            kept = order[: int((mass < plan.top_p).sum()) + 1]
            logp = logp - logp[kept].logsumexp(0)
        assert float(logp[ids[t]]) == pytest.approx(float(found.logp[row, t]), abs=2e-5)


def test_the_outcome_is_that_of_all_turns_and_the_replies_have_no_loss(policy):
    found, batch = rollout(policy)
    rows = rows_of(found)
    credit = torch.linspace(-1, 1, len(found.ids), dtype=torch.float64).float()
    assert torch.equal(rows.mask, found.written) and not (rows.mask & found.from_environment).any()
    assert not rows.advantage[found.from_environment].any()
    for row in range(len(found.ids)):
        assert (rows.advantage[row, rows.mask[row]] == credit[row]).all()
    policy.model.requires_grad_(True)

    def gradient(rows: TokenRows) -> torch.Tensor:
        policy.model.zero_grad()
        new = Token().evaluate(batch.policy, rows)
        old = Evaluation(new.logp.detach(), None)
        entries = Surrogate(0.2, 0.2)(Token(), {"new": new, "old": old}, rows)
        (entries.value[rows.mask].sum() / rows.mask.sum()).backward()
        return torch.cat([p.grad.flatten() for p in policy.model.parameters()])

    got = gradient(rows)
    policy.model.zero_grad()
    total = torch.zeros(())
    for i in range(len(found.ids)):  # the mean over the model's tokens of - advantage log p
        context, end = batch.contexts[int(found.prompt[i])], int(found.ends[i])
        ids = torch.tensor([[*context, *found.ids[i, :end].tolist()]])
        logits = policy.model(ids).logits[0, len(context) - 1 : -1] / WARPED["temperature"]
        place = torch.full((end,), i), torch.arange(end)
        wide = rows.kept[place].mask(logits.shape[1]) | found.from_environment[i, :end, None]
        logp = logits.masked_fill(~wide, -torch.inf).log_softmax(-1)
        own = logp.gather(1, ids[0, len(context) :, None])[:, 0][~found.from_environment[i, :end]]
        total = total - credit[i] * own.sum()
    (total / int(found.lengths.sum())).backward()
    want = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-3)
    wide = rows.kept.mask(policy.model.config.vocab_size) | found.from_environment[..., None]
    every = TokenSupport.of(wide.flatten(0, 1))
    kept = every.mapped(lambda part: part.view(found.from_environment.shape))
    wrong = replace(
        rows, from_environment=None, lengths=found.ends, kept=kept,
        mask=rows.mask | found.from_environment,
        advantage=rows.advantage + found.from_environment * credit[:, None],
    )  # fmt: skip
    assert (gradient(wrong) - want).abs().max() > 100 * (got - want).abs().max()


def test_completions_that_ran_out_of_room_can_be_masked(policy):
    found, _ = rollout(policy, steps=10)
    rows = rows_of(found, cut="mask")
    assert found.from_environment.any() and not found.stopped.all() and found.stopped.any()
    assert torch.equal(rows.mask, found.written & found.stopped[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5])
def test_neither_the_batch_nor_the_chunk_changes_a_conversation(tmp_path, policy, rows):
    found, _ = rollout(policy)
    other, _ = rollout(made(tmp_path, rows=rows))
    alone, _ = rollout(policy, draws=(2,), prompts=PROMPTS[2:3], meta=META[2:3])
    for name in ("ids", "lengths", "stopped", "from_environment"):
        assert torch.equal(getattr(found, name), getattr(other, name))
        assert torch.equal(getattr(found, name)[12:18], getattr(alone, name))
    torch.testing.assert_close(found.logp, other.logp, atol=2e-5, rtol=0)


def test_a_later_turn_has_noise_of_its_own(tmp_path):
    """A model that sees only the last token writes the same turn again under the same noise."""
    policy = made(tmp_path, "reply", settings={"low": "hi "})
    policy.model.model.layers = torch.nn.ModuleList()  # embedding and head
    found, _ = rollout(policy, Completions(16), prompts=["hi "] * 4, meta=[{"answer": "?"}] * 4)
    pairs = 0
    for row in range(len(found.ids)):
        end = int(found.ends[row])
        flags = found.from_environment[row, :end].tolist()
        if True not in flags:
            continue
        first = found.ids[row, : flags.index(True)].tolist()
        second = found.ids[row, flags.index(True) + 3 :][: len(first)].tolist()
        pairs += 1
        if len(first) > 4:
            assert first != second
    assert pairs > 20


def test_a_reply_is_a_turn_of_the_chat_template(tmp_path):
    policy = made(tmp_path, chat=True)
    assert policy.tokenizer.decode(policy.environment.encode("hi", [1])) == " <pad>:hi a:"
    found, batch = rollout(policy)
    whole = policy.tokenizer.decode(found.ids[int(found.from_environment.sum(1).argmax())])
    assert "<end> <pad>:hi  a:" in whole or "<end> <pad>:dig  a:" in whole
    rows = rows_of(found)
    said = batch.policy(rows, False)
    torch.testing.assert_close(said.logp, found.logp, atol=2e-5, rtol=0)


def test_a_template_s_own_end_of_a_turn_is_not_said_twice(tmp_path):
    policy = made(tmp_path)
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<end>:{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    assert policy.tokenizer.decode(policy.environment.encode("hi", [1])) == ":<pad>:hi<end>:a:"
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    how = policy.environment.how.model_copy(update={"role": "tool"})
    with pytest.raises(UserError, match="no tool turn"):
        Replies(how, policy.tokenizer, (1,))
    policy.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(UserError, match="leaves out the model's turns"):
        Replies(how, policy.tokenizer, (1,))


def test_a_model_without_an_end_of_its_own_gets_a_stop_token(tmp_path):
    policy = made(tmp_path)
    policy.model.generation_config.eos_token_id = policy.tokenizer.eos_token = None

    def opened(stop):
        use = replace(policy.use, stop=stop)
        return CausalPolicy(policy.model, policy.tokenizer, use=use).environment

    replies = advice(
        "model.environment: no token ends a turn of this model; add a stop token to model.stop",
        lambda: opened(()),
        lambda: opened(("<end>",)),
    )
    assert replies.stop == (1,)


FAILING = """
def fails(prompt, meta, turns, every=2):
    if len(turns[-1]) % every == 0:
        raise ValueError("bad\\nand more")
    return "hi"

def flaky(prompt, meta, turns, tried={}):
    key = prompt, tuple(turns)
    tried[key] = tried.get(key, 0) + 1
    if tried[key] < 3:
        raise OSError("busy")
    return "hi"
"""


def failing(tmp_path, name, **settings):
    (tmp_path / "failing.py").write_text(FAILING)
    return made(tmp_path, name, file="failing.py", **settings)


def test_an_exception_is_a_reply_or_the_end_of_its_text_or_of_the_run(tmp_path):
    with pytest.raises(UserError, match=r"fails failed after turn 1 .*ValueError: bad"):
        rollout(failing(tmp_path, "fails"))
    with pytest.warns(UserWarning, match="ValueError: bad; this is the reply"):
        (tmp_path / "one").mkdir()
        policy = failing(tmp_path / "one", "fails", errors="reply")
        found, _ = rollout(policy)
    told = policy.tokenizer("ValueError: bad").input_ids
    rows = [
        row[flags].tolist() for row, flags in zip(found.ids, found.from_environment, strict=True)
    ]
    assert any(told == row[: len(told)] for row in rows)
    with pytest.warns(UserWarning, match="the text ends there"):
        (tmp_path / "two").mkdir()
        found, _ = rollout(failing(tmp_path / "two", "fails", errors="end"))
    turns = 1 + found.last
    assert (turns == 1).any() and (turns > 1).any()
    assert found.stopped[turns == 1].any()


def test_a_function_is_tried_again(tmp_path):
    with pytest.raises(UserError, match="OSError: busy"):
        rollout(failing(tmp_path, "flaky", tries=2))
    (tmp_path / "more").mkdir()
    found, _ = rollout(failing(tmp_path / "more", "flaky", tries=3))
    assert found.from_environment.any()


def test_rows_are_answered_side_by_side_with_the_same_bits(policy, tmp_path):
    found, _ = rollout(policy)
    function, running, most = policy.environment.function, [], []

    def slow(*said):
        running.append(1)
        most.append(len(running))
        time.sleep(0.002 * (len(most) % 4))
        running.pop()
        return function(*said)

    policy = made(tmp_path, at_once=5)
    policy.environment.__dict__["function"] = slow
    other, _ = rollout(policy)
    assert 1 < max(most) <= 5
    for name in ("ids", "lengths", "logp", "from_environment"):
        assert torch.equal(getattr(found, name), getattr(other, name))
    assert torch.equal(found.points.states, other.points.states)


def test_the_example_of_the_documentation_answers():
    page = (PROJECT / "docs" / "language.md").read_text()
    code, named = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(code, names)
    asked = [names["reply"]("guess", {"answer": "42"}, ["9", text]) for text in ("17?", "42", "no")]
    assert asked == ["higher", None, "Say a number."]
    exec(named, names)
    turns = (["17"], ["17", "90"], ["90", "17"], ["90", "17", "no"], ["no"], ["90", "42"])
    asked = [names["reply"]("guess", {"answer": "42"}, turn) for turn in turns]
    found = [None if answer is None else tuple(answer.values()) for answer in asked]
    assert found == [
        ("higher", "17 to 101"), ("lower", "17 to 90"), ("higher", "17 to 90"),
        ("Say a number.", "17 to 90"), ("Say a number.", "guess"), None,
    ]  # fmt: skip
