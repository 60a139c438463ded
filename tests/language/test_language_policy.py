"""A language model as a policy: what it draws, what it says of it, and that the two agree."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl.errors import UserError
from flowrl.likelihoods.rows import TokenRows, take
from flowrl.likelihoods.token import Token
from flowrl.models.language import proofs, token_scores
from flowrl.models.language.given_texts import completion_rows
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.language.use import TextUse
from flowrl.models.policy import Batch, Policy, RolloutLike
from samplers.completions import Completions, Segments, TextRollout
from tests.support import tiny_lm

PROMPTS = ["a:", "cab dig:", "bead :", "hi"]
WARPED = Completions(6, temperature=0.7, top_p=0.9)


@pytest.fixture(scope="module")
def policy() -> CausalPolicy:
    return CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer())


def rollout(policy: CausalPolicy, plan, steps: int = 7, prompts=PROMPTS, **key) -> TextRollout:
    batch = policy.open(prompts, [], steps)
    draws = key.pop("draws", range(len(prompts)))
    (found,) = batch.rollouts(plan, draws, **({"seed": 0, "iteration": 0} | key))
    return found


def rows(found: TextRollout, **likelihood) -> TokenRows:
    n, k = len(found.ids), len(found.plan.nodes)
    credit = torch.linspace(-1, 1, n, dtype=torch.float64)[:, None].expand(n, k)
    (made,) = Token(**likelihood).rows(found, credit, torch.ones(n, k, dtype=torch.bool))
    return made


def test_it_meets_the_loop_s_joint(policy):
    batch = policy.open(PROMPTS, [], 3)
    assert isinstance(policy, Policy) and isinstance(batch, Batch)
    assert isinstance(rollout(policy, WARPED), RolloutLike)


@pytest.mark.parametrize("plan", [Completions(5), WARPED, Segments(2, 2, (2, 4), 0.7, 0.9)])
@pytest.mark.parametrize("make", [tiny_lm.llama, tiny_lm.gpt2])
def test_the_trainer_finds_the_sampler_s_log_probabilities(plan, make):
    policy = CausalPolicy(make(), tiny_lm.tokenizer())
    policy.rows_per_call = 7
    batch = policy.open(PROMPTS, [], 7)
    (found,) = batch.rollouts(plan, range(4), seed=0, iteration=0)
    made = rows(found, entropy=True)
    said = Token(entropy=True).evaluate(batch.policy, made)
    torch.testing.assert_close(said.logp, found.logp, atol=2e-5, rtol=0)
    assert (said.logp[found.written] < 0).any() and not said.logp[~found.written].any()
    assert found.stopped.any() and not found.stopped.all()


def test_log_probabilities_are_those_of_an_independent_computation(policy):
    """One token at a time from the model's own full logits, top-p by its definition."""
    found = rollout(policy, WARPED)
    context = policy.encode(PROMPTS[1])
    row = 8  # of the second prompt
    for t in range(int(found.lengths[row])):
        ids = torch.tensor([context + found.ids[row, :t].tolist()])
        with torch.no_grad():
            p = (policy.model(input_ids=ids).logits[0, -1].double() / 0.7).softmax(-1)
        kept, mass = [], 0.0
        for token in p.argsort(descending=True).tolist():
            if mass < 0.9:
                kept.append(token)
                mass += float(p[token])
        own = int(found.ids[row, t])
        assert own in kept
        assert found.logp[row, t].item() == pytest.approx((p[own] / mass).log().item(), abs=1e-5)


def test_completions_depend_on_neither_batch_nor_chunk_nor_order(policy):
    whole = rollout(policy, WARPED)
    policy.rows_per_call = 5
    chunked = rollout(policy, WARPED)
    policy.rows_per_call = None
    turned = rollout(policy, WARPED, prompts=PROMPTS[::-1], draws=(3, 2, 1, 0))
    assert torch.equal(whole.ids, chunked.ids)
    assert torch.equal(whole.ids.view(4, 6, -1), turned.ids.view(4, 6, -1).flip(0))
    torch.testing.assert_close(whole.logp, chunked.logp, atol=1e-5, rtol=0)
    assert not torch.equal(whole.ids, rollout(policy, WARPED, iteration=1).ids)
    assert not torch.equal(whole.ids, rollout(policy, WARPED, draws=(4, 5, 6, 7)).ids)


def test_first_tokens_have_the_model_s_probabilities(policy):
    """Over many keyed completions, against the softmax of the model's own logits."""
    found = rollout(policy, Completions(3000), steps=1, prompts=PROMPTS[:1])
    ids = torch.tensor([policy.encode(PROMPTS[0])])
    with torch.no_grad():
        p = policy.model(input_ids=ids).logits[0, -1].double().softmax(-1)
    counts = torch.bincount(found.ids[:, 0], minlength=len(p)).double()
    likely = p * 3000 > 5
    chi = ((counts - p * 3000).square() / (p * 3000))[likely].sum()
    assert chi < 40 and int(likely.sum()) <= 14  # 13 degrees: 40 is far beyond the 0.1 % point


def test_siblings_share_their_prefix_and_stopped_ones_are_copies(policy):
    found = rollout(policy, Segments(3, 2, (2,)), steps=6)
    pairs = found.ids.view(-1, 2, 6)
    assert torch.equal(pairs[:, 0, :2], pairs[:, 1, :2])
    early = found.lengths.view(-1, 2)[:, 0] <= 2
    early &= found.stopped.view(-1, 2)[:, 0]
    assert early.any() and not early.all()
    assert torch.equal(pairs[early, 0], pairs[early, 1])
    assert (pairs[~early, 0] != pairs[~early, 1]).any()
    made = rows(found)
    assert int(made.mask.sum()) == int(found.own.sum()) < int(found.written.sum())


def test_rows_spread_credit_over_segments_and_share_it_in_a_node(policy):
    found = rollout(policy, Segments(1, 2, (2,)), steps=4, prompts=PROMPTS[1:2])
    credit = torch.tensor([[1.0, 10.0], [3.0, -10.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    (made,) = Token().rows(found, credit, mask)
    own = found.own & (found.point == 0)
    assert (made.advantage[own] == 2.0).all() and own[0, 0] and not own[1].any()
    assert not made.mask[1].any() and not made.advantage[1].any()
    assert (made.advantage[0, 2:][found.written[0, 2:]] == 10.0).all()


@pytest.mark.parametrize("make", [tiny_lm.llama, tiny_lm.gpt2])
def test_chunks_of_logits_change_neither_values_nor_gradients(make, monkeypatch):
    policy = CausalPolicy(make(), tiny_lm.tokenizer())
    policy.train_all()
    batch = policy.open(PROMPTS, [], 7)
    (found,) = batch.rollouts(WARPED, range(4), seed=0, iteration=0)
    made = rows(found)

    def gradients(reader: token_scores.ScoringPolicy) -> list[torch.Tensor]:
        policy.model.zero_grad()
        said = reader(made, True)
        (said.logp * made.advantage + 0.1 * said.out).sum().backward()
        return [p.grad.clone() for p in policy.model.parameters()]

    assert batch.policy.separate_head
    plain = gradients(replace(batch.policy, separate_head=False))
    monkeypatch.setattr(token_scores, "LOGITS_HELD", 40)  # two tokens at a time
    for a, b in zip(plain, gradients(batch.policy), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_logits_are_made_of_completion_tokens_only_and_in_chunks(policy, monkeypatch):
    found = rollout(policy, Completions(6))
    made, sizes = rows(found), []
    hook = policy.model.get_output_embeddings().register_forward_hook(
        lambda module, given, logits: sizes.append(logits.shape[:-1].numel())
    )
    monkeypatch.setattr(token_scores, "LOGITS_HELD", 5 * 14)
    with torch.no_grad():
        policy.open(PROMPTS, [], 7).policy(made)
    tokens, parts = int(found.lengths.sum()), len(sizes)
    assert max(sizes) == 5 and sum(sizes) == tokens and max(sizes) - min(sizes) <= 1 < parts
    policy.open(PROMPTS, [], 7).policy(made).logp.sum().backward()
    hook.remove()
    assert len(sizes) == 3 * parts - 1  # backward makes all but the last again


def test_a_model_that_bends_its_logits_is_read_whole():
    """As those do that cap their logits: their head on hidden states is not what they say."""

    class Capped(type(tiny_lm.llama())):
        def forward(self, *given, **named):
            said = super().forward(*given, **named)
            said.logits = 2 * torch.tanh(said.logits / 2)
            return said

    model = tiny_lm.llama()
    model.__class__ = Capped
    policy = CausalPolicy(model, tiny_lm.tokenizer())
    batch = policy.open(PROMPTS, [], 7)
    (found,) = batch.rollouts(Completions(4), range(4), seed=0, iteration=0)
    assert not batch.separate_head and "in memory at once" in policy.proofs(PROMPTS, 7)[1]
    with torch.no_grad():
        torch.testing.assert_close(batch.policy(rows(found)).logp, found.logp, atol=2e-5, rtol=0)


def test_padding_of_rows_and_what_follows_the_stop_token_are_never_read(policy):
    found = rollout(policy, WARPED)
    made = rows(found)
    dirty = replace(made, ids=torch.where(made.written, made.ids, 5))
    batch = policy.open(PROMPTS, [], 7)
    with torch.no_grad():
        assert torch.equal(batch.policy(made).logp, batch.policy(dirty).logp)
        few = take(made, torch.tensor([7, 3]))
        torch.testing.assert_close(
            batch.policy(few).logp, batch.policy(made).logp[[7, 3]], atol=1e-5, rtol=0
        )


def test_texts_end_before_the_stop_token(policy):
    found = rollout(policy, Completions(8))
    texts = policy.open(PROMPTS, [], 7).media(found)
    letters = {i + 2: letter for i, letter in enumerate(tiny_lm.LETTERS)}
    for text, ids, stopped, length in zip(
        texts, found.ids.tolist(), found.stopped.tolist(), found.lengths.tolist(), strict=True
    ):
        assert text == "".join(letters.get(i, "") for i in ids[: length - stopped])
        assert (1 in ids[:length]) == stopped and (not stopped or ids[length - 1] == 1)
        assert stopped or length == 7


def test_an_empty_completion_is_its_stop_token_alone(policy):
    found = rollout(policy, Completions(200), steps=3, prompts=PROMPTS[:1])
    empty = (found.ids[:, 0] == 1).nonzero()[:, 0]
    assert len(empty) and (found.lengths[empty] == 1).all() and found.stopped[empty].all()
    texts = policy.open(PROMPTS[:1], [], 3).media(found)
    assert all(texts[i] == "" for i in empty.tolist())
    made = rows(found)
    assert made.mask[empty].sum(1).tolist() == [1] * len(empty)


def test_texts_that_never_stop_are_cut_and_masked_only_where_asked():
    policy = CausalPolicy(tiny_lm.llama(stop=False), tiny_lm.tokenizer(stop=False))
    found = rollout(policy, Completions(3), steps=5)
    assert not found.stopped.any() and (found.lengths == 5).all()
    assert rows(found).mask.all() and not rows(found, cut="mask").mask.any()
    assert "no stop token: all texts have 5 tokens" in policy.proofs(PROMPTS, 5)[0]


def test_a_tokenizer_without_a_pad_token_draws_the_same():
    with_pad, without = (
        rollout(CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer(pad=pad)), WARPED)
        for pad in (True, False)
    )
    assert torch.equal(with_pad.ids, without.ids)


def test_prompts_beyond_the_context_are_refused_before_anything_is_drawn():
    policy = CausalPolicy(tiny_lm.llama(positions=12), tiny_lm.tokenizer())
    policy.open(["abcabc"], [], 6)
    message = r"1 of 2 prompts are too long: the model has 12 positions.*up to 6.*7 tokens.*lower"
    for attempt in (policy.proofs, lambda prompts, steps: policy.open(prompts, [], steps)):
        with pytest.raises(UserError, match=message):
            attempt(["abc", "abcabca"], 6)


def test_further_stop_tokens_end_a_text(policy):
    stopping = CausalPolicy(tiny_lm.llama(), policy.tokenizer, use=TextUse(stop=[":"]))
    found = rollout(stopping, Completions(30))
    last = found.ids.gather(1, found.lengths[:, None] - 1)[:, 0][found.stopped]
    assert set(last.tolist()) == {1, 2 + tiny_lm.LETTERS.index(":")}


def test_the_chat_template_frames_prompts_and_plain_text_is_left_alone():
    chat = CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer(chat=True))
    plain = CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer())
    read = chat.tokenizer.decode
    assert read(plain.encode("bad")) == "bad"
    bare = read(chat.encode("bad"))
    dig = TextUse(system="dig")
    framed = read(CausalPolicy(chat.model, chat.tokenizer, use=dig).encode("bad"))
    assert bare.endswith("bad a:") and "dig" not in bare
    assert framed.endswith("bad a:") and framed.index("dig") < framed.index("bad")
    with pytest.raises(UserError, match="no chat template"):
        CausalPolicy(plain.model, plain.tokenizer, use=dig)
    with pytest.raises(UserError, match="no token"):
        plain.encode("")


def test_published_generation_settings_do_not_act_but_are_saved_again(tmp_path):
    source = tiny_lm.write(tmp_path / "base")
    policy = CausalPolicy.load(str(source), dtype=torch.float32, device=torch.device("cpu"))
    plain = CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer())
    assert torch.equal(rollout(policy, WARPED).ids, rollout(plain, WARPED).ids)
    policy.save(tmp_path / "again")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert saved.generation_config.repetition_penalty == 1.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_depends_on_padding_is_refused(monkeypatch, dtype):
    policy = CausalPolicy(tiny_lm.llama().to(dtype), tiny_lm.tokenizer())
    assert "left padding changes" in policy.proofs(PROMPTS, 7)[-1]
    plain = policy.model.forward

    def blind(*args, attention_mask=None, position_ids=None, **named):
        return plain(*args, **named)

    monkeypatch.setattr(policy.model, "forward", blind)
    with pytest.raises(UserError, match="rows_per_call: 1"):
        policy.proofs(PROMPTS, 7)


def test_padding_may_move_unlikely_tokens_in_half_precision_alone(monkeypatch):
    """Rounding in bfloat16 moves the logits of a large vocabulary's tail by half a nat, and hardly
    changes what is drawn."""
    plain = proofs._next

    def rounded(model, stop, contexts, images):
        logp = plain(model, stop, contexts, images).clone()
        if len(contexts) == 1:
            return logp
        likely, rare = logp[0].argmax(), logp[0].argmin()
        logp[0, rare] += 0.6
        logp[0, likely] += math.log(0.99)
        return logp

    policy = CausalPolicy(tiny_lm.llama().bfloat16(), tiny_lm.tokenizer())
    monkeypatch.setattr(proofs, "_next", rounded)
    assert "left padding changes" in policy.proofs(PROMPTS, 7)[-1]
    policy = CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer())
    with pytest.raises(UserError, match="total variation"):
        policy.proofs(PROMPTS, 7)


@pytest.mark.parametrize("lora", [True, False])
def test_saved_weights_are_what_plain_transformers_and_peft_load(tmp_path, lora):
    source = str(tiny_lm.write(tmp_path / "base"))

    def fresh() -> CausalPolicy:
        made = CausalPolicy.load(source, dtype=torch.float32, device=torch.device("cpu"))
        made.add_lora(rank=2, alpha=8, targets=None, seed=0) if lora else made.train_all()
        return made

    policy, ids = fresh(), torch.tensor([[2, 3, 4]])
    assert all(".lora_" in name for name in policy.trainable()) == lora
    with torch.no_grad():
        base = policy.model(input_ids=ids).logits
        for p in policy.trainable().values():
            p.add_(0.05)
        want = policy.model(input_ids=ids).logits
    policy.save(tmp_path / "out")
    if lora:
        from peft import PeftModel

        plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        plain = PeftModel.from_pretrained(plain, str(tmp_path / "out"))
    else:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    again = fresh()
    again.load_weights(tmp_path / "out")
    with torch.no_grad():
        assert (want - base).abs().max() > 1e-2
        torch.testing.assert_close(plain(input_ids=ids).logits, want)
        torch.testing.assert_close(again.model(input_ids=ids).logits, want)


def test_pairs_are_the_best_and_the_worst_and_ties_are_masked(policy):
    found = rollout(policy, Completions(3), prompts=PROMPTS[:2])
    credit = torch.tensor([0.0, 2.0, 1.0, 5.0, 5.0, 5.0], dtype=torch.float64)[:, None]
    (made,) = Token(paired=True).rows(found, credit, torch.ones(6, 1, dtype=torch.bool))
    assert torch.equal(made.ids[:2], found.ids[[1, 0]])
    assert torch.equal(made.mask[:2], found.written[[1, 0]]) and not made.mask[2:].any()


def test_a_pair_of_equal_completions_is_masked(policy):
    """Sampled twice with other credit, and given texts of one beginning that were cut."""
    found = rollout(policy, Completions(2), prompts=PROMPTS[:2])
    first = torch.tensor([0, 0, 2, 3])
    twice = replace(
        found, ids=found.ids[first], lengths=found.lengths[first], stopped=found.stopped[first]
    )
    credit = torch.tensor([0.0, 2.0, 1.0, 5.0], dtype=torch.float64)[:, None]
    (made,) = Token(paired=True).rows(twice, credit, torch.ones(4, 1, dtype=torch.bool))
    assert not made.mask[:2].any() and made.mask[2:].any(1).all()
    batch, places = policy.open(PROMPTS[:2], [], 3), torch.tensor([0, 0, 1, 1])
    texts = ["abcd", "abca", "bcda", "dabc"]
    given = completion_rows(batch, texts, places, torch.tensor([1.0, -1.0] * 2), paired=True)
    assert not given.mask[:2].any() and given.mask[2:].all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_texts_in_one_row_without_padding_have_the_same_values_and_gradients(
    attention, monkeypatch
):
    """What flash attention evaluates, here by masks: positions that begin again separate texts."""
    model = tiny_lm.llama().double()
    model.set_attn_implementation(attention)
    policy = CausalPolicy(model, tiny_lm.tokenizer())
    batch = policy.open(["a:", "cab :", "bead :"], [], 9)
    (rollout,) = batch.rollouts(Completions(4), (0, 1, 2), seed=0, iteration=0)
    (rows,) = Token().rows(rollout, torch.ones(12, 1), torch.ones(12, 1, dtype=torch.bool))
    assert rows.lengths.unique().numel() > 2
    found, widths = [], []
    model.model.register_forward_pre_hook(
        lambda _m, _a, named: widths.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    for one_row in (False, True):
        monkeypatch.setattr(token_scores, "takes_lengths", lambda _, chosen=one_row: chosen)
        model.zero_grad()
        logp = batch.policy(rows).logp
        (logp * rows.mask).sum().backward()
        found.append([logp, *(p.grad.clone() for p in model.parameters())])
    texts = sum(len(batch.contexts[p]) for p in rows.prompt.tolist()) + int(
        (rows.lengths - 1).sum()
    )
    assert widths[1] == (1, texts) and widths[0][0] == 12
    for padded, packed in zip(*found, strict=True):
        torch.testing.assert_close(packed, padded, atol=1e-6, rtol=1e-6)


def test_the_attention_is_chosen_and_one_that_is_not_there_is_named(tmp_path):
    source = tiny_lm.write(tmp_path)
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    made = CausalPolicy.load(str(source), attention="eager", **where)
    assert made.model.config._attn_implementation == "eager"
    assert not token_scores.takes_lengths(made.model)
    made.model.config._attn_implementation = "flash_attention_2"
    assert token_scores.takes_lengths(made.model)
    with pytest.raises(UserError, match=r"model.language: .* cannot be loaded"):
        CausalPolicy.load(str(source), attention="flash_attention_2", **where)


def test_a_pad_token_that_is_the_stop_token_hides_nothing(policy):
    """Such are the tokenizers of many models: the end stays a trained token, and a prompt's own
    stays in it."""
    tokenizer = tiny_lm.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    same = CausalPolicy(tiny_lm.llama(), tokenizer)
    found, before = rollout(same, WARPED), rollout(policy, WARPED)
    assert torch.equal(found.ids, before.ids) and found.stopped.any()
    assert rows(found).mask.gather(1, found.lengths[:, None] - 1).all()
    logp = same.open(PROMPTS, [], 7).policy(rows(found)).logp
    assert torch.equal(logp, policy.open(PROMPTS, [], 7).policy(rows(before)).logp)
    assert same.encode("a<end>b") == [2, 1, 3]
    given = completion_rows(
        same.open(PROMPTS, [], 7), ["cab"], torch.tensor([0]), torch.tensor([1.0])
    )
    assert given.ids[0, -1] == 1 and given.mask.all()
