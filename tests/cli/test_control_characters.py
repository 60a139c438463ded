"""Names that others wrote reach a terminal as text: it obeys none of their characters."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from PIL import Image

from flowrl.cli.app import exit_code
from flowrl.cli.runs import print_runs, run_lines
from flowrl.errors import printable, terminal_text
from flowrl.session.record import Terminal
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


NAME = f"a{OBEYED}.png"
PROMPT = f"a ball{OBEYED}"
SHOWN: dict[str, tuple[str, ...]] = {
    "score": ("score", "images", "--rewards", "brightness", "--prompts-from", "names"),
    "evaluate-rewards": ("evaluate-rewards", "pairs.jsonl", "--rewards", "brightness"),
    "import": ("import", "peer.yaml", "--of", "trl"),
}


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_shows_names_of_files_and_prompts_as_text(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    images = Path("images")
    images.mkdir()
    Image.new("RGB", (8, 8)).save(images / "b.png")
    (images / NAME).write_text("no image")
    rows = [{"prompt": PROMPT, "chosen": "images/b.png", "rejected": f"images/{NAME}"}]
    rows += [{"prompt": PROMPT, "chosen": "images/b.png", "rejected": "images/b.png"}]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    peer = {"model_name_or_path": "a/b", "dataset_name": "a/b", "learning_rate": PROMPT}
    Path("peer.yaml").write_text(yaml.safe_dump(peer | {"reward_funcs": OBEYED, OBEYED: OBEYED}))
    exit_code([*SHOWN[command]])
    said = "".join(capfd.readouterr())
    assert "\\x1b" in said and not obeyed(said.replace("\r\n", "\n"))


def test_the_terminal_of_a_run_shows_names_as_text(capfd) -> None:
    terminal = Terminal(True)
    terminal.say(f"a reward {OBEYED}")
    terminal.warn(f"a file {OBEYED}")
    said = "".join(capfd.readouterr())
    assert said.count("\\x1b]0;title") == 2 and not obeyed(said)


def test_letters_and_lines_stay() -> None:
    many = "\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u6f22\u3000\u5b57\xa0x\n\ty"
    assert terminal_text(many) == many  # a joiner, and spaces of other widths

    assert printable("größer 漢字 🙂\n\tline") == "größer 漢字 🙂\n\tline"
    assert printable("a\x1b[2J\u202e\ud800") == "a\\x1b[2J\\u202e\\ud800"


def test_a_label_that_no_line_can_show_is_refused() -> None:
    assert RewardSpec.model_validate({"name": "brightness", "label": "größer"}).label == "größer"
    for reward in ({"name": "brightness", "label": OBEYED}, {"name": "shapes", "kind": OBEYED}):
        with pytest.raises(ValueError, match="has characters that are not printed"):
            RewardSpec.model_validate(reward)
