"""Blocks of YAML and Python on the pages: the settings are accepted, and the functions run.

tests/test_docs.py and tests/api have docs/extending.md and docs/api.md, test_page_commands.py has
the commands.
"""

import ast
import inspect
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import flowrl
import rewards
from flowrl.settings.read import check_plan, check_rewards, run_from
from rewards import Samples
from rewards.checks.self_test import Prompts, self_test
from rewards.types import Kind
from tests.support import page_blocks
from tests.support.page_blocks import Block, block_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the pages' settings name."""
    page_blocks.named_files(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", page_blocks.blocks("yaml"), ids=str)
def test_settings_of_a_page_are_accepted(block: Block, folder: Path) -> None:
    page_blocks.own_files(block, folder)
    run = run_from(page_blocks.tree_of(block, folder), str(block))
    if run.workers.any:
        pytest.importorskip("ray")
    check_plan(run)
    check_rewards(run)


def loaded(block: Block, name: str, **settings: Any) -> rewards.Reward:
    """A reward of a block in the reader's file, as a run loads it, and after its self-test."""
    file = Path(f"reward_{block.line}.py")
    file.write_text(block.text)
    reward = rewards.load(f"{file}{name}", **settings)
    kind: Kind = "text" if name == ":named" else "video" if name == ":motion" else "image"
    self_test(name, reward, Prompts(kind=kind))
    return reward


def colours() -> Samples:
    """A red, a grey and a blue image."""
    values = torch.tensor([[1.0, 0.5, 0.0], [0.5, 0.5, 0.5], [0.0, 0.5, 1.0]])
    media = values.view(3, 3, 1, 1).expand(3, 3, 8, 8).contiguous()
    return Samples(media, ["a prompt"] * 3, torch.zeros(3).long())


def close(scores: Any, wanted: list[float]) -> None:
    torch.testing.assert_close(torch.as_tensor(scores), torch.tensor(wanted))


@pytest.mark.usefixtures("folder")
def test_rewards_of_images_on_the_pages_score_as_they_say() -> None:
    page, samples = "own_rewards.md", colours()
    close(loaded(block_of("README.md", "def warmth"), ":warmth")(samples), [1.0, 0.0, -1.0])
    functions = block_of(page, "def warmth")
    close(loaded(functions, ":warmth")(samples), [1.0, 0.0, -1.0])
    close(loaded(functions, ":light", above=0.4)(samples), [2 / 3, 1.0, 2 / 3])
    close(loaded(block_of(page, "class Warmth"), ":Warmth", power=2.0)(samples), [1.0, 0.0, -1.0])
    close(loaded(block_of(page, "def load"), "", channels=2)(samples), [0.5, 0.5, 0.5])
    Path("taste.py").write_text(block_of(page, "def warmer").text)
    together = replace(samples, group=torch.zeros(3).long())
    close(rewards.load("win_rate", judge="taste.py:warmer")(together).float(), [1.0, 0.5, 0.0])
    shy = {"name": "taste.py:warmer", "margin": 3.0}
    close(rewards.load("win_rate", judge=shy)(together).float(), [0.5, 0.5, 0.5])


@pytest.mark.usefixtures("folder")
def test_rewards_of_texts_and_videos_on_the_pages_score_as_they_say() -> None:
    named = loaded(block_of("own_rewards.md", "def named"), ":named")
    rows = [{"words": ["stone", "sea"]}, {"words": ["sky"]}, {}]
    texts = Samples(["A stone.", "A tree.", "A tree."], ["a"] * 3, torch.zeros(3).long(), rows)
    assert list(named(texts)) == [0.5, 0.0, None]
    motion = loaded(block_of("own_rewards.md", "def motion"), ":motion")
    films = torch.zeros(2, 3, 3, 4, 4)
    films[0, 1] = 1.0
    close(motion(Samples(films, ["a"] * 2, torch.zeros(2).long())), [1.0, 0.0])


def functions_of(block: Block) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "reader"}
    exec(compile(block.text, str(block), "exec"), space)
    return space


def test_a_reward_on_the_way_abstains_from_a_blur() -> None:
    promising = functions_of(block_of("feedback.md", "def promising"))["promising"]
    media = torch.full((2, 3, 8, 8), 0.5)
    media[0, :, :, 4:] = 1.0
    assert promising(Samples(media, ["a"] * 2, torch.zeros(2).long())) == [0.75, None]


def test_a_function_of_verl_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_verl_reward")
    vars(module)["compute_score"] = lambda source, text, truth, extra: float(text == truth)
    monkeypatch.setitem(sys.modules, "my_verl_reward", module)
    score = functions_of(block_of("coming_from.md", "def score"))["score"]
    truths = [{"ground_truth": "4"}] * 2
    assert score(["2 + 2"] * 2, ["4", "5"], ["sums"] * 2, truths, [None] * 2) == [1.0, 0.0]


def test_functions_of_two_tasks_abstain_from_the_others_rows() -> None:
    space = functions_of(block_of("rewards.md", "def sums"))
    texts, tasks = ["It is 4.", "Hello"], ["sum", "chat"]
    assert space["sums"](completions=texts, task=tasks, answer=["4", ""]) == [1.0, None]
    assert space["brief"](completions=texts, task=tasks) == [None, 1 / 6]


def test_environments_of_the_page_answer() -> None:
    first = functions_of(block_of("language.md", "import re"))
    reply = first["reply"]
    row = {"answer": "40"}
    answers = [reply("Guess.", row, turns) for turns in (["x"], ["9"], ["41?"], ["It is 40."])]
    assert answers == ["Say a number.", "higher", "lower", None]
    stated = functions_of(block_of("language.md", "    secret, guesses"))["reply"]
    assert stated("Guess.", row, ["20"]) == {"reply": "higher", "state": "20 to 101"}
    assert stated("Guess.", row, ["20", "60"]) == {"reply": "lower", "state": "20 to 60"}
    assert stated("Guess.", row, ["20", "40"]) is None


def test_every_block_of_python_has_its_test() -> None:
    """A new block needs a line in a test of this file, or in those of the pages below."""
    here = {"coming_from.md": 1, "language.md": 2, "feedback.md": 1}
    here |= {"own_rewards.md": 6, "README.md": 1, "rewards.md": 1, "your_own_taste.md": 1}
    # those of test_page_commands.py:
    with_runs = {"README.md": 2, "gallery.md": 2, "following.md": 1, "quickstart.md": 2}
    # test_api_pages.py, test_docs.py, test_own_runs.py, test_image_token_runs.py
    elsewhere = ("api.md", "extending.md", "own_models.md", "image_tokens.md")
    found = Counter(b.page for b in page_blocks.blocks("python") if b.page not in elsewhere)
    assert found == Counter(here) + Counter(with_runs)


def test_the_program_of_votes_calls_functions_as_they_are() -> None:
    """It waits for people, so only its calls' arguments are held against the functions."""
    block = block_of("your_own_taste.md", "flowrl.vote(")
    calls = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call)]
    found = {ast.unparse(call.func): call for call in calls}
    for name in ("vote", "fit_reward", "train"):
        call = found[f"flowrl.{name}"]
        named = {str(word.arg): None for word in call.keywords}
        inspect.signature(getattr(flowrl, name)).bind(*call.args, **named)


def test_functions_of_tasks_abstain_as_the_page_says() -> None:
    values: dict[str, Any] = {}
    exec(block_of("rewards.md", "def sums").text, values)
    tasks = ["sum", "chat"]
    assert values["sums"](["4", "hi"], tasks, ["4", ""]) == [1.0, None]
    assert values["brief"](["4", "hi"], tasks) == [None, 1 / 3]
