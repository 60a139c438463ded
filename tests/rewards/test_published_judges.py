"""Published judges behind a server: questions, forms of answers and formulas, recomputed here."""

import base64
import hashlib
import io
import json
import math
import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from PIL import Image
from transformers import PreTrainedTokenizerFast

from rewards import Samples, load
from rewards.catalogue.editscore import FOLLOWING_QUESTION, QUALITY_QUESTION, two_scores_in
from rewards.catalogue.soft_tifa import forms_of
from rewards.judging.answers import axis_in
from rewards.judging.published_texts import PublishedText
from rewards.load import load_judge
from rewards.perception.media import to_pil
from rewards.serving.requests import Unparsable
from tests.rewards.test_judge import images, level, said
from tests.support.servers import ChatServer

SERVER = {"model": "tiny", "tries": 1}


def listed(**mass: float) -> dict:
    """A choice of one token with these probabilities; `_` stands for a blank."""
    top = [{"token": t.replace("_", " "), "logprob": math.log(p)} for t, p in mass.items()]
    return {"message": {"content": "x"}, "logprobs": {"content": [{**top[0], "top_logprobs": top}]}}


def content(body: dict) -> list[str]:
    """The parts of the first message: texts, and the kind of each image."""
    return [
        part.get("text") or part["image_url"]["url"].partition(";")[0]
        for part in body["messages"][0]["content"]
    ]


def with_column(samples: Samples, column: str, values: list) -> Samples:
    meta = [{column: value} for value in values]
    return Samples(samples.media, samples.prompts, samples.group, meta)


def test_vqascore_is_the_probability_of_yes_exactly():
    def answer(words, shown):
        return listed(Yes=0.2, yes=0.3, _Yes=0.1) if level(shown[0]) > 0.5 else listed(No=0.9)

    with ChatServer(answer) as server:
        score = load("vqascore", url=server.url, **SERVER)(
            images(1.0, 0.0, prompts=["a {cat}"] * 2)
        )
        assert score.tolist() == pytest.approx([0.2, 0.0])
        assert content(server.bodies[0]) == [
            "data:image/png",
            'Does this figure show "a {cat}"? Please answer Yes or No.',
        ]
    with ChatServer(lambda words, shown: "Yes") as server:  # a server without log-probabilities
        assert load("vqascore", url=server.url, **SERVER)(images(1.0)).isnan().all()


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    """A tokenizer whose ` 2` starts with a blank, as Qwen's."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    known = ["<unk>", "Yes", "yes", "ĠYes", "Ġyes", "two", "Two", "Ġtwo", "Ġ", "2"]
    tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(known)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[A-Za-z]+| "), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokens.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="<unk>").save_pretrained(folder)
    return folder


def test_soft_tifa_sums_the_first_tokens_of_an_answers_forms(words):
    questions = [["How many cats are there?", "two"], ["Is the cat red?", "Yes"]]

    def answer(text, shown):
        if "How many" in text:
            return listed(two=0.3, _two=0.2, Two=0.05, **{"2": 0.1, "_": 0.04, "three": 0.2})
        return listed(Yes=0.5, yes=0.1, _yes=0.05, No=0.2)

    number, yes = 0.3 + 0.05 + 0.2 + 0.1 + 0.04, 0.65
    given = with_column(images(1.0, 0.5, 0.2), "vqa_list", [questions, questions[1:], None])
    with ChatServer(answer) as server:
        own = {"tokenizer": str(words), "url": server.url, **SERVER}
        mean = load("soft_tifa", kind="arithmetic", **own)(given)
        geometric = load("soft_tifa", **own)(given)
        reward = load("soft_tifa", **own)
        alone = reward(given.take([0]))
        with pytest.raises(ValueError, match="row 2 of the prompts has no questions in its column"):
            reward.check_prompts(["a"] * 2, [given.meta[0], {}])
        with pytest.raises(ValueError, match=r"vqa_list must be pairs .*, not \['why'\]"):
            reward(with_column(images(1.0), "vqa_list", [["why"]]))
        asked = {content(body)[-1] for body in server.bodies}
    assert mean[:2].tolist() == pytest.approx([(number + yes) / 2, yes])
    assert geometric[:2].tolist() == pytest.approx([math.sqrt(number * yes), yes])
    assert mean[2].isnan() and alone[0] == geometric[0]
    assert asked == {f"{question} Answer in one word." for question, _ in questions}
    assert forms_of("How many cats?", "eleven") == ("eleven", "Eleven", " eleven", " Eleven")


def test_soft_tifa_is_zero_where_one_answer_is(words):
    given = with_column(images(1.0), "vqa_list", [[["Is it?", "Yes"], ["How many?", "two"]]])
    with ChatServer(lambda text, shown: listed(Yes=0.5, No=0.5)) as server:
        score = load("soft_tifa", tokenizer=str(words), url=server.url, **SERVER)(given)
    assert score.tolist() == [0.0]


EDITS = [
    ('{"reasoning": "The hat is red now, the face is unchanged.", "score": [22, 20]}', (22, 20)),
    ('{ "reasoning" : "Shadow "floats" left of the cup", "score" : [14.5, 9] }', (14.5, 9)),
    ('```json\n{"reasoning": "\\"score\\": [1, 2]", "score": [0, 25]}\n```', (0, 25)),
    ('{"reasoning": "x", "score": []}', None),
    ('{"reasoning": "x", "score": [12]}', None),
    ('{"reasoning": "x", "score": [26, 3]}', None),
    ('{"reasoning": "x", "score": [-1, 3]}', None),
    ('{"reasoning": "x", "score": [22, 20', None),
    ("I'm sorry, but I can't assist with that request.", None),
]


@pytest.mark.parametrize(("text", "pair"), EDITS)
def test_two_scores_are_read_from_json_whole_or_damaged(text, pair):
    if pair is None:
        with pytest.raises(Unparsable):
            two_scores_in(said(text))
    else:
        assert two_scores_in(said(text)) == pair


def test_damaged_json_is_read_in_range_or_not_at_all():
    rng = random.Random(0)
    for seed in range(300):
        text = list(EDITS[seed % 3][0])
        for _ in range(3):
            place = rng.randrange(len(text))
            text[place : place + rng.randrange(3)] = rng.choice(['"', "[", "9", "-", "", ","])
        try:
            pair = two_scores_in(said("".join(text)))
        except Unparsable:
            continue
        assert all(0 <= score <= 25 for score in pair)


@pytest.fixture
def questions(monkeypatch, tmp_path) -> Path:
    """A stand-in for the authors' file: pieces that are joined, with the 10 replaced in one."""
    context = "You judge. All answers are in JSON, with reasoning and score."
    rule = "RULES: two images. Editing instruction: <instruction>, up to level 10."
    scale = "From scale 0 to 10: score = [success, overediting], be strict please."
    alone = "From scale 0 to 10: score = [naturalness, artifacts], be strict please."
    file = tmp_path / "vie_prompts.py"
    file.write_text(f"context = {context!r}\nother = 'x'\nrule = {rule!r}\ns = {scale!r}\n"
                    f"raise SystemExit  # never run\npq = {alone!r}\n")  # fmt: skip
    texts = {
        FOLLOWING_QUESTION: "\n".join([context, rule, scale.replace("10", "25")]),
        QUALITY_QUESTION: "\n".join([context, alone.replace("10", "25")]),
    }
    for published, text in texts.items():
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        monkeypatch.setitem(published.__dict__, "length", len(text))
        monkeypatch.setitem(published.__dict__, "digest", digest)
    return file


def test_editscore_is_the_root_of_two_minima(questions, tmp_path):
    source, edits = tmp_path / "source.png", (0.8, 0.4)
    to_pil(torch.full((3, 4, 4), 0.2)).save(source)
    given = images(*edits, 0.5, prompts=["make 10 cats red"] * 3)
    given = with_column(given, "source", [str(source)] * 2 + [None])
    votes = {0.8: ([20, 22], [24, 15]), 0.4: ([10, 4], [5, 25])}

    def answer(text, shown):
        following, quality = votes[round(level(shown[-1]), 1)]
        assert ("overediting" in text) == (len(shown) == 2)
        if len(shown) == 2:
            assert "<instruction>" not in text and "make 10 cats red" in text and "level 10" in text
            assert level(shown[0]) == pytest.approx(0.2)
        assert "0 to 25" in text
        return json.dumps({"reasoning": "r", "score": following if len(shown) == 2 else quality})

    def wanted(kind: str, level: float) -> float:
        (success, kept), quality = votes[level]
        return {
            "overall": math.sqrt(min(success, kept) / 2.5 * min(quality) / 2.5),
            "average_first": math.sqrt(success / 2.5 * min(quality) / 2.5),
            "prompt_following": success / 2.5,
            "consistency": kept / 2.5,
            "quality": min(quality) / 2.5,
        }[kind]

    with ChatServer(answer) as server:
        own = {"following": str(questions), "quality": str(questions), "url": server.url, **SERVER}
        for kind in ("overall", "average_first", "prompt_following", "consistency", "quality"):
            score = load("editscore", kind=kind, votes=2, **own)(given)
            assert score[:2].tolist() == pytest.approx([wanted(kind, edit) for edit in edits])
            assert score[2].isnan()
        assert {body["seed"] for body in server.bodies} == {42, 43}
        first = max(server.bodies, key=lambda body: len(content(body)))
        assert (first["temperature"], first["top_p"], first["top_k"]) == (0.7, 0.9, 20)
        assert first["max_tokens"] == 512
        assert content(first)[0] == "<img1>: " and len(content(first)) == 5
        load("editscore", base="qwen3", **own)(given.take([0]))
        assert not any("<img" in part for body in server.bodies[-2:] for part in content(body))


def test_editscore_in_training_asks_about_both_images_and_ends_at_1(questions, tmp_path):
    source = tmp_path / "source.png"
    to_pil(torch.full((3, 4, 4), 0.2)).save(source)
    given = with_column(images(0.8, prompts=["make it red"]), "source", [str(source)])

    def answer(text, shown):
        assert [round(level(image), 1) for image in shown] == [0.2, 0.8]
        return json.dumps({"score": [20, 22] if "overediting" in text else [24, 15]})

    with ChatServer(answer) as server:
        own = {"following": str(questions), "quality": str(questions), "url": server.url, **SERVER}
        score = load("editscore", protocol="training", votes=2, **own)(given)
        assert score.tolist() == pytest.approx([math.sqrt(20 / 2.5 * 15 / 2.5) / 10])
        assert len(server.bodies) == 4


def test_a_wrong_text_is_refused_with_its_digest(questions, tmp_path):
    (tmp_path / "other.txt").write_text("Rate it.")
    with pytest.raises(ValueError, match=r"other\.txt does not hold EditScore's question about an"):
        load("editscore", following=str(tmp_path / "other.txt"), url="http://x/v1", model="m")
    with pytest.raises(ValueError, match="following: no such file: nowhere"):
        load("editscore", following="nowhere", url="http://x/v1", model="m")
    with pytest.raises(ValueError, match="is not included in flowrl: name a file with `following`"):
        load("editscore", url="http://x/v1", model="m")
    (tmp_path / "damaged.py").write_text("a = (")
    with pytest.raises(ValueError, match=r"damaged\.py cannot be read"):
        load("editscore", following=str(tmp_path / "damaged.py"), url="http://x/v1", model="m")


def test_a_text_is_fetched_once_and_checked(monkeypatch, tmp_path):
    text = "Rate {prompt}\n"
    digest = hashlib.sha256(b"Rate {text_prompt}\nEND").hexdigest()[:16]
    published = PublishedText("a text", 22, digest, "x", "https://a.b/c.py", tail="END")
    monkeypatch.setattr("huggingface_hub.cached_assets_path", lambda *_, **__: tmp_path)
    fetched = []

    def opened(url, timeout):
        fetched.append(url)
        return io.BytesIO(f"A = {text!r}".encode())

    monkeypatch.setattr("urllib.request.urlopen", opened)
    for _ in range(2):
        assert published.read("r", "s", None) == "Rate {text_prompt}\nEND"
    assert fetched == ["https://a.b/c.py"]
    (tmp_path / "c.py").unlink()
    text = "Rate { prompt }\n"
    with pytest.raises(ValueError, match=r"https://a\.b/c\.py does not hold a text"):
        published.read("r", "s", None)
    assert not (tmp_path / "c.py").exists()


QUESTION = "Compare.\nText Caption: [{prompt}]\n"


def unified(tmp_path: Path, server: ChatServer) -> dict:
    (tmp_path / "question.txt").write_text(QUESTION)
    return {"question": str(tmp_path / "question.txt"), "url": server.url, **SERVER}


def test_unified_reward_asks_as_its_authors_do(tmp_path):
    axes = "Alignment Score (1-5): 4\nCoherence Score (1-5): 2\nStyle Score (1-5): 3"
    with ChatServer(lambda text, shown: axes) as server:
        own = unified(tmp_path, server)
        assert load("unified_reward", **own)(images(0.5)).tolist() == [0.5]
        assert load("unified_reward", axis="alignment", **own)(images(0.5)).tolist() == [0.75]
        assert load("unified_reward", axis="physics", **own)(images(0.5)).isnan().all()
        assert content(server.bodies[0]) == ["data:image/jpeg", QUESTION.format(prompt="a day")]
        assert server.bodies[0]["temperature"] == 0.0 and server.bodies[0]["max_tokens"] == 4096
        image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        load("unified_reward", **own)(Samples(image, ["a"], torch.zeros(1).long()))
        url = server.bodies[-1]["messages"][0]["content"][0]["image_url"]["url"]
        file = io.BytesIO()
        to_pil(image[0]).save(file, "JPEG", quality=95)
        assert base64.b64decode(url.partition(",")[2]) == file.getvalue()


def test_unified_reward_shows_frames_and_compares_pairs(tmp_path):
    def answer(text, shown):
        half = len(shown) // 2
        first, second = (sum(map(level, part)) for part in (shown[:half], shown[half:]))
        return f"<think>x</think><answer>Video {1 if first > second else 2} is better</answer>"

    video = torch.arange(10).view(1, 10, 1, 1, 1).expand(2, 10, 3, 4, 4) / 20
    video = video + torch.tensor([0.0, 0.2]).view(2, 1, 1, 1, 1)
    given = Samples(video, ["a"] * 2, torch.zeros(2).long())
    pair = torch.tensor([0, 1]), torch.tensor([1, 0])
    with ChatServer(answer) as server:
        judge = load_judge("unified_reward", frames=4, **unified(tmp_path, server))
        assert judge(given, *pair).tolist() == [0.0, 1.0]
        assert len(server.bodies) == 4
        assert content(server.bodies[0]) == ["data:image/jpeg"] * 8 + [QUESTION.format(prompt="a")]


def test_unified_reward_shows_the_source_of_an_edit_first(tmp_path):
    seen = []

    def answer(text, shown):
        seen.append([round(level(image), 1) for image in shown])
        return "Image 1: 1.2731\nImage 2: -0.4412"

    Image.new("RGB", (4, 4), (51, 51, 51)).save(tmp_path / "source.png")
    given = with_column(images(0.8, 0.4), "source", [str(tmp_path / "source.png"), None])
    with ChatServer(answer) as server:
        own = unified(tmp_path, server)
        judge = load_judge("unified_reward", column="source", both_orders=False, **own)
        p = judge(given, torch.tensor([0, 1]), torch.tensor([1, 0]))
        with pytest.raises(ValueError, match="row 1 of the prompts lacks the column 'source'"):
            load("unified_reward", column="source", **own).check_prompts(["a"], [{}])
        (tmp_path / "bare.txt").write_text("no field")
        with pytest.raises(ValueError, match=r"bare\.txt does not contain \{prompt\}"):
            load("unified_reward", **own | {"question": str(tmp_path / "bare.txt")})
    assert seen == [[0.2, 0.8, 0.4]] and p[0] == 1.0 and p[1].isnan()


def test_an_axis_is_its_last_number():
    text = "Style Score (1-5): 1\nStyle Score (1-5): 5"
    assert axis_in(said(text), "style") == 1.0
    with pytest.raises(Unparsable, match="no style score from 1 to 5"):
        axis_in(said("Style Score (1-5): 7"), "style")


@pytest.mark.parametrize(("kind", "low", "high"), [("deqa", 1.0, 5.0), ("q_align", 0.0, 1.0)])
def test_five_words_are_weighed_by_their_softmax(kind, low, high):
    def answer(text, shown):
        return listed(_excellent=0.3, good=0.3, fair=0.1, bad=0.1, red=0.2)

    with ChatServer(answer) as server:
        reward = load("deqa", kind=kind, jpeg=75, url=server.url, **SERVER)
        score = reward(images(0.5))
        body = server.bodies[0]
    share = (0.3 * 1 + 0.3 * 0.75 + 0.1 * 0.5) / 0.8
    assert score.tolist() == pytest.approx([low + (high - low) * share])
    assert content(body) == ["How would you rate the quality of this image?\n", "data:image/jpeg"]
    assert body["messages"][1]["content"] == "The quality of the image is"
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False


ONE_BY_ONE = {  # an answer that depends on what is shown
    "vqascore": lambda text, shown: listed(Yes=0.1 + level(shown[-1]) / 2, No=0.3),
    "soft_tifa": lambda text, shown: listed(Yes=0.1 + level(shown[-1]) / 2, No=0.3),
    "editscore": lambda text, shown: json.dumps({"score": [round(9 * level(shown[-1]), 1)] * 2}),
    "unified_reward": lambda text, shown: f"Final Score: {1 + 3 * level(shown[-1]):.3f}",
    "deqa": lambda text, shown: listed(good=0.1 + level(shown[-1]) / 3, bad=0.5),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_samples_score_alone_as_in_a_batch(name, words, questions, tmp_path):
    to_pil(torch.full((3, 4, 4), 0.2)).save(tmp_path / "source.png")
    given = images(0.2, 0.5, 0.9, prompts=["a", "b", "c"])
    row = {"source": str(tmp_path / "source.png"), "vqa_list": [["Is it?", "Yes"]]}
    given = Samples(given.media, given.prompts, given.group, [row] * 3)
    (tmp_path / "question.txt").write_text(QUESTION)
    own = {
        "soft_tifa": {"tokenizer": str(words)},
        "editscore": {"following": str(questions), "quality": str(questions)},
        "unified_reward": {"question": str(tmp_path / "question.txt")},
    }.get(name, {})
    with ChatServer(ONE_BY_ONE[name]) as server:
        reward = load(name, url=server.url, **own, **SERVER)
        together = reward(given)
        alone = torch.cat([reward(given.take([i])) for i in range(3)])
    assert together.tolist() == alone.tolist() and len(together.unique()) == 3
