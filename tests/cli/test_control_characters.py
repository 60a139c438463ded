"""Names that others wrote reach a terminal as text: it obeys none of their characters."""

import shutil
from pathlib import Path

import pytest
import yaml

from flowrl.cli.app import exit_code
from flowrl.cli.runs import print_runs, run_lines
from flowrl.errors import printable
from flowrl.settings import RewardSpec

OBEYED = "\x1b]0;title\x07\x1b[2J\x9b1A\u202eyaml.nur\r"
RUN = {
    "recipe": {"name": "flow_grpo", "steps": 4, "group": 2},
    "model": {"pipeline": "owner/name"},
    "prompts": "configs/data/simple.txt",
    "rewards": [{"name": "brightness"}],
}
PLACES = {
    "a model": {"model": {"pipeline": f"/x/{OBEYED}"}},
    "a reward": {"rewards": [{"name": OBEYED}]},
    "a label": {"rewards": [{"name": "brightness", "label": OBEYED}]},
    "a label by its kind": {"rewards": [{"name": "shapes", "kind": OBEYED}]},
    "a section": {OBEYED: 1},
    "a setting": {"train": {OBEYED: 1}},
}


def obeyed(text: str) -> set[str]:
    return {c for c in OBEYED if not c.isprintable() and c in text}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLOWRL_STATE", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("place", PLACES)
def test_a_refusal_shows_what_it_names_as_text(place: str, run: Path, capfd) -> None:
    (run / "run.yaml").write_text(yaml.safe_dump({**RUN, **PLACES[place]}))
    assert exit_code(["sample", str(run), "a ball", "--trust", "--weights", "base"]) == 2
    assert not obeyed("".join(capfd.readouterr()))


def test_a_list_of_runs_shows_names_of_folders_as_text(run: Path, capfd) -> None:
    (run / "run.yaml").write_text(yaml.safe_dump(RUN))
    shutil.copytree(run, run.with_name(f"a{OBEYED}"))
    (run.with_name("broken")).mkdir()
    (run.with_name("broken") / "run.yaml").write_text("{")
    print_runs(run_lines([run.parent]), as_json=False)
    said = capfd.readouterr().out
    assert "\\x1b]0;title" in said and "not valid YAML" in said and not obeyed(said)


def test_letters_and_lines_stay() -> None:
    assert printable("größer 漢字 🙂\n\tline") == "größer 漢字 🙂\n\tline"
    assert printable("a\x1b[2J\u202e\ud800") == "a\\x1b[2J\\u202e\\ud800"


def test_a_label_that_no_line_can_show_is_refused() -> None:
    assert RewardSpec.model_validate({"name": "brightness", "label": "größer"}).label == "größer"
    for reward in ({"name": "brightness", "label": OBEYED}, {"name": "shapes", "kind": OBEYED}):
        with pytest.raises(ValueError, match="has characters that are not printed"):
            RewardSpec.model_validate(reward)
