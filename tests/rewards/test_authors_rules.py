"""Rules of rewards whose model is another's or stands behind a server: the authors' arithmetic on
drawn answers, against the reward's."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import torch

from rewards import Samples, load
from rewards.catalogue import motion
from rewards.catalogue.ocr import Ocr
from scripts.authors.common import digest
from tests.rewards.test_authors import arrays, equal, given, script
from tests.support.servers import ChatServer

SERVER = {"model": "tiny", "tries": 1}


def listed(chances: dict[str, float]) -> dict:
    """An answer with the log-probabilities of its first token."""
    top = [{"token": word, "logprob": value} for word, value in chances.items()]
    said = {"content": [{**top[0], "top_logprobs": top}]}
    return {"message": {"content": top[0]["token"]}, "logprobs": said}


def greys(count: int, step: int) -> np.ndarray:
    """Images [n 4 4 3] that a server tells from each other."""
    level = np.arange(count, dtype=np.uint8)[:, None, None, None] * step
    return np.broadcast_to(level, (count, 4, 4, 3)).copy()


def shown(images: list[torch.Tensor], step: int) -> int:
    return round(float(images[0].mean()) * 255 / step)


def test_compbench_asks_and_reckons_as_the_authors(monkeypatch):
    wanted, tool = arrays("compbench")["scores"], script("compbench", monkeypatch)
    spacy = SimpleNamespace(util=SimpleNamespace(is_package=lambda _: True))
    spacy.load = lambda _: (
        lambda text: SimpleNamespace(
            noun_chunks=[SimpleNamespace(text=phrase) for phrase in text.split("; ")]
        )
    )
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    every = {phrase for prompt in tool.prompts() for phrase in prompt.split("; ")}

    def answer(text, images) -> dict:
        (asked,) = (p for p in every if f"image. {p}?\n" in text)
        yes, no = tool.logits(shown(images, 10), f"{asked}?")
        both = math.log(math.exp(yes) + math.exp(no))
        return listed({"Yes": yes - both, "No": no - both})

    with ChatServer(answer) as server:
        reward = load("compbench", url=server.url, **SERVER)
        equal(reward(given(greys(tool.SAMPLES, 10), tool.prompts())), wanted, 5.1e-5)


def test_deqa_asks_and_reckons_as_the_authors(monkeypatch):
    wanted, tool = arrays("deqa"), script("deqa", monkeypatch)

    def answer(text, images) -> dict:
        chances = torch.from_numpy(tool.logits(shown(images, 20))).log_softmax(0).tolist()
        return listed(dict(zip(tool.WORDS, chances, strict=True)))

    with ChatServer(answer) as server:
        reward = load("deqa", url=server.url, **SERVER)
        equal(reward(given(tool.images().copy(), ["a"] * tool.SAMPLES)), wanted["scores"], 5e-6)
        (user, begun), *_ = (body["messages"] for body in server.bodies)
    question = next(part["text"] for part in user["content"] if part["type"] == "text")
    asked = f"USER: {question}<|image|>\nASSISTANT: {begun['content']}"
    assert digest(asked) == str(wanted["question"])


def test_ocr_reckons_as_flow_grpo(monkeypatch):
    wanted, tool = arrays("ocr")["scores"], script("ocr", monkeypatch)
    reward = Ocr(lambda image: tool.cases()[round(float(image.mean()) * 255)][0], "published", 4)
    prompts = [prompt for _, prompt in tool.cases()]
    equal(reward(given(greys(tool.SAMPLES, 1), prompts)), wanted, 1e-12)


def test_dynamic_degree_is_vbenchs_rule(monkeypatch):
    wanted, tool = arrays("motion"), script("motion", monkeypatch)
    amounts, votes = [], []
    for flow in tool.flows():
        still = torch.zeros(1, len(flow) + 1, 3, *tool.SIDE)
        samples = Samples(still, ["a"], torch.zeros(1, dtype=torch.long))
        drawn = torch.from_numpy(flow).flatten(1, 2)
        monkeypatch.setattr(motion, "block_motion", lambda *_, drawn=drawn: drawn)
        monkeypatch.setattr(motion, "reduced_luma", lambda video: video[:, 0])
        amounts.append(load("motion", most=1e9)(samples))
        votes.append(load("motion", kind="vote")(samples))
    equal(torch.cat(amounts), wanted["amounts"], 1e-5)
    equal(torch.cat(votes), wanted["votes"], 1e-12)
