"""An environment's rewards of single turns, from the function to the credit of tokens."""

from typing import Any

import pytest
import torch

from flowrl.demo.maze import CELLS, distances, move, nearer
from flowrl.errors import UserError
from flowrl.models.language.environment import read_reply
from flowrl.run.train import begin
from flowrl.session.session import Session
from flowrl.settings.read import check_run, run_from
from tests.support import runs, text_runs
from tests.support.environments import GUESS, tree
from tests.support.iterations import collect

SCORED = """

def scored(prompt, meta, turns):
    said = reply(prompt, meta, turns)
    return {"reply": said, "reward": len(turns[-1]) / 10 + (said is None)}
"""
GAMMA = 0.6


def opened(model, folder, recipe) -> Session:
    settings = tree(model, folder, "scored", recipe, self_test="off")
    (folder / "guess.py").write_text(GUESS + SCORED)
    return runs.opened(settings, folder)


def test_returns_of_a_run_are_those_of_the_function_s_rewards(model, tmp_path):
    recipe = {"name": "text_rebn", "length": 24, "group": 6, "gamma": GAMMA}
    session = opened(model, tmp_path, recipe)
    experience = collect(session, 0)
    rows: Any = experience.rows[0]
    policy: Any = session.learner.policy
    way = experience.scores.intermediate
    assert way is not None
    names: dict = {}
    exec(GUESS + SCORED, names)
    told = rows.from_environment
    begins = told & ~torch.nn.functional.pad(told[:, :-1], (1, 0))
    turn = begins.cumsum(1)  # of each token
    returns: list[list[float]] = []
    asked = 0
    for i, prompt in enumerate(experience.samples.prompts):
        turns, rewards = list[str](), list[float]()
        for k in range(int(turn[i].max()) + 1):
            own = rows.ids[i][rows.written[i] & (turn[i] == k)].tolist()
            letters = [token for token in own if token != 1]
            turns.append(policy.tokenizer.decode(letters, skip_special_tokens=True))
            known = own[-1] == 1 and k < 2  # the third turn is the last one
            assert bool(way.scored[i, k]) == known
            rewards.append(0.0)
            if known:
                meta = experience.samples.meta[i]
                rewards[k] = names["scored"](prompt, meta, turns)["reward"]
                asked += 1
                assert float(way.values[i, k]) == pytest.approx(rewards[k])
        rewards[-1] += float(experience.scores.values[i, 0])
        rest, found = 0.0, []
        for reward in reversed(rewards):
            rest = reward + GAMMA * rest
            found.insert(0, rest)
        returns.append(found)
    assert asked > 10
    every = torch.tensor([each for row in returns for each in row], dtype=torch.float64)
    mean, std = every.mean(), every.std(correction=0)
    for i, row in enumerate(returns):
        for k, value in enumerate(row):
            own = rows.written[i] & (turn[i] == k)
            wanted = ((value - mean) / (std + 1e-9)).float().expand(int(own.sum()))
            torch.testing.assert_close(rows.advantage[i][own], wanted, atol=1e-5, rtol=1e-5)
    assert experience.metrics["reward_turns"] == pytest.approx(float(way.values.sum((1, 2)).mean()))


def test_a_recipe_with_one_outcome_refuses_rewards_of_turns(model, tmp_path):
    session = opened(model, tmp_path, text_runs.GRPO | {"length": 24})
    with pytest.raises(UserError, match="all turns share one credit in this recipe: use text_rebn"):
        collect(session, 0)


REWARDS = {
    "shown": """

def shown(prompt, meta, turns):
    if len(turns) < 2:
        return "again"
    return {"reply": None, "reward": 1.0}
""",
    "hidden": """

def helper(turns):
    return {"reply": None, "reward": len(turns) / 10}


def hidden(prompt, meta, turns):
    return helper(turns)
""",
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_recipe_with_one_outcome_refuses_rewards_of_turns_before_training(model, tmp_path, name):
    """From the function's source, before weights load; else with the evaluation of the base."""
    settings = tree(model, tmp_path, name, text_runs.GRPO | {"length": 24}, self_test="off")
    (tmp_path / "guess.py").write_text(GUESS + REWARDS[name])
    run = run_from(settings, "test")
    kept = runs.opened(settings, tmp_path)
    with pytest.raises(UserError, match="use text_rebn"):
        check_run(run) if name == "shown" else begin(kept, None, False)
    for recipe in ("text_rebn", "text_turns", "text_gigpo"):
        check_run(run_from({**settings, "recipe": {"name": recipe, "length": 24}}, "test"))


@pytest.mark.parametrize("reward", ["1", True, float("nan"), float("inf"), 10**400, [1.0]])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(UserError, match="must return a number as the reward, not"):
        read_reply({"reply": "a", "reward": reward}, "f")


def test_a_reply_of_none_may_have_a_reward():
    assert read_reply({"reply": None, "reward": 2}, "f") == (None, "", 2.0)
    assert read_reply({"reply": None}, "f") is None
    assert read_reply({"reply": "a", "reward": 1}, "f") == ("a", "a", 1.0)


def test_the_maze_rewards_moves_on_the_shortest_way():
    for goal in "AMY":
        for cell in CELLS:
            near = [distances(goal)[move(cell, each)] for each in "nesw"]
            assert cell == goal or min(near) == distances(goal)[cell] - 1
    assert nearer("AB:", {}, ["e"]) == {"reply": None, "reward": 0.1}
    assert nearer("AK:", {}, ["e"])["reward"] == -0.1 and nearer("AB:", {}, ["n"])["reward"] == 0
