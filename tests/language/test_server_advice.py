"""What is said of a server of completions, and that its advice works: the same start or the same
samples end well once the server, or the setting, is as the message says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from flowrl.models.language.served_check import WEIGHT_ROUNDINGS
from tests.language.test_text_server_owner import rounded
from tests.support import completion_servers
from tests.support.advice import advice
from tests.support.completion_servers import (
    GRPO,
    PROMPTS,
    CompletionsServer,
    only,
    tree,
    wait_shortly,
    weighty,
)
from tests.support.iterations import collect
from tests.support.runs import opened


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    wait_shortly(monkeypatch, 2.0)


def drawn(kept: Any) -> None:
    assert only(collect(kept, 0).rows).written.any()


def proven(server: CompletionsServer, folder: Path, recipe=GRPO, **settings: Any) -> str:
    made = opened(tree(server, folder, recipe, **settings), folder)
    return made.learner.policy.proofs(PROMPTS, 6)[-1]


Spoil = Callable[[dict[str, Any]], Any]


def cut_off(choice: dict[str, Any]) -> None:
    choice["token_ids"][:] = [5]
    choice["logprobs"]["token_logprobs"][:] = [-1.0]
    choice["finish_reason"] = "length"


def sure(choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"][0] = 5.0


@pytest.mark.slow
def test_a_server_with_whole_answers_is_trained_on(model, tmp_path):
    with CompletionsServer(model) as server:
        kept = opened(tree(server, tmp_path), tmp_path)

        def answers(spoil: Spoil | None = None, words: bool = False) -> None:
            server.spoil, server.words = spoil, words
            drawn(kept)

        advice(
            "model.server: its answers have no token ids (return_token_ids); use a newer vLLM or "
            "SGLang",
            lambda: answers(words=True),
            answers,
        )
        advice(
            "model.server: its answers have no log-probabilities of the sampled tokens, which "
            "training needs; use a server that returns logprobs",
            lambda: answers(lambda choice: choice.update(logprobs=None)),
            answers,
        )
        advice(
            "model.server: an answer gives {} as the log-probability of a token, but it must be a "
            "number of at most 0; use a server that returns logprobs",
            lambda: answers(sure),
            answers,
        )
        advice(
            "model.server: it cut off a completion after {} of {} tokens; raise its limit for "
            "prompt and completion (vLLM: --max-model-len)",
            lambda: answers(cut_off),
            answers,
        )


@pytest.mark.slow
def test_a_server_that_takes_adapters_is_in_step_and_one_that_need_not_is_asked(model, tmp_path):
    def loading(lora: bool, **settings: Any) -> None:
        with CompletionsServer(model) as server:
            kept = opened(tree(server, tmp_path, **settings), tmp_path)
            server.lora = lora
            drawn(kept)

    for follow in (lambda: loading(True), lambda: loading(False, sync="none")):
        advice(
            "model.server.sync: {}; the server must be able to load adapters while it runs (vLLM: "
            "--enable-lora, --max-lora-rank, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True) and to see "
            "{}; or set model.server.sync: none",
            lambda: loading(False),
            follow,
        )


@pytest.mark.slow
def test_a_server_that_reads_weights_is_in_step_and_one_that_need_not_is_asked(
    model, tmp_path, monkeypatch
):
    whole = completion_servers.RELOADING

    def sending(paths: tuple[str, ...], **settings: Any) -> None:
        monkeypatch.setattr(completion_servers, "RELOADING", paths)
        with CompletionsServer(model) as server:
            made = weighty(server, tmp_path)
            made["model"]["server"] |= settings
            drawn(opened(made, tmp_path))

    for follow in (lambda: sending(whole), lambda: sending((), sync="none")):
        advice(
            "model.server.sync: {}; the server must be a vLLM of 0.32 or newer, started with "
            "VLLM_SERVER_DEV_MODE=1, and see {}; or set model.server.sync: none",
            lambda: sending(()),
            follow,
        )


@pytest.mark.slow
def test_a_start_beside_a_server_of_the_same_weights_is_proven(model, tmp_path):
    half = GRPO | {"temperature": 0.5}
    with CompletionsServer(model) as server:

        def raw(are: bool, recipe: dict[str, Any]) -> str:
            server.raw = are
            return proven(server, tmp_path, recipe)

        for are, recipe in ((False, half), (True, GRPO | {"temperature": 1.0})):
            said = advice(
                "model.server: its log-probabilities ignore the temperature, but training samples "
                "at {}; start vLLM with --logprobs-mode processed_logprobs, or set "
                "recipe.temperature: 1",
                lambda: raw(True, half),
                lambda are=are, recipe=recipe: raw(are, recipe),
            )
            assert "samples completions" in said
        server.raw = False

        def restarted(scale: float) -> str:
            server.scale = scale
            server.restart()
            return proven(server, tmp_path)

        advice(
            "model.server: its log-probabilities differ from the model's own by {}",
            lambda: restarted(-5.0),
            lambda: restarted(1.0),
        )


@pytest.mark.slow
def test_a_server_of_quantized_weights_is_accepted_as_one(model, tmp_path):
    with CompletionsServer(model, change=rounded(WEIGHT_ROUNDINGS["int4"])) as server:
        said = advice(
            "that an earlier run has left: restart it with the weights of model.language",
            lambda: proven(server, tmp_path),
            lambda: proven(server, tmp_path, quantized="int4"),
        )
    assert "the server's weights are quantized (int4)" in said


@pytest.mark.slow
def test_a_start_without_a_server_needs_one_or_none(model, tmp_path):
    with CompletionsServer(model) as first:
        settings = tree(first, tmp_path)
        port = first.http.server_address[1]

    def proofs(server: dict[str, Any] | None) -> list[str]:
        made = settings | {"model": settings["model"] | {"server": server}}
        return opened(made, tmp_path).learner.policy.proofs(PROMPTS, 4)

    def started() -> list[str]:
        with CompletionsServer(model, port=port):
            return proofs(settings["model"]["server"])

    for follow, served in ((started, True), (lambda: proofs(None), False)):
        said = advice(
            "model.server: {}; start a server, or remove model.server",
            lambda: proofs(settings["model"]["server"]),
            follow,
        )
        assert any("samples completions" in sentence for sentence in said) == served
