"""A vision-language model as a judge, behind a real HTTP path; the model is a function."""

import math

import pytest
import torch

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from rewards import Samples, load
from rewards.checks.self_test import self_test
from rewards.judging.answers import (
    expected_in,
    questions_in,
    score_in,
    verdict_in,
    yes_in,
)
from rewards.judging.chat import completion
from rewards.load import load_judge
from rewards.perception.media import to_pil, to_tensor
from rewards.serving.requests import Malformed, Unparsable
from rewards.types import reports
from tests.support.servers import ChatServer, unpacked


def said(text: str | None) -> object:
    return completion({"choices": [{"message": {"content": text}}]})


def told(word: str, mass: dict[str, float]) -> dict:
    """A choice of one token with log-probabilities."""
    top = [{"token": token, "logprob": math.log(p)} for token, p in mass.items()]
    tokens = [{"token": word, "logprob": math.log(mass.get(word, 0.5)), "top_logprobs": top}]
    return {"message": {"content": word}, "logprobs": {"content": tokens}}


def images(*levels: float, prompts: list[str] | None = None) -> Samples:
    media = torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 3, 4, 4)
    n = len(levels)
    return Samples(media, prompts or ["a day"] * n, torch.zeros(n, dtype=torch.long))


def level(picture: torch.Tensor) -> float:
    return float(picture.mean())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>Image 2 is better? No.</think><answer>Image 1 is better</answer>", 1.0),
        ("<answer>\n image 2 is better.\n</answer>", 0.0),
        ("Thinking aloud. <answer>Video 2 is better</answer> <answer>1</answer>", 0.0),
        ("<answer>2</answer>", 0.0),
        ("<answer>Image 1</answer>", 1.0),
        ("<answer>a tie</answer>", 0.5),
        ("<answer>Both are equal.</answer>", 0.5),
        ("Image 1 is better", 1.0),
        ("Image 1 is better at colours", None),
        ("<think><answer>Image 1 is better</answer></think>", None),
        ("<answer>Image 1 is better, or Image 2 is better</answer>", None),
        ("<answer>Neither convinces me</answer>", None),
        ("<answer>Image 1 is not better</answer>", None),
        ("", None),
        (None, None),
    ],
)
def test_a_verdict_is_read_or_it_is_none(text, value):
    if value is None:
        with pytest.raises(Unparsable):
            verdict_in(said(text))
    else:
        assert verdict_in(said(text)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Nice.\nScore: 4", 0.75),
        ("Final Score: **3.5**", 0.625),
        ("A first score: 2. On reflection, score = 5", 1.0),
        ("<think>score: 1</think> Score: 5/5", 1.0),
        ("Score: 7", None),
        ("Score: 0", None),
        ("Excellent", None),
    ],
)
def test_a_score_is_the_last_that_is_named(text, value):
    if value is None:
        with pytest.raises(Unparsable):
            score_in(said(text))
    else:
        assert score_in(said(text)) == value


def test_log_probabilities_become_a_mean_or_a_share():
    answer = completion({"choices": [told("4", {"4": 0.5, " 5": 0.2, "4 ": 0.1, "cat": 0.2})]})
    assert expected_in(answer) == pytest.approx((0.6 * 3 + 0.2 * 4) / 0.8 / 4)
    yes = completion({"choices": [told("Yes", {"Yes": 0.3, "yes": 0.3, " NO": 0.2, "Maybe": 0.2})]})
    assert yes_in(yes) == pytest.approx(0.6 / 0.8)
    unsure = completion({"choices": [told("4", {"4": 0.3, "I": 0.7})]})
    with pytest.raises(Unparsable):
        expected_in(unsure)
    assert yes_in(said("No, there is none.")) == 0 and yes_in(said("**Yes**")) == 1
    with pytest.raises(Unparsable):
        yes_in(said("Nobody knows"))


def test_questions_lose_their_numbers():
    assert questions_in(said("Here:\n1. Is there a cat?\n- Is it 2 m tall?\nThat is all.")) == [
        "Is there a cat?", "Is it 2 m tall?",
    ]  # fmt: skip


@pytest.mark.parametrize("body", [None, [], {}, {"choices": []}, {"choices": [{"message": "x"}]}])
def test_another_format_is_malformed(body):
    with pytest.raises(Malformed):
        completion(body)


def test_pictures_and_words_arrive_as_they_are(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    seen: list[torch.Tensor] = []

    def answer(words: str, pictures: list[torch.Tensor]) -> str:
        assert 'says "{prompt}" \U0001f600\nand {media}' in words
        seen.append(pictures[0])
        return "Score: 5"

    noise = torch.rand(1, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    odd = 'says "{prompt}" \U0001f600\nand {media}'
    with ChatServer(answer) as server:
        reward = load("judge", url=server.url, model="tiny", key="JUDGE_KEY", body={"top_p": 0.9})
        assert reward(Samples(noise, [odd], torch.zeros(1, dtype=torch.long))).tolist() == [1.0]
    assert torch.equal(seen[0], to_tensor(to_pil(noise[0])))
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    body = server.bodies[0]
    assert (body["model"], body["top_p"], body["temperature"]) == ("tiny", 0.9, 0.0)
    assert "seed" not in body


def test_videos_are_shown_by_frames_and_texts_by_words():
    counts: list[int] = []

    def answer(words: str, pictures: list[torch.Tensor]) -> str:
        counts.append(len(pictures))
        return "Score: 5" if (level(pictures[-1]) == 1 if pictures else "four" in words) else ""

    clips = torch.linspace(0, 1, 9).view(1, 9, 1, 1, 1).expand(2, 9, 3, 4, 4)
    group = torch.zeros(2, dtype=torch.long)
    with ChatServer(answer) as server:
        reward = load("judge", url=server.url, model="tiny", frames=3)
        assert reward(Samples(clips, ["x", "y"], group)).tolist() == [
            1.0,
            1.0,
        ]  # the last frame too
        assert reward(Samples(["four", "four"], ["x", "y"], group)).tolist() == [1.0, 1.0]
    assert counts == [3, 3, 0, 0]


@pytest.mark.parametrize("kind", ["expected", "yes_no"])
def test_one_token_is_asked_for_its_probabilities(kind):
    def answer(words: str, pictures: list[torch.Tensor]) -> dict:
        p = 0.1 + 0.8 * level(pictures[0])
        return (
            told("5", {"5": p, "1": 1 - p})
            if kind == "expected"
            else told("no", {"yes": p, "no": 1 - p})
        )

    with ChatServer(answer) as server:
        reward = load("judge", url=server.url, model="tiny", kind=kind)
        scores = reward(images(0.0, 1.0, 0.2))
    torch.testing.assert_close(scores, torch.tensor([0.1, 0.9, 0.26], dtype=torch.float64))
    assert (server.bodies[0]["max_tokens"], server.bodies[0]["logprobs"]) == (1, True)


def test_votes_are_averaged_and_their_spread_told():
    """Votes of the dark picture: 1, 3, 5; of the bright one: 5, 5, and one that says nothing."""

    with ChatServer(compare) as server:
        server.choice = lambda body: {"message": {"content": _vote(body)}}  # type: ignore
        reward = load("judge", url=server.url, model="tiny", votes=3)
        scores = reward(images(0.0, 1.0, 0.5))
    assert scores[:2].tolist() == [0.5, 1.0]
    assert scores[2].isnan(), "one vote of three is no majority"
    spreads = (math.sqrt((0.25 + 0 + 0.25) / 3), 0.0, 0.0)
    found = reports({"j": reward})
    assert found["calls/j/spread"] == pytest.approx(sum(spreads) / 3)
    assert found["calls/j/unparsable"] == 3 and found["calls/j/requests"] == 9
    assert {body["temperature"] for body in server.bodies} == {0.7}
    assert "calls/j/spread" not in reports({"j": reward})


def _vote(body: dict) -> str:
    seed = body["seed"]
    shade = level(unpacked(body["messages"][0]["content"][1]["image_url"]["url"]))
    if shade < 0.1:
        return f"Score: {1 + 2 * seed}"
    return "Score: 5" if seed < (2 if shade > 0.9 else 1) else "No comment."


def compare(words: str, pictures: list[torch.Tensor]) -> str:
    assert "Image 1:" in words and "Image 2:" in words
    better = 1 if level(pictures[0]) > level(pictures[1]) else 2
    return f"<think>Light.</think><answer>Image {better} is better</answer>"


A, B = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])


@pytest.mark.parametrize("both", [True, False])
def test_both_orders_cancel_a_liking_for_the_first_place(both):
    def likes_the_first(words: str, pictures: list[torch.Tensor]) -> str:
        return "<answer>Image 1 is better</answer>"

    batch, biased = images(0.2, 0.8, 0.5), [0.5 if both else 1.0] * 3
    for answer, wanted in ((compare, [0.0, 1.0, 1.0]), (likes_the_first, biased)):
        with ChatServer(answer) as server:
            judge = load_judge("judge", url=server.url, model="tiny", both_orders=both)
            assert judge(batch, A, B).tolist() == wanted
            assert len(server.bodies) == (6 if both else 3)
            share = reports({"j": judge})["calls/j/first_wins"]
            assert share == (1.0 if answer is likes_the_first else 0.5 if both else 2 / 3)


def test_a_pair_with_one_order_answered_has_no_verdict():
    def answer(words: str, pictures: list[torch.Tensor]) -> str:
        return compare(words, pictures) if level(pictures[0]) < 0.5 else "I would rather not say."

    with ChatServer(answer) as server:
        judge = load_judge("judge", url=server.url, model="tiny")
        p = judge(images(0.2, 0.8, 0.4), A, B)
    assert p[[0, 1]].isnan().all() and p[2] == 1


def test_a_probability_is_a_verdict_too():
    def answer(words: str, pictures: list[torch.Tensor]) -> dict:
        p = float(torch.sigmoid(torch.tensor(level(pictures[0]) - level(pictures[1]))))
        return told("1", {"1": p, "2": 1 - p})

    with ChatServer(answer) as server:
        judge = load_judge("judge", url=server.url, model="tiny", kind="probability")
        p = judge(images(0.2, 0.8, 0.4), A, B)
    wanted = torch.sigmoid(torch.tensor([-0.6, 0.4, 0.2], dtype=torch.float64))
    torch.testing.assert_close(p, wanted, atol=1e-6, rtol=0)


def test_a_checklist_is_made_once_a_prompt_or_read_from_the_prompt_file():
    made: list[str] = []

    def answer(words: str, pictures: list[torch.Tensor]) -> str:
        if not pictures:
            made.append(words)
            return (
                "Nothing to ask." if "fog" in words else "1. Is it bright?\n2. Is it dark?\n3. Sun?"
            )
        yes = {"Is it bright?": level(pictures[0]) > 0.5, "Is it dark?": level(pictures[0]) < 0.5}
        return "Yes." if next((v for q, v in yes.items() if q in words), True) else "No."

    own = [{}, {}, {"questions": ["Is it bright?"]}, {}]
    media = torch.tensor([0.9, 0.1, 0.1, 0.5]).view(4, 1, 1, 1).expand(4, 3, 4, 4)
    batch = Samples(media, ["day", "day", "night", "fog"], torch.arange(4), own)
    with ChatServer(answer) as server:
        reward = load("judge", url=server.url, model="tiny", kind="checklist")
        for _ in range(2):
            scores = reward(batch)
            assert scores[:3].tolist() == pytest.approx([2 / 3, 2 / 3, 0.0])
            assert scores[3].isnan(), "no questions, no score"
    assert sorted(["fog" in words for words in made]) == [False, True, True]


def test_the_self_test_asks_once_and_knows_better_from_worse():
    def answer(words: str, pictures: list[torch.Tensor]) -> str:
        calm = [float(p.diff(dim=-1).abs().mean()) < 0.1 for p in pictures]
        if len(pictures) == 2:
            return f"<answer>Image {1 if calm[0] else 2} is better</answer>"
        return f"Score: {5 if calm[0] else 1}"

    with ChatServer(answer) as server:
        reward = load("judge", url=server.url, model="tiny")
        assert "called once" in self_test("judge", reward)
        assert len(server.bodies) == 2
        spec = {"name": "judge", "url": server.url, "model": "tiny"}
        assert "1 for the better" in self_test("pairs", load("win_rate", judge=spec))
    with ChatServer(lambda words, pictures: "Score: 3") as server:
        reward = load("judge", url=server.url, model="tiny")
        with pytest.raises(ValueError, match=r"both of its examples score 0\.5"):
            self_test("judge", reward)


def test_slips_are_told_before_anything_is_judged(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with ChatServer(compare) as server:
        good = {"url": server.url, "model": "tiny"}
        for changed, message in (
            ({"model": "giant"}, "the server does not serve 'giant'; it serves tiny"),
            ({"url": "localhost:8000"}, "must begin with http"),
            ({"key": "NO_SUCH_KEY"}, "variable NO_SUCH_KEY is empty"),
            ({"kind": "stars"}, "kind: expected 'score', .* or 'checklist', not 'stars'"),
            ({"votes": 0}, "votes: expected a number greater than or equal to 1"),
            ({"timeout": 0.0}, "timeout: expected a number greater than 0"),
            ({"kind": "checklist", "question": "?"}, "leave out question"),
        ):
            with pytest.raises(ValueError, match=message):
                load("judge", **(good | changed))
    monkeypatch.setattr("rewards.serving.client.SECONDS_TO_CLOSE", 0.1)
    with pytest.raises(ValueError, match=r"no answer from .*/models.*vllm serve MODEL"):
        load("judge", **good)
