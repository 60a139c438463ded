"""Kinds of models: settings of one are refused in another, and defaults change nothing."""

from typing import Any

import pytest

from flowrl.errors import UserError
from flowrl.settings import (
    LanguageSettings,
    ModelSettings,
    OwnSettings,
    PipelineSettings,
    RunSettings,
)
from flowrl.settings.command_line.options import option_names
from flowrl.settings.model.kinds import MODEL_KINDS, own_settings_of
from flowrl.settings.read import dump, override, recipe_kind, run_from

NAMED = {PipelineSettings: "a/b", LanguageSettings: "a/b", OwnSettings: "mine.py:Flow"}
RECIPES = {PipelineSettings: "nft", LanguageSettings: "text_grpo", OwnSettings: "nft"}
OTHER: dict[str, Any] = {
    "height": 64, "width": 64, "rewriter": {"language": "a/b"}, "adapters": ["a.safetensors"],
    "quantization": {"backend": "torchao", "bits": 8}, "guidance": 4.5, "call": {"a": 1},
    "sigmas": {"shift": 2.0}, "scheduler": {"a": 1}, "offload": True, "offload_experts": True,
    "encodings": {"keep": "cpu"}, "vae": {"tiling": True}, "attention": "flash", "compile": True,
    "context_parallel": 2, "form": "modular", "guider": {"name": "a"}, "rights": ["code"],
    "gguf_file": "a.gguf", "system": "a", "template": {"a": 1},
    "stop": ["a"], "server": {"url": "http://a/v1", "model": "a"},
    "environment": {"name": "a.py:f"}, "steps": {"most": 3}, "head_dtype": "float32",
    "image": {"guidance": 2.0},
    "weights": "a.safetensors", "engine": {"url": "http://a"},
}  # fmt: skip
PAIRS = [
    (kind, name)
    for kind in MODEL_KINDS
    for name in OTHER
    if name not in kind.model_fields
]  # fmt: skip


def tree_of(kind: type[ModelSettings], **more: Any) -> dict[str, Any]:
    model = {kind.KIND: NAMED[kind]} | more
    return {
        "recipe": RECIPES[kind],
        "model": model,
        "prompts": {"train": "p.txt"},
        "rewards": ["brightness"],
    }


def test_every_setting_of_some_kinds_alone_is_tried():
    assert set(OTHER) == {name for kind in MODEL_KINDS for name in own_settings_of(kind)}


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_setting_of_another_kind_is_refused_unless_it_has_its_default(kind, name):
    other = next(each for each in MODEL_KINDS if name in each.model_fields)
    with pytest.raises(UserError, match=f"model: {name} is a setting of {other.KIND} models"):
        run_from(tree_of(kind, **{name: OTHER[name]}), "run")
    plain = dump(run_from(tree_of(other), "run"))["model"][name]
    run = run_from(tree_of(kind, **{name: plain}), "run")
    assert type(run.model) is kind and run == run_from(tree_of(kind), "run")


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_files_that_list_all_settings_of_all_kinds_are_read_as_before(kind):
    run = run_from(tree_of(kind), "run")
    every = {name: None for other in MODEL_KINDS for name in [other.KIND]}
    for other in MODEL_KINDS:
        every |= {k: v for k, v in dump(run_from(tree_of(other), "run"))["model"].items()
                  if k != other.KIND}  # fmt: skip
    tree = dump(run)
    assert run_from({**tree, "model": every | tree["model"]}, "run") == run
    assert next(iter(tree["model"])) == kind.KIND


def test_a_name_of_several_kinds_means_the_same_in_each():
    """Options, help and messages describe it once."""
    seen: dict[str, tuple[Any, Any, str | None]] = {}
    for kind in MODEL_KINDS:
        for name, field in kind.model_fields.items():
            meaning = field.annotation, field.default, field.description
            assert seen.setdefault(name, meaning) == meaning, name


def test_an_option_that_names_another_kind_leaves_the_first_ones_settings_out():
    run = run_from(tree_of(PipelineSettings, height=64, dtype="bfloat16"), "run")
    other = override(run, ["--recipe.name", "text_grpo", "--model.language", "c/d"])
    assert isinstance(other.model, LanguageSettings)
    assert other.model.language == "c/d" and other.model.dtype == "bfloat16"


def test_options_have_the_settings_of_all_kinds():
    names = set(option_names(recipe_kind("nft")))
    assert {f"model.{kind.KIND}" for kind in MODEL_KINDS} - {"model.own"} <= names
    assert {"model.height", "model.stop", "model.weights", "model.own.name"} <= names


def test_a_misspelt_kind_is_named():
    tree = tree_of(PipelineSettings) | {"model": {"pipelin": "a/b"}}
    with pytest.raises(UserError, match="did you mean 'pipeline'"):
        run_from(tree, "run")
    with pytest.raises(UserError, match="set either pipeline"):
        run_from(tree | {"model": {"pipeline": "a/b", "language": "c/d"}}, "run")
    with pytest.raises(UserError, match=r"expected settings \(pipeline, language, own"):
        run_from(tree | {"model": 3}, "run")


def test_the_rewriter_of_a_joint_run_is_a_language_model():
    tree = tree_of(PipelineSettings, rewriter={"language": "c/d", "stop": ["."]})
    run = run_from(tree | {"recipe": {"name": "joint", "text": "text_grpo", "image": "nft"}}, "run")
    assert run.rewriter is not None and run.prompt_writer is not None
    assert run.rewriter.model() == LanguageSettings(language="c/d", stop=(".",))
    assert RunSettings.model_validate(run.model_dump(by_alias=True)) == run
