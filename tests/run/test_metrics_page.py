"""docs/metrics.md has every metric that runs write, and no name that no code has."""

import re

import pytest

from flowrl.paths import PROJECT
from tests.support import runs, text_runs, tiny_lm, tiny_pipelines_video

PAGE = (PROJECT / "docs" / "metrics.md").read_text()
NAMES = {
    name
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`([^`]+)`", line.split("|")[1])
}
TREE = {"name": "branch_grpo", "steps": 4, "at": [0, 2], "clip": 0.2}


def pattern(name: str) -> str:
    """A name of the page as an expression; a word in capitals stands for any text."""
    parts = re.split(r"([A-Z]{2,})", name)
    return "".join(".+" if part.isupper() else re.escape(part) for part in parts)


def undocumented(folder) -> set[str]:
    known = re.compile("|".join(f"(?:{pattern(name)})" for name in NAMES))
    return {name for line in runs.lines(folder) for name in line if not known.fullmatch(name)}


def train(settings, tmp_path) -> set[str]:
    settings |= {"evaluate": {"every": 1, "steps": 3, "samples": 8, "per_prompt": 2}}
    settings["train"] |= {"iterations": 1, "self_test": "off", "alarms": "warn"}
    path, folder = runs.write(settings, tmp_path), tmp_path / "run"
    assert runs.flowrl("train", path, "--folder", folder) == 0
    return undocumented(folder)


@pytest.mark.quick_cases("nft")
@pytest.mark.parametrize("recipe", [runs.NFT, TREE], ids=lambda r: r["name"])
def test_runs_of_images(pipeline, tmp_path, capsys, recipe):
    assert not train(runs.tree(pipeline, tmp_path, recipe), tmp_path)


@pytest.mark.slow
def test_a_run_of_videos(tmp_path, capsys):
    tiny_pipelines_video.wan().save_pretrained(tmp_path / "wan")
    settings = runs.tree(tmp_path / "wan", tmp_path, runs.FLOW_GRPO)
    settings["model"] |= {"height": 16, "width": 16, "call": {"num_frames": 5}}
    assert not train(settings, tmp_path)


@pytest.mark.parametrize("recipe", [text_runs.GRPO | {"kl": 0.1}, text_runs.TREE])
def test_runs_of_texts(tmp_path, capsys, recipe):
    settings = text_runs.tree(tiny_lm.write(tmp_path / "lm"), tmp_path, recipe)
    settings["budget"] = {"flat": "resample"}
    assert not train(settings, tmp_path)


def test_the_page_names_what_the_code_names():
    """The last fixed part of each name is a word of the sources, so that a renamed metric does not
    stay on the page."""
    files = [p for folder in ("flowrl", "rewards") for p in (PROJECT / folder).rglob("*.py")]
    source = "\n".join(path.read_text() for path in files)
    for name in NAMES:
        word = [part for part in re.split(r"[A-Z]{2,}|/", name) if part][-1].rstrip("_")
        assert re.search(rf"\b{re.escape(word)}", source), name
