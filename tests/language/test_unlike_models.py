"""Language models that are built otherwise than Llama: layers, heads, and states between calls."""

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from flowrl.media.statistics import merged_means
from flowrl.models.language.generation import Generation
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.language.token_scores import has_separate_head
from flowrl.session.progress import Progress
from samplers.completions import Completions
from samplers.generate import TokenRequest
from tests.support import environments, text_runs, tiny_lm
from tests.support.iterations import iterate

SMALL = {
    "vocab_size": 14, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def gemma2(cap: float | None):
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=cap)).eval()


def granite(scale: float):
    torch.manual_seed(0)
    return GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=scale)).eval()


@pytest.mark.parametrize(
    ("model", "separate"),
    [
        (lambda: gemma2(30.0), False), (lambda: gemma2(None), True), (lambda: granite(8.0), False),
        (lambda: granite(1.0), True), (tiny_lm.llama, True), (tiny_lm.gpt2, True),
    ],
    ids=["capped", "uncapped", "scaled", "unscaled", "llama", "gpt2"],
)  # fmt: skip
def test_a_head_with_more_behind_it_is_found_where_its_logits_are_small(model, separate):
    """A cap of 30 changes logits below 0.1 by less than rounding."""
    made = model().eval()
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(0.05)
        logits = made(input_ids=torch.tensor([[2, 3, 4]])).logits
    assert logits.abs().max() < 0.4
    assert has_separate_head(made) is separate
    assert not made.get_output_embeddings()._forward_hooks


def test_gpt2_takes_adapters_and_peft_reads_them(tmp_path):
    model = tiny_lm.gpt2()
    model.save_pretrained(tmp_path / "base")
    policy = CausalPolicy(model, tiny_lm.tokenizer())
    ids = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        policy.add_lora(rank=2, alpha=4, targets=None, seed=0)
        torch.testing.assert_close(model(input_ids=ids).logits, before)
        for name, weight in policy.trainable().items():
            assert ".lora_" in name
            weight.add_(0.1)
        after = model(input_ids=ids).logits
    assert len(policy.trainable()) == 2 * 2 * 4 and (after - before).abs().max() > 1e-2
    policy.save(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(input_ids=ids).logits, after)


def test_dropout_and_outputs_beyond_the_tokenizer_change_no_ratio(tmp_path):
    """GPT-2's dropout of 0.3, and more outputs than the tokenizer has tokens, as models padded for
    speed have: the first ratio is 1, the first KL 0, and every sampled id can be decoded."""
    model = tiny_lm.gpt2()
    model.resize_token_embeddings(24, mean_resizing=False)
    model.save_pretrained(tmp_path / "lm")
    tiny_lm.tokenizer().save_pretrained(tmp_path / "lm")
    recipe = {**text_runs.GRPO, "kl": 0.01}
    session = text_runs.session(tmp_path / "lm", tmp_path, recipe)
    policy = session.learner.policy
    assert isinstance(policy, CausalPolicy)
    assert policy.model.get_output_embeddings().out_features == 24 > len(policy.tokenizer)
    progress = Progress()
    first = iterate(session, progress).metrics
    assert first["ratio"] == pytest.approx(1, abs=1e-5) and abs(first["kl"]) < 1e-6
    assert not any(module.training for module in policy.model.modules())
    assert iterate(session, progress).metrics["reward"] >= 0


def test_a_recurrent_model_begins_every_call_anew():
    """RecurrentGemma itself resets its states only for prompts of several tokens."""
    torch.manual_seed(0)
    own = {k: v for k, v in SMALL.items() if k != "head_dim"}
    config = RecurrentGemmaConfig(**own, lru_width=16, block_types=["recurrent", "attention"])
    model = tiny_lm.sharpened(RecurrentGemmaForCausalLM(config))
    sampler = Generation(model, [1])
    for context in ([5], [5, 6, 7]):
        asked = TokenRequest([context], torch.tensor([7]), torch.tensor([6]), 1.0, 1.0)
        first, second = sampler(asked), sampler(asked)
        assert torch.equal(first.ids, second.ids) and torch.equal(first.logp, second.logp)


def test_statistics_of_texts_do_not_depend_on_the_number_of_processes(tmp_path):
    """Parts of unlike lengths, merged by what each is a mean of."""
    policy = environments.made(tmp_path, "named")
    batch = policy.open(environments.PROMPTS, environments.META, 24)
    found = {}
    for draws in ((0, 1, 2, 3), (0, 1), (2,), (3,)):
        some = [environments.PROMPTS[i] for i in draws], [environments.META[i] for i in draws]
        own = policy.open(*some, 24)
        (rollout,) = own.rollouts(Completions(6), draws, seed=0, iteration=0)
        found[draws] = own.statistics(rollout, own.media(rollout))
    whole = found.pop((0, 1, 2, 3)).means
    parts = [(each.means, each.size) for each in found.values()]
    nested = [(merged_means(parts[:2]), parts[0][1] + parts[1][1]), parts[2]]
    assert {"text/surprise", "text/met", "text/turns", "text/length"} <= whole.keys()
    assert len({each["text/length"] for each, _ in parts}) == 3
    for merged in (merged_means(parts), merged_means(nested)):
        assert merged == pytest.approx(whole, rel=1e-6)
    assert batch.meter.frozen == 0
