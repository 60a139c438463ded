"""Advice of a language model's messages is followed: the next start or call is not refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

from flowrl.errors import UserError
from flowrl.models.language import proofs
from flowrl.models.language.chat import rendered
from flowrl.models.language.environment import Replies
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.language.turns import turn_template
from flowrl.models.language.use import TextUse
from flowrl.models.open import refuse_images
from flowrl.prompts import Chat
from flowrl.session.given_samples import GIVEN
from flowrl.settings import EnvironmentSettings
from flowrl.settings.read import run_from
from rewards.sandbox import templates
from samplers.completions import Completions
from tests.support import runs, text_runs, tiny_lm, tiny_vlm
from tests.support.advice import advice
from tests.support.tiny_vlm import picture

USER = {"role": "user", "content": "c"}
CPU = torch.device("cpu")


def loaded(folder: Path, use: TextUse = TextUse()) -> CausalPolicy:
    return CausalPolicy.load(str(folder), dtype=torch.float32, device=CPU, use=use)


def made(use: TextUse = TextUse(), **tokenizer: bool) -> CausalPolicy:
    return CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer(**tokenizer), use=use)


def sampled(policy: CausalPolicy, rows: Any = (), prompts: Any = ("a", "bead c")) -> torch.Tensor:
    """Tokens of two completions of each prompt."""
    batch = policy.open(prompts, rows, 4)
    prompt = tuple(range(len(prompts)))
    (rollout,) = batch.rollouts(Completions(2), prompt, seed=0, iteration=0)
    return rollout.ids


def test_an_entry_of_the_tokenizer_that_is_no_number_may_be_left_out(tmp_path: Path) -> None:
    folder = tiny_lm.write(tmp_path)
    file = folder / "tokenizer_config.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | {"model_max_length": "many"}))

    def left_out() -> CausalPolicy:
        whole.pop("model_max_length", None)
        file.write_text(json.dumps(whole))
        return loaded(folder)

    followed = advice(
        "model_max_length is {}, which is no number: download the file again, or leave the entry "
        "out",
        lambda: loaded(folder),
        left_out,
    )
    assert sampled(followed).numel()


def pictured(model: Path, folder: Path) -> dict[str, Any]:
    """Settings of a run with a prompt of an image, and one without."""
    settings = text_runs.tree(model, folder, text_runs.GRPO)
    picture(0).save(folder / "0.png")
    parts = [{"type": "image"}, {"type": "text", "text": "a"}]
    rows = [
        {"prompt": [{"role": "user", "content": parts}], "image": "0.png", "kind": "picture"},
        {"prompt": [USER], "kind": "text"},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings["prompts"]["per_iteration"] = 1
    return settings


@pytest.mark.parametrize("way", ["model", "where"])
def test_prompts_with_images_need_another_model_or_are_left_out(tmp_path: Path, way: str) -> None:
    settings = pictured(tiny_lm.write(tmp_path / "lm", chat=True), tmp_path)

    def followed() -> Any:
        if way == "model":
            settings["model"]["language"] = str(tiny_vlm.write(tmp_path / "vlm"))
        else:
            source = settings["prompts"]["train"]
            chosen = {"source": source, "where": {"kind": "text"}}
            settings["prompts"] |= {"train": chosen, "held_out": chosen}
        return runs.opened(settings, tmp_path)

    session = advice(
        "the prompt has images, but model.language only reads texts: use a vision-language model, "
        "or {}",
        lambda: refuse_images(run_from(settings, "test"), settings["model"]["language"]),
        followed,
    )
    assert len(session.prompts.texts) == (2 if way == "model" else 1)


def supervised(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The run, trained on the texts of `folder`/given.jsonl."""
    rest = {name: value for name, value in settings.items() if name != "evaluate"}
    return rest | {
        "recipe": {"name": "text", "length": 6, "group": 2, "loss": "reinforce"},
        "given": {"file": str(folder / "given.jsonl"), "kind": "texts"},
        "prompts": {"per_iteration": 1},
    }


def test_rows_of_given_texts_are_taken_out_of_their_file(tmp_path: Path) -> None:
    """`given` has no setting `where`."""
    settings = pictured(tiny_lm.write(tmp_path / "lm", chat=True), tmp_path)
    file = Path(settings["prompts"].pop("train"))
    rows = [json.loads(line) | {"completion": "b"} for line in file.read_text().splitlines()]
    given = tmp_path / "given.jsonl"
    settings = supervised(settings, tmp_path)

    def opened(count: int) -> Any:
        given.write_text("".join(json.dumps(row) + "\n" for row in rows[-count:]))
        return runs.opened(settings, tmp_path)

    advice(
        "only reads texts: use a vision-language model, or {}",
        lambda: opened(2),
        lambda: opened(1),
    )
    with pytest.raises(UserError, match="or take such rows out of the file"):
        opened(2)


ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


def alternating(system: str | None) -> CausalPolicy:
    tokenizer = tiny_lm.tokenizer(chat=True)
    tokenizer.chat_template = ALTERNATE
    return CausalPolicy(tiny_lm.llama(), tokenizer, use=TextUse(system=system))


def test_a_template_that_refuses_messages_takes_them_in_its_order() -> None:
    twice = Chat("c", [USER, USER], "data.jsonl, line 3")
    answered = Chat("c", [USER, {"role": "assistant", "content": "b"}, USER])
    for refused, prompt, follow in (
        ("be a cab", "c", lambda: alternating(None).encode("c")),
        (None, twice, lambda: alternating(None).encode(answered)),
    ):
        ids = advice(
            "the chat template of model.language rejects messages of {} ({}); use the order that "
            "it expects, or remove model.system",
            lambda refused=refused, prompt=prompt: alternating(refused).encode(prompt),
            follow,
        )
        assert ids


def replies(template: str, role: Literal["user", "tool"]) -> Replies:
    tokenizer = tiny_lm.tokenizer(chat=True)
    tokenizer.chat_template = template
    return Replies(EnvironmentSettings(name="own.py:reply", role=role), tokenizer, (1,))


@pytest.mark.parametrize(("role", "other"), [("tool", "user"), ("user", "tool")])
def test_replies_take_the_role_that_the_template_allows(role: Any, other: Any) -> None:
    refusal = f"loop.index0 > 0 and m['role'] == '{role}'"
    template = tiny_lm.CHAT.replace(
        "{{ m['role']",
        f"{{% if {refusal} %}}{{{{ raise_exception('no') }}}}{{% endif %}}{{{{ m['role']",
    )
    followed = advice(
        "model.environment: the chat template allows no {} turn after the model's ({}); set "
        "model.environment.role: {}",
        lambda: replies(template, role),
        lambda: replies(template, other),
    )
    assert followed.encode("hi", [1])


NO_THIRD = "{% for m in messages %}{{ 1 // 0 if loop.index0 > 1 else m['content'] }}{% endfor %}"


def test_a_template_that_takes_no_replies_is_exchanged() -> None:
    followed = advice(
        "allows neither a user turn nor a tool turn after the model's ({}): use a model with "
        "another one",
        lambda: replies(NO_THIRD, "tool"),
        lambda: replies(tiny_lm.CHAT, "tool"),
    )
    assert followed.encode("hi", [1])


def test_a_role_is_no_way_out_where_the_template_has_another_fault() -> None:
    for role in ("tool", "user"):
        with pytest.raises(UserError, match=r"^model\.environment: [^:]* leaves out the model"):
            replies("{{ messages[0]['content'] }}", role)


ENDLESS = "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}"


@pytest.mark.slow
def test_a_template_that_does_not_end_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a prompt, and at a reply, where no role of `model.environment` is a way out."""
    tokenizer = tiny_lm.tokenizer(chat=True)
    late = {"chat_template": ENDLESS}

    def ended(render: Callable[[], object]) -> object:
        with monkeypatch.context() as shortened:
            shortened.setattr(templates, "RENDER_SECONDS", 0.3)
            return render()

    text = advice(
        "{}: model.language: {}: use a model with another one",
        lambda: ended(lambda: rendered(tokenizer, [USER], "c", late)),
        lambda: rendered(tokenizer, [USER], "c", {}),
    )
    assert text == "u:c a:"
    reply = advice(
        "model.language: {}: use a model with another one",
        lambda: ended(lambda: turn_template(tokenizer, late).reply("hi", "user", 1)),
        lambda: turn_template(tokenizer, {}).reply("hi", "user", 1),
    )
    assert reply


def test_completions_fit_or_are_cut(tmp_path: Path) -> None:
    settings = text_runs.tree(tiny_lm.write(tmp_path / "lm"), tmp_path, text_runs.GRPO)
    settings = supervised(settings, tmp_path)
    (tmp_path / "given.jsonl").write_text(json.dumps({"prompt": "a", "completion": "bead"}) + "\n")

    def proofs(length: int, fit: str) -> list[str]:
        settings["recipe"]["length"], settings["given"]["fit"] = length, fit
        return runs.opened(settings, tmp_path).table[GIVEN].proofs()

    for length, fit in ((5, "exact"), (3, "crop")):
        said = advice(
            "{}: the completion has {} tokens, including its end, but recipe.length is {}: raise "
            "it, or set given.fit: crop",
            lambda: proofs(3, "exact"),
            lambda length=length, fit=fit: proofs(length, fit),
        )
        assert said


class Scaled(nn.Linear):
    """A head of another kind, as Cohere's models could have it."""


def test_a_head_of_another_kind_keeps_its_dtype() -> None:
    def opened(use: TextUse) -> CausalPolicy:
        model = tiny_lm.llama().bfloat16()
        model.lm_head.__class__ = Scaled
        return CausalPolicy(model, tiny_lm.tokenizer(), use=use)

    followed = advice(
        "model.head_dtype: the head of {} is not a linear layer; leave the setting out",
        lambda: opened(TextUse(float32_head=True)),
        lambda: opened(TextUse()),
    )
    assert sampled(followed).numel()


def test_messages_need_a_template_or_become_a_column_of_texts(tmp_path: Path) -> None:
    settings = text_runs.tree(tiny_lm.write(tmp_path / "lm"), tmp_path, text_runs.GRPO)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": [USER], "question": "a", "answer": "a"}) + "\n")
    settings["prompts"]["per_iteration"] = 1

    def opened(**changes: Any) -> torch.Tensor:
        tree = settings | {
            "model": settings["model"] | changes.get("model", {}),
            "prompts": settings["prompts"] | changes.get("prompts", {}),
        }
        session = runs.opened(tree, tmp_path)
        policy: Any = session.learner.policy
        return sampled(policy, prompts=session.prompts.texts)

    with_template = str(tiny_lm.write(tmp_path / "chat", chat=True))
    for follow in ({"prompts": {"column": "question"}}, {"model": {"language": with_template}}):
        ids = advice(
            "{}: the prompt is a list of chat messages, but the tokenizer of model.language has "
            "no chat template: name a column of texts ({}), or use a model that has one",
            opened,
            lambda follow=follow: opened(**follow),
        )
        assert ids.numel()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny vision-language model."""
    return tiny_vlm.write(tmp_path_factory.mktemp("vlm"))


@pytest.mark.parametrize("setting", ["share", "server"])
def test_images_go_without_settings_that_pass_on_tokens(
    seeing: Path, tmp_path: Path, setting: str
) -> None:
    def opened(*, used: bool) -> torch.Tensor:
        share = used and setting == "share"
        kept = runs.opened(tiny_vlm.tree(seeing, tmp_path, share_prompts=share), tmp_path)
        policy: Any = kept.learner.policy
        policy.server = object() if used and setting == "server" else None
        prompts, rows = kept.prompts.take([0, 1, 2])
        return sampled(policy, rows, prompts)

    ids = advice(
        "{}: it passes prompts on as tokens only, but these have images: leave the setting out",
        lambda: opened(used=True),
        lambda: opened(used=False),
    )
    assert ids.numel()


def windowed() -> MistralForCausalLM:
    settings = tiny_lm.llama().config.to_dict()
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads", "num_key_value_heads", "pad_token_id", "eos_token_id",
              "bos_token_id", "max_position_embeddings")  # fmt: skip
    config = MistralConfig(sliding_window=4, **{name: settings[name] for name in shared})
    return tiny_lm.sharpened(MistralForCausalLM(config))


def test_layers_of_windows_share_no_prompts() -> None:
    followed = advice(
        "train.share_prompts: {}; set train.share_prompts: false",
        lambda: CausalPolicy(windowed(), tiny_lm.tokenizer(), use=TextUse(share_prompts=True)),
        lambda: CausalPolicy(windowed(), tiny_lm.tokenizer(), use=TextUse(share_prompts=False)),
    )
    assert sampled(followed).numel()


def test_long_prompts_are_removed_or_get_shorter_completions() -> None:
    policy = CausalPolicy(tiny_lm.llama(positions=12), tiny_lm.tokenizer())
    for prompts, steps in ((["abc"], 6), (["abc", "abcabca"], 5)):
        batch = advice(
            "{} of {} prompts are too long: the model has {} positions, a completion takes up to "
            "{}, and the prompt {} has {} tokens; remove such prompts, or lower recipe.length",
            lambda: policy.open(["abc", "abcabca"], [], 6),
            lambda prompts=prompts, steps=steps: policy.open(prompts, [], steps),
        )
        assert len(batch.contexts) == len(prompts)


def test_one_row_a_call_ends_the_refusal_of_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose rows change with padding, as Mistral 3 and RWKV: each call then has one row,
    and nothing is padded."""
    policy = loaded(tiny_lm.write(tmp_path))
    monkeypatch.setattr(proofs, "PADDING_TOLERANCE", -1.0)
    prompts = ["one", "one two three"]

    def alone() -> list[str]:
        policy.rows_per_call = 1
        return policy.proofs(prompts, 4)

    said = advice(
        "left padding changes {}'s next-token distribution by {} (total variation): set "
        "train.rows_per_call: 1",
        lambda: policy.proofs(prompts, 4),
        alone,
    )
    assert "each call has one row, without padding" in said


def test_a_special_token_ends_texts_by_itself() -> None:
    followed = advice(
        "model.stop: {} contains a special token, which decoded texts leave out: use only that "
        "token",
        lambda: made(TextUse(stop=["a<end>"])),
        lambda: made(TextUse(stop=["<end>"])),
    )
    assert followed.stops.tokens == [1] and followed.stops.texts is None


def test_an_empty_stop_text_is_left_out() -> None:
    followed = advice(
        "model.stop: {} has no tokens; leave it out",
        lambda: made(TextUse(stop=["", "j"])),
        lambda: made(TextUse(stop=["j"])),
    )
    assert len(followed.stops.tokens) == 2


@pytest.mark.parametrize("setting", [{"system": "dig"}, {"template": {"enable_thinking": False}}])
def test_a_tokenizer_without_a_template_takes_none_of_its_settings(setting: Any) -> None:
    followed = advice(
        "model.{}: this tokenizer has no chat template; remove the setting",
        lambda: made(TextUse(**setting)),
        made,
    )
    assert sampled(followed).numel()


def test_a_row_names_its_images_once(seeing: Path, tmp_path: Path) -> None:
    settings = tiny_vlm.tree(seeing, tmp_path)
    file = Path(settings["prompts"]["train"])
    file.write_text(json.dumps({"prompt": "a:", "image": "0.png", "images": ["1.png"]}) + "\n")
    settings["prompts"]["per_iteration"] = 1

    def opened(keep: list[str] | None) -> torch.Tensor:
        settings["prompts"]["train"] = {"source": str(file), "keep": keep}
        kept = runs.opened(settings, tmp_path)
        policy: Any = kept.learner.policy
        prompts, rows = kept.prompts.take([0])
        return sampled(policy, rows, prompts)

    ids = advice(
        "{} has the columns images and image: leave one out (keep)",
        lambda: opened(None),
        lambda: opened(["prompt", "image"]),
    )
    assert ids.numel()


def test_a_given_row_names_its_images_once(seeing: Path, tmp_path: Path) -> None:
    settings = supervised(tiny_vlm.tree(seeing, tmp_path), tmp_path)

    def proven(*columns: str) -> list[str]:
        row = {"prompt": "a:", "completion": "b", **dict.fromkeys(columns, "0.png")}
        (tmp_path / "given.jsonl").write_text(json.dumps(row) + "\n")
        return runs.opened(settings, tmp_path).table[GIVEN].proofs()

    said = advice(
        "{} has the columns images and image: take one out of the file",
        lambda: proven("image", "images"),
        lambda: proven("image"),
    )
    assert said


def test_images_of_several_shapes_are_called_one_by_one(seeing: Path) -> None:
    """A LLaVA whose processor leaves images as large as they are."""
    policy = loaded(seeing)
    assert policy.vision is not None
    processor = policy.vision.processor.image_processor
    processor.do_resize = processor.do_center_crop = False
    tower = policy.model.model.vision_tower
    tower.forward = partial(tower.forward, interpolate_pos_encoding=True)
    rows = [{"image": picture(0, 8, 8)}, {"image": picture(1, 12, 8)}]

    def alone() -> torch.Tensor:
        policy.rows_per_call = 1
        policy.proofs(["a", "bead c"], 4)
        return sampled(policy, rows)

    ids = advice(
        "model.language: {} has different shapes for different images ({}), so they cannot share "
        "a call: set train.rows_per_call: 1",
        lambda: sampled(policy, rows),
        alone,
    )
    assert len(ids) == 4
