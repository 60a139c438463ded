"""Runs of GARDO: the gate of a collect, the first ratio, the reference, and resuming to the bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowrl.credit.proxies import GATE, gate_of
from flowrl.credit.values import Context
from flowrl.errors import UserError
from flowrl.session.progress import Progress
from flowrl.settings.read import check_named_rewards, check_run, run_from
from tests.support import runs, tiny_pipelines
from tests.support.iterations import chunk_loss, collect, iterate

APART = """
import torch


def apart(samples):
    seen = samples.media.flatten(1).double()
    found = (seen[:, None] - seen).square().mean(-1)
    other = samples.group[:, None] == samples.group
    other = other & ~torch.eye(len(seen), dtype=torch.bool)
    nearest = found.masked_fill(~other, torch.inf).amin(1)
    return torch.where(other.any(1), nearest, torch.nan)
"""
GARDO = {
    "name": "gardo", "steps": 4, "group": 4, "clip": 0.2, "kl": 0.5, "share": 0.5,
    "auxiliary": ["jpeg", "colour"], "distance": "apart",
}  # fmt: skip


def tree(pipeline: Path, folder: Path, recipe: dict[str, Any] | None = None, **train: Any) -> Any:
    (folder / "apart.py").write_text(APART)
    settings = runs.tree(pipeline, folder, GARDO | (recipe or {}), **train)
    name = f"{folder / 'apart.py'}:apart"
    more = [{"name": "jpeg"}, {"name": "colour"}, {"name": name, "label": "apart"}]
    settings["rewards"] += [each | {"weight": 0} for each in more]
    settings["held_out_rewards"] = [{"name": "brightness"}]
    return settings


def below(values: list[float], i: int) -> float:
    others = [v for j, v in enumerate(values) if j != i]
    return sum((values[i] > v) + (values[i] == v) / 2 for v in others) / len(others)


def test_the_rows_of_a_collect_have_the_gate_and_the_advantages_of_plain_loops(pipeline, tmp_path):
    session = runs.opened(tree(pipeline, tmp_path, {"adapt": False}), tmp_path)
    made = collect(session, 0)
    names = made.scores.names
    assert names == ("brightness", "jpeg", "colour", "apart")
    table = [[float(v) for v in column] for column in made.scores.values.double().T]
    n = len(table[0])
    u = [below(table[0], i) - (below(table[1], i) + below(table[2], i)) / 2 for i in range(n)]
    high = sorted(each for each in u if each >= -1e-12)
    place = (len(high) - 1) * 0.5
    low = int(place)
    bound = high[low] + (place - low) * (high[min(low + 1, len(high) - 1)] - high[low])
    gated = [each > bound + 1e-12 for each in u]
    assert 0 < sum(gated) < n / 2
    assert made.metrics["gated"] == pytest.approx(sum(gated) / n)
    assert made.metrics["reward"] == pytest.approx(sum(table[0]) / n)
    assert made.metrics["reward/jpeg"] == pytest.approx(sum(table[1]) / n)
    wanted = []
    for first in range(0, n, 4):
        rows = range(first, first + 4)
        mean, d = (sum(table[k][i] for i in rows) / 4 for k in (0, 3))
        for i in rows:
            gap = table[0][i] - mean
            wanted.append(gap * table[3][i] / d if gap > 0 else gap)
    assert len(made.rows) == 3
    for rows in made.rows:
        assert rows.table[GATE].dtype == rows.advantage.dtype
        torch.testing.assert_close(
            rows.table[GATE][:, 0], torch.tensor(gated).float() * n / sum(gated)
        )
        torch.testing.assert_close(rows.advantage[:, 0], torch.tensor(wanted), atol=1e-6, rtol=1e-5)
        assert rows.mask.all()


@pytest.mark.slow
def test_samples_of_several_sizes_have_their_own_gates(tmp_path):
    tiny_pipelines.flux().save_pretrained(tmp_path / "flux")
    settings = tree(
        tmp_path / "flux", tmp_path, {"adapt": False, "distance": None}, self_test="off"
    )
    settings["rewards"].pop()  # its images have one size
    sizes = [{"height": 16, "width": 12}, {}, {"height": 12}, {"width": 12}]
    session = runs.opened(runs.sized(settings, sizes), tmp_path)
    made = collect(session, 0)
    gate = gate_of(session.algorithm.transforms)
    assert gate is not None and made.first is not None
    rollout = made.first.part.rollout
    context = Context(rollout.columns, torch.tensor([1.0, 0.0, 0.0]))
    weights = gate.weights(made.scores, context, torch.ones(16, dtype=torch.bool)).view(4, 4)
    assert len(weights.unique(dim=0)) > 1
    for rows in made.rows:
        assert len(rows.prompt) < 16
        for draw in rows.prompt.unique().tolist():
            own = rows.table[GATE][rows.prompt == draw, 0]
            torch.testing.assert_close(own.double(), weights[draw], atol=1e-6, rtol=0.0)


@pytest.mark.slow
def test_the_reference_is_the_last_copy_and_the_ratio_begins_at_1(pipeline, tmp_path):
    """Every second iteration; the KL is 0 in the step after."""
    recipe = {"refresh": 2, "refresh_kl": None}
    session = runs.opened(tree(pipeline, tmp_path, recipe, updates=2), tmp_path)
    progress, policies = Progress(), session.learner.policies
    start = policies.copies(["current"])["current"]
    copied = [start]
    for number in range(1, 6):
        metrics = iterate(session, progress).metrics
        assert metrics["ratio"] == pytest.approx(1, abs=1e-2) and metrics["kl_recent"] >= 0
        now = policies.copies(["current", "recent"])
        if number % 2 == 0:
            copied.append(now["current"])
        assert progress.refreshed.get("recent", 0) == number // 2 * 2
        for key, weight in copied[-1].items():
            assert torch.equal(now["recent"][key], weight)
    assert any(not torch.equal(start[key], copied[-1][key]) for key in start)
    assert "ref" not in policies.names, "the initial weights are held once"


@pytest.mark.slow
def test_a_large_kl_takes_the_copy_at_once_and_the_count_begins_anew(pipeline, tmp_path):
    recipe = {"refresh": 3, "refresh_kl": 1e-12}
    session = runs.opened(tree(pipeline, tmp_path, recipe, updates=2, lr=1e-3), tmp_path)
    progress, taken, above = Progress(), list[int](), list[bool]()
    for _ in range(4):
        above.append(iterate(session, progress).metrics["kl_recent"] > 1e-12)
        taken.append(progress.refreshed.get("recent", 0))
    last, expected = 0, list[int]()
    for number, large in enumerate(above, 1):
        last = number if large or number - last >= 3 else last
        expected.append(last)
    assert taken == expected and any(above)


def test_only_the_gated_rows_are_pulled_to_the_reference(pipeline, tmp_path):
    """Without advantages the gradient is that of the KL of gated rows; a gate of 0 has none."""
    session = runs.opened(tree(pipeline, tmp_path, {"adapt": False}), tmp_path)
    made = collect(session, 0)
    learner = session.learner
    with torch.no_grad():
        for p in learner.policies.parameters.values():
            p.add_(0.05 * torch.ones_like(p))
    rows = replace(made.rows[0], advantage=torch.zeros_like(made.rows[0].advantage))
    entries, _ = chunk_loss(learner, made, rows)
    pulled = entries.value.detach()[:, 0] > 0
    assert torch.equal(pulled, rows.table[GATE][:, 0] > 0) and pulled.any() and not pulled.all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param({"refresh": 1}, marks=pytest.mark.slow),
        {"refresh": 9, "refresh_kl": 1e-12},
    ],
)
def test_a_resumed_run_has_the_same_bits(pipeline, tmp_path, recipe):
    settings = tree(pipeline, tmp_path, recipe, updates=2)
    runs.check_resumed_bits(settings, tmp_path)
    states = [
        json.loads((tmp_path / run / "checkpoints" / "000002" / "state.json").read_text())
        for run in ("whole", "broken")
    ]
    assert states[0]["progress"]["refreshed"] == states[1]["progress"]["refreshed"]
    assert len(states[0]["tracker"]["means"]) == 2 and states[0]["tracker"] == states[1]["tracker"]
    weights = load_file(tmp_path / "whole" / "checkpoints" / "000002" / "policies.safetensors")
    assert any(name.startswith("recent/") for name in weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["rewards"].pop(1), r"rewards: jpeg is missing.*\{name: jpeg, weight: 0\}"),
        (lambda t: t["rewards"].pop(3), "rewards: apart is missing"),
        (lambda t: t["rewards"][2].update(weight=0.5), "colour has weight 0.5, but this recipe"),
        (lambda t: t.update(budget={"flat": "drop"}), "budget: this recipe compares all"),
        (lambda t: t["recipe"].update(auxiliary=[]), "name one in auxiliary"),
        (lambda t: t["recipe"].update(kl=0), "an anchor's weight must be above 0"),
        (
            lambda t: t["recipe"].update(loss={"name": "surrogate", "anchors": []}),
            "which nothing in this",
        ),
    ],
)
def test_what_a_run_lacks_is_said_before_weights_load(pipeline, tmp_path, change, message):
    settings = tree(pipeline, tmp_path)
    change(settings)
    with pytest.raises(UserError, match=message):
        check_run(run_from(settings, "test"))


@pytest.mark.slow
def test_other_recipes_take_the_gate_as_a_part(pipeline, tmp_path):
    """NFT with a gated anchor to the start, written in a run's file."""
    settings = tree(pipeline, tmp_path)
    gate = {"name": "proxy_gate", "auxiliary": ["jpeg"], "share": 0.5}
    settings["recipe"] = runs.NFT | {
        "advantage": ["standardize", {"name": "diverse", "distance": "apart"}, gate],
        "loss": {"name": "nft", "anchors": [{"weight": 0.1, "gated": True}]},
    }
    run = run_from(settings, "test")
    check_named_rewards(run)
    session = runs.session_of(run, tmp_path)
    metrics = iterate(session, Progress()).metrics
    assert 0 < metrics["gated"] < 0.5 and metrics["kl"] == 0
