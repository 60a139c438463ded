"""The tests that a diff touches, by imports."""

import pytest

from flowrl.cli.command_table import COMMANDS
from scripts.changed import commands, commands_run
from scripts.changed import tests_of as touched

ALWAYS = {"tests/test_house.py", "tests/test_prose.py"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "some"),
    [
        ("flowrl/settings/command_line/options.py", {"tests/settings/test_options.py"}),
        ("flowrl/cli/optimise.py", {"tests/cli/test_optimise.py"}),
        ("flowrl/cli/plan.py", {"tests/laws/test_laws.py", "tests/run/test_before_weights.py"}),
        ("flowrl/cli/export.py", {"tests/cli/test_export.py"}),
        ("flowrl/cli/steer.py", {"tests/cli/test_steer.py"}),
        ("samplers/kernels.py", {"tests/likelihoods/test_likelihoods.py"}),  # through the package
        ("rewards/catalogue/jpeg.py", {"tests/rewards"}),  # by its name alone
        ("scripts/changed.py", {"tests/scripts/test_changed.py"}),
        ("tests/support/page_blocks.py", {"tests/pages/test_page_commands.py"}),
        ("tests/cli/test_new.py", {"tests/cli/test_new.py"}),
        ("docs/data.md", {"tests/test_docs.py"}),
        ("configs/demo.yaml", {"tests/settings", "tests/recipes"}),
    ],
)
def test_a_changed_file_leads_to_its_tests(file: str, some: set[str]) -> None:
    found = list(touched([file]))
    assert some | ALWAYS <= set(found) and len(found) == len(set(found))


@pytest.mark.slow
def test_a_folder_stands_for_its_files_and_no_change_for_no_test() -> None:
    found = list(touched(["configs/demo.yaml", "flowrl/settings/command_line/options.py"]))
    assert "tests/settings" in found and "tests/settings/test_options.py" not in found
    assert list(touched([])) == []


@pytest.mark.slow
def test_every_command_leads_to_its_module_and_to_its_tests() -> None:
    """`plan` reads flowrl/cli/plan.py inside of its function, and no test imports that file."""
    assert commands().keys() == COMMANDS.keys()
    assert "flowrl.cli.plan" in commands()["plan"] and "flowrl.cli.prove" in commands()["prove"]
    for name in ("train", "plan", "export", "evaluate"):
        tests = [test for test, run in commands_run().items() if name in run]
        for module in commands()[name] & {f"flowrl.cli.{name}", "flowrl.cli.run_start"}:
            assert set(tests) <= set(touched([f"{module.replace('.', '/')}.py"]))


@pytest.mark.slow
def test_few_files_are_touched_by_a_change_of_one_module() -> None:
    assert len(list(touched(["flowrl/models/diffusers/lora/lora_keys.py"]))) < 8
