"""`flowrl vote` and `flowrl fit-reward` from the command line: from samples to a reward."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rewards
from flowrl.cli.vote import Vote, ask_for_votes
from flowrl.errors import UserError
from flowrl.pages.run_folder import RunFolder
from flowrl.paths import CONFIGS_FOLDER
from flowrl.votes.log import VoteLog
from flowrl.votes.plan import VotePlan
from rewards.fitted.scoring import FeatureColumns
from rewards.perception.media import to_pil
from tests.support import runs
from tests.support.advice import advice
from tests.support.voting import written_plan
from tests.support.warm import small

CLIP = "{name: clip, model: flowrl/demo/shapes-clip}"
PAIRS = CONFIGS_FOLDER / "preferences" / "pairs.jsonl"
VOTE = ("--person", "simulated", "--port", "0")


@pytest.fixture(autouse=True)
def _no_lingering(monkeypatch):
    monkeypatch.setattr("flowrl.votes.server.LINGER", 0.05)


def squares(folder: Path, prompts: int = 12) -> Path:
    """Three images of each prompt, with squares of different sizes on the demo's background."""
    folder.mkdir()
    draws, rows = torch.Generator().manual_seed(0), []
    colours = {"red": (0.85, 0.2, 0.2), "blue": (0.2, 0.3, 0.85), "green": (0.2, 0.65, 0.3)}
    for i in range(3 * prompts):
        name = list(colours)[i // 3 % 3]
        image = (torch.tensor((244, 244, 240)) / 255)[:, None, None].repeat(1, 32, 32)
        side = int(torch.randint(6, 26, (1,), generator=draws))
        left, top = torch.randint(0, 32 - side, (2,), generator=draws).tolist()
        colour = torch.tensor(colours[name])[:, None, None]
        image[:, top : top + side, left : left + side] = colour
        to_pil(image).save(folder / f"{i}.png")
        rows.append({"file": f"{i}.png", "prompt": f"a {name} square {'above ' * (i // 9)}"})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(("number", "code", "said"), [
    (errno.ENOSPC, 3, "the file of votes: no space left on device: make room"),
    (errno.EROFS, 2, "the file of votes: read-only file system"),
])  # fmt: skip
def test_a_simulated_person_ends_where_no_vote_can_be_written(
    number, code, said, tmp_path, capsys, monkeypatch
):
    """In a sentence, and the same command with the folder goes on."""
    source = squares(tmp_path / "images", prompts=2)
    out = ("--out", tmp_path / "votes", "--votes", "4")

    def refused(*_):
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.pwrite", refused)
        assert runs.flowrl("vote", source, *VOTE, *out) == code
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert runs.flowrl("vote", tmp_path / "votes", *VOTE) == 0


def test_a_simulated_person_ends_where_a_pair_cannot_be_shown(tmp_path, capsys, monkeypatch):
    source = squares(tmp_path / "images", prompts=2)
    broken = UserError("samples/000.png is damaged")
    monkeypatch.setattr("flowrl.votes.server.VotingRoom.state", raising(broken))
    words = ("--out", tmp_path / "votes", "--votes", "4")
    assert runs.flowrl("vote", source, *VOTE, *words) == 2
    error = capsys.readouterr().err
    assert "the page of votes: this pair cannot be shown: the terminal says why" in error
    assert "Traceback" not in error


IGNORED = {
    "a folder of images": (("--weights", "best"), ("--steps", "2")),
    "a table of preferences": (
        ("--prompts", "p.txt"),
        ("--prompts-from", "names"),
        ("--steps", "2"),
    ),
}


def test_an_option_that_a_source_would_ignore_is_refused(tmp_path):
    """And read without it: the images are voted on, then the votes once more."""
    images, votes = squares(tmp_path / "images", prompts=2), tmp_path / "votes"
    again = tmp_path / "again"
    sources = {
        "a folder of images": (images, "--out", votes, "--votes", "2"),
        "a table of preferences": (votes / "votes.jsonl", "--out", again, "--votes", "2"),
    }
    for kind, words in sources.items():
        for option in IGNORED[kind]:
            with pytest.raises(UserError, match=rf"{option[0]} is of .* is {kind}: leave it out"):
                runs.ended("vote", *words, *VOTE, *option)
        advice(
            "vote: --{} is of {}, and {} is {}: leave it out",
            lambda source=words, ignored=option: runs.ended("vote", *source, *VOTE, *ignored),
            lambda source=words: runs.ended("vote", *source, *VOTE),
        )


def test_what_nobody_can_vote_on_is_mended_as_the_message_says(tmp_path):
    images, votes = squares(tmp_path / "images", prompts=2), tmp_path / "votes"
    single = tmp_path / "single"
    single.mkdir()
    shutil.copyfile(images / "0.png", single / "0.png")
    (single / "prompts.jsonl").write_text(json.dumps({"file": "0.png", "prompt": "a square"}))
    words = (*VOTE, "--votes", "2", "--out", votes)
    advice(
        "vote: {} has no two samples of one prompt: sample each prompt twice or more",
        lambda: runs.ended("vote", single, *words),
        lambda: runs.ended("vote", images, *words),
    )
    for option in (("--votes", "3"), ("--question", "Which?"), ("--raters", "2")):
        advice(
            "vote: {} is a folder of votes, whose question, raters, number and order of pairs are "
            "fixed: leave out {}",
            lambda option=option: runs.ended("vote", votes, *VOTE, *option),
            lambda: runs.ended("vote", votes, *VOTE),
        )


@pytest.mark.parametrize("rest", [(), ("--taste", "left", "--person", "simulated")])
def test_a_taste_is_of_a_simulated_person(rest, tmp_path, monkeypatch):
    """A page, on which people vote, would wait for them."""
    images = squares(tmp_path / "images", prompts=2)
    monkeypatch.setattr("flowrl.cli.vote.serve_votes", served)
    monkeypatch.setattr("flowrl.cli.vote._reported", lambda folder, answer: answer)
    words = ("vote", images, "--out", tmp_path / "votes", "--votes", "2")
    advice(
        "vote: --taste is of a simulated person: add --person simulated, or leave it out",
        lambda: runs.ended(*words, "--taste", "left"),
        lambda: runs.ended(*words, *rest),
    )


def served(folder, address, person):
    return person


def raising(error: Exception):
    def fails(*_):
        raise error

    return fails


@pytest.mark.slow
def test_from_a_folder_of_images_to_a_reward(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = squares(tmp_path / "images")
    assert runs.flowrl("vote", source, *VOTE, "--out", "votes") == 0
    said = capsys.readouterr().out
    assert "36 pairs of 12 prompts voted on" in said and "own consistency" in said
    assert "?token=" not in said, "a simulated person prints no link"
    assert said.endswith("a reward from them: flowrl fit-reward votes --out taste\n")
    plan = VotePlan.read(Path("votes"))
    assert VoteLog.read(Path("votes"), plan).finished
    assert runs.flowrl("vote", "votes") == 0, "a finished folder answers at once"
    assert runs.flowrl("vote", "votes", "--votes", "3") == 2
    assert "number and order of pairs are fixed: leave out --votes" in capsys.readouterr().err
    words = ("--features", CLIP, "--robust", "4", "--out", "taste", "--beside", "brightness")
    assert runs.flowrl("fit-reward", "votes", *words) == 0
    said = capsys.readouterr().out
    assert "fitted to 36 votes on pairs of 12 prompts" in said
    assert "on prompts that it has not seen it agrees with people on" in said
    more = ("--features", CLIP, "--robust", "0", "--reuse", "taste", "--out", "second")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureColumns, "of", None)  # nothing is computed again for the fit
        patch.setattr("flowrl.votes.fit.report_rewards", lambda *_: None)
        assert runs.flowrl("fit-reward", "votes", *more) == 0
    assert (
        Path("second/head.safetensors").read_bytes() == Path("taste/head.safetensors").read_bytes()
    )
    capsys.readouterr()
    page = Path("taste/evaluation/evaluation.html").read_text()
    assert "taste, held-out prompts" in page and "brightness" in page
    found = json.loads(Path("taste/evaluation/evaluation.json").read_text())
    accuracy = found["rewards"]["taste, held-out prompts"]["accuracy"]["half"]
    assert accuracy["value"] > 0.7, "size is easy for this model"
    reward = rewards.load("fitted", path="taste")
    assert reward.has_seen("a red square ")
    words = (
        "--rewards",
        "{name: fitted, path: taste, label: taste}",
        "--robust",
        "0",
        "--out",
        "again",
    )
    assert runs.flowrl("evaluate-rewards", "votes", *words) == 0
    said = capsys.readouterr().out
    assert "taste was fitted to votes on the prompts of all 36 pairs" in said
    assert "agrees with people" not in said, "a fit is not praised for what it was fitted to"
    assert runs.flowrl("fit-reward", "votes", "--features", CLIP, "--out", "taste") == 2
    assert "taste already exists" in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(pipeline, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("voted")
    tree = small(pipeline, place)
    tree["train"]["iterations"] = 1
    tree["evaluate"] = tree.get("evaluate", {}) | {"per_prompt": 2}
    assert runs.flowrl("train", runs.write(tree, place), "--folder", place / "run") == 0
    return place / "run"


@pytest.mark.slow
def test_a_run_is_compared_with_its_base_beside_its_recorded_scores(finished, capsys):
    assert runs.flowrl("vote", finished, *VOTE, "--votes", "8") == 0
    said = capsys.readouterr().out
    assert "people prefer the trained weights in" in said and "brightness prefers trained" in said
    folder = finished / "votes" / "vote-0001"
    plan = VotePlan.read(folder)
    assert plan.sides == ("trained", "base") and len(plan.pairs) == 8
    for a, b in plan.pairs:
        first, second = plan.samples[a], plan.samples[b]
        assert first.prompt == second.prompt
        assert (first.origin, second.origin) == ("trained", "base")
        assert first.scores["brightness"] != second.scores["brightness"]
    assert any("people prefer" in line for line in RunFolder.read(finished).votes)
    assert "people prefer the trained weights" in (finished / "report.html").read_text()


@pytest.mark.slow
def test_two_runs_are_compared_by_name(finished, tmp_path, capsys):
    words = (*VOTE, "--votes", "2", "--out", tmp_path / "both")
    assert runs.flowrl("vote", finished, finished, *words) == 0
    assert "people prefer run (1) in" in capsys.readouterr().out
    plan = VotePlan.read(tmp_path / "both")
    assert plan.kind == "runs"
    assert len({plan.samples[a].prompt for a, _ in plan.pairs}) == 2, "as many prompts as pairs"


@pytest.mark.slow
def test_a_run_file_is_voted_on_before_anything_is_trained(pipeline, tmp_path, capsys):
    file = runs.write(small(pipeline, tmp_path), tmp_path)
    words = (*VOTE, "--votes", "6", "--out", tmp_path / "votes")
    assert runs.flowrl("vote", file, *words) == 0
    plan = VotePlan.read(tmp_path / "votes")
    assert (plan.kind, plan.sides, len(plan.pairs)) == ("base", (), 6)
    assert all(plan.samples[a].prompt == plan.samples[b].prompt for a, b in plan.pairs)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "give a run's folder"),
        (("nowhere",), "nowhere: no such file or folder, and none of flowrl's runs"),
        (("empty",), "empty has no images or videos"),
        (("one",), "has no two samples of one prompt"),
        (("one", "one"), "two sources must be two runs"),
        (("one", "--results"), "--results, --forget and --export need a folder"),
        (("one", "--question", " "), "--question is empty"),
        (("one", "--raters", "0"), "--raters"),
    ],
)
def test_a_mistake_is_a_sentence_and_leaves_no_folder(
    words, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("one").mkdir()
    to_pil(torch.zeros(3, 8, 8)).save("one/a_cat.png")
    assert runs.flowrl("vote", *words) == 2
    assert sentence in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "one"}


OF_A_PLAN = {
    "question": "Which has our look?",
    "votes": 3,
    "raters": 2,
    "out": Path("other"),
    "weights": "best",
    "trust": True,
    "steps": 3,
    "prompts": Path("prompts.jsonl"),
    "prompts_from": "names",
    "seed": 1,
}


@pytest.fixture
def voted(tmp_path) -> Path:
    """A folder of votes that are all in."""
    folder = tmp_path / "voted"
    plan = written_plan(folder, pairs=4, raters=2)
    with VoteLog.opened(folder, plan) as log:
        for rater in plan.turns:
            while (showing := log.show(rater)) is not None:
                log.vote(rater, showing, "left", 1.0)
    return folder


@pytest.mark.parametrize("option", OF_A_PLAN)
def test_an_option_that_cannot_change_begun_votes_is_refused(option, voted):
    """It was ignored: who asks for three raters has to hear that there are two."""
    advice(
        "vote: {} is a folder of votes, whose question, raters, number and order of pairs are "
        "fixed: leave out {}",
        lambda: ask_for_votes(Vote(source=(voted,), **{option: OF_A_PLAN[option]})),
        lambda: ask_for_votes(Vote(source=(voted,))),
    )


def test_votes_are_gone_on_with_alone(voted):
    with pytest.raises(UserError, match="which is gone on with alone"):
        ask_for_votes(Vote(source=(voted, voted)))


NOT_OF_SOURCE = [
    (source, option)
    for source, options in {
        "images": ("weights", "trust", "steps"),
        "votes.jsonl": ("weights", "trust", "steps", "prompts", "prompts_from"),
        "run.yaml": ("weights", "trust", "prompts_from"),
        "run": ("prompts_from",),
    }.items()
    for option in options
]


@pytest.mark.parametrize(("source", "option"), NOT_OF_SOURCE)
def test_an_option_of_another_source_is_refused(source, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    squares(Path("images"), prompts=2)
    Path("votes.jsonl").write_text("{}\n")
    Path("run").mkdir()
    for file in (Path("run.yaml"), Path("run/run.yaml")):
        file.write_text("recipe: {name: flow_grpo}\n")
    out = Path("new")
    with pytest.raises(UserError) as error:
        ask_for_votes(Vote(source=(Path(source),), out=out, **{option: OF_A_PLAN[option]}))
    name = option.replace("_", "-")
    assert str(error.value).startswith(f"vote: --{name} is of a")
    assert str(error.value).endswith(": leave it out") and not out.exists()


def test_what_is_refused_of_a_folder_of_images_is_left_out(tmp_path):
    source = squares(tmp_path / "images", prompts=2)
    vote = Vote(source=(source,), votes=2, person="simulated", port=0, out=tmp_path / "new")
    advice(
        "vote: {} is of {}, and {} is {}: leave it out",
        lambda: ask_for_votes(replace(vote, weights="best")),
        lambda: ask_for_votes(vote),
    )
    advice(
        "vote: --taste is of a simulated person: add --person simulated, or leave it out",
        lambda: ask_for_votes(Vote(source=(tmp_path / "new",), taste="warm")),
        lambda: ask_for_votes(Vote(source=(tmp_path / "new",), taste="warm", person="simulated")),
    )


def test_a_forgotten_rater_is_in_no_export_of_the_same_call(voted, capsys):
    assert runs.flowrl("vote", voted, "--export", "argilla", "--forget", "rater-2") == 0
    assert "rater-2" not in (voted / "votes.argilla.json").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--out", "new", "--features", "judge"), "--features: features: 'judge' offers none"),
        (("--out", "new", "--features", "{name: clip, modle: x}"), "has no setting 'modle'"),
        ((), "name the new folder with --out"),
        (("--out", "new", "--beside", "nobody"), "there is no reward 'nobody'"),
        (("--out", "new", "--features", "{name: clip, model: /nowhere}"), "/nowhere"),
        (("--out", "new", "--reuse", "nowhere"), "--reuse: nowhere has no features.safetensors"),
    ],
)
def test_a_mistake_of_a_fit_is_a_sentence_and_leaves_no_folder(
    words, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert runs.flowrl("fit-reward", PAIRS, *words) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("new").exists()
