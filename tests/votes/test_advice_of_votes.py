"""What the messages about votes advise is done, and the votes or the fit then go on."""

import importlib.util
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowrl.cli import serve
from flowrl.cli.vote import Vote, ask_for_votes
from flowrl.errors import UserError
from flowrl.media.tensors import drawn
from flowrl.paths import PROJECT
from flowrl.votes.collect import SampleCopies
from flowrl.votes.fit import FitReward, FittedReward, fit_reward_to
from flowrl.votes.live_page import LivePage
from flowrl.votes.plan import VotePlan, check_sample_files, sample_bytes
from flowrl.votes.serve import PageAddress, check_extra
from rewards import Samples
from rewards.perception.media import to_pil
from tests.support.advice import advice
from tests.support.voting import written_plan

CLIP = "{name: clip, model: flowrl/demo/shapes-clip}"


def images(folder: Path, prompts: tuple[str, ...]) -> Path:
    """Images of noise, with the prompt of each in prompts.jsonl."""
    folder.mkdir()
    draws, rows = torch.Generator().manual_seed(0), list[dict[str, str]]()
    for i, prompt in enumerate(prompts):
        to_pil(torch.rand(3, 32, 32, generator=draws)).save(folder / f"{i}.png")
        rows.append({"file": f"{i}.png", "prompt": prompt})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def simulated(*source: Path, **words: Any) -> Path:
    return ask_for_votes(Vote(source, person="simulated", port=0, **words))[0]


@pytest.mark.slow
def test_votes_have_a_source_with_pairs(tmp_path: Path) -> None:
    twice = images(tmp_path / "twice", ("a cat", "a cat", "a dog", "a dog"))
    once = images(tmp_path / "once", ("a cat", "a dog"))
    advice(
        "vote: give a run's folder, two of them, a folder of images or a table",
        lambda: simulated(),
        lambda: simulated(twice, out=tmp_path / "votes"),
    )
    advice(
        "has no two samples of one prompt: sample each prompt twice or more",
        lambda: simulated(once, out=tmp_path / "a"),
        lambda: simulated(twice, out=tmp_path / "a"),
    )
    for words in ({"votes": 3}, {"out": tmp_path / "b"}):
        advice(
            "is a folder of votes, whose question, raters, number and order of pairs are fixed: "
            "leave out",
            lambda more=words: simulated(tmp_path / "votes", **more),
            lambda: simulated(tmp_path / "votes"),
        )
    with pytest.raises(UserError, match="is a folder of votes, which is gone on with alone"):
        simulated(tmp_path / "votes", once)


def test_tensors_are_voted_on_as_the_models_own_drawings(tmp_path: Path) -> None:
    copies = SampleCopies(tmp_path)
    points = Samples(torch.zeros(2, 2), ["a point"] * 2, torch.arange(2))

    def image(sample: torch.Tensor) -> Image.Image:
        return Image.new("RGB", (8, 8), (int(sample[0]), 0, 255))

    rows = advice(
        "give your model an `image` function that draws its samples",
        lambda: copies.add_all(points, "trained"),
        lambda: copies.add_all(drawn(points, image), "trained"),
    )
    for row in rows:
        assert Image.open(tmp_path / copies.planned[row].file).getpixel((0, 0)) == (0, 0, 255)


def table(folder: Path, labels: tuple[float, ...]) -> Path:
    """A table of votes on images of noise."""
    draws, rows = torch.Generator().manual_seed(0), list[dict[str, object]]()
    folder.mkdir()
    for i, label in enumerate(labels):
        names = [f"{i}-{side}.png" for side in "ab"]
        for name in names:
            to_pil(torch.rand(3, 32, 32, generator=draws)).save(folder / name)
        rows.append({"prompt": f"prompt {i}", "a": names[0], "b": names[1], "label": label})
    (folder / "votes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "votes.jsonl"


@pytest.mark.slow
def test_a_fit_with_a_place_features_and_votes_that_say_something(tmp_path: Path) -> None:
    votes = table(tmp_path / "votes", (1.0, 0.0, 1.0, 0.5))
    ties = table(tmp_path / "ties", (0.5,) * 4)

    def fitted(name: str | None, file: Path = votes, features: tuple[str, ...] = (CLIP,)):
        out = None if name is None else tmp_path / name
        return fit_reward_to(FitReward(votes=file, features=features, out=out, robust=0))

    made: list[FittedReward] = [
        advice(
            "fit-reward: name the new folder with --out, such as --out taste",
            lambda: fitted(None),
            lambda: fitted("taste"),
        ),
        advice(
            "fit-reward: no features; add some, such as --features clip",
            lambda: fitted("b", features=()),
            lambda: fitted("b"),
        ),
        advice(
            "every vote is a tie, so nothing says which sample is better: vote on pairs that",
            lambda: fitted("c", ties),
            lambda: fitted("c"),
        ),
    ]
    assert all(reward.folder.is_dir() for reward in made)


def test_a_page_that_has_ended_is_there_again_after_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "votes"
    written_plan(folder, pairs=2)
    page, again = (LivePage(tmp_path, PageAddress(port=0)) for _ in range(2))
    page.turn_to(folder, "votes")

    def ended() -> None:
        page.check()  # it is there
        assert page._server is not None and page._thread is not None
        page._server.should_exit = True
        page._thread.join(10)
        page.check()

    def resumed() -> None:
        page.close()
        again.turn_to(folder, "votes")
        again.check()

    try:
        advice("ask: the page of votes has ended; resume the run to ask again", ended, resumed)
        assert again.link
    finally:
        again.close()


@pytest.mark.parametrize("way", ["bring the file back", "start the votes again"])
@pytest.mark.parametrize("damage", ["away", "a folder"])
def test_a_sample_that_cannot_be_read(tmp_path: Path, way: str, damage: str) -> None:
    plan = written_plan(tmp_path / "votes", pairs=2)
    name = plan.samples[0].file
    file, away = tmp_path / "votes" / name, tmp_path / "away.png"
    file.rename(away)
    if damage == "a folder":
        file.mkdir()

    def repaired() -> bytes:
        if way == "bring the file back":
            if damage == "a folder":
                file.rmdir()
            away.rename(file)
            folder = file.parent.parent
        else:
            folder = tmp_path / "new"
            written_plan(folder, pairs=2)
        check_sample_files(folder, VotePlan.read(folder))
        return sample_bytes(folder, name)

    assert advice(
        "cannot be read ({}): bring the file back, or start the votes again",
        lambda: check_sample_files(tmp_path / "votes", plan),
        repaired,
    )


@pytest.mark.parametrize("library", ["fastapi", "uvicorn"])
@pytest.mark.parametrize("command", ["vote", "serve-reward"])
def test_the_extra_of_pages_and_servers_has_what_they_need(
    monkeypatch: pytest.MonkeyPatch, library: str, command: str
) -> None:
    served: list[object] = []
    monkeypatch.setattr("uvicorn.run", lambda app, **_: served.append(app))
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    installed = importlib.util.find_spec

    def called() -> None:
        if command == "vote":
            check_extra()
        else:
            serve.run_reward_server(serve.Serve("brightness"))

    def without() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.util,
                "find_spec",
                lambda name, *rest: None if name == library else installed(name, *rest),
            )
            called()

    def with_the_extra() -> None:
        assert any(line.startswith(library) for line in extras["optional-dependencies"]["serve"])
        called()

    calls: dict[str, Callable[[], None]] = {
        "vote": lambda: advice(
            "vote: {} is missing; pip install 'flowrl[serve]'", without, with_the_extra
        ),
        "serve-reward": lambda: advice(
            "serve-reward: {} is missing; pip install 'flowrl[serve]'", without, with_the_extra
        ),
    }
    calls[command]()
    assert len(served) == (command == "serve-reward")


@pytest.mark.parametrize("value", [None, ""])
def test_a_servers_token_is_exported(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.setattr("uvicorn.run", lambda app, **_: None)
    if value is None:
        monkeypatch.delenv("MY_TOKEN", raising=False)
    else:
        monkeypatch.setenv("MY_TOKEN", value)

    def exported() -> None:
        monkeypatch.setenv("MY_TOKEN", "a secret")
        serve.run_reward_server(serve.Serve("brightness", token="MY_TOKEN"))

    advice(
        "--token: the environment variable {} is empty: export it",
        lambda: serve.run_reward_server(serve.Serve("brightness", token="MY_TOKEN")),
        exported,
    )
