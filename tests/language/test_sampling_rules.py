"""top-k, min-p and stop texts of several tokens: what is sampled is what is scored."""

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from flowrl.errors import UserError
from flowrl.likelihoods.token import Token
from flowrl.models.language.environment import Replies
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.language.stop_texts import StopTexts
from flowrl.models.language.use import Stops, TextUse
from flowrl.settings import EnvironmentSettings
from flowrl.settings.read import check_plan, run_from
from samplers.completions import Completions, Forks, Segments, TextPlan
from samplers.forks import Forking
from samplers.tokens import token_support, warp
from tests.support import text_runs, tiny_lm
from tests.support.environments import GUESS

PROMPTS = ["a:", "cab dig:", "bead :", "hi"]
RULE = {"temperature": 0.8, "top_p": 0.95, "top_k": 5, "min_p": 0.05}


def policy(*stop: str, chat: bool = False) -> CausalPolicy:
    return CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer(chat=chat), use=TextUse(stop=stop))


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"), [(1.0, 3, 0.0), (0.6, 8, 0.0), (1.0, 0, 0.2), (0.9, 10, 0.1)]
)
def test_kept_tokens_are_those_of_transformers(top_p, top_k, min_p):
    torch.manual_seed(0)
    logits = 3 * torch.randn(50, 40)
    theirs = logits / 0.7
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    if min_p:
        theirs = MinPLogitsWarper(min_p)(None, theirs)
    kept = token_support(warp(logits, 0.7), top_p, top_k, min_p)
    assert kept is not None and 0 < int(kept.sum()) < kept.numel()
    torch.testing.assert_close(warp(logits, 0.7, kept), theirs.log_softmax(-1))
    assert token_support(logits, 1.0, 0, 0.0) is None


@pytest.mark.parametrize(
    "plan",
    [
        Completions(6, **RULE),
        Completions(6, top_k=3),
        Completions(6, min_p=0.2),
        Segments(2, 2, (2, 4), **RULE),
        Forks(2, Forking(1, 2, 1, "entropy"), **RULE),
    ],
)
def test_the_ratio_of_unchanged_weights_is_one_under_every_rule(plan):
    made = policy()
    batch = made.open(PROMPTS, [], 7)
    (found,) = batch.rollouts(plan, range(4), seed=0, iteration=0)
    rows, _ = Token().whole(found)
    said = Token().evaluate(batch.policy, rows)
    torch.testing.assert_close(said.logp, found.logp, atol=2e-5, rtol=0)
    assert rows.kept is not None
    plain = Token().evaluate(batch.policy, rows.__class__(**{**vars(rows), "kept": None}))
    assert (plain.logp - found.logp).abs().max() > 0.01  # the full softmax is another rule


def test_rules_that_make_no_sense_are_refused(tmp_path):
    for rule in ({"top_k": -1}, {"min_p": 1.0}, {"min_p": -0.1}):
        with pytest.raises(ValueError, match=r"top_k must be at least 0 and min_p"):
            TextPlan(4, (2,), **rule)
    tree = text_runs.tree(tmp_path, tmp_path, text_runs.GRPO | {"top_k": 3})
    tree["model"]["server"] = {"url": "http://localhost:1/v1", "model": "x", "sync": "none"}
    with pytest.raises(UserError, match=r"top-p, top-k or min-p kept"):
        check_plan(run_from(tree, "test"))


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("plan", [Completions(12), Segments(4, 3, (3, 5))])
def test_a_completion_ends_where_its_text_first_has_a_stop_text(plan, rows):
    ends = [first + last for first in "abcde" for last in "fghij :"]
    made, free = policy(*ends), policy()
    made.rows_per_call = rows
    (found,) = (batch := made.open(PROMPTS, [], 9)).rollouts(plan, range(4), seed=0, iteration=0)
    texts = batch.media(found)
    by_text = 0
    for row, text in enumerate(texts):
        ids = found.ids[row, : int(found.lengths[row])].tolist()
        whole = made.tokenizer.decode(ids, skip_special_tokens=True)
        before = made.tokenizer.decode(ids[:-1], skip_special_tokens=True)
        assert not any(end in before for end in ends), (whole, before)
        at_end = [end for end in ends if whole.endswith(end) and ids[-1] != 1]
        assert bool(found.stopped[row]) == bool(at_end or ids[-1] == 1)
        assert text == (whole.removesuffix(at_end[0]) if at_end else whole)
        by_text += bool(at_end)
    assert by_text > 3 and not found.stopped.all()
    if isinstance(plan, Completions):  # the same tokens as without, up to the end
        (loose,) = free.open(PROMPTS, [], 9).rollouts(plan, range(4), seed=0, iteration=0)
        same = found.written & (loose.ids == found.ids)
        assert torch.equal(same, found.written) and (loose.lengths > found.lengths).any()
    said = Token().evaluate(batch.policy, Token().whole(found)[0])
    torch.testing.assert_close(said.logp, found.logp, atol=2e-5, rtol=0)


def test_a_prompt_s_own_text_ends_no_completion():
    made = policy("ca")
    batch = made.open(["bead c"], [], 1)
    (found,) = batch.rollouts(Completions(400), (0,), seed=0, iteration=0)
    a = made.tokenizer("a").input_ids[0]
    assert (found.ids[:, 0] == a).any() and not found.stopped[found.ids[:, 0] == a].any()


def test_stop_texts_of_one_token_stay_tokens_and_others_are_checked():
    made = policy("j", "ab")
    j = made.tokenizer("j").input_ids[0]
    assert made.stops == Stops([1, j], StopTexts(("ab",), made.tokenizer))
    assert "stops at '<end>', 'j', 'ab'" in made.proofs(["a"], 3)[0]
    with pytest.raises(UserError, match=r"model.stop: '' has no tokens"):
        policy("")
    with pytest.raises(UserError, match=r"contains a special token, which decoded texts leave out"):
        policy("a<end>")


def test_an_environment_replies_where_a_turn_ended_at_a_stop_text(tmp_path):
    (tmp_path / "guess.py").write_text(GUESS)
    made = policy("ab", chat=True)
    how = EnvironmentSettings(name=f"{tmp_path / 'guess.py'}:reply", turns=3)
    replies = Replies(how, made.tokenizer, tuple(made.stops.tokens), made.stops.texts)
    ids = made.tokenizer("cab").input_ids
    assert replies.said(ids) == "c" and replies.said([*ids[:1], 1]) == "c"
    made.tokenizer.chat_template = tiny_lm.CHAT.replace(
        "{{ m['content'] }} ", "{{ m['content'] }}<end> "
    )
    tokens = made.tokenizer
    assert replies.encode("hi", [made.stops.tokens[0]]) == tokens(" u:hi<end> a:").input_ids
    assert replies.encode("hi", tokens("cab").input_ids) == tokens("<end> u:hi<end> a:").input_ids
