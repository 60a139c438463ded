"""What the messages of served rewards and judges advise, followed."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import httpx

from rewards import load
from rewards.catalogue.brightness import Brightness
from rewards.judging.panel import PanelSettings
from rewards.serving.batching import ServerLimits
from rewards.serving.client import Client
from rewards.serving.server import Served
from rewards.serving.wire import encode_samples
from rewards.types import Reward
from tests.rewards.test_benchmark_judges import COMMON, SCRIPT, SERVER, script
from tests.support import runs
from tests.support.advice import advice
from tests.support.servers import ChatServer, pictures, serving


def answer(text: str, shown: list[torch.Tensor]) -> str:
    return "1. Is it bright?" if not shown else "Yes."


def test_a_judge_of_a_checklist_goes_without_a_question() -> None:
    with ChatServer(answer) as server:
        own = {"url": server.url, "kind": "checklist", **SERVER}
        advice(
            "judge: a checklist writes its own questions; leave out question",
            lambda: load("judge", question="Is it {prompt}?", **own),
            lambda: load("judge", **own),
        )


def test_a_server_that_does_not_answer_is_started() -> None:
    server = ChatServer(answer).start()
    server.stop()  # its port is free again

    def refused(call: Callable[[], object]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rewards.serving.client.SECONDS_TO_CLOSE", 0.1)
            call()

    def started() -> None:
        server.start()
        PanelSettings(url=server.url, model="tiny").open()

    advice(
        "judge: {}; start a server, such as `vllm serve MODEL`, and check that url ends with /v1",
        lambda: refused(PanelSettings(url=server.url, model="tiny").open),
        started,
    )
    bare = server.url.removesuffix("/v1")
    advice(
        "and check that url ends with /v1",
        PanelSettings(url=bare, model="tiny").open,
        PanelSettings(url=f"{bare}/v1", model="tiny").open,
    )
    server.stop()
    sent = pictures(2)
    with serving(Served.of("brightness", {}, Brightness())) as url:
        for followed in (lambda: load("remote", url=url), lambda: load("remote", url=f"{url}/")):
            advice(
                "remote: {}; start one with `flowrl serve-reward NAME --port PORT`, or fix url",
                lambda: refused(lambda: load("remote", url=server.url)),
                followed,
            )
        assert len(load("remote", url=url)(sent)) == 2


def test_a_token_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "")

    def exported() -> Client:
        monkeypatch.setenv("TOKEN_OF_MINE", "s3cret")
        return Client("http://127.0.0.1:9", "TOKEN_OF_MINE")

    advice(
        "the environment variable {} is empty; export the token first",
        lambda: Client("http://127.0.0.1:9", "TOKEN_OF_MINE"),
        exported,
    )


def test_the_questions_of_authors_are_put_where_the_setting_says(tmp_path: Path) -> None:
    with ChatServer(answer) as server:
        place = str(tmp_path / "question.txt")
        own = {"url": server.url, **SERVER}

        def copied() -> Reward:
            Path(place).write_text("Compare.\nText Caption: [{prompt}]\n")
            return load("unified_reward", question=place, **own)

        advice(
            "unified_reward: question: no such file: {}; copy the text from your release's client "
            "(github.com/CodeGoat24/UnifiedReward), with {{prompt}} in place of the prompt",
            lambda: load("unified_reward", question=place, **own),
            copied,
        )
        advice(
            "question: no such file: {}; use {}",
            lambda: load("unigenbench", question="nowhere.py", **own),
            lambda: load("unigenbench", question=script(tmp_path, COMMON), **own),
        )
        (tmp_path / "other.py").write_text("x = 1")
        advice(
            "question: {} does not hold UniGenBench's question (definitions of test points, two "
            "lists of them, and an instruction): use {}",
            lambda: load("unigenbench", question=str(tmp_path / "other.py"), **own),
            lambda: load("unigenbench", question=script(tmp_path, COMMON), **own),
        )
        rows = [{"testpoints": ["风格"], "testpoint_descriptions": ["水墨"]}]

        def check(text: str) -> None:
            reward = load("unigenbench", question=script(tmp_path, text), **own)
            reward.check_prompts(["猫"], rows)

        advice(
            "the question does not define the test point {}; it defines {}: use the file in the "
            "prompts' language",
            lambda: check(SCRIPT),
            lambda: check(SCRIPT.replace('"Style"', '"风格"')),
        )


OFFICIAL = {
    "dpg_bench": "item_id,text,proposition_id,dependency,category_broad,category_detailed,tuple,"
    "question_natural_language\n0,A cat.,1,0,entity,whole,entity - whole (cat),Is there a cat?\n",
    "unigenbench": 'index,prompt_en,sub_dims_en\n0,Ink.,"{""Primary Categories"": ""Art"", '
    '""Testpoints"": [""Style""], ""Testpoint Description"": [""ink""]}"\n',
}


def test_official_files_are_converted(tmp_path: Path) -> None:
    with ChatServer(answer) as server:
        own = {"url": server.url, **SERVER}
        dpg = load("dpg_bench", **own)
        points = load("unigenbench", question=script(tmp_path), **own)

        def converted(name: str, reward: Any) -> None:
            file, out = tmp_path / f"{name}.csv", tmp_path / f"{name}.jsonl"
            file.write_text(OFFICIAL[name])
            assert runs.flowrl("suites", f"{name}:{file}", "--out", str(out)) == 0
            rows = [json.loads(line) for line in out.read_text().splitlines()]
            reward.check_prompts([row["prompt"] for row in rows], rows)

        advice(
            "dpg_bench: row {} of the prompts has no column {}: convert the official file with "
            "flowrl suites dpg_bench:FILE --out prompts.jsonl",
            lambda: dpg.check_prompts(["a"], [{}]),
            lambda: converted("dpg_bench", dpg),
        )
        advice(
            "unigenbench: row {} of the prompts has no column {}: convert the official file with "
            "flowrl suites unigenbench:FILE --out prompts.jsonl",
            lambda: points.check_prompts(["a"], [{}]),
            lambda: converted("unigenbench", points),
        )


def test_noun_phrases_are_a_column_or_a_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser is the one that the setting names; one that is there and finds none helps no
    further."""
    chunks = [SimpleNamespace(text="a green bench")]
    with ChatServer(answer) as server:
        own = {"url": server.url, "spacy_model": "words_of_mine", **SERVER}

        def installed() -> None:
            spacy = SimpleNamespace(util=SimpleNamespace(is_package=lambda name: name == model))
            spacy.load = lambda _: lambda text: SimpleNamespace(noun_chunks=chunks * bool(text))
            monkeypatch.setitem(sys.modules, "spacy", spacy)
            monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
            load("compbench", **own).check_prompts(["a green bench"], [{}])

        with pytest.raises(ValueError, match="download ") as refused:
            load("compbench", **own).check_prompts(["a"], [{}])
        model = str(refused.value).rpartition(" ")[2]
        for followed in (
            lambda: load("compbench", **own).check_prompts(["a"], [{"noun_phrases": ["a"]}]),
            installed,
        ):
            advice(
                "compbench: row {} of the prompts has no noun phrases: add a column {} (a list)",
                lambda: load("compbench", **own).check_prompts(["a"], [{}]),
                followed,
            )
        with pytest.raises(ValueError, match=r"has no noun phrases: add .* \(a list\)$"):
            load("compbench", **own).check_prompts([""], [{}])


def test_a_body_that_a_server_refuses_is_made_smaller_or_clear() -> None:
    limits = ServerLimits(pixels=100, values=300)

    def send(url: str, body: Any) -> None:
        """ValueError with what the server says."""
        answered = httpx.post(f"{url}/score", content=json.dumps(body).encode())
        if answered.status_code != 200:
            raise ValueError(answered.json()["detail"])

    served = Served.of("brightness", {}, Brightness())
    two = encode_samples(pictures(2))
    with serving(served, limits) as url, serving(served) as wide:
        advice(
            "{} is not a valid JSON number; send null",
            lambda: send(url, two | {"meta": [{"x": math.nan}] * 2}),
            lambda: send(url, two | {"meta": [{"x": None}] * 2}),
        )
        six = pictures(6)  # of 4 x 5 pixels
        many = replace(pictures(4), meta=[{"x": [1] * 100}] * 4)
        for followed in (
            lambda: load("remote", url=url, batch=2)(many),
            lambda: load("remote", url=wide)(many),
        ):
            advice(
                "the body has more than {} JSON values; send fewer samples (the setting batch), or "
                "start the server with a larger --values",
                lambda: load("remote", url=url)(many),
                followed,
            )
        for followed in (
            lambda: load("remote", url=url, batch=4)(six),
            lambda: load("remote", url=wide)(six),
        ):
            advice(
                "the media have more than {} pixels in total; send fewer samples (the setting "
                "batch), or start the server with a larger --pixels",
                lambda: load("remote", url=url)(six),
                followed,
            )
