"""The tests that a diff touches, by imports."""

import pytest

from scripts.changed import tests_of as touched

ALWAYS = {"tests/test_house.py", "tests/test_prose.py"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "some"),
    [
        ("flowrl/settings/command_line/options.py", {"tests/settings/test_options.py"}),
        ("flowrl/cli/optimise.py", {"tests/cli/test_optimise.py"}),
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


def test_a_folder_stands_for_its_files_and_no_change_for_no_test() -> None:
    found = list(touched(["configs/demo.yaml", "flowrl/settings/command_line/options.py"]))
    assert "tests/settings" in found and "tests/settings/test_options.py" not in found
    assert list(touched([])) == []


def test_few_files_are_touched_by_a_change_of_one_module() -> None:
    assert len(list(touched(["flowrl/models/diffusers/lora/lora_keys.py"]))) < 8
