"""The table of words, and the suggestions made from it."""

import json
import re

import pytest

import rewards
from flowrl.errors import UserError
from flowrl.importing.peers.trl_names import TRL_NAMES
from flowrl.recipes import RECIPES
from flowrl.settings import RECIPE_SETTINGS
from flowrl.settings.command_line.options import option_names
from flowrl.settings.read import override, run_from
from flowrl.settings.words.names import PEERS, WORDS, flowrl_words, words_table
from flowrl.settings.words.other_forms import OTHER_FORMS, other_form

TREE = {
    "recipe": {"name": "flow_grpo"},
    "model": {"pipeline": "flowrl/demo/shapes-sd3"},
    "prompts": {"train": "configs/prompts/shapes_train.jsonl"},
    "rewards": "brightness",
}


def test_every_word_is_a_setting_or_an_option_of_train():
    known = {name for kind in RECIPE_SETTINGS.values() for name in option_names(kind)}
    known |= {"model.lora", "--folder", "--resume"}
    known |= {f"model.call.{name}" for name in ("num_frames", "max_sequence_length")}
    known |= {
        f"model.{inner}"
        for inner in ("lora.rank", "lora.alpha", "lora.targets", "server.url", "vae.tiling")
    }
    assert not [word.setting for word in WORDS if word.setting not in known]
    assert len({word.setting for word in WORDS}) == len(WORDS)


def test_the_table_is_markdown_with_a_row_per_word():
    head, line, *rows = words_table().splitlines()
    assert head.split(" | ")[2:] == [*PEERS[:-1], f"{PEERS[-1]} |"]
    assert line == "|---|---|---|---|---|---|---|---|" and len(rows) == len(WORDS)
    assert all(row.count(" | ") == 7 for row in rows)
    assert any("`train.lr`" in row and "`learning_rate`" in row for row in rows)


@pytest.mark.parametrize(
    ("section", "key", "hint"),
    [
        ("train", "learning_rate", "did you mean train.lr?"),
        ("recipe", "group_size", "did you mean recipe.group?"),
        ("recipe", "beta", "did you mean recipe.kl?"),
        ("recipe", "num_generations", "did you mean recipe.group?"),
        ("recipe", "num_image_per_prompt", "did you mean recipe.group?"),
        ("recipe", "noise_level", "did you mean recipe.eta?"),
        ("recipe", "num_inference_steps", "did you mean recipe.steps or evaluate.steps?"),
        ("model", "fp16", "did you mean model.dtype?"),
        ("model", "guidance_scale", "did you mean model.guidance.sample?"),
        ("model", "lora_r", "did you mean model.lora.rank?"),
        ("train", "num_inner_epochs", "did you mean train.epochs?"),
        ("train", "gradient_accumulation_steps", "did you mean train.rows_per_call?"),
        ("track", "report_to", "did you mean track.with?"),
        ("train", "ppo_mini_batch_size", "did you mean train.updates?"),
        ("prompts", "train_files", "did you mean prompts.train?"),
        ("train", "output_dir", "did you mean --folder?"),
    ],
)
def test_a_word_of_another_library_leads_to_ours(section, key, hint):
    part = {**TREE.get(section, {}), key: 1}
    with pytest.raises(UserError) as caught:
        run_from({**TREE, section: part}, "run.yaml")
    assert str(caught.value) == f"run.yaml: {section}.{key}: {key!r} is not known; {hint}"


def test_another_spelling_of_a_recipe_is_recognized():
    for name in ("Flow-GRPO", "flow grpo", "FLOW_GRPO"):
        with pytest.raises(UserError, match=r"is not known; did you mean 'flow_grpo'\?$"):
            run_from({**TREE, "recipe": {"name": name}}, "run.yaml")
    assert run_from({**TREE, "recipe": "flow_grpo"}, "run.yaml").recipe.name in RECIPES


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--learning_rate", "--learning_rate is not known; did you mean --train.lr?"),
        ("--num-generations", "--num-generations is not known; did you mean --recipe.group?"),
        ("--train.lrr", "--train.lrr is not known; did you mean --train.lr?"),
    ],
)
def test_options_have_the_same_suggestions(option, hint):
    with pytest.raises(UserError) as caught:
        override(run_from(TREE, "x"), [option, "1"])
    assert str(caught.value) == hint


def test_a_reward_may_be_a_bare_name():
    for value in ("brightness", ["brightness"], [{"name": "brightness"}]):
        run = run_from({**TREE, "rewards": value, "held_out_rewards": value}, "x")
        assert [(s.name, s.label, s.settings) for s in run.judges] == [
            ("brightness", "brightness", {})
        ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": {"name": "grpo"}}, "did you mean flow_grpo or text_grpo?"),
        ({"recipe": {"name": "rloo"}}, "did you mean text_rloo?"),
        ({"recipe": {"name": "MixGRPO"}}, "did you mean 'mix_grpo'?"),
        ({"recipe": {"name": "DiffusionNFT"}}, "did you mean nft?"),
        ({"recipe": {"name": "nft", "group_size": 3}}, "did you mean recipe.group?"),
        ({"model_name_or_path": "black-forest-labs/FLUX.1-dev"}, "did you mean model.pipeline?"),
        ({"extends": "a.yaml"}, "did you mean base?"),
        ({"lora": 16}, "did you mean model.lora?"),
        ({"guidance": 4.5}, "did you mean model.guidance or evaluate.guidance?"),
        ({"iterations": 3}, "did you mean train.iterations or steer.iterations?"),
        ({"train": {"group": 8}}, "did you mean recipe.group?"),
    ],
)
def test_a_name_of_elsewhere_comes_before_edit_distance(change, words):
    with pytest.raises(UserError) as caught:
        run_from({**TREE, **change}, "x")
    assert str(caught.value).endswith(words)


def test_a_name_or_path_is_of_the_recipes_kind():
    with pytest.raises(UserError, match=r"did you mean model\.language\?"):
        recipe = {"name": "text_grpo"}
        run_from({**TREE, "recipe": recipe, "model_name_or_path": "Qwen/Qwen2.5-0.5B"}, "x")


def test_the_last_word_of_an_option_is_enough():
    with pytest.raises(UserError, match=r"--lr is not known; did you mean --train\.lr\?"):
        override(run_from(TREE, "x"), ["--lr", "1"])


def test_a_reward_by_its_name_elsewhere():
    for name, ours in (("hpsv2", "hps"), ("HPSv2", "hps"), ("image_reward", "imagereward")):
        with pytest.raises(ValueError, match=f"did you mean '{ours}'"):
            rewards.check_reward(name, {})


def test_a_misspelt_base_is_the_only_complaint():
    for word in ("bases", "extends"):
        with pytest.raises(UserError) as caught:
            run_from({word: "demo.yaml", "train": {"lr": 1e-4}}, "x")
        assert "did you mean" in str(caught.value) and "missing" not in str(caught.value)


def test_each_argument_of_trl_is_answered_by_a_setting_or_what_stands_for_it():
    unanswered = [n for n in sorted(TRL_NAMES) if not (flowrl_words(n) or other_form(n))]
    assert unanswered == []


def test_other_forms_name_settings_and_recipes_that_exist():
    settings = {name for kind in RECIPE_SETTINGS.values() for name in option_names(kind)}
    for _, advice in OTHER_FORMS:
        for word in re.findall(r"\b(?:recipe|model|train|evaluate|checkpoint|track)\.\w+", advice):
            assert any(name == word or name.startswith(f"{word}.") for name in settings), advice
        for word in re.findall(r"\btext_\w+(?!\.md)\b", advice):
            assert word in RECIPES or f"docs/{word}.md" in advice, advice


@pytest.mark.parametrize(
    ("recipe", "change"),
    [
        ("text_grpo", {"recipe.loss": {"high": 0.28}}),
        ("text_grpo", {"recipe.loss": {"denominator": "tokens"}}),
        ("text_grpo", {"recipe.advantage": {"name": "standardize", "scale": None}}),
        ("text_grpo", {"recipe.likelihood": {"cut": "mask"}}),
        ("text_grpo", {"recipe.likelihood": {"ratio": "sequence"}}),
        ("text_grpo", {"model.template": {"enable_thinking": False}}),
        ("text_grpo", {"model.quantization": {"backend": "bitsandbytes", "bits": 4}}),
        ("text_grpo", {"rewards": [{"name": "length", "weight": 0.5}]}),
    ],
)
def test_what_other_forms_advise_is_accepted(recipe, change):
    tree = TREE | {"recipe": recipe, "model": {"language": "lm"}, "rewards": "length"}
    words = [f"--{name}={json.dumps(value)}" for name, value in change.items()]
    override(run_from(tree, "run.yaml"), words)


@pytest.mark.parametrize("name", ["train.clip_range", "train.epsilon", "actor.clip_ratio_low"])
def test_a_setting_of_other_recipes_is_said_to_be_one(name):
    """`--train.clip_range` was answered with --train.lr, which is spelled alike."""
    with pytest.raises(UserError, match=r"that is recipe\.clip here, which this run's recipe does"):
        override(run_from(TREE | {"recipe": "nft"}, "x"), [f"--{name}=0.1"])
    with pytest.raises(UserError, match=r"did you mean --recipe\.clip\?"):
        override(run_from(TREE | {"recipe": "flow_grpo"}, "x"), [f"--{name}=0.1"])


@pytest.mark.parametrize("name", ["steps", "num_inference_steps", "eta", "timestep_fraction"])
@pytest.mark.parametrize("recipe", ["text_grpo", "text_dapo"])
def test_no_suggestion_is_a_setting_that_the_recipe_lacks(recipe, name):
    """One of these was answered by itself: 'steps' is not known; did you mean recipe.steps?"""
    tree = TREE | {"model": {"language": "lm"}, "rewards": "length"}
    for raised in (
        lambda: run_from(tree | {"recipe": {"name": recipe, name: 4}}, "run.yaml"),
        lambda: override(run_from(tree | {"recipe": recipe}, "x"), [f"--recipe.{name}=4"]),
    ):
        with pytest.raises(UserError, match="is not known") as error:
            raised()
        offered = str(error.value).partition("is not known")[2]
        offered = re.sub(r"that is \S+ here, which this run's recipe does not have", "", offered)
        assert not re.search(r"recipe\.(steps|eta|fraction)\b", offered), error.value
