"""Whole runs of a tiny language model, through the loop that makes pictures."""

import ast
import json
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Context, Estimator, Standardize
from flowrl.errors import UserError
from flowrl.iteration import ratio_check
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Transition
from flowrl.losses.base import Counts, reduced
from flowrl.losses.ratio import Surrogate
from flowrl.media.statistics import text_statistics
from flowrl.models.language.policy import CausalPolicy
from flowrl.paths import PROJECT
from flowrl.run.evaluate.evaluate import evaluate_held_out
from flowrl.session.progress import Progress
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings.read import check_run, run_from
from rewards import Scores
from samplers import Chain, FlowSDE, Latents, Ode, roll
from samplers.completions import Completions
from tests.support import text_runs, tiny_lm
from tests.support.advice import advice
from tests.support.iterations import Collected, collect, iterate
from tests.support.runs import flowrl, lines, write
from tests.support.tiny import TinyFlow

SMALL = {
    "text_grpo": text_runs.GRPO | {"kl": 0.01},
    "text_rloo": {"length": 6, "group": 6},
    "text_dr_grpo": {"length": 6, "group": 6},
    "text_dapo": {"length": 6, "group": 6},
    "text_gspo": {"length": 6, "group": 6, "low": 0.1, "high": 0.1},
    "text_tree": text_runs.TREE,
}
WARPED = {"temperature": 0.7, "top_p": 0.9}


@pytest.mark.quick_cases("text_grpo")
@pytest.mark.parametrize("recipe", [text_runs.GRPO, text_runs.TREE], ids=lambda r: r["name"])
def test_a_run_leaves_what_it_promises(model, tmp_path, capsys, recipe):
    config = write(text_runs.tree(model, tmp_path, recipe | WARPED), tmp_path)
    folder = tmp_path / "run"
    assert flowrl("train", config, "--folder", folder) == 0
    said = capsys.readouterr().out
    assert "left padding changes" in said and "self-check" in said
    assert [line["iteration"] for line in lines(folder)] == [0, 1, 2, 3]
    names = {f"text/{n}" for n in ("length", "stopped", "empty", "distinct", "surprise")}
    assert names | {"reward", "ratio", "grad_norm", "seconds/sample"} <= lines(folder)[1].keys()
    assert lines(folder)[1]["count/scored"] == 18
    counted = lines(folder)[1]
    assert counted["count/training"] >= counted["count/sampling"] > 0
    pages = {
        name: [json.loads(line) for line in (folder / "samples" / f"{name}.jsonl").open()]
        for name in ("before", "000002", "after", "before_after")
    }
    assert all(len(page) == 4 for page in pages.values())
    for old, new, both in zip(pages["before"], pages["after"], pages["before_after"], strict=True):
        assert (both["prompt"], both["before"], both["after"]) == (
            old["prompt"], old["text"], new["text"],
        )  # fmt: skip
        assert both["score_after"] == new["score"]
    page = (folder / "samples" / "before_after.html").read_text()
    assert "run, iteration 3: share" in page and page.count("<tr") == 5
    assert f"samples: {folder / 'samples'}  weights:" in said and "images:" not in said
    plain = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert AutoTokenizer.from_pretrained(folder / "model")("ab").input_ids == [2, 3]
    assert plain.generation_config.repetition_penalty == 1.7
    assert flowrl("sample", folder, "cab :", "--count", "3", "--out", tmp_path / "out") == 0
    written = [json.loads(line) for line in (tmp_path / "out" / "grid.jsonl").open()]
    assert len(written) == 3 and written[0]["prompt"] == "cab :"
    assert flowrl("evaluate", folder, "--samples", "6", "--out", tmp_path / "scores.jsonl") == 0
    assert "distinct within a prompt" in capsys.readouterr().out
    assert flowrl("sample", folder, "cab :", "--guidance", "2.0") == 2
    assert flowrl("sample", folder, "cab :", "--steer", "best") == 2
    assert "images" in capsys.readouterr().err
    assert flowrl("plan", config) == 0
    assert "completions of at most 6 tokens" in capsys.readouterr().out


def test_adapters_are_trained_and_saved(model, tmp_path, capsys):
    tree = text_runs.tree(model, tmp_path, text_runs.GRPO | {"kl": 0.05})
    tree["model"]["lora"] = {"rank": 2, "alpha": 8}
    assert flowrl("train", write(tree, tmp_path), "--folder", tmp_path / "run") == 0
    saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert any(t.abs().max() > 0 for name, t in saved.items() if "lora_B" in name)
    assert "kl" in lines(tmp_path / "run")[1]
    assert flowrl("sample", tmp_path / "run", "cab :", "--out", tmp_path / "out") == 0


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("warp", [{}, WARPED], ids=["plain", "warped"])
def test_the_first_ratio_is_one_at_any_temperature(model, tmp_path, name, warp):
    kept = text_runs.session(model, tmp_path, {"name": name, **SMALL[name], **warp})
    experience = collect(kept, 0)
    floor = ratio_check.check_ratio(kept.learner, experience, kept.terminal)
    assert floor is not None and floor < 2e-5


@pytest.mark.quick_cases("text_tree", "text_gspo")
@pytest.mark.parametrize("name", SMALL)
def test_every_text_recipe_raises_its_reward(model, tmp_path, name):
    kept = text_runs.session(
        model, tmp_path, {"name": name, **SMALL[name]}, lr=2e-2, rows_per_call=32
    )
    progress = Progress()
    rewards = [iterate(kept, progress).metrics["reward"] for _ in range(12)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards


def test_recomputed_old_log_probabilities_make_the_ratio_exactly_one(model, tmp_path):
    kept = text_runs.session(model, tmp_path, text_runs.GRPO | WARPED, recompute_old=True)
    metrics = iterate(kept, Progress()).metrics
    assert metrics["ratio_max"] == metrics["ratio_min"] == 1.0


def test_another_chunk_size_gives_the_same_weights(model, tmp_path):
    def trained(rows: int) -> list[torch.Tensor]:
        kept = text_runs.session(
            model, tmp_path, text_runs.GRPO, rows_per_call=rows, updates=2, lr=1e-3
        )
        progress = Progress()
        for _ in range(2):
            iterate(kept, progress)
        return [p.detach().clone() for p in kept.learner.policies.parameters.values()]

    for a, b in zip(trained(64), trained(5), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


def test_a_resumed_run_ends_with_the_same_bits(model, tmp_path):
    def opened(folder):
        folder.mkdir()
        return text_runs.session(model, folder, text_runs.TREE | WARPED, updates=2)

    text_runs.check_resumed_bits(tmp_path, opened)


def test_rows_without_a_score_are_masked_and_counted_and_a_silent_group_is_an_error(
    model, tmp_path
):
    settings = text_runs.tree(model, tmp_path, text_runs.GRPO)
    settings["rewards"] = [{"name": f"{tmp_path / 'own.py'}:patchy"}]
    settings["train"] |= {"self_test": "off"}
    skipping = deepcopy(settings)
    skipping["train"] |= {"on_failure": "skip_group"}
    right = deepcopy(settings)
    right["rewards"] = [{"name": f"{tmp_path / 'own.py'}:share"}]

    def sampled(tree: dict[str, Any]) -> tuple[Session, Collected]:
        run = run_from(tree, "test")
        session = open_session(run, tmp_path, open_accelerator(run, tmp_path))
        return session, collect(session, 0)

    for follow in (right, skipping):
        kept, experience = advice(
            "{} of {} groups have no score{}; fix the reward, or set train.on_failure: skip_group "
            "to skip these groups",
            lambda: sampled(settings),
            lambda follow=follow: sampled(follow),
        )
    (rows,) = experience.rows
    silent = ~experience.scores.scored[:, 0]
    assert silent.sum() == experience.metrics["unscored"] >= 6
    assert torch.equal(~rows.mask.any(1), silent) and not rows.advantage[silent].any()
    assert iterate(kept, Progress()).metrics["skipped"] == 0


def test_one_estimator_and_one_loss_serve_pictures_and_text():
    """The same two objects on an image batch and on a text batch, against formulas by hand."""
    estimator, loss = Estimator((Standardize("group", correction=1),)), Surrogate(0.2, 0.2)
    values = torch.tensor([1.0, 2.0, 3.0, 6.0, 0.0, 0.0, 5.0, 5.0])[:, None]
    scores = Scores(values, torch.ones(8, 1, dtype=torch.bool), ("toy",))
    groups = values.view(2, 4).double()
    want = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)

    (plan,) = Chain(FlowSDE(0.7), 4)([1.0, 0.6, 0.3, 0.0], 0, 0)
    flow, policy = TinyFlow(2), tiny_policy()
    (pictures,) = roll((plan,), flow, Latents((2,)), (0, 1), seed=0, iteration=0)
    batch = policy.open(["a:", "cab :"], [], 5)
    (texts,) = batch.rollouts(Completions(4), (0, 1), seed=0, iteration=0)
    shift = 0.3
    written = torch.arange(5) < texts.lengths[:, None]
    assert len(texts.lengths.unique()) > 1
    for rollout, likelihood, made, model, entries_of in (
        (pictures, Transition(), flow, flow, torch.ones(8, 1, dtype=torch.bool)),
        (texts, Token(), batch.policy, policy.model, written),
    ):
        context = Context(rollout.columns, torch.ones(1))
        advantage, mask = estimator(scores, context)
        assert advantage.shape == (8, len(rollout.columns.nodes))
        for column in advantage.unbind(1):
            torch.testing.assert_close(column, want.flatten())
        every = likelihood.rows(rollout, advantage, mask)
        assert len(every) == (2 if rollout is pictures else 1), "trained steps, or one for all"
        for rows in every:
            assert torch.equal(rows.mask, entries_of), "all of them, and no padding"
            each = want.flatten().float()[:, None].expand_as(rows.mask)
            torch.testing.assert_close(rows.advantage[rows.mask], each[rows.mask])
            check_gradient(loss, likelihood, likelihood.evaluate(made, rows), rows, model)
            with torch.no_grad():
                new = likelihood.evaluate(made, rows)
            moved = {"new": new._replace(logp=rows.old.logp + shift), "old": rows.old}
            entries = loss(likelihood, moved, rows)
            ratio = torch.tensor(shift).exp()
            a = rows.advantage
            by_hand = -torch.minimum(ratio * a, ratio.clamp(max=1.2) * a)
            torch.testing.assert_close(entries.value[rows.mask], by_hand[rows.mask])
            same = loss(likelihood, {"new": new, "old": rows.old}, rows)
            torch.testing.assert_close(same.value[rows.mask], -a[rows.mask], atol=1e-4, rtol=1e-4)


def check_gradient(loss, likelihood, new, rows, model) -> None:
    """On fresh samples it is REINFORCE's: the mean of -A times the gradient of log p."""
    entries = loss(likelihood, {"new": new, "old": new._replace(logp=new.logp.detach())}, rows)
    plain = -(rows.advantage * new.logp)[rows.mask].mean()
    weights = [p for p in model.parameters() if p.requires_grad]
    value = reduced(entries, rows.mask, Counts.of([rows.mask]))
    got, want = (torch.autograd.grad(v, weights, retain_graph=True) for v in (value, plain))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    assert max(float(g.abs().max()) for g in got) > 1e-3


def tiny_policy() -> CausalPolicy:
    return CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer())


def test_the_loop_s_files_do_not_know_text():
    """Names of language models, tokens or texts stand in no file of the loop."""
    stages = ("stages", "draw", "sample", "score", "credit", "rows", "update", "ratio_check")
    wings = ("run/train", "run/evaluate/evaluate", "run/save/checkpoint", "session/policies")
    for name in (*wings, *(f"iteration/{stage}" for stage in stages)):
        tree = ast.parse((PROJECT / "flowrl" / f"{name}.py").read_text())
        words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        words |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        words |= {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        known = {"language", "pipeline", "tokenizer", "TextRollout", "TokenRows", "CausalPolicy"}
        assert not words & known, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"pipeline": "flowrl/demo/shapes-sd3"}}, "either pipeline"),
        ({"model": {"height": 32}}, "height is a setting of pipeline models"),
        ({"recipe": {"name": "nft", "steps": 4, "group": 4}}, "nft is for model.pipeline"),
        ({"model": {"gguf_file": "no.gguf"}}, "has no no.gguf"),
        ({"recipe": {"name": "text_grpo", "length": 6, "group": 1}}, "group of one"),
        ({"recipe": {"name": "text_grpo", "length": 6, "group": 4, "temperature": 0.0}}, "temp"),
        ({"recipe": {"name": "text_tree", "length": 6, "at": [7]}}, "must increase"),
    ],
)
def test_mixtures_that_cannot_be_are_refused_before_weights_load(model, tmp_path, changes, message):
    tree = text_runs.tree(model, tmp_path, text_runs.GRPO)
    for section, values in changes.items():
        tree[section] = values if section == "recipe" else tree[section] | values
    with pytest.raises(UserError, match=message):
        check_run(run_from(tree, "test"))


def test_a_picture_recipe_s_likelihood_and_a_plan_of_text_do_not_mix():
    parts = {"steps": 4, "advantage": Estimator((Standardize(),)), "loss": Surrogate(0.2, 0.2)}
    with pytest.raises(UserError, match="needs the Token likelihood"):
        Algorithm(plan=Completions(4), likelihood=Transition(), **parts)
    with pytest.raises(UserError, match="needs a text plan"):
        Algorithm(plan=Ode(4), likelihood=Token(), **parts)


def test_text_statistics_are_what_their_names_say():
    texts, group = ["a", "a", "b", " ", "c", "c"], torch.tensor([0, 0, 0, 1, 1, 1])
    lengths = torch.tensor([2, 2, 2, 2, 3, 3])
    stopped = torch.tensor([True, True, True, True, False, False])
    found = text_statistics(texts, group, lengths, stopped)
    assert found.means == pytest.approx(
        {"length": 14 / 6, "stopped": 4 / 6, "empty": 1 / 6, "distinct": 8 / 12}
    )
    for name in ("length", "stopped", "empty"):
        assert float(found.columns[name].mean()) == pytest.approx(found.means[name])
    assert found.columns["distinct"].tolist() == [0.5, 0.5, 1, 1, 0.5, 0.5]


def test_an_evaluation_gathers_sharded_weights_once_and_behind_its_own(
    model, tmp_path, monkeypatch
):
    session = text_runs.session(model, tmp_path, text_runs.GRPO)
    assert session.held_out is not None
    order: list[str] = []

    @contextmanager
    def noted(name, real):
        with real():
            order.append(name)
            yield

    learner, parallel = session.learner, session.parallel
    evaluating, whole = learner.evaluating, parallel.whole
    monkeypatch.setattr(type(learner), "evaluating", lambda _: noted("own", evaluating))
    monkeypatch.setattr(type(parallel), "whole", lambda _: noted("gathered", whole))
    evaluate_held_out(learner, session.held_out, session.judges)
    assert order == ["own", "gathered"]
