"""A release: the tag, the notes, the workflow and the templates of issues."""

import re
from pathlib import Path

import pytest
import yaml

from flowrl.paths import PROJECT
from scripts import release

FILES = {
    "pyproject.toml": '[project]\nversion = "0.2.0"\n',
    "CITATION.cff": "cff-version: 1.2.0\nversion: 0.2.0\ndate-released: 2026-11-30\n",
    "CHANGELOG.md": "# Log\n\n## 0.2.0 - 2026-11-30\n\n### Runs\n- One.\n\n## 0.1.0 - 2026-1-1\n",
}


def tree(folder: Path, changed: str = "", before: str = "", after: str = "") -> Path:
    for name, text in FILES.items():
        (folder / name).write_text(text.replace(before, after) if name == changed else text)
    return folder


def test_notes_are_the_newest_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["v0.2.0"], tree(tmp_path)) == 0
    assert capsys.readouterr() == ("### Runs\n- One.\n", "")


@pytest.mark.parametrize(
    ("changed", "before", "after", "said"),
    [
        ("pyproject.toml", "0.2.0", "0.1.0", "pyproject.toml: version is 0.1.0, not 0.2.0"),
        ("CITATION.cff", "n: 0.2.0", "n: 0.1.0", "CITATION.cff: version is 0.1.0, not 0.2.0"),
        ("CITATION.cff", "11-30", "11-29", "name it '0.2.0 - 2026-11-29'"),
        ("CHANGELOG.md", "0.2.0 - 2026-11-30", "Unreleased", "newest section is 'Unreleased'"),
    ],
)
def test_a_tree_that_is_another_release_has_no_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: str, before: str, after: str,
    said: str,
) -> None:  # fmt: skip
    assert release.main(["v0.2.0"], tree(tmp_path, changed, before, after)) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["0.2.0"], ["v0.2"], ["v0.2.0", "x"]])
def test_a_tag_has_a_form(words: list[str]) -> None:
    assert release.main(words) == 1


def test_the_trees_own_versions_agree() -> None:
    """All but the changelog, which is `Unreleased` until a release is made."""
    version = re.findall(r'^version = "(.+)"$', (PROJECT / "pyproject.toml").read_text(), re.M)[0]
    _, faults = release.release(version, PROJECT)
    assert not [fault for fault in faults if not fault.startswith("CHANGELOG.md")]


def test_the_workflow_runs_files_that_exist() -> None:
    text = (PROJECT / ".github" / "workflows" / "ci.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    files = [word for step in steps for word in re.findall(r"(?:scripts/|\.ci/)[\w.]+", step)]
    assert {".ci/run", "scripts/release.py"} == {*files}
    assert all((PROJECT / file).is_file() for file in files)
    assert jobs["release"]["needs"] == "check" and "tags/v" in jobs["release"]["if"]


def test_templates_of_issues_ask_for_what_a_fault_needs() -> None:
    folder = PROJECT / ".github" / "ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml")}
    assert {"bug", "question", "method", "config"} == {*forms}
    for name, form in forms.items():
        if name != "config":
            assert {"name", "description", "labels", "body"} == {*form}
            assert all(part["type"] in ("input", "textarea") for part in form["body"])
            assert all(part["attributes"]["label"] for part in form["body"])
    assert "flowrl doctor" in str(forms["bug"])
