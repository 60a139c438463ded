"""Credit of turns in whole runs: its numbers by loops, and what is refused."""

from collections import defaultdict

import pytest

from flowrl.cli.sample import with_rows
from flowrl.errors import UserError
from flowrl.iteration import ratio_check
from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings.read import check_run, run_from
from tests.support import text_runs
from tests.support.environments import GUESS, tree
from tests.support.iterations import collect, iterate
from tests.support.runs import flowrl, same_weights, write

SHARED = {"length": 24, "group": 6}
GIGPO = {"name": "text_gigpo", **SHARED, "kl": 0.0, "gamma": 0.8, "weight": 0.7}
RECIPES = {
    "gigpo": GIGPO,
    "gigpo std": GIGPO | {"scale": True},
    "turns": {"name": "text_turns", **SHARED},
    "rebn": {"name": "text_rebn", **SHARED, "gamma": 0.6},
}


def opened(model, folder, recipe, budget=None, **train) -> Session:
    """States are named, so that a later one may be the first turn's."""
    folder.mkdir(exist_ok=True)
    settings = tree(model, folder, "named", recipe, **train) | {"budget": budget or {}}
    run = run_from(settings, "test")
    check_run(run)
    return open_session(run, folder, open_accelerator(run, folder))


class Trajectory:
    """A row of tokens, replayed with the function of the environment."""

    def __init__(self, session: Session, rows, row: int, prompts: list[int], won: float) -> None:
        names: dict = {}
        exec(GUESS, names)
        self.won = won
        self.place, self.texts, self.states = prompts[int(rows.prompt[row])], [], []
        (prompt,), (meta,) = session.prompts.take([self.place])
        ids, told = (
            rows.ids[row, : int(rows.ends[row])].tolist(),
            rows.from_environment[row].tolist(),
        )
        self.turn_of, state = [], prompt
        for t, token in enumerate(ids):
            if told[t]:
                continue
            if t == 0 or told[t - 1]:
                if t:
                    self.turn_of += [None] * (t - len(self.turn_of))
                    state = names["named"](prompt, meta, self.texts)["state"]
                self.states.append(state)
                self.texts.append("")
            self.turn_of.append(len(self.states) - 1)
            self.texts[-1] += "" if token == 1 else session.learner.policy.tokenizer.decode([token])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    return (sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def gigpo(every: list[Trajectory], recipe) -> list[list[float]]:
    """arXiv:2505.10978, eqs. 3 to 8, with groups by prompt."""
    outcomes, returns = defaultdict(list), defaultdict(list)
    for one in every:
        outcomes[one.place].append(one.won)
        for k, state in enumerate(one.states):
            left = len(one.states) - 1 - k
            returns[one.place, state].append(one.won * recipe["gamma"] ** left)
    found = []
    for one in every:
        own, values = outcomes[one.place], []
        for k, state in enumerate(one.states):
            same = returns[one.place, state]
            macro = one.won - mean(own)
            micro = one.won * recipe["gamma"] ** (len(one.states) - 1 - k) - mean(same)
            if recipe.get("scale"):
                macro /= std(own) + 1e-6
                micro /= (std(same) if len(same) > 1 else 1.0) + 1e-6
            values.append(macro + recipe["weight"] * micro)
        found.append(values)
    return found


def turns(every: list[Trajectory], recipe) -> list[list[float]]:
    groups = defaultdict(list)
    for one in every:
        for k in range(len(one.states)):
            groups[one.place, k].append(one.won)
    found = []
    for one in every:
        own = [groups[one.place, k] for k in range(len(one.states))]
        same = [len(g) < 2 or std(g) == 0 for g in own]
        pairs = zip(own, same, strict=True)
        found.append([0.0 if flat else (one.won - mean(g)) / (std(g) + 1e-4) for g, flat in pairs])
    return found


def rebn(every: list[Trajectory], recipe) -> list[list[float]]:
    returns = [
        [one.won * recipe["gamma"] ** (len(one.states) - 1 - k) for k in range(len(one.states))]
        for one in every
    ]
    flat = [value for values in returns for value in values]
    spread = mean([(value - mean(flat)) ** 2 for value in flat]) ** 0.5
    return [[(value - mean(flat)) / (spread + 1e-9) for value in values] for values in returns]


def prompts_of(session: Session, experience) -> list[int]:
    """The prompt of each draw."""
    texts = dict(zip(experience.samples.group.tolist(), experience.samples.prompts, strict=True))
    return [session.prompts.texts.index(texts[i]) for i in range(len(experience.draws))]


@pytest.mark.quick_cases("True-turns", "False-gigpo", "True-rebn")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("merged", [False, True])
def test_advantages_of_a_collected_iteration_are_the_formula_s(
    model, tmp_path, monkeypatch, name, merged
):
    monkeypatch.setattr("flowrl.budget.spending.knapsack", lambda *_: [2, 0, 1])
    kept = opened(model, tmp_path, RECIPES[name], {"repeat": 2} if merged else None)
    experience = collect(kept, 0)
    (rows,) = experience.rows
    places = prompts_of(kept, experience)
    won = experience.scores.values[:, 0].tolist()
    every = [Trajectory(kept, rows, row, places, won[row]) for row in range(len(rows.ids))]
    want = {"gigpo": gigpo, "turns": turns, "rebn": rebn}[name.split()[0]](every, RECIPES[name])
    differ = 0
    for row, (one, values) in enumerate(zip(every, want, strict=True)):
        for t, turn in enumerate(one.turn_of):
            expected = 0.0 if turn is None else values[turn]
            assert float(rows.advantage[row, t]) == pytest.approx(expected, abs=2e-5), (row, t)
            assert bool(rows.mask[row, t]) == (turn is not None)
        differ += max(values) - min(values) > 1e-3
    assert differ, "credit that is the same for all turns would show nothing"
    assert len(set(places)) == (2 if merged else 3), "a prompt was drawn twice"


def test_the_first_ratio_is_one(model, tmp_path):
    rule = {"temperature": 0.7, "top_p": 0.9}
    # of this seed some conversations end before their last turn, and some do not
    kept = opened(model, tmp_path, GIGPO | rule, rows_per_call=5, seed=3)
    experience = collect(kept, 0)
    assert 0 < experience.metrics["text/met"] < 1
    floor = ratio_check.check_ratio(kept.learner, experience, kept.terminal)
    assert floor is not None and floor < 2e-5


@pytest.mark.slow
def test_a_run_that_remembers_successes_ends_with_the_same_bits_when_resumed(model, tmp_path):
    """Replayed texts bring the states that they were drawn in."""
    names, budget = ("whole", "broken", "again"), {"replay": 4, "flat": "drop"}
    whole, broken, again = (
        opened(model, tmp_path / name, GIGPO | {"group": 3}, budget, updates=2, lr=1e-2)
        for name in names
    )
    progress = Progress()
    replayed = sum(iterate(whole, progress).metrics["budget/replayed"] for _ in range(6))
    progress = Progress()
    for _ in range(3):
        iterate(broken, progress)
    checkpoint.save_checkpoint(broken, progress, Alarms())
    progress = checkpoint.restore(again, tmp_path / "broken" / "checkpoints" / "000003", Alarms())
    for _ in range(3):
        iterate(again, progress)
    assert same_weights(whole, again) and replayed > 0


@pytest.mark.parametrize("name", ["text_gigpo", "text_turns", "text_rebn"])
def test_a_recipe_that_compares_turns_needs_some(model, tmp_path, name):
    settings = text_runs.tree(model, tmp_path, {"name": name, "length": 6, "group": 4})
    with pytest.raises(UserError, match="compares turns or steps, but without"):
        check_run(run_from(settings, "test"))
    settings = tree(model, tmp_path, recipe={"name": name, "length": 6, "group": 4})
    check_run(run_from(settings, "test"))
    with pytest.raises(UserError, match="needs one advantage per sample"):
        check_run(run_from(settings | {"budget": {"subset": 2}}, "test"))


def test_a_plan_says_who_answers(model, tmp_path, capsys):
    config = write(tree(model, tmp_path, recipe=GIGPO), tmp_path)
    assert flowrl("plan", config) == 0
    said = capsys.readouterr().out
    assert "guess.py:reply replies between the turns: at most 3 turns of the model, 24" in said
    config = write(text_runs.tree(model, tmp_path, text_runs.GRPO), tmp_path)
    assert flowrl("plan", config) == 0 and "replies" not in capsys.readouterr().out


def test_prompts_of_a_run_are_sampled_with_their_rows(model, tmp_path, capsys):
    run = run_from(tree(model, tmp_path), "test")
    found = with_rows(run, ("cab :", "dig", "cab :"))
    assert found.texts == ("cab :", "dig", "cab :")
    assert found.meta[0] == found.meta[2] == {"prompt": "cab :", "answer": "b"}
    assert found.meta[1] == {"prompt": "dig"}
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "'dig' is not in the run's prompt files" in said
    plain = run_from(text_runs.tree(model, tmp_path, text_runs.GRPO), "test")
    assert with_rows(plain, ("cab :",)).meta == ({"prompt": "cab :"},)
    assert not capsys.readouterr().out
