"""Seconds and memory a sample by `flowrl score`, of tiny random weights in the published layouts.

`pytest -m slow -s tests/rewards/test_reward_costs.py` prints the table of docs/rewards.md.
"""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from tests.rewards.test_dreamsim import Tiny
from tests.rewards.test_editreward import Edit
from tests.rewards.test_mps import tiny as mps_files  # noqa: F401
from tests.rewards.test_published_judges import listed, questions, words  # noqa: F401
from tests.rewards.test_safety import vit  # noqa: F401
from tests.rewards.test_scalar_heads import Hps, Video
from tests.support import runs
from tests.support.servers import ChatServer
from tests.support.tiny_rewards import bytes_of, pixels

CPU = {"device": "cpu"}
EDITED = json.dumps({"reasoning": "r", "score": [20, 10]})
ANSWERS = {
    "vqascore": lambda text, shown: listed(Yes=0.6, No=0.4),
    "soft_tifa": lambda text, shown: listed(Yes=0.6, No=0.4),
    "editscore": lambda text, shown: EDITED,
    "unified_reward": lambda text, shown: "Final Score: 4",
    "deqa": lambda text, shown: listed(good=0.6, fair=0.4),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Twelve images, each with what the rewards read beside it."""
    made = tmp_path / "images"
    made.mkdir()
    rows = []
    for i, image in enumerate(pixels(12, 64, 64)):
        bytes_of(image).save(made / f"{i}.png")
        beside = {"source": str(made / "0.png"), "reference": str(made / "0.png")}
        asked = [["Is it red?", "Yes"]]
        rows.append({"file": f"{i}.png", "prompt": f"a red ball {i}", **beside, "vqa_list": asked})
    (made / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def costs(specs: list[dict], folder: Path, capsys) -> dict[str, tuple[float, float]]:
    """Milliseconds and megabytes a sample, as `flowrl score` prints them."""
    said = yaml.safe_dump(specs, default_flow_style=True, width=10**6).strip()[1:-1]
    options = ["--chunk", 4, "--frames", 12, "--sheet", 0, "--out", folder.parent / "scores"]
    assert runs.flowrl("score", folder, "--rewards", said, *options) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    found = {line[0]: line for line in lines if line and len(line) == 8}
    with capsys.disabled():
        print(printed)
    assert all(found[spec["name"]][5] == "0" for spec in specs), "all are scored"
    return {s["name"]: (float(found[s["name"]][6]), float(found[s["name"]][7])) for s in specs}


def published(folder: Path, monkeypatch, request) -> list[dict]:
    """The rewards with weights, each in its files."""
    parts = {name: folder.parent / name for name in ("hpsv3", "editreward", "dreamsim")}
    for part in parts.values():
        part.mkdir()
    hps, edit = Hps(parts["hpsv3"], monkeypatch), Edit(parts["editreward"], monkeypatch)
    texts = {"following": str(edit.texts), "quality": str(edit.texts)}
    Tiny(parts["dreamsim"])
    clip, mps, *_ = request.getfixturevalue("mps_files")
    safe, _ = request.getfixturevalue("vit")
    return [
        {"name": "hpsv3", **hps.write(parts["hpsv3"] / "a.safetensors"), **CPU},
        {"name": "editreward", "checkpoint": str(edit.folder), "base": str(edit.base)}
        | {**texts, **CPU},
        {"name": "dreamsim", "folder": str(parts["dreamsim"]), **CPU},
        {"name": "mps", "checkpoint": str(mps), "clip": str(clip), **CPU},
        {"name": "safety", "model": str(safe), **CPU},
    ]


@pytest.mark.slow
def test_score_says_seconds_and_memory_of_every_published_reward(
    folder, monkeypatch, request, capsys
):
    specs = published(folder, monkeypatch, request)
    (folder.parent / "question.txt").write_text("Compare.\nText Caption: [{prompt}]\n")
    asked = str(request.getfixturevalue("questions"))
    own = {
        "soft_tifa": {"tokenizer": str(request.getfixturevalue("words"))},
        "editscore": {"following": asked, "quality": asked},
        "unified_reward": {"question": str(folder.parent / "question.txt")},
    }
    with ExitStack() as stack:
        for name, answer in ANSWERS.items():
            server = stack.enter_context(ChatServer(answer))
            specs.append({"name": name, "url": server.url, "model": "tiny", **own.get(name, {})})
        found = costs(specs, folder, capsys)
    assert len(found) == 10 and all(ms > 0 and mb >= 0 for ms, mb in found.values())


@pytest.mark.slow
def test_score_says_seconds_and_memory_of_videoalign(tmp_path, monkeypatch, capsys):
    tiny = Video(tmp_path, monkeypatch)
    folder = tmp_path / "videos"
    folder.mkdir()
    for i in range(8):
        frames = [bytes_of(frame) for frame in pixels(12, 56 + 28 * (i % 2), 84)]
        frames[0].save(folder / f"a_{i}.gif", save_all=True, append_images=frames[1:], duration=250)
    found = costs([{"name": "videoalign", **tiny.settings}], folder, capsys)
    assert found["videoalign"][0] > 0
