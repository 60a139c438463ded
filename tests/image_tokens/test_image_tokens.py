"""Images by tokens: Janus and Emu3 against transformers' own `generate`, and as policies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from flowrl.cli.model_card import language_lines
from flowrl.errors import UserError
from flowrl.likelihoods.token import Token
from flowrl.models.image_tokens.policy import ImageTokenPolicy
from flowrl.prompts import Chat
from flowrl.settings import LanguageSettings
from flowrl.settings.model.image_tokens import ImageTokenSettings
from samplers.completions import Completions, Forks, Segments
from samplers.forks import Forking
from tests.support import tiny_image_tokens as tiny
from tests.support.advice import advice

PROMPTS = ["a b", "abcdefgh", "cc"]
SETTINGS = {
    "janus": ImageTokenSettings(),
    "emu3": ImageTokenSettings(guidance=2.0, height=16, width=24, negative="bad"),
    "emu3 without a negative prompt": ImageTokenSettings(guidance=2.0, height=24, width=24),
    "unguided": ImageTokenSettings(guidance=1.0),
}
KINDS = list(SETTINGS)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp(kind) for kind in ("janus", "emu3")}
    return {kind: tiny.write(folder, kind) for kind, folder in found.items()}


def opened(folders: dict[str, Path], kind: str) -> ImageTokenPolicy:
    folder = folders["emu3" if kind.startswith("emu3") else "janus"]
    return ImageTokenPolicy.load(str(folder), SETTINGS[kind], dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def policies(folders) -> dict[str, ImageTokenPolicy]:
    return {kind: opened(folders, kind) for kind in KINDS}


def length(policy: ImageTokenPolicy) -> int:
    return policy.family.layout.codes


def drawn(policy: ImageTokenPolicy, plan: Any, seed: int = 0) -> tuple[Any, Any]:
    batch = policy.open(PROMPTS, [], length(policy))
    return batch, batch.rollouts(plan, (0, 1, 2), seed=seed, iteration=0)[0]


class Forced(LogitsProcessor):
    """Makes `generate` write these tokens, and notes the probabilities that they had."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.logp = tokens, list[float]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[len(self.logp)]
        self.logp.append(float(scores[0].double().log_softmax(-1)[token]))
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)


class LastStays(LogitsProcessorList):
    """Janus' `generate` appends its guidance: it goes before what was given."""

    def append(self, item: Any) -> None:
        self.insert(len(self) - 1, item)


def by_janus(policy: ImageTokenPolicy, prompt: str, codes: list[int]) -> tuple[list[float], Any]:
    """Probabilities of an image's codes, and the image, by the calls of Janus' documentation."""
    processor, model = policy.processor, policy.model
    turns = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    text = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    given = processor(text=[text], generation_mode="image", return_tensors="pt")
    forced = Forced(codes)
    made = model.generate(
        **given, generation_mode="image", do_sample=False, guidance_scale=policy.guided.scale,
        logits_processor=LastStays([forced]),
    )  # fmt: skip
    assert made[0].tolist() == codes
    images = model.decode_image_tokens(made).permute(0, 3, 1, 2)  # as its processor without torch
    shown = processor.postprocess(list(images), return_tensors="PIL.Image.Image")
    return forced.logp, shown["pixel_values"][0]


def by_emu3(policy: ImageTokenPolicy, prompt: str, codes: list[int]) -> tuple[list[float], Any]:
    """The same by the calls of Emu3's documentation, with its rule of the tokens that may come."""
    processor, model, words = policy.processor, policy.model, policy.processor.tokenizer
    size: dict[str, Any] = {"ratio": "3:2", "image_area": 16 * 24}
    if policy.family.negative is None:
        size = {"ratio": "1:1", "image_area": 24 * 24}
    size["return_for_image_generation"] = True
    given = processor(text=[prompt], return_tensors="pt", **size)
    height, width = given.pop("image_sizes")[0]
    negative = {}
    if policy.family.negative is not None:
        other = processor(text=[policy.family.negative], return_tensors="pt", **size)
        negative["negative_prompt_ids"] = other.input_ids
        negative["negative_prompt_attention_mask"] = other.attention_mask
    ends = words.convert_tokens_to_ids("<|extra_200|>")
    last = [words.eof_token_id, words.eoi_token_id, words.eos_token_id]
    visual = model.vocabulary_mapping.image_tokens

    def allowed(batch_id: int, ids: Tensor) -> Any:
        place = torch.nonzero(ids == words.image_wrapper_token_id, as_tuple=True)[0][0]
        offset = ids.shape[0] - int(place)
        if offset % (width + 1) == 0:
            return (ends,)
        after = offset - (width + 1) * height
        return visual if after <= 0 else (last[after - 1],)

    tokens: list[int] = []
    for row in range(height):
        own = codes[row * width : (row + 1) * width]
        tokens += [*(model.vocabulary_mapping.img2bpe[code] for code in own), ends]
    forced = Forced([*tokens, *last])
    made = model.generate(
        **given, max_new_tokens=50, do_sample=False, guidance_scale=policy.guided.scale,
        prefix_allowed_tokens_fn=allowed, logits_processor=LogitsProcessorList([forced]),
        **negative,
    )  # fmt: skip
    new = made[:, given.input_ids.shape[1] :]
    assert new[0].tolist() == forced.tokens
    sure = [i for i, token in enumerate(forced.tokens) if token == ends or token in last]
    assert [forced.logp[i] for i in sure] == [0.0] * (height + 3), "forced tokens are certain"
    image = model.decode_image_tokens(image_tokens=new, height=height, width=width)
    shown = processor.postprocess(list(image), return_tensors="PIL.Image.Image")
    return [p for i, p in enumerate(forced.logp) if i not in sure], shown["pixel_values"][0]


@pytest.mark.quick_cases("janus")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unguided"])
def test_densities_and_images_are_those_of_the_class_s_own_generate(policies, kind):
    policy = policies[kind]
    batch, rollout = drawn(policy, Completions(2))
    rows, _ = Token().whole(rollout)
    logp, images = batch.policy(rows).logp.detach(), batch.media(rollout)
    assert logp.abs().max() > 1
    own = by_emu3 if kind.startswith("emu3") else by_janus
    for n, place in enumerate(rollout.prompt.tolist()):
        wanted, image = own(policy, PROMPTS[place], rollout.ids[n].tolist())
        torch.testing.assert_close(logp[n], torch.tensor(wanted), atol=2e-5, rtol=1e-5)
        shown = torch.tensor(np.array(image)).permute(2, 0, 1) / 255
        assert (images[n] - shown).abs().max() < 1.01 / 255  # a file's numbers are rounded down


def plain(policy: ImageTokenPolicy, prompt: str, codes: Tensor) -> Tensor:
    """Log-probabilities of Janus' codes by its own modules, one prompt, without padding or
    cache."""
    model, inner = policy.model, policy.model.model
    (tokens, without), parts = policy.encode(prompt), list[Tensor]()
    for ids in (tokens, without)[: policy.guided.rows]:
        text = model.get_input_embeddings()(torch.tensor([ids]))
        image = model.prepare_embeddings_for_image_generation(codes[None, :-1])
        states = inner.language_model(inputs_embeds=torch.cat([text, image], 1)).last_hidden_state
        parts.append(inner.generation_head(states[0, len(ids) - 1 :]))
    logits = parts[0]
    if policy.guided.rows == 2:
        logits = parts[1] + policy.guided.scale * (parts[0] - parts[1])
    return logits.log_softmax(-1).gather(1, codes[:, None])[:, 0]


@pytest.mark.parametrize("kind", ["janus", "unguided"])
def test_gradients_are_those_of_a_plain_loop(folders, kind):
    policy = opened(folders, kind)
    policy.train_all()
    batch, rollout = drawn(policy, Completions(2))
    rows, _ = Token().whole(rollout)
    weight = torch.linspace(-1, 1, rollout.ids.numel()).view(rollout.ids.shape)
    (batch.policy(rows).logp * weight).sum().backward()
    found = {name: p.grad.clone() for name, p in policy.trainable().items()}
    policy.model.zero_grad()
    for n, place in enumerate(rollout.prompt.tolist()):
        (plain(policy, PROMPTS[place], rollout.ids[n]) * weight[n]).sum().backward()
    assert {name.split(".")[1] for name in found} == {
        "language_model", "generation_embeddings", "generation_aligner", "generation_head",
    }  # fmt: skip
    for name, p in policy.trainable().items():
        scale = float(p.grad.abs().max())
        torch.testing.assert_close(found[name], p.grad, atol=1e-5 * scale + 1e-7, rtol=1e-3)
    frozen = {n for n, p in policy.model.named_parameters() if p.grad is None}
    assert {name for name in frozen if "vqmodel" in name or "vision_model" in name}


PLANS = {
    "independent": Completions(3),
    "tree": Segments(2, 2, (2, 4)),
    "forks": Forks(2, Forking(top=1, branch=2, rounds=1, by="entropy")),
    "greedy": Completions(2, greedy=True),
}
CUTS = {"all": {}, "cut": {"temperature": 0.7, "top_p": 0.9, "top_k": 7, "min_p": 0.01}}


@pytest.mark.parametrize("kind", ["janus", "emu3"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("cut", CUTS)
def test_sampling_and_training_agree_in_every_plan(policies, kind, plan, cut):
    policy = policies[kind]
    batch, rollout = drawn(policy, replace(PLANS[plan], **CUTS[cut]))
    rows, which = Token(entropy=True).whole(rollout)
    again = batch.policy(rows, True)
    assert rollout.stopped.all() and (rollout.lengths == length(policy)).all()
    torch.testing.assert_close(again.logp.detach(), rollout.logp[which], atol=2e-5, rtol=1e-4)
    assert again.out is not None and (again.out > 0).any()
    assert (rollout.kept is not None) == (cut == "cut")
    if rollout.kept is not None:
        whole = batch.policy(replace(rows, kept=None)).logp
        assert (again.logp > whole + 1e-3).any(), "what top-p and top-k left has all probability"


@pytest.mark.parametrize("kind", ["janus", "emu3"])
def test_a_seed_gives_the_same_tokens_for_every_size_of_a_call(policies, kind):
    policy = policies[kind]
    _, one = drawn(policy, Completions(3))
    _, other = drawn(policy, Completions(3), seed=1)
    policy.sizes.sampling = 2
    _, cut = drawn(policy, Completions(3))
    policy.sizes.sampling = 1
    batch, alone = drawn(policy, Completions(3))
    policy.sizes.decoding = 2
    images = batch.media(alone)
    policy.sizes.sampling = policy.sizes.decoding = None
    assert torch.equal(one.ids, cut.ids) and torch.equal(one.ids, alone.ids)
    assert not torch.equal(one.ids, other.ids)
    torch.testing.assert_close(images, batch.media(one), atol=1e-5, rtol=0)


def test_guidance_s_other_row_is_the_model_s_own(policies):
    janus, emu3 = policies["janus"], policies["emu3"]
    assert (janus.guided.scale, janus.guided.rows, policies["unguided"].guided.rows) == (3, 2, 1)
    words = janus.processor.tokenizer
    prompt, without = janus.encode("ab")
    assert words.decode(prompt) == "<bos><pad>:ab a:<boi>"  # u is no letter of it
    assert words.decode(without) == "<bos>" + "<pad>" * 7 + "<boi>"
    prompt, without = emu3.encode("ab")
    words = emu3.processor.tokenizer
    assert words.decode(prompt) == "<bos>ab<boi>2*3<|image token|>"
    assert words.decode(without) == "<bos>bad<boi>2*3<|image token|>"
    alone = policies["emu3 without a negative prompt"].encode("ab")
    assert alone.without == alone.prompt[-1:]


def test_proofs_say_what_is_driven_and_notice_another_model(policies, monkeypatch):
    policy = policies["emu3"]
    said = " ".join(policy.proofs(PROMPTS, length(policy)))
    assert "images of 16 x 24 pixels by 6 of 12 tokens" in said and "guidance 2" in said
    own = policy.family.states

    def sees_padding(embeddings, **more):
        return own(embeddings, **{k: v for k, v in more.items() if k != "attention_mask"})

    monkeypatch.setattr(policy.family, "states", sees_padding)
    with pytest.raises(UserError, match="other probabilities in training than in sampling"):
        policy.proofs(PROMPTS, length(policy))


def test_prompts_without_room_and_chats_without_a_template_are_refused(policies, folders):
    janus, emu3 = policies["janus"], policies["emu3"]
    with pytest.raises(UserError, match="1 of 2 prompts are too long: the model has 96 positions"):
        janus.open(["a", "a" * 81], [], 9)
    janus.open(["a" * 80], [], 9)
    with pytest.raises(UserError, match=r"recipe.length is 6, but an image .* has 9 tokens"):
        janus.open(PROMPTS, [], 6)
    chat = Chat("a", [{"role": "user", "content": "a"}], "p.jsonl: row 1")
    assert janus.encode(chat) == janus.encode("a")
    advice(
        "the prompt is a list of chat messages, but Emu3 writes images of a text: name a column "
        "of texts (prompts.column)",
        lambda: emu3.encode(chat),
        lambda: emu3.encode("a"),
    )
    plain = opened(folders, "janus")
    plain.family.processor.chat_template = None
    advice(
        "the prompt is a list of chat messages, but the processor of model.language has no chat "
        "template: name a column of texts (prompts.column)",
        lambda: plain.encode(chat),
        lambda: plain.encode("a"),
    )
    pictured = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
    with pytest.raises(UserError, match="the prompt has images"):
        janus.encode(Chat("a", pictured, "p.jsonl: row 1"))


@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "all weights"])
@pytest.mark.parametrize("kind", ["janus", "emu3"])
def test_a_card_s_lines_load_the_model_and_its_processor(
    folders, tmp_path, monkeypatch, kind, lora
):
    policy = opened(folders, kind)
    if lora:
        policy.add_lora(rank=2, alpha=4, targets=None, seed=0)
    policy.save(tmp_path)
    base, files = str(folders[kind]), [path.name for path in tmp_path.iterdir()]
    settings = LanguageSettings(language=base, image=ImageTokenSettings())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("\n".join(language_lines(settings, base, None, files)), names)
    assert type(names["processor"]).__name__ == type(policy.processor).__name__
    model, file = names["model"], "adapter_model.safetensors" if lora else "model.safetensors"
    if lora:
        read = get_peft_model_state_dict(model)
    else:  # under the names of files, which transformers changes when it reads some classes
        model.save_pretrained(tmp_path / "again")
        read = load_file(tmp_path / "again" / file)
    stored = load_file(file)
    assert read.keys() == stored.keys()
    assert all(torch.equal(read[name], value) for name, value in stored.items())
