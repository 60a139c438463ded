"""Readers on every published form of a judge's answer, whole and damaged."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.judging.answers import (
    expected_in,
    questions_in,
    score_in,
    verdict_in,
    which_in,
    yes_in,
)
from rewards.judging.chat import Completion, completion
from rewards.serving.requests import Malformed, Unparsable
from tests.support import fuzz

VIDEO = (
    "visual quality: 3\ntemporal consistency: 4\ndynamic degree: 2\n"
    "text-to-video alignment: 3\nfactual consistency: 3\nFinal Score: {}"
)
THINK = (
    "<think>\n1. Semantic consistency: {0} 2 (7/10) - x; {0} 1 (9/10) - y\nTotal score:\n"
    "{0} 1: 9+8=17\n{0} 2: 7+8=15\n</think>\n<answer>{0} 1 is better</answer>"
)
BLOCKS = (
    "<think>\n1. Aesthetics: \n    Image 1 (6/10) - x; \n    Image 2 (8/10) - y\nTotal score:\n"
    "Image 1: 6=6\nImage 2: 8=8\n</think>\n<answer>{}</answer>"
)
PAIR = (
    "Alignment Score:\n Image 1: {}\n Image 2: {}\n\nCoherence Score:\n Image 1: 0.5\n"
    " Image 2: 0.5\n\nStyle Score:\n Image 1: 0.61\n Image 2: 0.39"
)
FLEX = json.dumps(
    {
        "prompt": "p {1}",
        "categories": [
            {
                "name": "Semantic",
                "dims": [
                    {"name": "Count", "reason_1": "a", "reason_2": "b", "score_1": 7, "score_2": 3}
                ],
                "cat_reason": "c",
                "cat_winner": "Image 2",
            }
        ],
        "reason": "r",
        "winner": "Image 1",
    }
)
EDIT = '{"reasoning": "The hat is red now.", "score": [4, 2]}'

SCORES = [  # answer, score in 0..1 or None for unscored
    ("dog (animal): 1\nred (color): 0\nFinal Score: 3.4", 0.6),
    ("Final Score: 4", 0.75),
    ("Alignment Score (1-5): 4", 0.75),
    (
        "Alignment Score (1-5): 3.112400054931641\nCoherence Score (1-5): 2.5\n"
        "Style Score (1-5): 4",
        ((3.112400054931641 + 2.5 + 4) / 3 - 1) / 4,
    ),
    (
        "Alignment Score (1-5): 3\nCoherence Score (1-5): 2\nStyle Score (1-5): 4\n---\n"
        'Word-wise Scores: [["red", 1.2], ["[No_mistakes]", 0.4]]',
        0.5,
    ),
    ("Alignment Score (1-5): 2\n\nPhysics Score (1-5): 3\n\nStyle Score (1-5): 4", 0.5),
    ("Alignment Score (1-5): 2\nStyle Score (1-5): 3\nFinal Score (1-5): 5", 1.0),
    (VIDEO.format(7), 6 / 9),
    (VIDEO.format(10), 1.0),
    ("**Score (1 to 5)**: **4**", 0.75),
    ("Score: [4]", 0.75),
    ('{"score": 4}', 0.75),
    ("Score: 4 out of 5.", 0.75),
    ("Score (1-5):", None),
    ("Alignment Score (1-5): 4\nStyle Score (1-5): 9", None),
    ("Score: 4/10", None),
    ("Score: -3", None),
    ("Score: 3-4", None),
    ("Score: 10", None),
    ("Score: 4e-1", None),
    ("Score: 4 out of 10", None),
    ("There are 5 reasons, so it deserves much", None),
    ("<think>Score: 1</think>\nScore: 5", 1.0),
    ("**Final Score: 3.5** (good)", 0.625),
    (EDIT, None),
    ("Alignment Score:\n Image 1: 0.43\n Image 2: 0.57", None),
]
VERDICTS = [
    ("Image 1 is better.", 1.0),
    ("The first has the cat. Image 2 is better.", 0.0),
    ("Both show it, therefore both images are equally good.", 0.5),
    ("both images are equally good", 0.5),
    ("<answer>Both images are equally good</answer>", 0.5),
    ("<answer>The two videos are equally good.</answer>", 0.5),
    (THINK.format("Image"), 1.0),
    (THINK.format("Video"), 1.0),
    (BLOCKS.format("Image 2 is better"), 0.0),
    (BLOCKS.format("both images are equally good"), 0.5),
    (PAIR.format(0.43, 0.57), (0.43 + 0.5 + 0.61) / 3),
    ("Edited Image 1 is better", 1.0),
    ("Image 1: 1.2731\nImage 2: -0.4412", 1.0),
    ("Image 1: -0.10\nImage 2: 0.95", 0.0),
    (FLEX, 1.0),
    ("```json\n" + FLEX.replace('"winner": "Image 1"', '"winner": "Image 2"') + "\n```", 0.0),
    ("I cannot say that Image 1 is better.", None),
    ("<answer>It is not true that both images are equally good</answer>", None),
    ("Image 1 is better in colour, Image 2 is better in form.", None),
    ("<think>Image 1 is better", None),
    ("<answer>Image 1 is better", None),
    ("Image 1: 9+8=17\nImage 2: 7+8=15", None),
    ("Image 1: 1.2\nImage 2:", None),
]
FORMS = [text for text, _ in (*SCORES, *VERDICTS)]
NOISE = (
    *(
        "9" * 400,
        "[" * 3000,
        "{" * 3000,
        "Score: " * 300,
        "\n" * 500,
        "1e999",
        "NaN",
        "-0",
        "²",
        "٣",
    ),
    *("<think>" * 200, "Image 1 " * 300, " " * 3000, "0." + "0" * 400 + "1", '"' * 999, "\ud800"),
)
READERS = (score_in, verdict_in, yes_in, expected_in, which_in, questions_in)


@pytest.mark.parametrize("reader", READERS)
def test_an_answer_without_content_is_unscored_whatever_it_thought(reader):
    message = {"content": None, "reasoning_content": "Score: 5. Image 1 is better. Yes"}
    with pytest.raises(Unparsable):
        reader(completion({"choices": [{"message": message}]}))


def answer(text: str) -> Completion:
    return completion({"choices": [{"message": {"content": text}}]})


def check(reader, text: str, value: float | None) -> None:
    if value is None:
        with pytest.raises(Unparsable):
            reader(answer(text))
    else:
        assert reader(answer(text)) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(("text", "value"), SCORES)
def test_scores_of_all_published_forms(text, value):
    check(score_in, text, value)


@pytest.mark.parametrize(("text", "value"), VERDICTS)
def test_verdicts_of_all_published_forms(text, value):
    check(verdict_in, text, value)


@st.composite
def damaged_answers(draw) -> str:
    text = draw(st.sampled_from(FORMS))
    for _ in range(draw(st.integers(1, 4))):
        start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 60))
        noise = draw(st.text(max_size=12) | st.sampled_from(NOISE))
        text = text[:start] + noise + text[start + length :]
    return text


@pytest.mark.slow
@fuzz.COUNTS
def test_a_damaged_answer_is_read_or_unparsable(count):
    def check(text: str) -> None:
        for reader in READERS:
            try:
                value = reader(answer(text))
            except Unparsable as error:
                fuzz.one_sentence(str(error))
            else:
                assert reader is questions_in or 0 <= value <= 1

    fuzz.examples(count, damaged_answers(), check)


def body(text: str) -> dict[str, Any]:
    """An answer of a server, with log-probabilities and what it counts."""
    top = [{"token": text[:3], "logprob": -0.1}, {"token": "yes", "logprob": -2.5}]
    content = [{"token": text[:3], "logprob": -0.1, "top_logprobs": top}]
    message = {"role": "assistant", "content": text}
    choice = {"message": message, "logprobs": {"content": content}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}


@fuzz.COUNTS
def test_a_damaged_body_is_read_or_unparsable(count):
    values = (None, 0, -1, 1e400, float("nan"), "", "x", [], {}, [[]], True, 10**400)

    def check(rng: random.Random) -> None:
        tree = body(rng.choice(FORMS))
        places = [(node, key) for node, key in fuzz.nodes(tree)]
        for node, key in rng.sample(places, rng.randint(1, 3)):
            node[key] = rng.choice(values)
        try:
            got = completion(tree)
        except Malformed:  # the server is asked again
            return
        for reader in READERS:
            try:
                value = reader(got)
            except Unparsable as error:
                fuzz.one_sentence(str(error))
            else:
                assert reader is questions_in or 0 <= value <= 1

    fuzz.cases(count, check)


@pytest.mark.slow
@given(st.sampled_from(["Alignment Score (1-5): ", "Score (1-5): ", "Final Score: "]), st.data())
def test_a_cut_range_is_never_taken_for_a_score(head, data):
    cut = head[: data.draw(st.integers(0, len(head)))]
    with pytest.raises(Unparsable):
        score_in(answer(f"Good. {cut}"))


def test_broken_log_probabilities_are_no_overflow():
    for value in (1e9, float("inf"), float("nan"), -float("inf")):
        top = [{"token": "yes", "logprob": value}]
        content = [{"token": "yes", "logprob": value, "top_logprobs": top}]
        choice = {"message": {"content": "yes"}, "logprobs": {"content": content}}
        assert 0 <= yes_in(completion({"choices": [choice]})) <= 1
