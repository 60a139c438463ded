"""Runs whose model writes images as tokens: training, resuming, weights, commands, refusals."""

import copy
import dataclasses
import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import JanusForConditionalGeneration

from flowrl.errors import UserError
from flowrl.iteration import ratio_check
from flowrl.likelihoods.token import Token
from flowrl.models.before_weights import check_before_weights
from flowrl.models.description import describe
from flowrl.models.image_tokens.policy import ImageTokenPolicy
from flowrl.session.progress import Progress
from flowrl.settings.model.image_tokens import ImageTokenSettings
from flowrl.settings.read import run_from
from samplers.completions import Completions
from tests.support import runs, text_runs, tiny_lm
from tests.support import tiny_image_tokens as tiny
from tests.support.advice import advice
from tests.support.iterations import collect, iterate
from tests.support.page_blocks import block_of
from tests.support.runs import flowrl, lines, write

CPU = torch.device("cpu")
CODES = 9  # of the tiny Janus
PROMPTS = ("a b", "abcdefgh", "cc")


@pytest.fixture(scope="module")
def janus(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("janus"))


@pytest.fixture(scope="module")
def emu3(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("emu3"), "emu3")


def tree(model: Path, folder: Path, recipe: dict[str, Any] | None = None, **train: Any) -> Any:
    folder.mkdir(exist_ok=True)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return {
        "recipe": {"name": "text_grpo", "length": CODES, "group": 4, "kl": 0.01} | (recipe or {}),
        "model": {"language": str(model), "image": {}, "lora": {"rank": 4}, "device": "cpu"},
        "prompts": {"train": str(prompts), "held_out": str(prompts), "per_iteration": 2},
        "rewards": [{"name": "brightness"}],
        "train": {"iterations": 2, "lr": 1e-2, "alarms": "off", **train},
        "evaluate": {"every": 1, "samples": 6, "per_prompt": 2},
        "checkpoint": {"every": 1},
        "track": {"images": 4},
    }


def small(settings: dict[str, Any]) -> dict[str, Any]:
    """The same run of the tiny Emu3: six tokens."""
    settings["recipe"]["length"] = 6
    settings["model"]["image"] = {"guidance": 2.0, "height": 16, "width": 24, "negative": "bad"}
    return settings


RECIPES: dict[str, dict[str, Any]] = {
    "text_grpo": {"kl": 0.05, "top_p": 0.9, "top_k": 8},
    "text_tree": {"roots": 2, "branch": 2, "at": [4]},
    "text_dapo": {},
    "text_dpo": {},
    "text_treerl": {"roots": 2},
}


@pytest.mark.quick_cases("text_dpo", "text_tree")
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_of_texts_begin_at_ratio_1_and_learn(janus, tmp_path, name):
    settings = tree(janus, tmp_path)
    settings["recipe"] = {"name": name, "length": CODES, **RECIPES[name]}
    session = runs.opened(settings, tmp_path)
    made = collect(session, 0)
    floor = ratio_check.check_ratio(session.learner, made, session.terminal)
    assert floor is None or floor < 1e-5
    assert made.samples.media.shape[1:] == (3, 6, 6) and made.samples.kind == "image"
    assert all(rows.ids.max() < tiny.CODES for rows in made.rows)
    done = iterate(session, Progress())
    assert done.metrics["grad_norm"] > 0 and done.metrics["image/surprise"] > 1


def test_the_reference_is_guided_too(janus, tmp_path):
    """With the adapters as they begin, the divergence from the initial model is 0."""
    session = runs.opened(tree(janus, tmp_path, {"kl": 0.1}), tmp_path)
    made = iterate(session, Progress())
    assert made.metrics["kl"] == pytest.approx(0, abs=1e-9)
    assert iterate(session, Progress(1)).metrics["kl"] > 1e-6


@pytest.mark.parametrize(
    "kind", ["adapters", *(pytest.param(k, marks=pytest.mark.slow) for k in ("whole", "emu3"))]
)
def test_a_run_resumes_to_the_bit(janus, emu3, tmp_path, kind):
    def opened(folder: Path) -> Any:
        settings = tree(janus, folder, updates=2)
        if kind == "emu3":
            settings = small(settings | {"model": settings["model"] | {"language": str(emu3)}})
        if kind == "whole":
            settings["model"]["lora"] = None
        return runs.opened(settings, folder)

    text_runs.check_resumed_bits(tmp_path, opened)


def densities(model: Any, processor: Any, published: Any, codes: torch.Tensor) -> torch.Tensor:
    policy = ImageTokenPolicy(model, processor, ImageTokenSettings(), published)
    rows = _rows(policy, codes)
    return policy.open(PROMPTS, [], CODES).policy(rows).logp.detach()


def _rows(policy: ImageTokenPolicy, codes: torch.Tensor) -> Any:
    batch = policy.open(PROMPTS, [], CODES)
    (rollout,) = batch.rollouts(Completions(1), (0, 1, 2), seed=0, iteration=0)
    return Token().whole(dataclasses.replace(rollout, ids=codes))[0]


def trained(model: Path, folder: Path, lora: dict[str, Any] | None) -> tuple[Any, torch.Tensor]:
    """A run's policy after an iteration, and densities of some codes under it."""
    settings = tree(model, folder)
    settings["model"]["lora"] = lora
    session = runs.opened(settings, folder)
    codes = torch.arange(3 * CODES).view(3, CODES) % tiny.CODES
    policy: Any = session.learner.policy
    rows = _rows(policy, codes)
    before = policy.open(PROMPTS, [], CODES).policy(rows).logp.detach()
    iterate(session, Progress())
    after = policy.open(PROMPTS, [], CODES).policy(rows).logp.detach()
    assert (after - before).abs().max() > 1e-3
    policy.save(folder / "saved")
    return policy, after


def codes_of_test() -> torch.Tensor:
    return torch.arange(3 * CODES).view(3, CODES) % tiny.CODES


@pytest.mark.slow
def test_an_adapter_loads_in_plain_peft(janus, tmp_path):
    policy, after = trained(janus, tmp_path / "run", {"rank": 4})
    plain = JanusForConditionalGeneration.from_pretrained(janus)
    published = copy.deepcopy(plain.generation_config)
    text = block_of("image_tokens.md", "PeftModel").text.replace(
        "deepseek-community/Janus-Pro-1B", str(janus)
    )
    space: dict[str, Any] = {}
    exec(text.replace("runs/run-0001/adapter", str(tmp_path / "run/saved")), space)
    adapted = space["model"]
    found = densities(adapted.base_model.model, policy.processor, published, codes_of_test())
    torch.testing.assert_close(found, after, atol=1e-6, rtol=0)
    names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert names and all(".language_model." in name for name in names)
    begun = ImageTokenPolicy.load(str(janus), ImageTokenSettings(), dtype=torch.float32, device=CPU)
    begun.begin_from(str(tmp_path / "run/saved"))
    again = begun.open(PROMPTS, [], CODES).policy(_rows(begun, codes_of_test())).logp
    torch.testing.assert_close(again.detach(), after, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_whole_weights_load_in_plain_transformers(janus, tmp_path):
    policy, after = trained(janus, tmp_path / "run", None)
    saved = tmp_path / "run/saved"
    plain = JanusForConditionalGeneration.from_pretrained(saved)
    assert plain.generation_config.guidance_scale == 3.0, "as published"
    published = copy.deepcopy(plain.generation_config)
    found = densities(plain, policy.processor, published, codes_of_test())
    torch.testing.assert_close(found, after, atol=1e-6, rtol=0)
    base = JanusForConditionalGeneration.from_pretrained(janus)
    same = [
        torch.equal(p, dict(base.named_parameters())[name])
        for name, p in plain.named_parameters()
        if "vqmodel" in name or "vision_model" in name
    ]
    assert same and all(same), "the decoder does not learn"
    again = ImageTokenPolicy.load(str(saved), ImageTokenSettings(), dtype=torch.float32, device=CPU)
    again.load_weights(saved)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["janus", pytest.param("emu3", marks=pytest.mark.slow)])
def test_commands_see_images(janus, emu3, tmp_path, capsys, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    settings = tree(janus, tmp_path, iterations=1)
    if kind == "emu3":
        settings = small(settings | {"model": settings["model"] | {"language": str(emu3)}})
    file = write(settings, tmp_path)
    assert flowrl("plan", file, "--devices", "1xH100") == 0
    said = capsys.readouterr().out
    assert "tokens per image (recipe.length)" in said and "all tokens of an image" in said
    assert "not counted: activations of the decoder of images" in said
    assert flowrl("train", file) == 0
    run = next((tmp_path / "runs").iterdir())
    assert "held_out/brightness" in lines(run)[-1] and "image/surprise" in lines(run)[-1]
    assert flowrl("sample", run, "a b", "--count", "2", "--out", tmp_path / "made") == 0
    assert {path.name for path in (tmp_path / "made").iterdir()} == {
        "000.png", "001.png", "grid.png", "prompts.jsonl",
    }  # fmt: skip
    assert flowrl("evaluate", run) == 0
    assert flowrl("export", run, "--merged", "--out", tmp_path / "out") == 0
    card = (tmp_path / "out/README.md").read_text()
    assert "pipeline_tag: text-to-image" in card and "| tokens per image |" in card
    assert (tmp_path / "out/merged/model.safetensors").is_file()
    page = (run / "report.html").read_text()
    assert "data:image" in page


REFUSED = [
    ({"recipe.length": 8}, r"recipe.length is 8, but an image .* set recipe.length: 9"),
    ({"evaluate.steps": 8}, r"evaluate.steps is 8, but an image .* set evaluate.steps: 9"),
    ({"model.image.height": 16}, "model.image.height is a setting of Emu3, not of Janus"),
    ({"model.image.guidance": 0.5}, "image.guidance"),
    ({"model.stop": ["b"]}, r"stop: the model writes images \(image\), and an image always has"),
    ({"model.steps": {"separator": " "}}, "steps: the model writes images"),
    ({"model.lora": {"rank": 2, "vision": True}}, "lora.vision: the model writes images"),
    ({"train.share_prompts": True}, "train.share_prompts: .*model.image"),
    ({"recipe": {"name": "flow_grpo"}}, "trained by recipes for texts, token by token, but flow"),
    (
        {"recipe": {"name": "joint", "text": "text_grpo", "image": "flow_grpo"}},
        "a joint run's images are a pipeline's: set model.pipeline",
    ),
    ({"evaluate.guidance": 2.0}, "evaluate.guidance .*pipelines"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED)
def test_what_does_not_fit_is_refused_before_weights_load(
    janus, tmp_path, monkeypatch, capsys, changes, says
):
    settings = tree(janus, tmp_path)
    for place, value in changes.items():
        *path, name = place.split(".")
        section = settings
        for each in path:
            section = section[each]
        section[name] = value
    monkeypatch.setattr(
        JanusForConditionalGeneration, "from_pretrained", lambda *_, **__: pytest.fail("loaded")
    )
    monkeypatch.chdir(tmp_path)
    assert flowrl("train", write(settings, tmp_path)) == 2
    assert re.search(says, " ".join(capsys.readouterr().err.split()))


def test_images_of_rows_are_not_the_model_s(janus, tmp_path):
    run = run_from(tree(janus, tmp_path), "test")
    described = describe(run.model)
    assert described is not None and described.image_columns(["image", "prompt"]) == []
    texts = describe(run.model.model_copy(update={"image": None}))
    assert texts is not None and texts.image_columns(["image", "prompt"]) == ["image"]


def started(settings: dict[str, Any]) -> None:
    check_before_weights(run_from(settings, "test"))


def test_other_models_and_sizes_are_refused_before_weights_load(janus, emu3, tmp_path):
    texts = tree(tiny_lm.write(tmp_path / "lm"), tmp_path / "run")
    plain = texts | {"model": {k: v for k, v in texts["model"].items() if k != "image"}}
    advice(
        "model.image: {} is a {} model, and only {} write images as tokens here: leave the setting "
        "out",
        lambda: started(texts),
        lambda: started(plain | {"rewards": [{"name": "length"}]}),
    )
    fixed = tree(janus, tmp_path / "run")
    sized = copy.deepcopy(fixed)
    sized["model"]["image"] = {**(sized["model"]["image"] or {}), "height": 16}
    advice(
        "model.image.{} is a setting of Emu3, not of Janus: leave it out",
        lambda: started(sized),
        lambda: started(fixed),
    )
    fits = small(tree(emu3, tmp_path / "run"))
    odd, brief = copy.deepcopy(fits), copy.deepcopy(fits)
    odd["model"]["image"]["width"] = 25
    brief["model"]["system"] = "be brief"
    advice(  # 24, as those that fit have
        "model.image.{}: Emu3's decoder makes multiples of {} pixels, not {}: set {}",
        lambda: started(odd),
        lambda: started(fits),
    )
    with pytest.raises(UserError, match=r"model.image.width: .* multiples of 8 pixels, .* set 24"):
        started(odd)
    advice(
        "model.{}: {} reads prompts of images without a chat template: remove the setting",
        lambda: started(brief),
        lambda: started(fits),
    )


def test_a_count_of_tokens_is_that_of_an_image(janus, tmp_path):
    """Of the run's texts, and of what the model's own file says."""
    folder = tmp_path / "edited"
    shutil.copytree(janus, folder)
    whole = json.loads((folder / "config.json").read_text())

    def written(tokens: int) -> None:
        vision = whole["vision_config"] | {"num_image_tokens": tokens}
        (folder / "config.json").write_text(json.dumps(whole | {"vision_config": vision}))
        started(tree(folder, tmp_path / "run"))

    advice(
        "model.image: config.json names {} tokens for an image, but the decoder takes {} x {}: "
        "set vision_config.num_image_tokens there to {}",
        lambda: written(10),
        lambda: written(9),
    )
    advice(
        "{} is {}, but an image of {} ({} x {} pixels) has {} tokens: set {}: {}",
        lambda: started(tree(janus, tmp_path / "run", {"length": 8})),
        lambda: started(tree(janus, tmp_path / "run", {"length": CODES})),
    )


def test_what_generate_needs_is_asked_of_the_models_file(janus, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(janus, broken)
    file = broken / "generation_config.json"
    config = json.loads(file.read_text())

    def checked(more: dict[str, int]) -> None:
        less = {key: value for key, value in config.items() if key != "pad_token_id"}
        file.write_text(json.dumps(less | more))
        check_before_weights(run_from(tree(broken, tmp_path / "run"), "test"))

    advice(
        "model.image: generation_config.json has no {}, which Janus needs for the row of guidance "
        "without the prompt: add the token's number there",
        lambda: checked({}),
        lambda: checked({"pad_token_id": config["pad_token_id"]}),
    )


@pytest.mark.slow
def test_brightness_is_learned_by_three_seeds(emu3, tmp_path, monkeypatch):
    """Held-out images get brighter where that is rewarded: the interval of the gain over three
    seeds (Student's t with two degrees of freedom, 4.303) is above 0."""
    monkeypatch.chdir(tmp_path)
    gains: list[float] = []
    for seed in range(3):
        settings = small(tree(emu3, tmp_path, seed=seed, iterations=40, lr=5e-3))
        settings["recipe"] |= {"group": 16, "kl": 0.0}
        settings["prompts"]["per_iteration"] = 3
        settings["evaluate"] = {"every": 40, "samples": 96, "per_prompt": 32}
        settings["checkpoint"] = {"every": 40}
        assert flowrl("train", write(settings, tmp_path), "--folder", tmp_path / f"run{seed}") == 0
        rows = lines(tmp_path / f"run{seed}")
        found = [row["held_out/brightness"] for row in rows if "held_out/brightness" in row]
        gains.append(found[-1] - found[0])
    mean, half = statistics.mean(gains), 4.303 * statistics.stdev(gains) / 3**0.5
    print(f"gains of brightness {gains}: {mean:.4f} +- {half:.4f}")
    assert mean - half > 0
