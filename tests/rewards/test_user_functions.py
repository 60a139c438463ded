"""Reward functions as Flow-GRPO's and TRL's users have them."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.prompts import Chat
from rewards import Samples, check_reward, load, score_all
from rewards.checks.self_test import Prompts, self_test
from rewards.perception.media import WrongMedia
from rewards.user_function import (
    FlowGrpoFunction,
    TrlFunction,
    object_reward,
    said_words,
    user_reward,
)
from tests.support.advice import advice

PEERS = """
import io
import numpy as np
import torch
from PIL import Image


def jpeg_incompressibility():
    def _fn(images, prompts, metadata):
        if isinstance(images, torch.Tensor):
            images = (images * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
            images = images.transpose(0, 2, 3, 1)  # NCHW -> NHWC
        buffers = [io.BytesIO() for _ in images]
        for image, buffer in zip(images, buffers):
            Image.fromarray(image).save(buffer, format="JPEG", quality=95)
        return np.array([buffer.tell() / 1000 for buffer in buffers]), {}
    return _fn


jpeg = jpeg_incompressibility()


def several(images, prompts, metadata, scale: float = 1.0):
    assert isinstance(prompts, list) and all(isinstance(row, dict) for row in metadata)
    light = images.flatten(1).mean(1) * scale + torch.tensor([m.get("plus", 0) for m in metadata])
    return {"light": light, "avg": light}, {}


def strings(images, prompts, metadata):
    return prompts, {}


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def accuracy(prompts, completions, answer, **kwargs):
    assert set(kwargs) == {"level"} and len(prompts) == len(completions)
    return [None if a is None else float(a in c) for c, a in zip(completions, answer)]


async def slow(completions, factor: int = 2):
    return [float(len(completion) * factor) for completion in completions]


def ids(completions, completion_ids):
    return [float(len(i)) for i in completion_ids]


def turns(prompts: list[list[dict[str, str]]], completions: list[list[dict[str, str]]], **columns):
    pairs = zip(prompts, completions)
    return [float(len(p)) + (c[0]["content"] == p[-1]["content"]) for p, c in pairs]


def only_ids(completion_ids, **kwargs):
    return [0.0 for _ in completion_ids]
"""


@pytest.fixture
def peers(tmp_path) -> str:
    (tmp_path / "peers.py").write_text(PEERS)
    return str(tmp_path / "peers.py")


def pictures(n: int = 4, **more) -> Samples:
    media = torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return Samples(media, ["a"] * n, torch.zeros(n, dtype=torch.long), **more)


def test_flow_grpos_signature_is_taken(peers):
    reward = load(f"{peers}:jpeg")
    assert isinstance(reward, FlowGrpoFunction)
    samples = pictures()
    scores = score_all({"jpeg": reward}, samples)
    ours = load("jpeg")(samples)
    torch.testing.assert_close(scores.values[:, 0], ours, rtol=0, atol=1e-12)
    listed = Samples([*samples.media, torch.zeros(3, 4, 6)], ["a"] * 5, torch.arange(5))
    assert torch.equal(reward(listed)[:4], ours)
    assert "one by one the same" in self_test("jpeg", reward)
    with pytest.raises(WrongMedia, match="scores images or videos; it was given text"):
        reward(Samples(["x"], ["p"], torch.zeros(1, dtype=torch.long)))


def test_flow_grpos_sum_of_scores_and_settings_are_read(peers):
    samples = pictures(meta=[{"plus": i} for i in range(4)])
    reward = load(f"{peers}:several", scale=2.0)
    light = samples.media.flatten(1).mean(1).double()
    torch.testing.assert_close(reward(samples), 2 * light + torch.arange(4))
    torch.testing.assert_close(load(f"{peers}:several")(pictures()), light)
    videos = Samples(torch.rand(2, 5, 3, 4, 4), ["a"] * 2, torch.arange(2))
    assert load(f"{peers}:several")(videos).shape == (2,)
    with pytest.raises(ValueError, match="reward 'strings' returned a list with a str"):
        load(f"{peers}:strings")(samples)
    with pytest.raises(ValueError, match="no setting 'scal'; did you mean 'scale'"):
        check_reward(f"{peers}:several", {"scal": 1})


def texts(*completions: str, meta=()) -> Samples:
    n = len(completions)
    return Samples(list(completions), ["p"] * n, torch.arange(n), meta)


def test_trls_signature_is_taken(peers):
    reward = load(f"{peers}:reward_len")
    assert isinstance(reward, TrlFunction)
    assert score_all({"len": reward}, texts("x" * 20, "x")).values.flatten().tolist() == [0, -19]
    meta = [{"answer": "7", "level": 1}, {"answer": None, "level": 2}]
    assert load(f"{peers}:accuracy")(texts("7", "7", meta=meta)) == [1.0, None]
    assert load(f"{peers}:slow", factor=3)(texts("abc")) == [9.0]
    assert "one by one" in self_test("len", reward, Prompts(kind="text"))
    with pytest.raises(WrongMedia, match="scores text; it was given images"):
        reward(pictures())


def test_trls_columns_are_checked_before_the_run(peers):
    check_reward(f"{peers}:accuracy", {})
    reward = load(f"{peers}:accuracy")
    rows = {"level": 1, "answer": "7"}
    for followed in (
        lambda: self_test("accuracy", reward, Prompts(["p"], [rows], "text")),
        lambda: load(f"{peers}:accuracy", answer="7").check_prompts(["p"], [{"level": 1}]),
    ):
        advice(
            "takes {}, but none of {} prompts has it: add a column {} to the prompt file, or pass "
            "it as a setting of the reward",
            lambda: self_test("accuracy", reward, Prompts(["p"], [{"level": 1}], "text")),
            followed,
        )


def test_a_factory_is_refused_with_the_way_out(peers):
    advice(
        "takes no arguments, but a reward takes (samples), (images, prompts, metadata) or "
        "(prompts, completions); if it is a factory, call it in the file and name its result",
        lambda: check_reward(f"{peers}:jpeg_incompressibility", {}),
        lambda: check_reward(f"{peers}:jpeg", {}),
    )


SLIPS = """
import torch
from rewards import Samples

def one(image, prompt):
    return image.mean()

def alone(image):
    return image.mean()

def several(images):
    return images.mean()

def images_of(samples):
    light = samples.images.flatten(1)
    return light.mean(1)

def forgotten(samples):
    scores = samples.media.flatten(1).mean(1)

def bare(samples):
    def inner():
        return 1.0
    if inner():
        return
    return None

class Judge:
    def __call__(self, samples):
        return [len(text) for text in samples.texts]

def annotated(image: Samples):
    return image.media.flatten(1).mean(1)

def sound(samples):
    rows, media = samples.meta, samples.media
    return [float(samples.take([i]).media.mean()) for i in range(len(samples.prompts))]

def other(samples):
    samples = samples.media
    return samples.mean((1, 2, 3))

def hidden(samples):
    whole = samples
    return whole.pictures.mean((1, 2, 3))

def two(images, prompts):
    return images.flatten(1).mean(1)

def several_rest(images, prompts, *rest):
    return images.flatten(1).mean(1)

short = lambda samples: samples.media.flatten(1).mean(1)
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("one", r"takes \(image, prompt\), but a reward is called with all samples at once"),
        ("alone", r"takes \(image\), but .*write alone\(samples\)"),
        ("several", r"takes \(images\), but "),
        ("images_of", r"line 15: samples have no 'images'; they have media"),
        ("forgotten", "has no `return`: it must return one score per sample"),
        ("bare", "has no `return`"),
        ("Judge", r"line 30: samples have no 'texts'"),
        ("two", r"gets a third argument.*write two\(images, prompts, metadata\)"),
    ],
)
def test_common_slips_are_named_before_a_run(function, message, tmp_path):
    (tmp_path / "mine.py").write_text(SLIPS)
    with pytest.raises(ValueError, match=message):
        check_reward(f"{tmp_path / 'mine.py'}:{function}", {})


def written(tmp_path: Path, function: str) -> str:
    """The name of a function of this source, alone in a file."""
    file = tmp_path / f"file_{len([*tmp_path.iterdir()])}.py"
    file.write_text(f"{function}\n")
    return f"{file}:mine"


LIGHT = "return images.flatten(1).mean(1)"


def test_common_slips_are_mended_as_they_say(tmp_path: Path) -> None:
    def checked(function: str) -> None:
        check_reward(written(tmp_path, function), {})

    advice(
        "takes (images, prompts), but gets a third argument, the columns of the prompt file: write "
        "{}(images, prompts, metadata)",
        lambda: checked(f"def mine(images, prompts): {LIGHT}"),
        lambda: checked(f"def mine(images, prompts, metadata): {LIGHT}"),
    )
    for form in ("samples", "images, prompts, metadata", "completions"):
        advice(
            "yields asynchronously, and a reward's call must return its scores: return a list of "
            "them",
            lambda form=form: checked(f"async def mine({form}):\n    yield 0.5"),
            lambda form=form: checked(f"async def mine({form}):\n    return [0.5]"),
        )
    for followed in (
        "def mine(samples):\n    return [float(image.mean()) for image in samples.media]",
        f"def mine(images, prompts, metadata): {LIGHT}",
    ):
        advice(
            "but a reward is called with all samples at once: write {}(samples) and return one "
            "score for each of samples.media and samples.prompts, or take (images, prompts, "
            "metadata)",
            lambda: checked("def mine(image, prompt):\n    return image.mean()"),
            lambda followed=followed: checked(followed),
        )
    lengths = "return [float(len(text)) for text in completions]"
    test = "if completion_ids is not None:\n        completion_ids.pop()"
    for followed in (
        f"def mine(completions):\n    {lengths}",
        f"def mine(completions, completion_ids=None):\n    {test}\n    {lengths}",
    ):
        advice(
            "takes {}, which only TRL's trainer provides: take it out, or give it the default None "
            "and test for that",
            lambda: checked(f"def mine(completions, completion_ids):\n    {lengths}"),
            lambda followed=followed: checked(followed),
        )
        advice(
            "is None here, since only TRL's trainer provides it: take it out, or test for None "
            "before its use",
            lambda: checked(
                "def mine(completions, completion_ids=None):\n    completion_ids.pop()\n    "
                + lengths
            ),
            lambda followed=followed: checked(followed),
        )


@pytest.mark.parametrize("function", ["annotated", "sound", "other", "short", "several_rest"])
def test_sound_functions_pass(function, tmp_path):
    (tmp_path / "mine.py").write_text(SLIPS)
    name = f"{tmp_path / 'mine.py'}:{function}"
    check_reward(name, {})
    assert score_all({"a": load(name)}, pictures()).values.std() > 0


def test_what_samples_do_not_have_is_a_sentence(tmp_path):
    (tmp_path / "mine.py").write_text(SLIPS)
    with pytest.raises(AttributeError, match="samples have no 'pictures'; they have media"):
        load(f"{tmp_path / 'mine.py'}:hidden")(pictures())
    assert getattr(pictures(), "pictures", None) is None


def test_chat_messages_reach_functions_that_are_annotated_so(peers):
    chat = Chat("b", [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}])
    samples = Samples(["b", "c", "c"], [chat, chat, "c"], torch.arange(3))
    assert load(f"{peers}:turns")(samples) == [3.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="takes 'completion_ids', which only TRL's trainer"):
        check_reward(f"{peers}:only_ids", {})


def test_trl_s_own_rewards_run_as_they_are(tmp_path):
    pytest.importorskip("trl", reason="the extra trl is not installed")
    (tmp_path / "trl_rewards.py").write_text("from trl.rewards import think_format_reward\n")
    reward = load(f"{tmp_path / 'trl_rewards.py'}:think_format_reward")
    assert reward(texts("<think>a</think>b", "a</think>b", "<think>a")) == [1.0, 0.0, 0.0]


OBJECTS = """
class Red:
    def __init__(self, channel=0):
        self.channel = channel

    def __call__(self, images, prompts, metadata):
        assert images.shape[1] == 3
        return [float(image[self.channel].mean()) for image in images]


class Long:
    def __call__(self, prompts, completions, answer=None, **columns):
        return [float(len(text)) for text in completions]


class Plain:
    def __call__(self, samples):
        return [float(i) for i, _ in enumerate(samples.media)]
"""


@pytest.mark.parametrize(
    ("name", "shown", "kind"),
    [("Red", pictures, FlowGrpoFunction), ("Long", lambda: texts("a", "bbb"), TrlFunction)],
)
def test_an_object_is_called_by_the_signature_of_its_call(name, shown, kind, tmp_path):
    """From a file by its class, and from Python as an instance: one object twice is one reward."""
    (tmp_path / "objects_of_mine.py").write_text(OBJECTS)
    loaded = load(f"{tmp_path / 'objects_of_mine.py'}:{name}")
    assert isinstance(loaded, kind)
    assert len(set(score_all({"a": loaded}, shown()).values.flatten().tolist())) > 1
    instance = loaded.function.reward
    assert object_reward(instance, "a") == object_reward(instance, "a")
    assert isinstance(object_reward(instance, "a"), kind)


def test_an_object_that_takes_samples_stays_itself(tmp_path):
    (tmp_path / "objects_of_mine.py").write_text(OBJECTS)
    loaded = load(f"{tmp_path / 'objects_of_mine.py'}:Plain")
    assert object_reward(loaded, "a") is loaded


WORDS = {"per": "sample", "one_call": True, "waits": True, "concurrent": True}
SPEAKING = """
class Plain:
    def __call__(self, samples):
        return [0.0] * len(samples.media)


class Red(Plain):
    def __call__(self, images, prompts, metadata):
        return [float(image[0].mean()) for image in images]


class Long(Plain):
    def __call__(self, prompts, completions):
        return [float(len(text)) for text in completions]


def light(samples):
    return samples.media.flatten(1).mean(1)


def red(images, prompts, metadata):
    return images[:, 0].flatten(1).mean(1)


def long(completions):
    return [float(len(text)) for text in completions]


for one in (Plain, light, red, long):
    one.per, one.one_call, one.waits, one.concurrent = "sample", True, True, True
"""
FORMS = ("Plain", "Red", "Long", "light", "red", "long")


@pytest.mark.parametrize("name", FORMS)
def test_what_a_reward_says_of_itself_is_kept_in_every_form(name: str, tmp_path: Path) -> None:
    file = tmp_path / "speaking.py"
    file.write_text(SPEAKING)
    assert said_words(load(f"{file}:{name}")) == WORDS


ASYNCHRONOUS = """
import asyncio


async def light(samples):
    await asyncio.sleep(0)
    return samples.media.flatten(1).mean(1)


async def red(images, prompts, metadata):
    return images[:, 0].flatten(1).mean(1), {}


async def long(completions):
    return [float(len(text)) for text in completions]


class Light:
    async def __call__(self, samples):
        return samples.media.flatten(1).mean(1)


class Red:
    async def __call__(self, images, prompts, metadata):
        return images[:, 0].flatten(1).mean(1)


async def lighter(samples, a, b):
    level = samples.media.flatten(1).mean(1)
    return (level[a] > level[b]).double()
"""


@pytest.mark.parametrize("notebook", [False, True])
@pytest.mark.parametrize("name", ["light", "red", "long", "Light", "Red", "lighter"])
def test_a_reward_may_be_asynchronous_in_every_form(
    name: str, notebook: bool, tmp_path: Path
) -> None:
    """In a script, and in a notebook, whose thread runs an event loop."""
    file = tmp_path / "asynchronous.py"
    file.write_text(ASYNCHRONOUS)
    named = {"name": "win_rate", "judge": f"{file}:lighter"} if name == "lighter" else {}
    reward = load(**(named or {"name": f"{file}:{name}"}))
    samples = texts("a", "bbb") if name == "long" else pictures()

    async def cell() -> object:
        return score_all({"a": reward}, samples)

    scores: Any = asyncio.run(cell()) if notebook else score_all({"a": reward}, samples)
    assert len(set(scores.values.flatten().tolist())) > 1


def noisy(samples: Samples) -> torch.Tensor:
    """As a service with a temperature answers."""
    return samples.media.flatten(1).mean(1) + torch.rand(len(samples.prompts))


def test_a_reward_that_cannot_be_repeated_is_called_once() -> None:
    def asked_once() -> str:
        noisy.one_call = True  # type: ignore[attr-defined]
        return self_test("a", user_reward(noisy, {}))

    def repeatable(samples: Samples) -> torch.Tensor:
        return samples.media.flatten(1).mean(1)

    for followed, ending in (
        (lambda: self_test("a", user_reward(repeatable, {})), "one by one"),
        (asked_once, "; called once"),
    ):
        said = advice(
            "is too large compared with the spread of {} within a group; make it repeatable, or "
            "set its attribute one_call = True if that is impossible",
            lambda: self_test("a", user_reward(noisy, {})),
            followed,
        )
        assert ending in said


def exact(completions, answer, **columns):
    return [float(text == row) for text, row in zip(completions, answer, strict=True)]


def within(completions, answer, **columns):
    return [float(str(row) in text) for text, row in zip(completions, answer, strict=True)]


def never(completions, answer, **columns):
    return [0.0 for _ in completions]


@pytest.mark.parametrize("function", [exact, within])
def test_a_reward_that_compares_with_a_column_is_tested_with_its_value(function):
    """All of the plain test texts score 0, as wrong answers do."""
    rows = Prompts(["1+2=", "2+2="], [{"answer": "33"}, {"answer": "44"}], "text")
    assert "1, 0, 0, 0 for 4 different" in self_test("a", user_reward(function, {}), rows)


def test_a_reward_that_no_column_moves_is_still_refused():
    rows = Prompts(["1+2=", "2+2="], [{"answer": "33"}, {"answer": "44"}], "text")
    with pytest.raises(ValueError, match="texts all score 0"):
        self_test("a", user_reward(never, {}), rows)


TRAINERS_OWN = """
def state(prompts, completions, trainer_state=None):
    step = trainer_state.global_step
    return [float(step)] * len(completions)


def logs(completions, log_metric=None):
    log_metric("a", 1.0)
    return [0.0] * len(completions)


def ids(completions, completion_ids=None):
    return [float(len(i)) for i in completion_ids]


def first(completions, completion_ids=None):
    for entry in completion_ids:
        return [float(entry)] * len(completions)


class Object:
    def __call__(self, completions, trainer_state=None):
        return [float(trainer_state.global_step)] * len(completions)


def guarded(completions, trainer_state=None, log_metric=None):
    step = trainer_state.global_step if trainer_state else 0
    if log_metric is not None:
        log_metric("a", step)
    return [float(step)] * len(completions)


def early(completions, trainer_state=None):
    if trainer_state is None:
        return [0.0] * len(completions)
    return [float(trainer_state.global_step)] * len(completions)


def in_a_branch(completions, log_extra=None, loud: bool = False):
    if loud:
        log_extra("a", [1])
    return [0.0] * len(completions)


def replaced(completions, log_metric=None):
    log_metric = log_metric or print
    log_metric("a")
    return [0.0] * len(completions)


def another(completions, trainer_state=5):
    return [float(trainer_state.real)] * len(completions)
"""
TAKEN = ("guarded", "early", "in_a_branch", "replaced", "another")


@pytest.mark.parametrize(
    ("function", "line", "argument"),
    [
        ("state", 3, "trainer_state"),
        ("logs", 8, "log_metric"),
        ("ids", 13, "completion_ids"),
        ("first", 17, "completion_ids"),
        ("Object", 23, "trainer_state"),
    ],
)
def test_what_only_trls_trainer_has_is_refused_where_it_is_used(
    tmp_path: Path, function: str, line: int, argument: str
) -> None:
    """Before anything loads: the call would fail for an attribute of None."""
    file = tmp_path / "mine.py"
    file.write_text(TRAINERS_OWN)
    said = f"{function}, line {line}: {argument} is None here, since only TRL's trainer provides it"
    with pytest.raises(ValueError, match=re.escape(said)):
        check_reward(f"{file}:{function}", {})


@pytest.mark.parametrize("function", TAKEN)
def test_a_function_that_does_without_trls_trainer_is_taken(tmp_path: Path, function: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TRAINERS_OWN)
    reward = load(f"{file}:{function}")
    assert len(reward(Samples(["a", "b"], ["p"] * 2, torch.zeros(2).long()))) == 2
