"""What the messages of rewards advise, followed: columns, settings, servers and questions."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from rewards import Samples, load
from rewards.answers.code_tests import read_tests
from rewards.catalogue.brightness import Brightness
from rewards.checks.self_test import Prompts, check_sum
from rewards.combine import scored
from rewards.judging.panel import PanelSettings
from rewards.sandbox import run
from rewards.sandbox.run import SandboxLimits
from rewards.serving.client import Client
from rewards.serving.server import Served
from rewards.types import Reward
from tests.rewards.test_benchmark_judges import COMMON, SCRIPT, SERVER, script
from tests.rewards.test_external_sandbox import configure
from tests.support import runs
from tests.support.advice import advice
from tests.support.servers import ChatServer, pictures, serving

Rows = Sequence[Mapping[str, Any]]


def of(media: list[str], meta: Rows = ()) -> Samples:
    n = len(media)
    return Samples(media, ["p"] * n, torch.zeros(n, dtype=torch.long), meta)


def test_a_form_of_tests_that_lacks_its_function_is_given_one() -> None:
    pairs = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    assert advice(
        "testtype is functional, but nothing names the function to call: name the column that has "
        "it with `function` (LiveCodeBench: metadata or starter_code)",
        lambda: read_tests(pairs),
        lambda: read_tests(pairs, "add"),
    ).python
    check = "def check(candidate):\n    assert candidate(1, 2) == 3"
    (test,) = advice(
        "check(candidate) is called by nothing: name the column that has the function with "
        "`function` (HumanEval, LeetCodeDataset: entry_point)",
        lambda: read_tests([check]),
        lambda: read_tests([check], "add"),
    ).python
    assert test.endswith("check(called)")
    cases = "import pytest\n@pytest.mark.parametrize('x', [1, 2])\ndef test_a(x):\n    assert f(x)"
    advice(
        "needs pytest (it has a decorator or a fixture), which does not run here: write its cases "
        "as calls",
        lambda: read_tests([cases]),
        lambda: read_tests(["def test_a():\n    assert f(1)\n    assert f(2)"]),
    )


def test_the_named_column_reaches_the_tests() -> None:
    """The setting that the message names, where a user writes it."""
    rows = [{"tests": [{"input": "1", "output": "1", "testtype": "functional"}], "names": "f"}]

    def plan(**settings: Any) -> None:
        load("code_tests", isolation="best", **settings).check_prompts(["p"], rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run_program", lambda *_: SimpleNamespace(missing=()))
        advice("name the column that has it with `function`", plan, lambda: plan(function="names"))


def test_a_system_that_isolates_no_program_is_accepted_in_the_ways_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run.run_program("", "", SandboxLimits())
    configure(tmp_path, monkeypatch, f'[sandbox]\ncommand = ["{sys.executable}"]')

    def rooted() -> Reward:
        """As where namespaces are permitted, or for root."""
        monkeypatch.setattr(run, "run_program", lambda *_: replace(real, missing=()))
        return load("code_tests")

    def accepted() -> Reward:
        with pytest.warns(UserWarning, match="a malicious program can exploit that"):
            return load("code_tests", isolation="best")

    for followed in (lambda: load("code_tests", isolation="external"), accepted, rooted):
        monkeypatch.setattr(run, "run_program", lambda *_: replace(real, missing=("network",)))
        advice(
            "code_tests: this system cannot fully isolate a program ({}): permit user namespaces, "
            "run as root, use isolation: external, or accept the risk with isolation: best",
            lambda: load("code_tests"),
            followed,
        )


def test_rows_of_a_value_without_a_reward_get_one_or_are_said_to_have_none() -> None:
    advice(
        "by_row: give a reward for at least one value of the column",
        lambda: load("by_row", rewards={}),
        lambda: load("by_row", rewards={"sums": "exact_answer"}),
    )
    sums = {"sums": "exact_answer"}
    rows = [{"data_set": "sums", "answer": "7"}, {"data_set": "code", "answer": "8"}]

    def scores(**settings: Any) -> list[float]:
        return scored("routed", load("by_row", **settings), of(["7", "8"], rows)).tolist()

    added: dict[str, Any] = {"rewards": sums | {"code": "exact_answer"}}
    for settings, second in (
        (added, [1.0]),
        ({"rewards": sums, "otherwise": 0.25}, [0.25]),
        ({"rewards": sums, "otherwise": "abstain"}, []),
    ):
        assert [
            score
            for score in advice(
                "but only {} have rewards: add one, or set `otherwise` to the score of such rows, "
                "or to `abstain` if other rewards score them",
                lambda: scores(rewards=sums),
                lambda settings=settings: scores(**settings),
            )[1:]
            if score == score
        ] == second


def test_a_column_that_is_missing_is_added_or_named() -> None:
    near = {"name": "length", "most": 3, "kind": "near"}
    for column in ("reference", "other"):
        row = {column: "a b"}
        settings = {} if column == "reference" else {"column": column}
        advice(
            "centred: the prompts have no columns; add a column {} with a reference to the prompt "
            "file, or name another with `column`",
            lambda: load("centred", reward=near)(of(["a b c"])),
            lambda row=row, settings=settings: load("centred", reward=near, **settings)(
                of(["a b c"], [row])
            ),
        )
    for column in ("answer", "other"):
        samples = of(["7"], [{column: "7"}])
        settings = {} if column == "answer" else {"column": column}
        assert advice(
            "exact_answer: the prompts have no columns; add a column {} to the prompt file, or "
            "name another with `column`",
            lambda: load("exact_answer")(of(["7"])),
            lambda samples=samples, settings=settings: load("exact_answer", **settings)(samples),
        ).tolist() == [1]


def test_math_answers_find_their_column() -> None:
    pytest.importorskip("math_verify")

    def plan(row: Mapping[str, str], **settings: Any) -> None:
        reward: Any = load("math_answer", processes=1, **settings)
        reward.check_prompts(["p"], [row])
        reward.workers.close()

    for followed in (
        lambda: plan({"answer": "7"}),
        lambda: plan({"truth": "7"}, column="truth"),
    ):
        advice(
            "math_answer: no prompt has a column {}; add it to the prompt file, or name another "
            "with `column`",
            lambda: plan({"truth": "7"}),
            followed,
        )


def test_settings_that_belong_together_are_given_together() -> None:
    for name, alone, both, neither in (
        ("format", {"pattern": "a+"}, {"kind": "pattern", "pattern": "a+"}, {}),
        ("format", {"kind": "pattern"}, {"kind": "pattern", "pattern": "a+"}, {}),
    ):
        for settings in (both, neither):
            advice(
                "format: `pattern` and `kind: pattern` belong together: give both or neither",
                lambda name=name, alone=alone: load(name, **alone),
                lambda name=name, settings=settings: load(name, **settings),
            )
    tokens = {"tokenizer": "flowrl/demo/sums-lm"}
    for settings in ({"unit": "tokens", **tokens}, {}):
        advice(
            "length: `tokenizer` and `unit: tokens` belong together: give both or neither",
            lambda: load("length", most=4, **tokens),
            lambda settings=settings: load("length", most=4, **settings),
        )


def test_the_all_design_takes_no_count() -> None:
    for settings in ({}, {"pairs": "each", "count": 3}, {"pairs": "anchors", "count": 3}):
        advice(
            "pairs: the design all takes no count: leave count out, or set pairs to each or "
            "anchors",
            lambda: load("win_rate", judge="brightness", count=3),
            lambda settings=settings: load("win_rate", judge="brightness", **settings),
        )


def test_rewards_that_cancel_have_their_weights_changed() -> None:
    def light(samples: Samples) -> torch.Tensor:
        return samples.media.flatten(1).mean(1)

    both = {"light": light, "dark": lambda samples: 1 - light(samples)}
    advice(
        "they cancel: their weighted sum is {} for all {} test samples, so no sample is better "
        "than another; change a weight",
        lambda: check_sum(both, {"light": 1.0, "dark": 1.0}, Prompts()),
        lambda: check_sum(both, {"light": 1.0, "dark": 0.5}, Prompts()),
    )


def test_kinds_in_one_batch_are_separated() -> None:
    mixed = [torch.rand(3, 4, 4), "a"]
    assert advice(
        "Samples: {} in one batch; separate them",
        lambda: of(mixed).kind,  # type: ignore[arg-type]
        lambda: [of([one]).kind for one in mixed],  # type: ignore[list-item]
    ) == ["image", "text"]


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
    words = "compbench: row {} of the prompts has no noun phrases: add a column {} (a list)"
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
            advice(words, lambda: load("compbench", **own).check_prompts(["a"], [{}]), followed)
        with pytest.raises(ValueError, match=r"has no noun phrases: add .* \(a list\)$"):
            load("compbench", **own).check_prompts([""], [{}])


def test_a_masked_array_is_filled() -> None:
    import numpy as np

    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    values = advice(
        "a masked array, whose mask would be lost: return .filled(numpy.nan)",
        lambda: scored("a", lambda _: masked, of(["a", "b"])),
        lambda: scored("a", lambda _: masked.filled(np.nan), of(["a", "b"])),
    )
    assert values[0] == 1 and values[1].isnan()


def test_a_reward_that_writes_into_the_media_copies_it() -> None:
    def clamps(samples: Samples) -> torch.Tensor:
        return samples.media.clamp_(0.4, 0.5).flatten(1).mean(1)

    def copies(samples: Samples) -> torch.Tensor:
        return samples.media.clone().clamp_(0.4, 0.5).flatten(1).mean(1)

    advice(
        "wrote into the media, which other rewards and the run still need; change a copy instead: "
        "samples.media.clone()",
        lambda: scored("a", clamps, pictures(2)),
        lambda: scored("a", copies, pictures(2)),
    )
