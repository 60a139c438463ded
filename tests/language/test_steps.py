"""Steps of completions as decisions: where they begin, what is shown to rewards, what IGPO's
rewards are, and whole iterations."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl.credit.process import Information
from flowrl.errors import UserError
from flowrl.iteration import ratio_check
from flowrl.models.language.steps import Steps, point_ends
from flowrl.settings.read import check_run, run_from
from samplers.completions import Completions, SegmentPoints
from tests.support import environments, runs, text_runs, tiny_lm
from tests.support.advice import advice
from tests.support.iterations import collect

PROCESS = {"name": "text_process", "length": 24, "group": 24, "kl": 0.0, "temperature": 3.0}
PREFIX = '''
def length(samples):
    """A number of the text so far."""
    return [float(len(text)) + text.count("a") for text in samples.media]
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_lm.write(tmp_path_factory.mktemp("lm"))


def tree(model, folder, recipe=PROCESS, most=3, **train) -> dict[str, Any]:
    settings = text_runs.tree(model, folder, recipe, **train)
    (folder / "prefix.py").write_text(PREFIX)
    settings["model"]["steps"] = {"separator": ":", "most": most}
    settings["intermediate_rewards"] = [
        {"name": f"{folder / 'prefix.py'}:length", "weight": 0.5, "label": "long"},
        {"name": f"{folder / 'own.py'}:share"},
    ]
    return settings


class Words:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def decode(self, ids, **_: Any) -> str:
        return "".join(self.texts[i] for i in ids)

    def batch_decode(self, rows, **_: Any) -> list[str]:
        return [self.decode(row) for row in rows]


def test_a_step_begins_behind_the_token_that_ends_a_separator():
    words = Words("", "x", "\n", "\n\n", "y\n\nz", " ")
    begins = Steps("\n\n", 9, words)._begins
    assert begins([1, 3, 1]) == [2] and begins([1, 2, 2, 1]) == [3]
    assert begins([1, 4, 1]) == [2]  # a token with the separator inside belongs to the step before
    assert begins([1, 3, 2, 5, 1]) == [4]  # whitespace behind a separator belongs to it
    assert begins([1, 4]) == []  # nothing follows the token
    assert begins([1, 3]) == [] and begins([3, 1]) == [] and begins([1]) == []
    assert begins([1, 3, 0]) == []  # a stop token alone is no step
    assert Steps("\n\n", 2, words)._begins([1, 3, 1, 3, 1]) == [2]


def test_letters_of_several_tokens_are_counted_by_whole_beginnings():
    class Pairs(Words):
        def decode(self, ids, **_: Any) -> str:  # two 0 are one letter
            text = "".join("ab:"[i] for i in ids)
            return text.replace("aa", "e")

    assert Steps(":", 9, Pairs())._begins([0, 0, 2, 1, 2, 0, 0]) == [3, 5]


def begins_by_hand(letters: list[str]) -> list[int]:
    """Read letter by letter: behind something and ":", the next letter begins a step, and blanks
    before it still belong to the last one. A special token has no letter."""
    found, some, ended, last = [], False, False, 0
    for k, letter in enumerate(letters):
        if letter == ":" and some:
            ended, last = True, k
        elif letter == " " and ended:
            last = k
        elif letter.strip(": "):
            if ended:
                found.append(last + 1)
            some, ended = True, False
    return found


def test_credit_of_steps_is_that_of_the_rewards_of_beginnings(model, tmp_path):
    session = runs.opened(tree(model, tmp_path), tmp_path)
    experience = collect(session, 0)
    rows: Any = experience.rows[0]
    policy: Any = session.learner.policy
    names: dict = {}
    exec(PREFIX + text_runs.REWARD, names)
    cut: list[list[int]] = []
    rewards: list[list[float]] = []
    samples: Any = experience.samples
    for i, text in enumerate(samples.media):
        ids = rows.ids[i][: int(rows.lengths[i])].tolist()
        begins = begins_by_hand([policy.tokenizer.decode([k], skip_special_tokens=True)
                                 for k in ids])[:2]  # fmt: skip
        texts = {k: policy.tokenizer.decode(ids[:k], skip_special_tokens=True) for k in begins}
        cut.append(begins)
        parts = [*(texts[k] for k in begins), text]
        shown = type("S", (), {"media": parts})
        both = zip(names["length"](shown), names["share"](shown), strict=True)
        rewards.append([0.5 * a + b for a, b in both])
    way = experience.scores.intermediate
    assert way is not None and max(map(len, rewards)) == 3
    for i, row in enumerate(rewards):
        assert way.scored[i, :, 0].tolist() == [k < len(row) for k in range(3)]
        assert way.values[i, : len(row), 0].tolist() == pytest.approx(row)
    for first in range(0, len(rewards), 24):
        every = torch.tensor([r for row in rewards[first : first + 24] for r in row]).double()
        for i in range(first, first + 24):
            ends = [0, *cut[i], int(rows.lengths[i])]
            for k in range(len(rewards[i])):
                rest = torch.tensor(rewards[i][k:]).double() - every.mean()
                wanted = float(rest.sum() / (every.std() + 1e-4))
                got = rows.advantage[i, ends[k] : ends[k + 1]]
                torch.testing.assert_close(got, torch.full_like(got, wanted), atol=1e-4, rtol=1e-4)
    assert experience.metrics["text/steps"] == pytest.approx(sum(map(len, rewards)) / len(rewards))
    floor = ratio_check.check_ratio(session.learner, experience, session.terminal)
    assert floor is not None and floor < 1e-4


def information_by_hand(model, policy, found, prompts, answers, before):
    """p(answer) after each history, by a call of the plain model for each."""
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    values = []
    for i in range(len(found.ids)):
        prompt = int(found.prompt[i])
        parts = environments.by_hand(policy, found, i)
        histories, text = [[]], []
        for ids, is_reply in parts:
            text = text + list(ids)
            if is_reply:
                histories.append(list(text))
        row = []
        for history in histories:
            context = [*policy.encode(prompts[prompt]), *history, *before]
            answer = policy.tokenizer(answers[prompt]).input_ids
            with torch.no_grad():
                logits = plain(input_ids=torch.tensor([context + answer])).logits[0]
            logp = logits.double().log_softmax(-1)[len(context) - 1 : -1]
            chosen = logp[torch.arange(len(answer)), torch.tensor(answer)]
            row.append(float(chosen.mean().exp()))
        values.append(row)
    return values


@pytest.mark.parametrize("rows", [3, 64])
def test_information_is_the_gain_of_the_answer_s_probability(model, tmp_path, rows):
    policy = environments.made(tmp_path)
    policy.model.load_state_dict(AutoModelForCausalLM.from_pretrained(model).state_dict())
    found, batch = environments.rollout(policy)
    answers = ["e", "gab", "b", "dd"]
    meta = [{"answer": answers[int(p)]} for p in found.prompt]
    gains = batch.information(found, Information("answer", "a:"), meta, rows)
    before = policy.tokenizer("a:").input_ids
    want = information_by_hand(model, policy, found, environments.PROMPTS, answers, before)
    assert max(map(len, want)) == 3
    for row, values in zip(gains.tolist(), want, strict=True):
        for k, gain in enumerate(row):
            if k + 1 < len(values):
                assert gain == pytest.approx(values[k + 1] - values[k], abs=1e-6)
            else:
                assert gain != gain


def test_ends_of_turns_leave_replies_out(tmp_path):
    policy = environments.made(tmp_path)
    found, batch = environments.rollout(policy)
    ends = point_ends(found)
    texts = batch.beginnings(found, batch.media(found))
    for i in range(len(found.ids)):
        at, own = 0, []
        for ids, is_reply in environments.by_hand(policy, found, i):
            at += len(ids)
            if not is_reply:
                own.append(at)
        assert ends[i, : len(own)].tolist() == own and not ends[i, len(own) :].any()
        assert len(texts[i]) == len(own) and texts[i][-1] == batch.media(found)[i]
        assert all(texts[i][-1].startswith(part) for part in texts[i])


IGPO = {"name": "text_igpo", "length": 24, "group": 4, "temperature": 1.2}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [PROCESS, IGPO], ids=["steps", "information"])
def test_runs_resume_to_the_bit(model, tmp_path, recipe):
    def opened(folder):
        folder.mkdir()
        if recipe is PROCESS:
            return runs.opened(tree(model, folder), folder)
        return runs.opened(environments.tree(model, folder, "reply", recipe), folder)

    text_runs.check_resumed_bits(tmp_path, opened)


def test_the_first_ratio_of_igpo_is_one_and_its_rewards_are_credited(model, tmp_path):
    session = environments.session(model, tmp_path, "reply", IGPO)
    experience = collect(session, 0)
    floor = ratio_check.check_ratio(session.learner, experience, session.terminal)
    assert floor is not None and floor < 1e-4
    way = experience.scores.intermediate
    assert way is not None and way.scored.any() and way.values.abs().max() > 1e-4
    assert experience.metrics["reward_turns"] == pytest.approx(float(way.values.sum((1, 2)).mean()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": text_runs.GRPO}, "this recipe has one credit for a whole completion"),
        ({"recipe": PROCESS | {"name": "text_gigpo"}}, "turns in the same state, and steps have"),
        ({"intermediate_rewards": []}, "model.steps: no reward scores the steps"),
        ({"budget": {"replay": 2}}, "budget.replay needs one score per sample"),
    ],
)
def test_what_does_not_fit_is_refused(model, tmp_path, change, message):
    settings = tree(model, tmp_path) | change
    with pytest.raises(UserError, match=message):
        check_run(run_from(settings, "test"))


def test_steps_and_turns_exclude_each_other_and_one_is_needed(model, tmp_path):
    settings = environments.tree(model, tmp_path, "reply", PROCESS)
    settings["model"]["steps"] = {}
    with pytest.raises(UserError, match=r"turns are the decisions of a run with model.environment"):
        check_run(run_from(settings, "test"))
    settings["model"] |= {"steps": None, "environment": None}
    with pytest.raises(UserError, match="a text has only one: set"):
        check_run(run_from(settings, "test"))


def test_an_answer_that_is_missing_is_named(model, tmp_path):
    recipe = IGPO | {"answer": "solution"}
    run = run_from(environments.tree(model, tmp_path, "reply", recipe), "test")
    advice(
        "recipe.answer: the prompt {} has no answer in the column {}, for whose probability turns "
        "are rewarded: name another column",
        lambda: check_run(run),
        lambda: check_run(run_from(environments.tree(model, tmp_path, "reply", IGPO), "test")),
    )
    session = environments.session(model, tmp_path, "reply", recipe)
    with pytest.raises(UserError, match=r"recipe.answer: a prompt has no answer in the column"):
        collect(session, 0)


def test_rewards_that_score_no_step_end_the_run_with_a_sentence(model, tmp_path):
    settings = tree(model, tmp_path, self_test="off")
    (tmp_path / "none.py").write_text(
        "def none(samples):\n    return [float('nan')] * len(samples.media)\n"
        "def silent(samples):\n    return [None] * len(samples.media)\n"
    )
    settings["intermediate_rewards"] = [{"name": f"{tmp_path / 'none.py'}:none"}]
    with pytest.raises(UserError, match=r"none scored none of .* turns or steps: fix the reward"):
        collect(runs.opened(settings, tmp_path), 0)
    settings["intermediate_rewards"] = [{"name": f"{tmp_path / 'none.py'}:silent"}]
    found = collect(runs.opened(settings, tmp_path), 0).scores.intermediate
    assert found is not None and not found.scored.any(), "one that applies to no step adds nothing"


def test_completions_without_steps_are_untouched(model, tmp_path):
    session = text_runs.session(model, tmp_path, text_runs.GRPO)
    batch = session.learner.policy.open(["a:"], [{}], 6)
    (found,) = batch.rollouts(Completions(2), (0,), seed=0, iteration=0)
    assert found.points == SegmentPoints() and found.plan.turns == 1
