"""Runs of several turns through the loop of all runs, and what is refused."""

import asyncio
from pathlib import Path

import pytest
import torch

from flowrl.errors import UserError
from flowrl.iteration import ratio_check
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from flowrl.settings.read import check_run, run_from
from tests.support import text_runs
from tests.support.advice import advice
from tests.support.environments import RECIPE, WARPED, session, tree
from tests.support.iterations import collect, iterate
from tests.support.runs import flowrl, lines, write


@pytest.mark.slow
def test_a_run_says_who_answers_and_counts_turns(model, tmp_path, capsys):
    settings = tree(model, tmp_path, self_test="off")
    settings["model"]["environment"]["settings"] = {"low": "fig "}
    config = write(settings, tmp_path)
    assert flowrl("train", config, "--folder", tmp_path / "run") == 0
    assert "guess.py:reply answers as text: up to 3 turns" in capsys.readouterr().out
    assert lines(tmp_path / "run")[1]["text/turns"] > 1
    assert flowrl("sample", tmp_path / "run", "cab :", "--out", tmp_path / "out") == 0
    assert flowrl("evaluate", tmp_path / "run", "--samples", "6") == 0


def test_an_environment_that_ends_at_once_is_a_run_without_one(model, tmp_path):
    def trained(function):
        (folder := tmp_path / str(function)).mkdir()
        kept = session(model, folder, function, RECIPE | WARPED, updates=2)
        progress = Progress()
        metrics = [iterate(kept, progress).metrics for _ in range(2)]
        return [p.detach() for p in kept.learner.policies.parameters.values()], metrics

    (plain, before), (ended, after) = trained(None), trained("at_once")
    assert all(torch.equal(a, b) for a, b in zip(plain, ended, strict=True))
    assert [m["text/turns"] for m in after] == [1.0, 1.0]
    for a, b in zip(before, after, strict=True):
        same = {k: v for k, v in a.items() if not k.startswith("seconds")}
        assert same == {k: b[k] for k in same}


@pytest.mark.quick_cases("64-warped", "5-plain")
@pytest.mark.parametrize("warp", [{}, WARPED], ids=["plain", "warped"])
@pytest.mark.parametrize("rows", [64, 5, 1])
def test_the_first_ratio_is_one_with_replies_in_between(model, tmp_path, warp, rows):
    kept = session(model, tmp_path, recipe=RECIPE | warp, rows_per_call=rows)
    experience = collect(kept, 0)
    assert experience.metrics["text/turns"] > 1.5
    floor = ratio_check.check_ratio(kept.learner, experience, kept.terminal)
    assert floor is not None and floor < 2e-5


def test_recomputed_log_probabilities_make_the_ratio_exactly_one(model, tmp_path):
    kept = session(model, tmp_path, recipe=RECIPE | WARPED, recompute_old=True)
    metrics = iterate(kept, Progress()).metrics
    assert metrics["ratio_max"] == metrics["ratio_min"] == 1.0


def test_an_asynchronous_environment_replies_as_another(model, tmp_path):
    """Also where the thread already runs an event loop, as in a notebook."""

    def sampled(function: str) -> list[str]:
        (folder := tmp_path / function).mkdir(exist_ok=True)
        return list(collect(session(model, folder, function), 0).samples.media)

    async def in_a_notebook() -> list[str]:
        return sampled("later")

    plain = sampled("reply")
    assert sampled("later") == plain
    assert asyncio.run(in_a_notebook()) == plain


@pytest.mark.slow
def test_guesses_get_better(model, tmp_path):
    kept = session(model, tmp_path, lr=2e-2, rows_per_call=64)
    progress = Progress()
    rewards = [iterate(kept, progress).metrics["reward"] for _ in range(15)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(model, tmp_path):
    def opened(folder: Path) -> Session:
        folder.mkdir()
        return session(model, folder, recipe=RECIPE | WARPED, updates=2)

    text_runs.check_resumed_bits(tmp_path, opened)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", r"guess.py:broken failed after turn 1 of the prompt 'bead :': KeyError"),
        ("leaves", r"guess.py:leaves failed after turn 1 of the prompt '.*': SystemExit: 0"),
        ("number", "must return a text or None, not 7"),
    ],
)
def test_an_environment_that_fails_is_one_sentence(model, tmp_path, function, message):
    kept = session(model, tmp_path, function)
    with pytest.raises(UserError, match=message):
        for iteration in range(3):
            collect(kept, iteration)


def test_a_reply_without_tokens_is_none_instead(model, tmp_path):
    def collected(function):
        (folder := tmp_path / function).mkdir()
        kept = session(model, folder, function)
        return [collect(kept, iteration) for iteration in range(3)]

    advice(
        "model.environment: {} returned {}, which has no tokens; return None to end the text",
        lambda: collected("nothing"),
        lambda: collected("at_once"),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": text_runs.TREE}, "this recipe samples trees"),
        ({"recipe": {"name": "text_treerl", "length": 6}}, "this recipe samples trees"),
        ({"name": "no_file.py:reply"}, "model.environment: no such file: no_file.py"),
        ({"name": "reply"}, "names no function"),
        ({"function": "streams"}, "streams yields, and its call must return the reply"),
        ({"function": "yields"}, "yields yields, and its call must return the reply"),
        ({"function": "short"}, r"must take \(prompt, meta, turns\)"),
        ({"function": "replay"}, "did you mean 'reply'"),
        ({"settings": {"secrets": "a"}}, "unexpected keyword argument 'secrets'"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_load(model, tmp_path, changes, message):
    settings = tree(model, tmp_path, changes.get("function", "reply"))
    own = settings["model"]["environment"]
    settings["recipe"] = changes.get("recipe", settings["recipe"])
    own |= {key: changes[key] for key in ("name", "settings") if key in changes}
    with pytest.raises(UserError, match=message):
        check_run(run_from(settings, "test"))


def test_environments_are_rewritten_as_their_messages_say(model, tmp_path):
    def check(function: str, text: str | None = None) -> None:
        settings = tree(model, tmp_path, function)
        if text is not None:
            (tmp_path / f"{function}.py").write_text(text)
            name = f"{tmp_path / function}.py:{function}"
            settings["model"]["environment"]["name"] = name
        check_run(run_from(settings, "test"))

    advice(
        "{} yields, and its call must return the reply: write `return`",
        lambda: check("yields"),
        lambda: check("yields", "def yields(prompt, meta, turns):\n    return None\n"),
    )
