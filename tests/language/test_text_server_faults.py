"""What a server of completions may do wrong, and settings that it cannot carry out: one sentence
each."""

import threading

import pytest
import torch

pytest.importorskip("httpx")

from flowrl.errors import UserError
from flowrl.losses.weights import Mismatch
from flowrl.models.language.completion_answers import CompletionChoice, CompletionLogprobs
from flowrl.models.language.served_adapters import fingerprint, served
from flowrl.settings.read import check_run, run_from
from tests.support import text_runs
from tests.support.advice import advice
from tests.support.completion_servers import (
    GRPO,
    PROMPTS,
    CompletionsServer,
    only,
    tree,
    wait_shortly,
)
from tests.support.iterations import collect
from tests.support.runs import opened


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    wait_shortly(monkeypatch, 2.0)


def drop(name: str):
    return lambda choice: choice.pop(name)


def put(**values):
    return lambda choice: choice.update(values)


def short(choice):
    choice["logprobs"]["token_logprobs"].pop()


def said(value):
    return lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, value)


def early(choice):
    ids, said = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    ids[:], said[:] = [5], said[:1]


@pytest.mark.quick_cases("True as the log-probability", "short-", "no log-probabilities")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (put(logprobs=None), "no log-probabilities"),
        (short, "log-probabilities instead of 1 to 4"),
        *((said(value), f"gives {value!r} as the log-probability") for value in (5.0, "-1", True)),
        (put(token_ids=[]), "an answer has no whole text"),
        (put(finish_reason="abort"), r"an answer has no whole text \(abort\)"),
        (put(token_ids=[99] * 4, logprobs={"token_logprobs": [-1.0] * 4}), "returned token 99"),
        (
            lambda choice: (early(choice), choice.update(finish_reason="stop")),
            "is not a stop token here",
        ),
        (lambda choice: (early(choice), choice.update(finish_reason="length")), "max-model-len"),
    ],
)
def test_answers_that_cannot_be_trained_on_are_told(model, tmp_path, spoil, message):
    with CompletionsServer(model, spoil=spoil) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        with pytest.raises(UserError, match=message):
            collect(kept, 0)


def test_a_server_that_tokenizes_anew_is_started_without_its_templates(model, tmp_path):
    with CompletionsServer(model, spoil=put(prompt_token_ids=[2, 2, 3])) as server:
        kept = opened(tree(server, tmp_path), tmp_path)

        def of_plain_tokens():
            server.spoil = None
            return collect(kept, 0)

        advice(
            "model.server: the server tokenized a prompt of {} tokens differently; it must accept "
            "token ids unchanged: switch off its templates and special tokens",
            lambda: collect(kept, 0),
            of_plain_tokens,
        )


@pytest.mark.slow
def test_a_stop_token_of_the_server_is_one_of_the_run_or_none(model, tmp_path):
    def stopped(choice):
        early(choice)
        choice["finish_reason"] = "stop"

    with CompletionsServer(model, spoil=stopped) as server:
        settings = tree(server, tmp_path)
        kept = opened(settings, tmp_path)

        def stopping():
            word = kept.learner.policy.tokenizer.decode([5])
            model_settings = settings["model"] | {"stop": [word]}
            return collect(opened(settings | {"model": model_settings}, tmp_path / "other"), 0)

        def plain():
            server.spoil = None
            return collect(kept, 0)

        for follow in (stopping, plain):
            advice(
                "model.server: a completion ended ({}) at token {}, which is not a stop token "
                "here; add it to model.stop, or start the server without its own stop tokens "
                "(vLLM: --generation-config vllm)",
                lambda: collect(kept, 0),
                follow,
            )


def test_ids_are_read_from_either_place_and_words_are_refused(model, tmp_path):
    with CompletionsServer(model, spoil=drop("token_ids")) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        assert only(collect(kept, 0).rows).written.any()
        server.words, server.spoil = True, None
        with pytest.raises(UserError, match="have no token ids"):
            collect(kept, 0)


@pytest.mark.slow
def test_a_server_in_trouble_is_asked_again_and_then_told(model, tmp_path):
    with CompletionsServer(model, trouble=[503, 500, 429]) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        before = only(collect(kept, 0).rows)
        assert len(server.bodies) == 12 + 3
        server.trouble = [503] * 60
        with pytest.raises(UserError, match=r"completions failed at .*status 503, .*long for"):
            collect(kept, 0)
        server.trouble = [400] * 60
        with pytest.raises(UserError, match=r"refuses every request: status 400.*too long for me"):
            collect(kept, 0)
        server.trouble = [404]
        with pytest.raises(UserError, match="nothing at this address"):
            collect(kept, 0)
        server.trouble = []
        assert torch.equal(before.ids, only(collect(kept, 0).rows).ids)
    with pytest.raises(UserError, match="unreachable"):
        collect(kept, 0)
    with pytest.raises(UserError, match=r"start a server, or remove model\.server"):
        kept.learner.policy.proofs(PROMPTS, 4)


GOOD = (
    '{"choices": [{"finish_reason": "stop", "token_ids": [1], "logprobs": '
    '{"token_logprobs": [-1.0]}}], "usage": %s}'
)
BROKEN = {
    "a token of 400 digits": (200, {}, GOOD.replace("[1]", f"[{'9' * 400}]") % "null"),
    "a log-probability of 400 digits": (200, {}, GOOD.replace("-1.0", "9" * 400) % "null"),
    "a log-probability that is no number": (200, {}, GOOD.replace("-1.0", "NaN") % "null"),
    "a negative token": (200, {}, GOOD.replace("[1]", "[-1]") % "null"),
    "a huge usage": (
        200,
        {},
        GOOD % '{"prompt_tokens": 1%s, "completion_tokens": 1%s}' % ("0" * 400, "0" * 400),
    ),
    "100,000 brackets": (200, {}, "[" * 100_000),
    "bad gzip": (200, {"Content-Encoding": "gzip"}, GOOD % "null"),
    "a wait that is no number": (503, {"Retry-After": "\xb2"}, "busy"),
}


QUICK = ("a log-probability that is no number", "bad gzip")


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in BROKEN]
)
def test_a_broken_answer_is_asked_for_again(model, tmp_path, broken):
    status, headers, text = BROKEN[broken]
    with CompletionsServer(model) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        want = only(collect(kept, 0).rows)
        server.raw_answers = [(status, headers, text.encode())] * 2
        got = only(collect(kept, 0).rows)
        assert server.raw_answers == [] and torch.equal(got.ids, want.ids)


@pytest.mark.parametrize("word", ["token_id:\u00b2", "token_id:" + "9" * 5000, "token_id:"])
def test_a_token_by_a_word_that_is_no_number_has_no_id(word):
    choice = CompletionChoice(logprobs=CompletionLogprobs(tokens=["token_id:5", word]))
    assert choice.ids is None


@pytest.mark.slow
def test_what_the_start_finds_out(model, tmp_path):
    def proofs(server: CompletionsServer, recipe=GRPO, **settings) -> list[str]:
        return opened(tree(server, tmp_path, recipe, **settings), tmp_path).learner.policy.proofs(
            PROMPTS, 6
        )

    warm = GRPO | {"temperature": 0.5}
    with CompletionsServer(model) as server:
        assert "samples completions" in proofs(server, warm)[-1]
        with pytest.raises(UserError, match=r"serves tiny.*, not big"):
            proofs(server, model="big")
        server.raw = True
        assert "samples completions" in proofs(server)[-1]
        with pytest.raises(UserError, match="processed_logprobs"):
            proofs(server, warm)
        server.raw, server.scale = False, -5.0
        with pytest.raises(UserError, match="another model"):
            proofs(server)
        server.lora = False
        assert "keeps its own weights" in proofs(server)[-1]
        server.restart()
        with pytest.raises(UserError, match="must be able to load adapters while it runs"):
            server.lora = True
            kept = opened(tree(server, tmp_path), tmp_path)
            server.lora = False
            kept.learner.policy.proofs(PROMPTS, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": GRPO | {"top_p": 0.9}}, "set recipe.top_p: 1"),
        ({"recipe": {"name": "text_treerl", "length": 4, "top_p": 1.0}}, "forks need the entropy"),
        ({"lora": None}, "set server.sync: weights or none"),
        ({"url": "http://localhost:8000"}, "must end with /v1"),
        ({"correction": {"high": 0.5}}, "greater than 1"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_weights_load(model, tmp_path, changes, message):
    settings = text_runs.tree(model, tmp_path, changes.pop("recipe", GRPO))
    lora = {"rank": 2} if "lora" not in changes else changes.pop("lora")
    server = {"url": "http://localhost:1/v1", "model": "tiny"} | changes
    settings["model"] |= {"lora": lora, "server": server}
    with pytest.raises(UserError, match=message):
        check_run(run_from(settings, "test"))


def test_vespo_weighs_the_mismatch_of_rows_by_itself_and_pairs_have_no_ratio(model, tmp_path):
    settings = text_runs.tree(model, tmp_path, {"name": "text_vespo", "length": 4})
    settings["model"]["server"] = {"url": "http://x/v1", "model": "tiny", "sync": "none"}
    loss = run_from(settings, "test").algorithm().loss
    assert loss.mismatch == Mismatch() and loss.weights == (Mismatch(mode="none"),)
    settings["recipe"] = {"name": "text_dpo", "length": 4}
    assert "weights" not in vars(run_from(settings, "test").algorithm().loss)


def test_the_fingerprint_is_of_adapters_and_sees_every_change(model, tmp_path):
    settings = text_runs.tree(model, tmp_path, GRPO)
    settings["model"]["lora"] = {"rank": 2}
    policy = opened(settings, tmp_path).learner.policy
    first = fingerprint(policy.model)
    assert first == fingerprint(policy.model)
    with torch.no_grad():
        list(policy.trainable().values())[-1].view(-1)[-1] += 1e-6
    assert fingerprint(policy.model) != first


@pytest.mark.parametrize("spoiled", [put(token_ids=[]), put(finish_reason="abort")])
def test_a_completion_that_was_broken_off_is_asked_for_again(model, tmp_path, spoiled):
    with CompletionsServer(model) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        want, left = only(collect(kept, 0).rows), [1, 1, 1]
        whole = len(server.bodies)

        def spoil(choice):
            if left:
                left.pop()
                spoiled(choice)

        server.spoil = spoil
        assert torch.equal(only(collect(kept, 0).rows).ids, want.ids) and not left
        assert len(server.bodies) > 2 * whole  # its words alone do not show that it was asked again


@pytest.mark.slow
def test_a_server_that_goes_away_after_it_was_found_is_waited_for(model, tmp_path, monkeypatch):
    """It answers no request, however often, until its models are asked for again."""
    with CompletionsServer(model) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        want, listings = only(collect(kept, 0).rows), []

        def listed(client):
            listings.append(server.url)
            if len(listings) == 2:
                server.trouble.clear()
            return served(client)

        monkeypatch.setattr("flowrl.models.language.server.served", listed)
        server.trouble.extend([0] * 1000)
        assert torch.equal(only(collect(kept, 0).rows).ids, want.ids)


@pytest.mark.slow
def test_an_outage_is_waited_for(model, tmp_path, capsys):
    """The server is gone for longer than all tries of a request, and has no adapters then."""
    first = CompletionsServer(model)
    with first:
        kept = opened(tree(first, tmp_path, patience=60), tmp_path)
        want = only(collect(kept, 0).rows)
        port = first.http.server_address[1]

    def again():
        second = CompletionsServer(model, port=port)
        second.__enter__()
        back.append(second)

    back: list[CompletionsServer] = []
    timer = threading.Timer(4.0, again)
    timer.start()
    got = only(collect(kept, 0).rows)
    assert torch.equal(got.ids, want.ids) and back[0].loaded
    assert "waiting for it up to 60 s" in capsys.readouterr().err
    back[0].__exit__()
