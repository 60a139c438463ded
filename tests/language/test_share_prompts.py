"""train.share_prompts: common beginnings of texts are evaluated once, with the same gradients."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from flowrl.errors import UserError
from flowrl.iteration import update
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.language.prefixes import Packing, refuse_windows
from flowrl.models.language.token_scores import ScoringPolicy
from flowrl.models.language.use import TextUse
from flowrl.session.learner import Learner
from flowrl.session.progress import Progress
from flowrl.settings.read import check_plan, run_from
from tests.support import iterations, runs, text_runs, tiny_lm
from tests.support.iterations import collect

RECIPES: dict[str, dict[str, Any]] = {
    "chain": {"name": "text_grpo", "length": 6, "group": 4, "kl": 0.04},
    "tree": {**text_runs.TREE, "roots": 2, "at": [1, 3]},
    "forks": {"name": "text_treerl", "length": 6, "roots": 2},
    "entropies": {
        "name": "text",
        "length": 6,
        "group": 4,
        "loss": {"entropy": 0.01},
        "likelihood": {"entropy": True},
    },
    "pairs": {"name": "text_dpo", "length": 6, "group": 4},
}
ALL = Packing(math.inf)  # everything that neighbours share
SHARED = TextUse(share_prompts=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """GPT-2, whose layers keep float64; Llama's norms round to float32."""
    folder = tmp_path_factory.mktemp("share") / "lm"
    tiny_lm.gpt2().save_pretrained(folder)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_those_of_texts_by_themselves(model, tmp_path, monkeypatch, name):
    """Two optimizer steps of the same deal: gradients, ratios and every other role."""
    found: list[list[Tensor]] = []

    def step(learner: Learner, progress: Progress, tally: update.Tally) -> float:
        parameters = learner.policies.parameters.values()
        found.append([p.grad.clone() for p in parameters if p.grad is not None])
        learner.optimizer.zero_grad()
        with torch.no_grad():
            for p in parameters:  # so that the second step has ratios other than 1
                p.add_(0.02 * torch.sin(torch.arange(p.numel(), dtype=p.dtype)).view_as(p))
        return 1.0

    monkeypatch.setattr(update, "optimizer_step", step)
    settings = text_runs.tree(model, tmp_path, RECIPES[name], updates=2, rows_per_call=5)
    settings["model"]["dtype"] = "float64"
    kept = runs.opened(settings, tmp_path)
    experience = collect(kept, 0)
    before = kept.learner.policies.state()
    metrics = [iterations.update(kept.learner, experience, Progress()).metrics]
    kept.learner.policies.restore(before)
    tokens = Tokens()
    kept.learner.policy.roots()["model"].register_forward_pre_hook(tokens)
    iterations.update(kept.learner, experience, Progress())
    alone, tokens.seen = tokens.seen, 0
    kept.learner.policies.restore(before)
    experience = replace(experience, policy=replace(experience.policy, packing=ALL))  # type: ignore[type-var]
    metrics.append(iterations.update(kept.learner, experience, Progress()).metrics)
    assert tokens.seen < 0.75 * alone
    for key, value in metrics[0].items():
        assert metrics[1][key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
    assert len(found) == 6
    for got, want in zip(found[4:], found[:2], strict=True):
        size = max(float(grad.abs().max()) for grad in want)
        assert size > 1e-6
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12 * size, rtol=1e-12)


class Tokens:
    """Counts the tokens of a model's calls, padding included."""

    seen = 0

    def __call__(self, _module: Any, args: tuple[Any, dict[str, Any]]) -> None:
        self.seen += args[1]["input_ids"].numel()


TEXTS = st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=7), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None)
@given(TEXTS, st.sampled_from([0.0, 3.0, 30.0, math.inf]))
def test_a_pack_holds_every_beginning_once_and_attends_to_it_alone(texts, pairs):
    packs = Packing(pairs).packs(texts)
    assert sum(len(pack.paths) for pack in packs) == len(texts)
    rows = iter(texts)
    for pack in packs:
        beginnings = set()
        mask = pack.ancestors(len(pack.ids) + 1)
        for path in pack.paths:
            text = next(rows)
            assert [pack.ids[node] for node in path] == text
            assert [pack.depths[node] for node in path] == list(range(len(text)))
            for depth, node in enumerate(path):
                assert mask[node].nonzero()[0].tolist() == sorted(path[: depth + 1])
            beginnings |= {tuple(text[:end]) for end in range(1, len(text) + 1)}
        assert len(pack.ids) == len(beginnings)
        assert mask[-1].nonzero()[0].tolist() == [len(pack.ids)]


def test_texts_share_a_pack_where_that_lowers_the_cost_of_a_text():
    prompt = list(range(2, 34))
    texts = [[*prompt, 40 + i] for i in range(4)]
    assert len(Packing(100.0).packs(texts)) == 1
    assert len(Packing(100.0).packs([[*text[:1], *range(i, i + 40)]
                                     for i, text in enumerate(texts)])) == 4  # fmt: skip
    # 2 tokens in common of 32: at 16 pairs a token the larger attention costs more than they do
    few = [[2, 3, *range(10 * i, 10 * i + 30)] for i in range(1, 3)]
    assert [len(Packing(pairs).packs(few)) for pairs in (16.0, 16000.0)] == [2, 1]
    assert Packing(16.0)(few, torch.device("cpu")) is None


@pytest.mark.parametrize("make", [tiny_lm.llama, tiny_lm.gpt2])
def test_the_start_proves_it(make):
    policy = CausalPolicy(make(), tiny_lm.tokenizer(), use=SHARED)
    assert any("evaluated once" in line for line in policy.proofs(["ab:", "cdefg:"], 3))
    assert policy.open(["ab:"], [{}], 3).policy.packing == policy.packing


def test_a_model_that_ignores_the_mask_is_refused():
    model = tiny_lm.llama()
    policy = CausalPolicy(model, tiny_lm.tokenizer(), use=SHARED)
    inner, forward = model.base_model, model.base_model.forward

    def deaf(*args: Any, **named: Any) -> Any:
        if named.get("attention_mask") is not None and named["attention_mask"].ndim == 4:
            named["attention_mask"] = None
        return forward(*args, **named)

    inner.forward = deaf
    with pytest.raises(
        UserError,
        match=r"train.share_prompts: it changes the next-token distribution of LlamaForCausalLM",
    ):
        policy.proofs(["abcd:", "cdefgh:"], 4)


def test_windows_and_other_layers_are_refused():
    small = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    window = MistralForCausalLM(MistralConfig(**small, sliding_window=4))
    layers = Qwen3ForCausalLM(Qwen3Config(**small, use_sliding_window=True, sliding_window=4,
                                          max_window_layers=1))  # fmt: skip
    for model in (window, layers):
        with pytest.raises(UserError, match=r"train.share_prompts: .*set train.share_prompts: fal"):
            CausalPolicy(model, tiny_lm.tokenizer(), use=SHARED)
    flash = tiny_lm.llama()
    flash.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UserError, match="flash_attention_2 attention takes no mask"):
        refuse_windows(flash)


def test_a_pipeline_has_no_prompts_to_share(tmp_path, pipeline):
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO, share_prompts=True)
    with pytest.raises(UserError, match=r"train\.share_prompts is only for texts"):
        check_plan(run_from(tree, "test"))


def test_without_the_setting_texts_are_called_by_themselves(model, tmp_path):
    """So that the numbers of earlier runs stay the same to the bit."""
    kept = text_runs.session(model, tmp_path, text_runs.GRPO)
    policy = collect(kept, 0).policy
    assert isinstance(policy, ScoringPolicy) and policy.packing is None
    with_it = text_runs.session(model, tmp_path, text_runs.GRPO, share_prompts=True)
    assert collect(with_it, 0).policy.packing is not None  # type: ignore[union-attr]


def test_texts_of_several_packs_find_their_own_tokens():
    texts = [[1, 2, 3], [1, 2, 4], [5, 6, 7, 8], [5, 6, 9]]
    packed = Packing(2.0)(texts, torch.device("cpu"))
    assert packed is not None and len(packed.ids) == 2, "a pack for each beginning"
    found = packed.ids.flatten()[packed.positions]
    assert [row[: len(text)].tolist() for row, text in zip(found, texts, strict=True)] == texts
