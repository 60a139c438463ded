"""On-policy means on-policy: before the first optimizer step every recipe's ratio is 1, and its
gradient depends neither on the size of calls nor on the order of rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.iteration import ratio_check, update
from flowrl.likelihoods.rows import Rows, input_of, take
from flowrl.losses.base import ClipsRatio
from flowrl.recipes.table import IMAGE_RECIPES, TEXT_RECIPES
from flowrl.session.learner import Learner
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from tests.support import every_recipe, iterations, runs
from tests.support.iterations import Collected, collect
from tests.support.runs import opened

ROUNDING = {"float32": 1e-6, "float64": 1e-12}  # of a gradient, as a share of its norm
# the same where an image model's own products of another number of rows round differently, which
# depends on the processor
NETWORK_ROUNDING = {"float32": 3e-5, "float64": 1e-12}


@pytest.fixture
def open_run(model, pipeline_folder, tmp_path, monkeypatch) -> Callable[..., Session]:
    """(recipe, dtype, settings of `train`) -> a session of a tiny model."""

    def build(name: str, dtype: str, **train: Any) -> Session:
        tree = every_recipe.settings(
            name, tmp_path, pipeline=pipeline_folder, language=model, **train
        )
        tree["model"]["dtype"] = dtype
        return opened(tree, tmp_path)

    return build


@pytest.fixture(scope="module")
def pipeline_folder(tmp_path_factory) -> Path:
    return runs.write_pipeline(tmp_path_factory.mktemp("pipeline"))


def step_gradients(monkeypatch, kept: Session, experience: Collected) -> list[Tensor]:
    """Gradients of the one optimizer step of an iteration, which is not taken."""
    found: list[Tensor] = []

    def step(learner: Learner, progress: Progress, tally: update.Tally) -> float:
        grads = [p.grad for p in learner.policies.parameters.values()]
        found.extend(torch.zeros(1) if g is None else g.double().clone() for g in grads)
        learner.optimizer.zero_grad()
        return 1.0

    monkeypatch.setattr(update, "optimizer_step", step)
    iterations.update(kept.learner, experience, Progress())
    return found


@dataclass
class OutputGradients:
    """Gradients with respect to what the network returns, row by row and call by call: a gradient
    through several steps of a path calls it for each.

    Kept in a first step. Later ones are compared with them, and with `fixed` replaced by them
    before they reach the network: then only the network's own backward differs.
    """

    kept: dict[bytes, Tensor] = field(default_factory=dict)
    fixed: bool = False
    away: float = 0.0
    size: float = 0.0

    def policy(self, real: Any, keys: list[bytes]) -> Callable[..., Tensor]:
        calls = count()

        def velocity(*args: Any) -> Tensor:
            v = real(*args)
            if v.requires_grad:
                assert len(v) == len(keys)
                number = next(calls)
                own = [b"%d:" % number + key for key in keys]
                v.register_hook(lambda grad: self.seen(grad, own))
            return v

        return velocity

    def seen(self, grad: Tensor, keys: list[bytes]) -> Tensor:
        for key, row in zip(keys, grad, strict=True):
            self.kept.setdefault(key, row.clone())
        kept = torch.stack([self.kept[key] for key in keys])
        self.away += float((grad - kept).double().square().sum())
        self.size += float(kept.double().square().sum())
        return kept if self.fixed else grad

    @contextmanager
    def watched(self, monkeypatch) -> Iterator[None]:
        """Within an update; an input is known by all that its rows hold."""
        real = update.chunk_loss

        def watching(learner: Learner, experience: Collected, chunk: Rows, first: bool) -> Any:
            found = [getattr(chunk, f.name) for f in fields(chunk)]
            tensors = [value.cpu() for value in found if isinstance(value, Tensor)]
            rows = range(len(chunk.prompt))
            each = [b"".join(value[row].numpy().tobytes() for value in tensors) for row in rows]
            inputs = input_of(chunk).tolist()  # rows that share one are evaluated once
            keys = [b""] * (max(inputs) + 1)
            for row, number in zip(each, inputs, strict=True):
                keys[number] += row
            policy: Any = self.policy(experience.policy, keys)
            return real(learner, replace(experience, policy=policy), chunk, first)

        self.away = self.size = 0.0
        with monkeypatch.context() as patch:
            patch.setattr(update, "chunk_loss", watching)
            yield


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    return float(sum((a - b).square().sum() for a, b in zip(got, want, strict=True))) ** 0.5


def shuffled(experience: Collected, unit: int) -> Collected:
    """The rows in another order; the rows of a unit stay together."""
    rng, parts = torch.Generator().manual_seed(0), []
    for rows in experience.rows:
        units = torch.randperm(len(rows.prompt) // unit, generator=rng)
        parts.append(take(rows, (units[:, None] * unit + torch.arange(unit)).flatten()))
    return replace(experience, rows=tuple(parts))


def disturb(experience: Collected) -> bool:
    """Add noise to stored log-probabilities, as if sampling had used other arithmetic."""
    stored = [rows.old.logp for rows in experience.rows if rows.old is not None]
    for logp in stored:
        rng = torch.Generator().manual_seed(0)
        logp += 0.1 * torch.randn(logp.shape, generator=rng)
    return len(stored) > 0


QUICK_TEXTS = {"text_grpo", "text_gspo", "text_tree", "text_process"}  # of slopes
QUICK_IMAGES = {"flow_grpo", "branch_grpo", "nft", "dpo"}  # the others take minutes together
ALL_RECIPES = [
    *(
        pytest.param(name, marks=() if name in QUICK_IMAGES else pytest.mark.slow)
        for name in IMAGE_RECIPES
        if name != "opd"  # has no ratio, and needs a teacher
    ),
    *(
        pytest.param(name, marks=[pytest.mark.slow] * bool(place % 3))  # every third one
        for place, name in enumerate(TEXT_RECIPES)
    ),
]


@pytest.mark.quick_cases("nft-bfloat16", "text_process-bfloat16", "text_tree-bfloat16")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("name", ALL_RECIPES)
def test_the_first_ratio_of_every_recipe_is_one(open_run, name, dtype):
    kept = open_run(name, dtype, rows_per_call=3)
    experience = collect(kept, 0)
    half = dtype == "bfloat16"
    stored = disturb(experience) if half else experience.rows[0].old is not None
    metrics = iterations.update(kept.learner, experience, Progress()).metrics
    assert metrics["skipped"] == 0
    has_ratio = "old" in kept.algorithm.loss.roles
    assert has_ratio == ("ratio" in metrics or "moved" in metrics)
    for end in ("ratio_min", "ratio_max"):
        assert metrics.get(end, 1.0) == pytest.approx(1.0, abs=0.0 if half else 1e-5)
    assert metrics.get("moved", 0.0) == 0
    if has_ratio and stored and name in TEXT_RECIPES:
        assert (0.03 < metrics["mismatch"] < 0.3) if half else metrics["mismatch"] < 1e-5
    for share in ("clipped_low", "clipped_high"):
        assert metrics.get(share, 0.0) == 0
    for factor in ("phi", "gate"):
        assert metrics.get(factor, 1.0) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.quick_cases("bfloat16-updates")
@pytest.mark.parametrize("steps", [{"updates": 2}, {"epochs": 2}], ids=["updates", "epochs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recomputed_old_is_that_of_the_weights_that_sampled(open_run, dtype, steps):
    """With two steps the second one's ratio is to the sampling weights, as the trainer computes
    them; `recompute_old` decides in every dtype."""
    kept = open_run("text_rloo", dtype, rows_per_call=3, recompute_old=True, lr=1e-2, **steps)
    experience = collect(kept, 0)
    assert disturb(experience)
    metrics = iterations.update(kept.learner, experience, Progress()).metrics
    assert metrics["ratio_min"] < 1 < metrics["ratio_max"], "the second step's have moved"
    assert 0.03 < metrics["mismatch"] < 0.3, "of both steps, before either was taken"
    plain = open_run("text_rloo", dtype, rows_per_call=3, recompute_old=True, lr=1e-2, **steps)
    same = iterations.update(plain.learner, collect(plain, 0), Progress()).metrics
    for name in ("ratio", "ratio_min", "ratio_max", "grad_norm"):
        assert same[name] == metrics[name], "the sampler's log-probabilities are not read"


def test_a_sampler_whose_numbers_are_kept_is_measured_and_warned_of(open_run, capsys):
    """Also for losses without a clip range."""
    kept = open_run("text_vespo", "bfloat16", rows_per_call=3, recompute_old=False)
    assert not isinstance(kept.algorithm.loss, ClipsRatio)
    experience = collect(kept, 0)
    disturb(experience)
    assert ratio_check.check_ratio(kept.learner, experience, kept.terminal) > 0.1
    assert "train.recompute_old" in capsys.readouterr().err
    metrics = iterations.update(kept.learner, experience, Progress()).metrics
    assert 0.03 < metrics["mismatch"] < 0.3 and metrics["ratio_max"] > 1.1


@pytest.mark.quick_cases("text_tree", "text_grpo")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK_TEXTS)) for n in TEXT_RECIPES],
)
def test_no_gradient_depends_on_the_size_of_calls_or_on_the_order_of_rows(
    open_run, monkeypatch, name, dtype
):
    kept = open_run(name, dtype, rows_per_call=4)
    experience = collect(kept, 0)
    want = step_gradients(monkeypatch, kept, experience)
    norm = distance(want, [torch.zeros_like(each) for each in want])
    other = shuffled(experience, kept.algorithm.loss.unit)
    for rows, same in ((64, experience), (2, experience), (4, other)):
        kept.learner.policy.rows_per_call = rows
        away = distance(step_gradients(monkeypatch, kept, same), want)
        assert norm > 0 and away <= ROUNDING[dtype] * norm


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in IMAGE_RECIPES if name != "opd"],
)
def test_no_image_gradient_does_beyond_the_networks_own_rounding(
    open_run, monkeypatch, name, dtype
):
    """Two statements. What the loss hands back to the network for a row does not depend on the
    calls, and with those gradients kept from the first step the weights' gradient is the same one
    again. On one processor both are equal to the bit in float32; on another the network's
    velocities differ with the rows of a call, and what is handed back differs by up to 8e-6 of its
    norm (DDPO). So all that is left of a dependence is the network's own rounding: its backward
    sums a weight's gradient over the rows of a call, 4e-7 to 2e-6 of the norm in float32, since
    rows of opposite advantages cancel, and 2e-15 in float64.
    """
    kept, outputs = open_run(name, dtype, rows_per_call=4), OutputGradients()
    experience = collect(kept, 0)
    with outputs.watched(monkeypatch):
        want = step_gradients(monkeypatch, kept, experience)
    norm = distance(want, [torch.zeros_like(each) for each in want])
    other = shuffled(experience, kept.algorithm.loss.unit)
    for rows, same in ((64, experience), (2, experience), (4, other)):
        kept.learner.policy.rows_per_call = rows
        found = []
        for outputs.fixed in (False, True):
            with outputs.watched(monkeypatch):
                found.append(step_gradients(monkeypatch, kept, same))
        assert outputs.away**0.5 <= NETWORK_ROUNDING[dtype] * outputs.size**0.5
        assert norm > 0 and distance(*found) <= NETWORK_ROUNDING[dtype] * norm
