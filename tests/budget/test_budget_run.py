"""Budgets inside runs, of texts and of pictures: what they spend, learn from, and remember."""

from dataclasses import replace

import pytest
import torch

from flowrl.budget.spending import LATER_ROUNDS, Rationed
from flowrl.errors import UserError
from flowrl.iteration import minibatches as assignment
from flowrl.iteration import ratio_check, update
from flowrl.likelihoods.rows import take
from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.learner import Learner
from flowrl.session.progress import Progress
from flowrl.session.session import SPENDING, Session
from tests.support import iterations, runs, text_runs, tiny_lm
from tests.support.iterations import collect, iterate

TEXT = {"name": "text_grpo", "length": 5, "group": 4, "kl": 0.0}
EVERYTHING = {
    "flat": "resample", "rounds": 3, "order": "uncertain", "rates": [0.05, 0.95], "repeat": 2,
    "subset": 2, "replay": 4,
}  # fmt: skip
VARIANTS = {
    "resample": {"flat": "resample", "rounds": 3},
    "curriculum": {"order": "uncertain", "rates": [0.1, 0.9], "revisit": 2},
    "repeat": {"repeat": 2},
    "subset": {"subset": 2},
    "replay": {"replay": 4},
    "everything": EVERYTHING,
}
OWN = '''
def fifth(samples):
    """1 for about a fifth of all texts."""
    return [float(sum(map(ord, text)) % 5 == 0) for text in samples.media]


def never(samples):
    return [0.0] * len(samples.media)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_lm.write(tmp_path_factory.mktemp("budget") / "lm")


def text_tree(model, folder, budget, reward: str = "fifth", **train) -> dict:
    folder.mkdir(exist_ok=True)
    tree = text_runs.tree(model, folder, TEXT, **train)
    (folder / "mine.py").write_text(OWN)
    return tree | {"rewards": [{"name": f"{folder / 'mine.py'}:{reward}"}], "budget": budget}


def texts(model, folder, budget, **train) -> Session:
    return runs.opened(text_tree(model, folder, budget, **train), folder)


def picture_tree(pipeline, folder, budget, **train) -> dict:
    """Brightness is above `success` now and then."""
    folder.mkdir(exist_ok=True)
    tree = runs.tree(pipeline, folder, runs.FLOW_GRPO, **train)
    return tree | {"budget": {"success": 0.472, **budget}}


def pictures(pipeline, folder, budget, **train) -> Session:
    return runs.opened(picture_tree(pipeline, folder, budget, **train), folder)


def weights(session: Session) -> list[torch.Tensor]:
    return [p.detach().clone() for p in session.learner.policies.parameters.values()]


def equal(first: Session, second: Session) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


def resumed_like_unbroken(make, folder) -> dict[str, float]:
    """Four iterations at once, and two and two; sums of the unbroken run's metrics."""
    whole, broken, again = (make(folder / name) for name in ("whole", "broken", "again"))
    progress, total = Progress(), dict[str, float]()
    for _ in range(4):
        for name, value in iterate(whole, progress).metrics.items():
            total[name] = total.get(name, 0.0) + value
    progress = Progress()
    for _ in range(2):
        iterate(broken, progress)
    checkpoint.save_checkpoint(broken, progress, Alarms())
    saved = checkpoint.newest(broken.folder)
    assert saved is not None
    progress = checkpoint.restore(again, saved, Alarms())
    assert str(again.table[SPENDING].state()) == str(broken.table[SPENDING].state())
    for _ in range(2):
        iterate(again, progress)
    assert equal(whole, again)
    return total


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "everything")) for n in VARIANTS]
)
def test_a_resumed_run_spends_as_the_unbroken_one(model, tmp_path, name):
    total = resumed_like_unbroken(
        lambda folder: texts(model, folder, VARIANTS[name], updates=2), tmp_path
    )
    if name == "resample":
        assert total["budget/rounds"] > 4, "some iteration drew again"
    if name == "everything":
        assert total["budget/stored"] > 0


@pytest.mark.slow
def test_a_resumed_run_of_pictures_too(pipeline, tmp_path):
    total = resumed_like_unbroken(
        lambda folder: pictures(pipeline, folder, EVERYTHING | {"spread": 0.0018}), tmp_path
    )
    assert total["budget/rounds"] > 4 and total["budget/stored"] > 0


def test_further_rounds_are_learned_from_under_their_own_prompts(model, tmp_path):
    kept = texts(model, tmp_path, {"flat": "resample", "rounds": 4})
    for iteration in range(6):
        experience = collect(kept, iteration)
        if experience.metrics["budget/rounds"] > 1 and experience.metrics["budget/kept"] == 3:
            break
    assert any(draw >= LATER_ROUNDS for draw in experience.draws) and len(experience.draws) == 3
    assert len(set(experience.draws)) == 3
    (rows,) = experience.rows
    assert rows.prompt.bincount().tolist() == [4, 4, 4] and rows.mask.any(1).all()
    assert rows.advantage.view(3, 4, -1)[..., 0].std(1).min() > 0.5
    floor = ratio_check.noise_floor(kept.learner, experience)
    assert floor is not None and floor < 2e-5, "each row is scored after its own prompt"
    assert experience.metrics["count/scored"] == 4 * experience.metrics["budget/drawn"]


def test_a_process_whose_draws_are_all_left_out_has_nothing_to_learn_from(
    model, tmp_path, monkeypatch
):
    """Of further rounds another process may hold all draws that are kept. The check of the first
    ratio waits for that process, and judges what it has found."""
    kept = texts(model, tmp_path, {"flat": "resample"})
    experience = collect(kept, 0)
    none = torch.empty(0, dtype=torch.int64)
    empty = replace(experience, draws=(), rows=tuple(take(r, none) for r in experience.rows))
    assert all(share == [] for share in assignment.shares_of(kept.learner, empty, 0))
    assert ratio_check.noise_floor(kept.learner, empty) is None
    assert ratio_check.check_ratio(kept.learner, empty, kept.terminal) is None
    elsewhere = 3e-6
    monkeypatch.setattr(type(kept.learner.parallel), "every", lambda _, mine: [mine, elsewhere])
    assert ratio_check.check_ratio(kept.learner, empty, kept.terminal) == elsewhere


def test_further_rounds_of_pictures(pipeline, tmp_path):
    kept = pictures(pipeline, tmp_path, {"flat": "resample", "spread": 0.0018})
    for iteration in range(6):
        experience = collect(kept, iteration)
        if any(draw >= LATER_ROUNDS for draw in experience.draws):
            break
    assert experience.metrics["budget/rounds"] > 1
    assert any(draw >= LATER_ROUNDS for draw in experience.draws)
    floor = ratio_check.noise_floor(kept.learner, experience)
    assert floor is not None and floor < 1e-4


def test_where_all_groups_are_flat_nothing_is_learned(model, tmp_path):
    kept = texts(
        model, tmp_path, {"flat": "resample", "rounds": 2}, reward="never", self_test="off"
    )
    before = weights(kept)
    metrics = iterate(kept, Progress()).metrics
    assert metrics["budget/rounds"] == 2 and metrics["grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(kept), strict=True))


@pytest.mark.parametrize("kind", ["texts", pytest.param("pictures", marks=pytest.mark.slow)])
def test_a_subset_is_all_that_is_computed_and_gives_the_same_gradient(
    kind, model, pipeline, tmp_path, monkeypatch
):
    def opened(name: str) -> Session:
        if kind == "texts":
            return texts(model, tmp_path / name, {"subset": 2})
        return pictures(pipeline, tmp_path / name, {"subset": 2})

    found: list[list[torch.Tensor]] = []

    def step(learner: Learner, progress: Progress, tally: update.Tally) -> float:
        grads = [p.grad for p in learner.policies.parameters.values() if p.grad is not None]
        found.append([grad.clone() for grad in grads])
        return 1.0

    monkeypatch.setattr(update, "optimizer_step", step)
    small, large = opened("small"), opened("large")
    monkeypatch.setattr(large.table[SPENDING], "rows", lambda rows, unit: rows)
    few, many = (
        iterations.update(kept.learner, collect(kept, 0), Progress()).metrics
        for kept in (small, large)
    )
    assert few["count/training"] < 0.75 * many["count/training"]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-3)
    assert any(grad.abs().max() > 1e-4 for grad in found[0])


@pytest.mark.parametrize("kind", ["texts", pytest.param("pictures", marks=pytest.mark.slow)])
def test_a_stored_success_stands_in_for_a_failure(kind, model, pipeline, tmp_path):
    make = texts if kind == "texts" else pictures
    kept = make(model if kind == "texts" else pipeline, tmp_path, {"replay": 8})
    spending = kept.table[SPENDING]
    assert isinstance(spending, Rationed)
    for iteration in range(8):
        collect(kept, iteration)
    stored = {prompt: success for (prompt, _), success in spending.successes.kept.items()}
    assert stored
    failing = replace(kept, rewards=dict.fromkeys(kept.rewards, _nothing))
    hits = 0
    for iteration in range(8, 12):
        experience = collect(failing, iteration)
        drawn = [kept.prompts.texts.index(p) for p in experience.samples.prompts[::4]]
        hits += len(set(drawn) & set(stored))
        assert experience.metrics["budget/replayed"] == sum(prompt in stored for prompt in drawn)
        assert experience.metrics["reward"] == 0
        for place, prompt in enumerate(drawn):
            advantage = torch.stack([r.advantage[:, 0] for r in experience.rows])
            each = advantage[:, 4 * place : 4 * place + 4]
            if prompt not in stored:
                assert each.eq(0).all()
                continue
            assert (each[:, 3] > 0).all() and (each[:, :3] < 0).all()
            rows, pieces = experience.rows[0], stored[prompt].pieces
            logp = pieces[".logp"] if kind == "texts" else pieces[".edges.0.logp"][None]
            assert torch.equal(rows.old.logp[4 * place + 3], logp)
    assert hits > 0


def _nothing(samples) -> torch.Tensor:
    return torch.zeros(len(samples.prompts))


def test_draws_of_one_prompt_are_compared_as_one_group(model, tmp_path):
    kept = texts(model, tmp_path, {"repeat": 3})
    spending = kept.table[SPENDING]
    assert isinstance(spending, Rationed)
    spending.rates.known = {0: (0.0, 9.0, 0), 1: (0.0, 9.0, 0), 2: (0.3, 9.0, 0)}
    experience = collect(kept, 0)
    assert len(set(experience.samples.prompts)) == 1 and len(experience.draws) == 3
    (rows,) = experience.rows
    scores = experience.scores.values[:, 0].double()
    want = (scores - scores.mean()) / (scores.std() + 1e-4)
    torch.testing.assert_close(rows.advantage[:, 0].double(), want, atol=1e-5, rtol=1e-5)


def test_what_is_outside_of_the_range_is_not_drawn(model, tmp_path):
    kept = texts(model, tmp_path, {"rates": [0.2, 0.8]})
    spending = kept.table[SPENDING]
    assert isinstance(spending, Rationed)
    spending.rates.known = {0: (0.0, 9.0, 0), 1: (0.5, 9.0, 0), 2: (1.0, 9.0, 0)}
    prompts = kept.run.prompts.model_copy(update={"per_iteration": 1})
    settings = kept.run.model_copy(update={"prompts": prompts})
    one = replace(kept, learner=replace(kept.learner, run=settings))
    experience = collect(one, 1)
    assert set(experience.samples.prompts) == {kept.prompts.texts[1]}
    assert experience.metrics["budget/outside"] == 0


def test_replayed_images_and_recomputed_log_probabilities_do_not_go_together(pipeline, tmp_path):
    with pytest.raises(UserError, match="leave one of the two out"):
        pictures(pipeline, tmp_path, {"replay": 4}, recompute_old=True)
