"""What the hub answers for a data set, a model, a run, a file of a reward: one sentence that says
so and what to do. None of them calls an answer a missing file, or a missing network."""

import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from flowrl.api.hub import downloaded_run
from flowrl.cli.given_model import is_pipeline
from flowrl.errors import UserError
from flowrl.prompts import DataSource, PromptSet, files
from flowrl.settings import LanguageSettings, PipelineSettings
from flowrl.settings.checks import machine
from rewards.perception.hub import fetched, hub_silence, unreached
from tests.support import fuzz
from tests.support.hub.repositories import Hub, serving

NAME = "owner/name"


class Answering(Hub):
    """A hub that has one answer for everything: a status, and the hub's word for it; or the page of
    a network that asks its users to log in."""

    status, word, page = 200, "", False

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        self.asked.append(request.path)
        if self.slow:
            self.release.wait(60)
        if self.page:
            request.send_response(200)
            request.send_header("Content-Type", "text/html")
            request.send_header("Content-Length", "27")
            request.end_headers()
            if body:
                request.wfile.write(b"<!doctype html><html></html>"[:27])
            return None
        if self.cut:
            request.send_response(200)
            request.send_header("Content-Length", "100")
            request.end_headers()
            if body:
                request.wfile.write(b'{"id": "owner')
            return None
        return self._refuse(request, self.status, self.word)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Answering]:
    made = Answering({})
    with serving(made) as url:
        constants = huggingface_hub.constants
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
        for room in (machine, files):
            monkeypatch.setattr(room, "_HUB_SECONDS", 1.0)
        monkeypatch.setattr("rewards.perception.hub._TIMEOUT", 1.0)
        unreached.cache_clear()
        hub_silence.cache_clear()
        monkeypatch.setattr(time, "sleep", lambda _: None)  # between the client's own tries
        monkeypatch.chdir(tmp_path)
        yield made


def reward_file() -> None:
    from huggingface_hub import hf_hub_download

    fetched("it", f"a.pth of {NAME}", "set weights", lambda: hf_hub_download(NAME, "a.pth"))


DOORS: dict[str, Callable[[], object]] = {
    "a data set": lambda: PromptSet.of(DataSource(source=NAME), "prompts.train"),
    "a pipeline": lambda: machine.check_hub(PipelineSettings(pipeline=NAME)),
    "a language model": lambda: machine.check_hub(LanguageSettings(language=NAME)),
    "--model": lambda: is_pipeline(NAME),
    "a run": lambda: downloaded_run(NAME),
    "a reward's file": reward_file,
}
LICENCE = "accept its licence on the hub"
# status, the hub's word, words of the sentence
ANSWERS: dict[str, tuple[int, str, str]] = {
    "gated": (401, "GatedRepo", LICENCE),
    "private or absent": (401, "RepoNotFound", "check the name"),
    "a wrong token": (401, "", LICENCE),
    "no right": (403, "", LICENCE),
    "absent": (404, "RepoNotFound", "check the name"),
    "too many requests": (429, "", "too many requests (429)"),
    "an error": (500, "", "the hub is in trouble (500)"),
    "a proxy's error": (503, "", "the hub is in trouble (503)"),
}


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as told:
        read()
    said = str(told.value)
    fuzz.one_sentence(said, 500)
    assert NAME in said
    return said


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("door", DOORS)
def test_an_answer_of_the_hub_is_said_with_the_way_out(door: str, answer: str, hub: Answering):
    hub.status, hub.word, words = ANSWERS[answer]
    said = refusal(DOORS[door])
    assert hub.asked and words in said, said
    assert "has no file" not in said and "a machine with a network" not in said, said


@pytest.mark.parametrize("door", ["a pipeline", "a language model"])
def test_a_repository_without_the_file_is_said(door: str, hub: Answering) -> None:
    hub.status, hub.word = 404, "EntryNotFound"
    with pytest.raises(UserError, match=r"owner/name on the hub has no file \w+\.json"):
        DOORS[door]()


@pytest.mark.quick_cases("a pipeline", "a data set")
@pytest.mark.parametrize("door", [name for name in DOORS if "reward" not in name])
def test_a_silent_hub_is_a_missing_network(door: str, hub: Answering) -> None:
    """A request that nobody answers, within the limit of a start."""
    hub.slow = (NAME,)
    start = time.monotonic()
    said = refusal(DOORS[door])
    hub.release.set()
    assert time.monotonic() - start < 30
    assert "hf download" in said or door == "a run", said


def test_a_data_set_whose_answers_are_cut_off_is_said(hub: Answering) -> None:
    hub.cut = (NAME,)
    assert "hf download --repo-type dataset owner/name" in refusal(DOORS["a data set"])
