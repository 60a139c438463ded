"""A server draws the completions: the same numbers where it has the same weights, and their size
and the formula of the correction where it has not."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("httpx")

from flowrl.iteration import ratio_check
from flowrl.iteration.features.ahead import IterationsAhead
from flowrl.iteration.units import LAG
from flowrl.likelihoods.rows import TokenRows
from flowrl.likelihoods.token import Token
from flowrl.run import start
from flowrl.session.progress import Progress
from flowrl.settings import CorrectionSettings
from samplers.generate import Sampler, TokenRequest
from tests.support.completion_servers import (
    GRPO,
    PROMPTS,
    TREE,
    CompletionsServer,
    only,
    tree,
    wait_shortly,
)
from tests.support.iterations import collect, iterate
from tests.support.runs import check_resumed_bits, flowrl, lines, opened, write


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    wait_shortly(monkeypatch, 2.0)


@pytest.mark.slow
def test_a_server_of_the_same_weights_agrees_before_and_after_updates(model, tmp_path):
    """Its adapter is that of the weights in force: saved, loaded there by peft, and asked for."""
    with CompletionsServer(model) as server:
        kept = opened(tree(server, tmp_path, GRPO | {"temperature": 0.7}), tmp_path)
        progress, far = Progress(), []
        assert isinstance(kept.learner.policy.server, Sampler)
        for _ in range(3):
            metrics = iterate(kept, progress).metrics
            far.append(metrics["mismatch_max"])
            assert metrics["ratio_max"] == metrics["ratio_min"] == 1.0
            assert metrics["mismatch_weight"] == pytest.approx(1.0, abs=1e-4)
            assert metrics["mismatch_effective"] == pytest.approx(1.0, abs=1e-6)
        assert max(far) < 1e-5, far
        # each iteration has one adapter more, and the former one goes
        told = [path.rpartition("/")[2] for path, _ in server.told]
        assert told == ["load_lora_adapter"] + 2 * ["load_lora_adapter", "unload_lora_adapter"]
        assert {body["model"] for body in server.bodies} == {
            body["lora_name"] for path, body in server.told if "/load" in path
        }
        assert len(list((tmp_path / "served").iterdir())) == 1
        collect(kept, 3), collect(kept, 3)
        assert len(server.told) == 7, "weights that have not changed are not sent again"


def test_every_request_asks_for_the_plain_distribution_with_a_seed_of_its_own(model, tmp_path):
    with CompletionsServer(model) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        first = only(collect(kept, 0).rows)
        bodies, server.bodies = server.bodies, []
        again = only(collect(kept, 0).rows)
        assert torch.equal(first.ids, again.ids), "noise is keyed by the row"
        assert {b["seed"] for b in bodies} == {b["seed"] for b in server.bodies}
        assert not torch.equal(first.ids, only(collect(kept, 1).rows).ids)
    assert len({body["seed"] for body in bodies}) == len(bodies) == 12
    contexts = [kept.learner.policy.encode(prompt) for prompt in PROMPTS]
    assert sorted(body["prompt"] for body in bodies) == sorted(contexts * 4)
    for body in bodies:
        assert (body["n"], body["max_tokens"], body["temperature"], body["top_p"]) == (1, 4, 1, 1)
        assert (body["top_k"], body["repetition_penalty"], body["min_p"]) == (-1, 1.0, 0.0)
        assert body["stop_token_ids"] == [1] and not body["ignore_eos"]
    assert first.old is None and first.sampled is not None
    ends = first.ids.gather(1, first.lengths[:, None] - 1)[:, 0] == 1
    assert ends.any() and not ends.all()
    assert (first.lengths[~ends] == 4).all() and not first.sampled[~first.written].any()


@pytest.mark.quick_cases("sequence")
@pytest.mark.parametrize(
    "correction",
    [
        {"level": "token", "mode": "truncate", "high": 1.2},
        {"level": "sequence", "mode": "mask", "high": 1.5},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                {"level": "sequence", "mode": "truncate", "high": 1.5, "low": 0.5},
                {"level": "token", "mode": "mask", "high": 1.2, "low": 0.7},
                {"mode": "none"},
            )
        ),
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_other_weights_have_a_mismatch_of_known_size_and_the_correction_is_its_formula(
    model, tmp_path, correction
):
    """The server's logits are 0.5 times ours, so both log-probabilities follow from ours."""
    with CompletionsServer(model, scale=0.5, lora=False) as server:
        kept = opened(tree(server, tmp_path, correction=correction), tmp_path)
        experience = collect(kept, 0)
        rows = only(experience.rows)
        assert ratio_check.check_ratio(kept.learner, experience, kept.terminal) is None
        metrics = iterate(kept, Progress()).metrics
        new = Token().evaluate(experience.policy, rows)  # after the update: not these weights
    plain = opened(tree(server, tmp_path, correction=correction), tmp_path)
    with torch.no_grad():
        policy = plain.learner.policy.open(PROMPTS, [], 4).policy
        ours = policy(rows).logp.double()
        logp = _logits(plain.learner.policy.model, plain.learner.policy, rows)
    theirs = torch.stack([0.5 * row for row in logp]).log_softmax(-1)
    theirs = theirs.gather(2, rows.ids[..., None])[..., 0] * rows.written
    torch.testing.assert_close(rows.sampled.double(), theirs, atol=1e-5, rtol=0)
    assert (new.logp - ours).abs().max() > 1e-3
    c = CorrectionSettings.model_validate(correction)
    apart = (ours - theirs)[rows.mask]
    assert metrics["mismatch"] == pytest.approx(float(apart.abs().mean()), abs=1e-6)
    assert metrics["mismatch_max"] == pytest.approx(float(apart.abs().max()), abs=1e-5)
    ratio = ((ours - theirs) * rows.mask).exp()
    if c.level == "sequence":
        ratio = ratio.prod(1, keepdim=True).expand_as(ours)
    outside = ((ratio > c.high) | (ratio < c.low))[rows.mask]
    assert outside.any() or c.mode == "none"
    cut = ratio.clamp(c.low, c.high)
    weight = {"truncate": cut, "mask": torch.where(cut == ratio, ratio, 0.0), "none": ratio**0}
    w = weight[c.mode][rows.mask]
    assert metrics["mismatch_weight"] == pytest.approx(float(w.mean()), abs=1e-5)
    effective = w.sum() ** 2 / (len(w) * w.square().sum())
    assert metrics["mismatch_effective"] == pytest.approx(float(effective), abs=1e-5)
    share = {"truncate": "mismatch_truncated", "mask": "mismatch_masked"}.get(c.mode)
    for name in ("mismatch_truncated", "mismatch_masked"):
        want = float(outside.double().mean()) if name == share else 0.0
        assert metrics[name] == pytest.approx(want)
    old = -(rows.advantage[rows.mask] * w)
    assert metrics["loss"] == pytest.approx(float(old.mean()), abs=1e-5), "ratio 1 at first"


def _logits(model, policy, rows: TokenRows) -> torch.Tensor:
    """[b t v], one row at a time from the model's own full logits."""
    found = torch.zeros(*rows.ids.shape, model.config.vocab_size, dtype=torch.float64)
    for i, row in enumerate(rows.ids.tolist()):
        context = policy.encode(PROMPTS[int(rows.prompt[i])])
        length = int(rows.lengths[i])
        logits = model(input_ids=torch.tensor([context + row[:length]])).logits[0].double()
        found[i, :length] = logits[len(context) - 1 : -1]
    return found


@pytest.mark.slow
def test_a_run_with_a_server_trains_evaluates_and_needs_none_afterwards(model, tmp_path, capsys):
    with CompletionsServer(model) as server:
        settings = tree(server, tmp_path) | {"evaluate": {"every": 1, "samples": 12}}
        folder = tmp_path / "run"
        assert flowrl("train", write(settings, tmp_path), "--folder", folder) == 0
        assert "samples completions; its log-probabilities differ" in capsys.readouterr().out
        kept = sum("/load" in path for path, _ in server.told)
        assert kept == 4, "the start, and once after each of three updates"
        assert not server.loaded and not list((folder / "served").iterdir()), "taken away"
    assert lines(folder)[1]["mismatch_max"] < 1e-5
    assert flowrl("sample", folder, "cab :", "--out", tmp_path / "out") == 0


def test_requests_of_one_key_that_begin_apart_have_seeds_apart(model, tmp_path):
    """Later turns and segments of a row come with its own key, further on in its noise."""
    with CompletionsServer(model) as server:
        sampler = opened(tree(server, tmp_path), tmp_path).learner.policy.server
        noise = torch.tensor([7, -(2**63), 2**63 - 1])
        asked = TokenRequest([[2]] * 3, noise, torch.tensor([1] * 3), 1.0, 1.0)
        for first in (0, 1, 4, 400):
            sampler(replace(asked, first=first))
        seeds = [body["seed"] for body in server.bodies]
    assert len(set(seeds)) == 12 and all(0 <= seed < 2**31 for seed in seeds)


def test_evaluations_are_drawn_here_where_the_server_keeps_its_own_weights(model, tmp_path):
    with CompletionsServer(model, scale=0.5, lora=False) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        batch = kept.learner.policy.open(PROMPTS, [], 4)
        (found,) = batch.rollouts(kept.learner.policy.plain(4), (0, 1, 2), seed=0, iteration=0)
        assert not server.bodies and not found.elsewhere
        (drawn,) = batch.rollouts(kept.algorithm.plan, (0, 1, 2), seed=0, iteration=0)
        assert len(server.bodies) == len(drawn.ids) == 12 and drawn.elsewhere


@pytest.mark.slow
def test_a_tree_of_segments_is_drawn_from_prefixes(model, tmp_path):
    with CompletionsServer(model) as server:
        kept = opened(tree(server, tmp_path, TREE), tmp_path)
        rows = only(collect(kept, 0).rows)
        metrics = iterate(kept, Progress()).metrics
    assert metrics["mismatch_max"] < 1e-5
    pairs = rows.ids.view(-1, 2, 4)
    assert torch.equal(pairs[:, 0, :2], pairs[:, 1, :2])
    assert {len(body["prompt"]) for body in server.bodies} == {2, 4, 5, 7, 6, 8}


@pytest.mark.slow
def test_a_server_draws_an_iteration_ahead_with_the_weights_of_its_version(
    model, tmp_path, monkeypatch
):
    """While the model is updated. Asked late, with those weights loaded again, it draws the same:
    so it does for a resumed run, whose answers ahead are lost."""
    with CompletionsServer(model) as server:
        found = []
        for ahead in (True, False):
            folder = tmp_path / str(ahead)
            folder.mkdir()
            settings = tree(server, folder) | {"workers": {"lag": 1}}
            kept = opened(settings, folder)
            kept = start.with_source(kept, start.sampled_ahead(kept))
            answers, drawn = kept.learner.policy.server.ahead, []
            if not ahead:
                monkeypatch.setattr(IterationsAhead, "_ask_server", lambda *_: None)
            progress = Progress()
            for _ in range(3):
                made = iterate(kept, progress)
                answers.wait()
                assert len(answers.known) == ahead, "the next iteration's, and none that was used"
                metrics = {k: v for k, v in made.metrics.items() if not k.startswith("seconds")}
                drawn.append((only(made.rows.rows).ids, metrics))
            loads = [path.rpartition("/")[2] for path, _ in server.told]
            found.append((drawn, loads.count("load_lora_adapter")))
            server.told.clear()
            kept.learner.close()
    (early, loaded), (late, again) = found
    for (ids, metrics), (other, beside) in zip(early, late, strict=True):
        assert ids.equal(other) and metrics == beside
    assert [metrics[LAG] for _, metrics in early] == [0, 1, 1]
    assert (loaded, again) == (3, 2), "a version is loaded once, when its iteration begins"


@pytest.mark.slow
def test_a_run_with_a_server_and_a_lag_is_resumed_with_the_same_bits(model, tmp_path):
    with CompletionsServer(model) as server:
        check_resumed_bits(tree(server, tmp_path) | {"workers": {"lag": 1}}, tmp_path)
