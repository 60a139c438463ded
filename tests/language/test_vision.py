"""Vision-language policies: images in prompts, through the model's own processor."""

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from flowrl.errors import UserError
from flowrl.iteration import ratio_check
from flowrl.likelihoods.token import Token
from flowrl.models.language.generation import rows_can_leave
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.language.token_scores import takes_lengths
from flowrl.models.language.vision import Vision, call_inputs
from flowrl.prompts import Chat
from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from flowrl.settings.read import check_run, run_from
from samplers.completions import Completions
from tests.support import runs, text_runs, tiny_lm, tiny_vlm
from tests.support.advice import advice
from tests.support.iterations import collect, iterate
from tests.support.runs import flowrl, lines, same_weights, write
from tests.support.tiny_vlm import picture

IMAGE, PAD, END = 14, 0, 1  # tokens of the tiny LLaVA
PROMPTS = ["a b", "a<image>bcd<image>", "abc"]
SIDE = 40  # pixels: more than one token of Qwen's
ROWS = [
    {"image": picture(0, SIDE, SIDE)},
    {"images": [picture(1, SIDE, 30), picture(2, 70, SIDE)]},
    {},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_vlm.write(tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="module")
def policies(model, tmp_path_factory) -> dict[str, CausalPolicy]:
    qwen, processor = tiny_vlm.qwen(tmp_path_factory.mktemp("qwen"))
    read = Vision.made(qwen, processor)
    llava = CausalPolicy.load(str(model), dtype=torch.float32, device=torch.device("cpu"))
    return {"llava": llava, "qwen": CausalPolicy(qwen, processor.tokenizer, vision=read)}


def ids(text: str) -> list[int]:
    """Tokens of the tiny LLaVA by hand; every @ is an image of four patches."""
    letters = {letter: i + 2 for i, letter in enumerate(tiny_lm.LETTERS)}
    found = [[IMAGE] * 4 if letter == "@" else [letters.get(letter, PAD)] for letter in text]
    return [token for some in found for token in some]


CHAT = [
    {"role": "system", "content": "be a cab"},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "image"}]},
]


@pytest.mark.parametrize(
    ("prompt", "row", "text"),
    [
        ("a b", {"image": picture(0)}, "u:@a b a:"),
        ("a b", {"images": [picture(0), picture(1)]}, "u:@@a b a:"),
        ("a<image>b<image>", {"images": [picture(0), picture(1)]}, "u:a@b@ a:"),
        (Chat("a", CHAT), {"images": [picture(0), picture(1)]}, "s:be a cab u:@a a:b u:c@ a:"),
        ("a b", {}, "u:a b a:"),
    ],
)
def test_images_stand_where_messages_or_marks_say_and_else_first(policies, prompt, row, text):
    found, images = policies["llava"].vision.encode(prompt, row, None, {})
    assert found == ids(text)
    assert (images is None) == ("@" not in text)
    if images is not None:
        assert len(images.arrays["pixel_values"]) == text.count("@")


def direct(policy: CausalPolicy, prompt: str, row: dict[str, Any], own: list[int]) -> Tensor:
    """Log-probabilities of a completion, by the processor and the model's own call on one row."""
    content: list[dict[str, Any]] = []
    images = row.get("images") or [row[key] for key in row]
    pieces = prompt.split("<image>")
    if len(pieces) == 1:
        content = [{"type": "image"} for _ in images]
    for i, piece in enumerate(pieces):
        content += [{"type": "image"}] if i else []
        content += [{"type": "text", "text": piece}] if piece else []
    assert policy.vision is not None
    processor = policy.vision.processor
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    given = processor(text=[text], images=images or None, return_tensors="pt")
    start = given["input_ids"].shape[1]
    new = torch.tensor([own])
    given["input_ids"] = torch.cat([given["input_ids"], new], 1)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if "mm_token_type_ids" in given:
        types = torch.zeros_like(new)
        given["mm_token_type_ids"] = torch.cat([given["mm_token_type_ids"], types], 1)
    logits = policy.model(**given).logits[0, start - 1 : -1].double()
    for token in policy.vision.placeholders:
        logits[:, token] = -torch.inf
    return logits.log_softmax(-1).gather(1, new[0][:, None])[:, 0]


@pytest.mark.parametrize("kind", ["llava", "qwen"])
@pytest.mark.parametrize("rows_per_call", [None, 2])
@torch.no_grad()
def test_sampling_and_training_agree_with_the_model_s_own_call(policies, kind, rows_per_call):
    """Rows of one, of two and of no image in one call, from a cache and left padding, from right
    padding, and each by itself by the processor."""
    policy = policies[kind]
    policy.rows_per_call = rows_per_call
    batch = policy.open(PROMPTS, ROWS, 5)
    (rollout,) = batch.rollouts(Completions(3), (0, 1, 2), seed=0, iteration=0)
    rows, _ = Token().whole(rollout)
    again = batch.policy(rows).logp
    assert rollout.logp.abs().sum() > 1
    torch.testing.assert_close(again, rollout.logp, atol=2e-5, rtol=1e-4)
    assert policy.vision is not None and policy.vision.placeholders
    assert not torch.isin(rollout.ids, torch.tensor(policy.vision.placeholders)).any()
    for n, length in enumerate(rollout.lengths.tolist()):
        own = rollout.ids[n, :length].tolist()
        at = int(rollout.prompt[n])
        wanted = direct(policy, PROMPTS[at], ROWS[at], own)
        torch.testing.assert_close(again[n, :length].double(), wanted, atol=2e-5, rtol=1e-4)
    other = [*ROWS[:1], {"images": ROWS[1]["images"][::-1]}, ROWS[2]]
    moved = (policy.open(PROMPTS, other, 5).policy(rows).logp - again).abs().sum(1) > 1e-3
    assert moved.tolist() == [False] * 3 + [True] * 3 + [False] * 3, "only of the row whose images"


@torch.no_grad()
def test_images_of_any_shape_share_a_call(policies):
    """A single pixel, a thread, and images smaller and larger than the model's own."""
    policy, shapes = policies["llava"], [(1, 1), (60, 2), (5, 7), (20, 20), (13, 70)]
    rows = [{"image": picture(i, *shape)} for i, shape in enumerate(shapes)]
    policy.rows_per_call = None
    batch = policy.open(["a"] * len(rows), rows, 4)
    (rollout,) = batch.rollouts(Completions(1), tuple(range(len(rows))), seed=0, iteration=0)
    for n, length in enumerate(rollout.lengths.tolist()):
        wanted = direct(policy, "a", rows[n], rollout.ids[n, :length].tolist())
        torch.testing.assert_close(rollout.logp[n, :length].double(), wanted, atol=2e-5, rtol=1e-4)


def test_columns_of_tokens_are_padded_with_the_prompts(policies, monkeypatch):
    policy, seen = policies["qwen"], dict[str, Tensor]()
    plain = policy.model.generate

    def listening(**given):
        seen.update(given)
        return plain(**given)

    monkeypatch.setattr(policy.model, "generate", listening)
    policy.rows_per_call = None
    policy.open(PROMPTS, ROWS, 2).rollouts(Completions(2), (0, 1, 2), seed=0, iteration=0)
    image = seen["input_ids"] == policy.model.config.image_token_id
    assert torch.equal(seen["mm_token_type_ids"] == 1, image) and image.any()
    assert (seen["attention_mask"].sum(1) < image.shape[1]).any(), "some row is padded"


def test_placeholders_have_no_probability_and_no_gradient(policies):
    head = policies["llava"].model.get_output_embeddings()
    logits = head(torch.randn(3, 16, requires_grad=True))
    logp = logits.log_softmax(-1)
    assert (logp[:, IMAGE] < -1e30).all() and torch.isfinite(logp[:, :IMAGE]).all()
    logp[:, 3].sum().backward()


def test_a_placeholder_behind_the_heads_rows_cannot_be_sampled_and_is_left():
    """A head of 8 tokens, as of models whose embeddings have rows that the head lacks."""
    head = torch.nn.Linear(4, 8)
    config = SimpleNamespace(image_token_id=7, video_token_id=8)
    model = SimpleNamespace(config=config, get_output_embeddings=lambda: head)
    vision = Vision.made(model, SimpleNamespace(image_processor="any"))
    assert vision.placeholders == (7,)
    assert (head(torch.ones(4)) < -1e30).tolist() == [False] * 7 + [True]


@pytest.mark.parametrize(
    ("prompt", "row", "message"),
    [
        ("a<image>b", {"images": [picture(0), picture(1)]}, "has 2 images, but .* places for 1"),
        ("a<image><image>", {"image": picture(0)}, "a place for an image that the row lacks"),
        ("a", {"image": picture(0), "images": []}, "has the columns images and image"),
        ("a", {"image": 7}, "7 is not an image: expected a path"),
        ("a", {"image": "no.png"}, "no.png: no such file"),
        ("a", {"image": {"bytes": b"GIF89a", "path": None}}, "not a PNG, JPEG or WebP image"),
        ("a", {"image": {"bytes": b"", "path": "x.png"}}, "x.png: an empty file"),
    ],
)
def test_what_cannot_be_placed_or_read_is_one_sentence(policies, prompt, row, message):
    with pytest.raises(UserError, match=message):
        policies["llava"].open([prompt], [row], 4)


def places(*parts: str) -> Chat:
    """A message whose content is a list of parts: texts, and "" for an image."""
    content = [{"type": "text", "text": part} if part else {"type": "image"} for part in parts]
    return Chat("a", [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("fewer", "enough"),
    [
        ("a<image>b", "a<image>b<image>"),
        (Chat("a", [{"role": "user", "content": "a<image>b"}]),
         Chat("a", [{"role": "user", "content": "a<image>b<image>"}])),
        (places("a", "", "b<image>"), places("a", "", "b", "")),
    ],
    ids=["a text", "a message", "a list of parts"],
)  # fmt: skip
def test_an_image_without_a_place_gets_one(policies, fewer, enough):
    row, encode = {"images": [picture(0), picture(1)]}, policies["llava"].vision.encode
    found, _ = advice(
        "the row has {} images, but its prompt has places for {}: add {} to the prompt where each "
        "belongs, and to a list of parts",
        lambda: encode(fewer, row, None, {}),
        lambda: encode(enough, row, None, {}),
    )
    assert found == ids("u:a@b@ a:")


def test_processors_of_another_kind_are_refused(policies):
    vision = policies["llava"].vision
    columns = {"pixel_values": torch.zeros(1, 2), "cross_attention_mask": torch.zeros(1, 3)}
    with pytest.raises(UserError, match="LlavaProcessor returns cross_attention_mask, but only"):
        vision._columns(columns, 3)
    images = [vision._columns({"pixel_values": torch.zeros(1, 3, n, 4)}, 3) for n in (4, 6)]
    with pytest.raises(UserError, match=r"cannot share a call: set train.rows_per_call: 1"):
        call_inputs(images, [0, 0], 8, policies["llava"].model)
    template = copy.copy(vision.processor)
    template.chat_template = "{{ messages[0]['content'][-1]['text'] }}"
    with pytest.raises(UserError, match="1 images, but 0 places"):
        Vision(template, vision.placeholders).encode("a", {"image": picture(0)}, None, {})


def test_a_model_of_texts_refuses_images_before_it_loads(tmp_path, monkeypatch):
    settings = text_runs.tree(tiny_lm.write(tmp_path, chat=True), tmp_path, text_runs.GRPO)
    parts = [{"type": "image"}, {"type": "text", "text": "a"}]
    row = {"prompt": [{"role": "user", "content": parts}], "image": "0.png"}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.delattr(CausalPolicy, "load")
    with pytest.raises(UserError, match=r"line 1: the prompt has images, but model.lang"):
        runs.opened(settings, tmp_path)


@pytest.mark.parametrize("setting", ["share", "server"])
def test_settings_that_pass_on_tokens_alone_are_refused(model, tmp_path, setting):
    settings = tiny_vlm.tree(model, tmp_path, share_prompts=setting == "share")
    kept = runs.opened(settings, tmp_path)
    policy: Any = kept.learner.policy
    policy.server = object() if setting == "server" else None
    with pytest.raises(UserError, match="it passes prompts on as tokens only, but these have"):
        policy.open(*kept.prompts.take([0, 1, 2]), 4)


@pytest.mark.parametrize("rows", [64, 4, 1])
def test_the_first_ratio_is_one_with_images(model, tmp_path, rows):
    kept = tiny_vlm.session(model, tmp_path, rows_per_call=rows)
    experience = collect(kept, 0)
    floor = ratio_check.check_ratio(kept.learner, experience, kept.terminal)
    assert floor is not None and floor < 2e-5


@pytest.mark.slow
def test_another_size_of_calls_gives_the_same_weights(model, tmp_path):
    def trained(rows: int) -> list[torch.Tensor]:
        kept = tiny_vlm.session(model, tmp_path, rows_per_call=rows, updates=2, lr=1e-3)
        progress = Progress()
        for _ in range(2):
            iterate(kept, progress)
        return [p.detach().clone() for p in kept.learner.policies.parameters.values()]

    for a, b in zip(trained(64), trained(5), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(model, tmp_path):
    def opened(name: str):
        (tmp_path / name).mkdir()
        return tiny_vlm.session(model, tmp_path / name, updates=2)

    whole, broken, again = opened("whole"), opened("broken"), opened("again")
    progress = Progress()
    for _ in range(4):
        iterate(whole, progress)
    progress = Progress()
    for _ in range(2):
        iterate(broken, progress)
    checkpoint.save_checkpoint(broken, progress, Alarms())
    progress = checkpoint.restore(again, tmp_path / "broken" / "checkpoints" / "000002", Alarms())
    for _ in range(2):
        iterate(again, progress)
    assert same_weights(whole, again)


@pytest.mark.parametrize("vision", [False, True])
def test_adapters_are_those_of_the_language_part_or_of_all(model, tmp_path, vision):
    settings = tiny_vlm.tree(model, tmp_path)
    settings["model"]["lora"] = {"rank": 2, "alpha": 8, "vision": vision}
    kept = runs.opened(settings, tmp_path)
    names = [n for n in kept.learner.policies.parameters if ".lora_" in n]
    assert any("language_model" in name for name in names)
    assert any("vision_tower" in name for name in names) == vision
    assert iterate(kept, Progress()).metrics["ratio"] == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 8}])
def test_the_command_line_trains_samples_and_evaluates(model, tmp_path, capsys, lora):
    settings = tiny_vlm.tree(model, tmp_path)
    settings["model"]["lora"] = lora
    config, folder = write(settings, tmp_path), tmp_path / "run"
    assert flowrl("plan", config) == 0
    assert flowrl("train", config, "--folder", folder) == 0
    said = capsys.readouterr().out
    assert "prompts have images; training and sampling predict" in said
    assert [line["iteration"] for line in lines(folder)] == [0, 1, 2, 3]
    if lora is None:
        plain = AutoModelForImageTextToText.from_pretrained(folder / "model")
        assert AutoProcessor.from_pretrained(folder / "model").image_token == "<image>"
        assert plain.config.image_token_id == IMAGE
    else:
        saved = load_file(folder / "adapter" / "adapter_model.safetensors")
        assert not any("vision_tower" in name for name in saved)
        assert flowrl("export", folder, "--merged", "--out", tmp_path / "exported") == 0
        merged = tmp_path / "exported" / "merged"
        assert AutoProcessor.from_pretrained(merged).image_token == "<image>"
        found = {
            place: AutoModelForImageTextToText.from_pretrained(place).state_dict()
            for place in (model, merged)
        }
        adapted = PeftModel.from_pretrained(
            AutoModelForImageTextToText.from_pretrained(model), str(folder / "adapter")
        )
        wanted = adapted.merge_and_unload().state_dict()
        assert max(float((found[merged][n] - wanted[n]).abs().max()) for n in wanted) < 1e-6
        assert max(float((found[merged][n] - found[model][n]).abs().max()) for n in wanted) > 1e-5
    assert flowrl("sample", folder, "a:", "--out", tmp_path / "out") == 0
    assert flowrl("evaluate", folder, "--samples", "6") == 0
    assert flowrl("train", "--resume", folder, "--train.iterations", "4") == 0


def test_a_chat_template_s_arguments(tmp_path):
    thinks = (
        "{% if enable_thinking is defined and not enable_thinking %}d{% endif %}" + tiny_lm.CHAT
    )
    settings = text_runs.tree(tiny_lm.write(tmp_path, chat=True), tmp_path, text_runs.GRPO)
    (tmp_path / "chat_template.jinja").write_text(thinks)
    firsts = []
    for template in ({}, {"enable_thinking": False}):
        settings["model"]["template"] = template
        policy: Any = runs.opened(settings, tmp_path).learner.policy
        firsts.append(policy.encode("a"))
    assert firsts[1] == [*policy.tokenizer("d").input_ids, *firsts[0]]
    tiny_lm.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"model.template: this tokenizer has no chat template"):
        runs.opened(settings, tmp_path)
    settings["model"] |= {"pipeline": "flowrl/demo/shapes-sd3", "language": None}
    with pytest.raises(UserError, match="template is a setting of language models"):
        check_run(run_from(settings, "test"))


@pytest.mark.parametrize("kind", ["llava", "qwen"])
def test_rows_with_images_stay_in_their_call_and_in_rows_of_their_own(policies, kind, monkeypatch):
    """Positions of images are not those of tokens, and a call that goes on has no images."""
    policy = policies[kind]
    text = policy.model.config.get_text_config()
    monkeypatch.setattr(text, "_attn_implementation_internal", "flash_attention_2")
    assert text._attn_implementation == "flash_attention_2"
    assert not rows_can_leave(policy.model) and not takes_lengths(policy.model)
    assert policy.trial_calls(PROMPTS, 4) == {}
