"""Mutants of the checks of rights: each `need` and `allows` in the code is left out once, so a check
that no test reads is found when it is written. `run.py` runs them."""

import ast
from collections.abc import Iterator
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[2]
RIGHTS, TRUST, OPENED = "rewards/rights.py", "flowrl/settings/trust.py", "flowrl/settings/read.py"
TESTS = "settings/test_rights.py"
USES = f"{TESTS}::test_each_use_needs_its_right"
WRITERS = f"{TESTS}::test_trust_holds_for_what_was_asked_and_by_whom"
ROWS_OF_PROMPTS = f"{TESTS}::test_rows_of_prompt_files_name_images_within_the_folder_alone"
# where a check is tried, if not by USES
TRIED = {
    "flowrl/prompts/prompt_set.py": ROWS_OF_PROMPTS,
    "flowrl/prompts/files.py": f"{USES} prompts/test_places_of_data.py",
    "flowrl/cli/given_model.py": "cli/test_links_out.py",
}
WITHOUT = {"need": "None", "allows": "True"}


def checks_left_out() -> Iterator[tuple[str, str, str, str, str]]:
    """A row for each call of a check outside of rights.py itself."""
    for folder in ("rewards", "flowrl"):
        for path in sorted((_PROJECT / folder).rglob("*.py")):
            file = str(path.relative_to(_PROJECT))
            text = path.read_text()
            if file == RIGHTS or "rights import" not in text:
                continue
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            for call in calls:
                if isinstance(call.func, ast.Name) and call.func.id in WITHOUT:
                    found = ast.get_source_segment(text, call)
                    assert found is not None
                    tests = TESTS if call.func.id == "allows" else USES
                    tests = TRIED.get(file, tests)
                    name = f"trust-{path.stem}-{call.lineno}"
                    yield name, file, found, WITHOUT[call.func.id], tests


# fmt: off
ROWS = (
    *checks_left_out(),
    ("trust-refusal", OPENED, "    if lacking := not_granted(used, limits):\n", "    lacking = ()\n    if lacking:\n",
     f"{TESTS}::test_named_rights_are_granted_alone_and_remembered"),
    ("trust-links", RIGHTS, "real = path.expanduser().resolve()", "real = path.expanduser().absolute()", ROWS_OF_PROMPTS),
    ("trust-writers", TRUST, "(owners == self.owners and (self.shared or not shared))", "True", WRITERS),
    ("trust-more", TRUST, "if record.whole and all(need.thing in things for need in needs):", "if record.whole:", WRITERS),
    ("trust-token", RIGHTS, "= anonymous or _token_before", "= _token_before",
     f"{TESTS}::test_the_hub_gets_no_token_without_accounts"),
    ("trust-base", OPENED, "        if not inside(base, folder):", "        if False:",
     f"{TESTS}::test_a_base_outside_the_folder_is_not_read"),
    ("trust-examples", "rewards/load.py", "        return path.resolve() in EXAMPLES",
     "        return path.resolve().is_relative_to(EXAMPLES[0].parents[2])", "settings/test_rights.py"),
    ("trust-imported", "rewards/load.py", "        if not _is_example(path):", "        if False:",
     "settings/test_rights.py::test_every_file_of_flowrl_but_its_examples_needs_the_right_to_code"),
    ("trust-data-links", "flowrl/prompts/files.py", "                if path.is_symlink():", "                if False:",
     "prompts/test_places_of_data.py"),
    ("trust-data-places", "flowrl/prompts/files.py", "                _check_place(text, folder)", "                pass",
     "prompts/test_places_of_data.py"),
    ("trust-data-addresses", "flowrl/prompts/files.py", '    if "://" in text or "::" in text:', "    if False:",
     "prompts/test_places_of_data.py"),
    ("trust-hub-files", "flowrl/prompts/files.py", "    _check_on_hub(builder, at)", "    pass",
     "prompts/test_data_sets.py"),
    ("trust-weights-links", "flowrl/cli/given_model.py", "        _check_links(chosen)", "        pass",
     "cli/test_links_out.py"),
    ("trust-card", "flowrl/cli/model_card.py", "            check_readable(folder, path)", "            path.stat()",
     "cli/test_links_out.py"),
    ("terminal-errors", "flowrl/cli/app.py", "printable(str(error))", "str(error)", "cli/test_control_characters.py"),
    ("terminal-label", "flowrl/settings/sections/data.py", "if not self.label.isprintable():", "if False:",
     "cli/test_control_characters.py"),
    ("terminal-runs", "flowrl/cli/runs.py", "printable(cell) for cell", "cell for cell", "cli/test_control_characters.py"),
    ("hub-names", "rewards/hub_names.py", "        validate_repo_id(text)", "        pass",
     "cli/test_hub_names.py"),
)
