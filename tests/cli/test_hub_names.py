"""What is neither a folder nor a possible name on the hub is one sentence, at each door that takes
a model by name, before the hub's own client sees it."""

from collections.abc import Callable

import pytest

from flowrl.cli.given_model import is_pipeline
from flowrl.errors import UserError
from flowrl.settings.checks.machine import check_language, check_model, check_pipeline
from flowrl.settings.model.form import modular_alone
from flowrl.settings.read import run_from
from rewards.hub_names import names_repository

NO_NAMES = (
    "127.0.0.1:9/model", "owner/name?x=y", "owner/name#main", "owner/name@main", "http:/name",
    "-owner/name", "owner/name.git", "owner/na..me", "owner/na--me", "owner/na me",
    "owner/", "/name", "./name", "../name", "~/name", "a/b/c",
    f"owner/{'n' * 100}", "owner\\x/name",
)  # fmt: skip
NAMES = ("owner/name", "owner-1/name_2.5", "Owner/name-x")


def adapters(name: str) -> None:
    tree = {"recipe": {"name": "flow_grpo", "steps": 4, "group": 2}, "rewards": ["brightness"]}
    tree |= {"prompts": "configs/data/simple.txt"}
    tree |= {"model": {"pipeline": "a/b", "adapters": [{"path": name}]}}
    check_model(run_from(tree, "run.yaml").model)


DOORS: dict[str, tuple[Callable[[str], object], str]] = {
    "a pipeline": (check_pipeline, "model.pipeline: .* is neither a folder nor a hub name"),
    "a language model": (
        lambda name: check_language(name, None),
        "model.language: .* is neither a folder nor a hub name",
    ),
    "--model": (is_pipeline, "--model: .* is neither a folder nor a hub name"),
    "an adapter": (adapters, "there is no file or folder"),
}


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_the_hub_cannot_have_is_a_sentence(name: str) -> None:
    assert not names_repository(name) and not modular_alone(name)
    for door, said in DOORS.values():
        with pytest.raises(UserError, match=said):
            door(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_the_hub_may_have_is_left_to_it(name: str) -> None:
    assert names_repository(name)
    check_pipeline(name)
