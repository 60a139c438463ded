"""Names inside the packages that scripts outside of the project import: a move leaves them."""

import importlib

import pytest

NAMES = {
    "flowrl.errors": ("UserError",),
    "flowrl.models.diffusers.lora.given_adapters": ("merge_adapters",),
    "flowrl.models.language.given_texts": ("completion_tokens",),
    "flowrl.models.language.policy": ("CausalPolicy",),
    "flowrl.prompts.files": ("read_rows",),
    "flowrl.prompts.source": ("DataSource",),
    "flowrl.settings.adapters": ("FrozenAdapter",),
    "rewards.judging.answers": ("score_in",),
    "rewards.judging.chat": ("completion",),
    "rewards.load": ("load",),
    "rewards.perception.files": ("open_image_file", "read_images"),
    "rewards.types": ("Samples",),
}


@pytest.mark.parametrize("module", NAMES)
def test_a_name_that_scripts_outside_import_is_there(module):
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if name not in vars(found)] == []


def test_a_language_policy_names_its_stop_tokens():
    from flowrl.models.language.policy import CausalPolicy
    from tests.support import tiny_lm

    assert CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer()).stop == [1]
