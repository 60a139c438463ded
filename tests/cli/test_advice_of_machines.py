"""Advice of commands that need a finished run, a program of the machine, its disk, or another
process: each message is raised, and the command that does what it says is not refused for it."""

import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import huggingface_hub
import pytest
import yaml
from PIL import Image

from flowrl.cli import device_check
from flowrl.cli.export import check_upload
from flowrl.cli.given_model import GivenModel
from flowrl.cli.serve import Serve, _token
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.paths import new_numbered
from flowrl.settings.command_line.arguments import EvaluateArguments
from flowrl.settings.trust import remember
from tests.run.test_own_runs import tree
from tests.support import runs
from tests.support.advice import advice
from tests.support.disks import mounted
from tests.support.warm import small
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.pipelines import tiny
from tests.support.zoo.sounds import SOUND_SPECIALS

OWN_MODEL = "examples/own/points.py:Points"
VOTE = ("--person", "simulated", "--port", "0", "--votes", "4")


@pytest.fixture(scope="module")
def finished(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    tree = small(pipeline, place)
    tree["train"]["iterations"] = 1
    assert runs.flowrl("train", runs.write(tree, place), "--folder", place / "run") == 0
    return place / "run"


def begun(tree: dict[str, Any], folder: Path) -> Path:
    """A run's folder with its settings alone, as one that was stopped before its first
    checkpoint."""
    folder.mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    remember(folder, tree)
    return folder


@pytest.mark.slow
def test_a_proof_needs_a_file_or_a_model(
    tmp_path: Path, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that the message names is flowrl's own, from any folder."""
    monkeypatch.chdir(tmp_path)
    advice(
        "prove: give a run file, such as `flowrl prove configs/demo.yaml`, or use --model",
        lambda: runs.ended("prove"),
        lambda: [
            runs.ended("prove", "configs/demo.yaml"),
            runs.ended("prove", "--model", pipeline),
        ],
    )


def test_a_check_of_a_known_device_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {"devices": (lambda _: "it is there", "whether a device is there")}
    monkeypatch.setattr(device_check, "CHECKS", checks)
    advice(
        "doctor: --device {} is not known; choose one of {}",
        lambda: runs.ended("doctor", "--device", "tpu"),
        lambda: runs.ended("doctor", "--device", "cpu"),
    )


@pytest.mark.parametrize("place", ["sky", "k8s"])
def test_what_flowrl_does_not_submit_is_printed(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("launch", place, "demo", "--folder", "/runs/demo", "--gpus", "1")
    advice(
        "flowrl does not submit there: leave --submit out, write the output into a file, and hand",
        lambda: runs.ended(*words, "--submit"),
        lambda: runs.ended(*words),
    )
    assert [*yaml.safe_load_all(capsys.readouterr().out)]


def test_an_option_of_another_place_is_left_out() -> None:
    words = ("launch", "ray", "demo", "--folder", "runs/demo", "--cpus", "1")
    advice(
        "launch {}: --{} is of {}: leave it out",
        lambda: runs.ended(*words, "--partition", "large"),
        lambda: runs.ended(*words),
    )


def test_a_folder_of_one_line_stands_in_a_script() -> None:
    words = ("launch", "slurm", "demo", "--gpus", "1", "--folder")
    advice(
        "is a name that a job's script cannot hold: choose one of letters, numbers and signs on",
        lambda: runs.ended(*words, "runs/demo\n#"),
        lambda: runs.ended(*words, "runs/demo, 2nd"),
    )


def test_a_script_is_printed_where_there_is_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("launch", "slurm", "demo", "--gpus", "1", "--folder", tmp_path / "run")
    monkeypatch.setenv("PATH", str(tmp_path))
    advice(
        "launch slurm: sbatch is not on this machine: leave --submit out",
        lambda: runs.ended(*words, "--submit"),
        lambda: runs.ended(*words),
    )
    assert capsys.readouterr().out.startswith("#!")


@pytest.fixture
def undrilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drill up to its first training, which takes minutes."""
    monkeypatch.setattr("flowrl.cli.drill._drilled", lambda *_: 0)


@pytest.mark.slow
def test_a_drill_begins_once_the_run_is_trained(
    undrilled: None, pipeline: Path, tmp_path: Path
) -> None:
    tree = small(pipeline, tmp_path)
    tree["train"]["iterations"] = 1
    run = begun(tree, tmp_path / "run")

    def drilled() -> None:
        runs.ended("drill", run, "--yes", "--out", tmp_path / "drill")

    advice(
        "drill: {} has no checkpoint to begin from: train it first",
        drilled,
        lambda: [runs.ended("train", "--resume", run), drilled()],
    )


@pytest.mark.slow
def test_a_drill_writes_where_there_is_room(
    undrilled: None, finished: Path, tmp_path: Path
) -> None:
    words = ("drill", finished, "--yes", "--out")
    with mounted(tmp_path / "disk", "size=64k") as disk:
        advice(
            "GiB are free in {}: choose another --out",
            lambda: runs.ended(*words, disk / "drill"),
            lambda: runs.ended(*words, tmp_path / "drill"),
        )


@contextmanager
def logged_in(file: Path) -> Iterator[None]:
    """As `hf auth login` leaves this machine: a token in the hub's file."""
    file.write_text("hf_abcdefghijklmnopqrstuvwxyz")
    yield
    file.unlink()


def test_an_upload_has_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(file))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def with_file() -> None:
        with logged_in(file):
            check_upload("me/new")

    def with_variable() -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
        check_upload("me/new")

    for follow in (with_file, with_variable):
        advice(
            "no token for the hub was found: run `hf auth login`, or set HF_TOKEN",
            lambda: check_upload("me/new"),
            follow,
        )


def test_an_own_model_is_told_its_steps(tmp_path: Path) -> None:
    words = ("sample", "--model", OWN_MODEL, "a point", "--count", "1", "--out", tmp_path / "out")
    advice(
        "your own model has no default number of steps: set --steps",
        lambda: runs.ended(*words),
        lambda: runs.ended(*words, "--steps", "2"),
    )


def test_a_pipeline_without_a_number_of_steps_is_told_it(pipeline: Path) -> None:
    made = tiny(diffusers.StableAudio3Pipeline, SPECIALS | SOUND_SPECIALS, SIZES)
    policy = PipelinePolicy(made.pipe, call=made.call)
    model = GivenModel.of(EvaluateArguments(model=str(pipeline)), (), "sample")
    steps = advice(
        "{} has no default number of steps: set --steps",
        lambda: model.steps(policy, None),
        lambda: model.steps(policy, 2),
    )
    assert steps == 2


@pytest.mark.slow
def test_steering_takes_prompts_of_one_size(pipeline: Path, tmp_path: Path) -> None:
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    sides = [{"height": 16, "width": 16}, {"height": 16, "width": 32}]
    tree = runs.sized(tree, [*sides, *sides])
    first, second = "a red ball", "a blue cube on the table"
    run = begun(tree, tmp_path / "run")

    def sampled(*words: str) -> None:
        steered = ("--steer", "best", "--particles", "2", "--steps", "2", "--weights", "base")
        place = new_numbered(tmp_path, "out")
        runs.ended("sample", run, *words, *steered, "--count", "1", "--out", place)

    says = "needs prompts of one size, but the run's files give them {}: sample them one by one"
    advice(says, lambda: sampled(first, second), lambda: [sampled(first), sampled(second)])
    advice(
        "sample them one by one, or set --height and --width",
        lambda: sampled(first, second),
        lambda: sampled(first, second, "--height", "16", "--width", "16"),
    )


@pytest.mark.slow
def test_votes_compare_trained_weights_with_the_base(finished: Path, tmp_path: Path) -> None:
    words = ("vote", finished, *VOTE, "--out", tmp_path / "votes")
    for chosen in ("last", "best"):
        advice(
            "vote: --weights base leaves nothing to compare: choose last or best",
            lambda: runs.ended(*words, "--weights", "base"),
            lambda weights=chosen: runs.ended(*words, "--weights", weights),
        )
        shutil.rmtree(tmp_path / "votes")


CLIP = "{name: clip, model: flowrl/demo/shapes-clip}"


def pairs_of(folder: Path, label: str, dark: int) -> Path:
    """A table of pairs of a bright image and another one."""
    folder.mkdir()
    rows = []
    for i in range(8):
        names = {"a": f"{i}-bright.png", "b": f"{i}-dark.png"}
        for name, level in zip(names.values(), (200 + i, dark + i), strict=True):
            Image.new("RGB", (32, 32), (level, level, level)).save(folder / name)
        rows.append({"prompt": f"p{i}", **names, "label": label})
    table = folder / "pairs.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table


@pytest.mark.slow
def test_a_fit_has_votes_that_say_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.votes.fit.report_rewards", lambda *_: None)
    table = pairs_of(tmp_path / "votes", "a", 30)
    ties, alike = pairs_of(tmp_path / "ties", "tie", 30), pairs_of(tmp_path / "alike", "a", 200)
    out = ("--out", tmp_path / "taste")

    def fitted(votes: Path, *words: str | Path) -> None:
        runs.ended("fit-reward", votes, "--robust", "0", *words)

    def well() -> None:
        fitted(table, "--features", CLIP, *out)
        shutil.rmtree(tmp_path / "taste")

    advice(
        "fit-reward: name the new folder with --out, such as --out taste",
        lambda: fitted(table, "--features", CLIP),
        well,
    )
    advice(
        "every vote is a tie, so nothing says which sample is better: vote on pairs that differ",
        lambda: fitted(ties, "--features", CLIP, *out),
        well,
    )
    advice(
        "are alike, so they explain no vote: choose other --features, or vote on pairs that differ",
        lambda: fitted(alike, "--features", CLIP, *out),
        well,
    )


@pytest.mark.slow
def test_a_fitted_reward_has_a_new_folder_and_what_it_reuses_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.votes.fit.report_rewards", lambda *_: None)
    table = pairs_of(tmp_path / "votes", "a", 30)

    def fitted(name: str, *words: str | Path) -> None:
        given = (
            "--features",
            "{name: patches, model: flowrl/demo/shapes-clip}",
            "--robust",
            "0",
            *words,
        )
        runs.ended("fit-reward", table, *given, "--out", tmp_path / name)

    fitted("taste")
    advice(
        "fit-reward: {} already exists: choose a new folder",
        lambda: fitted("taste"),
        lambda: fitted("other"),
    )
    stored = tmp_path / "taste" / "features.safetensors"
    stored.write_bytes(stored.read_bytes()[:100])
    advice(
        "--reuse: {} is damaged, or no file of fit-reward: leave --reuse out",
        lambda: fitted("again", "--reuse", tmp_path / "taste"),
        lambda: fitted("again"),
    )


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file of a small run of a user's own model, `run.yaml`, and the finished run
    `run`."""
    folder = tmp_path_factory.mktemp("points")
    (folder / "run.yaml").write_text(yaml.safe_dump(tree(folder, iterations=1)))
    runs.ended("train", folder / "run.yaml", "--folder", folder / "run")
    return folder


def ended(words: str, points: Path, new: Path) -> None:
    """The command; {run} and {file} are a finished run and its file, {new} a name that is free."""
    places = {"{run}": points / "run", "{file}": points / "run.yaml", "{new}": new}
    parts = shlex.split(words)
    for name, place in places.items():
        parts = [part.replace(name, str(place)) for part in parts]
    runs.ended(*parts)


MODEL = f"--model {OWN_MODEL} --steps 2"
REWARD = "--rewards examples/own/points.py:Closeness"
EVALUATED = f"evaluate {MODEL} --samples 2 --per-prompt 1"
SAMPLED = f"sample {MODEL} 'a point' --count 1 --out {{new}}"
LAUNCH = "launch slurm demo --folder r"


class CommandAdvice(NamedTuple):
    """A part of a message's source, the command that it refuses, and those that do what it says, in
    each way that it names."""

    says: str
    refused: str
    follow: tuple[str, ...]
    slow: bool = False


COMMANDS = [
    CommandAdvice(
        "train: give a run file first, such as",
        "train --train.iterations 1",
        ("train {file} --folder {new} --train.iterations 1",),
        slow=True,
    ),
    CommandAdvice(
        "train: {} is a run's folder: resume it with `flowrl train --resume {}`, or begin another",
        "train {run} --folder {new}",
        ("train --resume {run} --train.iterations 2", "train {run}/run.yaml --folder {new}"),
        slow=True,
    ),
    CommandAdvice(
        "sample: give prompts, such as: flowrl sample RUN",
        f"sample {MODEL} --out {{new}} --model.dtype float32 'a point'",
        (SAMPLED + " --model.dtype float32",),
    ),
    CommandAdvice("plan: give a run file, such as", "plan", ("plan configs/demo.yaml",), slow=True),
    CommandAdvice(
        "plan: --svg draws a single run: give one file",
        "plan configs/demo.yaml {file} --svg {new}.svg",
        ("plan configs/demo.yaml --svg {new}.svg",),
        slow=True,
    ),
    CommandAdvice(
        "path: name one file, such as configs/accelerate/ddp.yaml",
        "path",
        ("path configs/accelerate/ddp.yaml",),
    ),
    CommandAdvice("recipes: give a single recipe, not", "recipes nft awm", ("recipes nft",)),
    CommandAdvice("rewards: give a single reward, not", "rewards jpeg shapes", ("rewards jpeg",)),
    CommandAdvice(
        "completion: give a shell, one of {}",
        "completion csh",
        ("completion bash", "completion zsh", "completion fish"),
    ),
    CommandAdvice(
        "evaluate: --model has no rewards: add some with --rewards",
        f"{EVALUATED} --prompts {{run}}/../prompts.txt",
        (f"{EVALUATED} --prompts {{run}}/../prompts.txt {REWARD}",),
    ),
    CommandAdvice(
        "evaluate: {}: add --prompts FILE",
        f"{EVALUATED} {REWARD}",
        (f"{EVALUATED} {REWARD} --prompts {{run}}/../prompts.txt",),
    ),
    CommandAdvice(
        "{}: give either a run's folder or, with --model, the folder or hub name of a pipeline",
        f"evaluate {{run}} {MODEL}",
        (
            "evaluate {run} --samples 2 --per-prompt 1",
            f"{EVALUATED} {REWARD} --prompts {{run}}/../prompts.txt",
        ),
    ),
    CommandAdvice(
        "name the run's folder with --folder: every start resumes the run that is in it",
        "launch slurm demo --cpus 1",
        (LAUNCH + " --cpus 1",),
    ),
    CommandAdvice(
        "launch {}: --gpus 0: give --cpus in its place, the processes on each machine without GPUs",
        LAUNCH + " --gpus 0",
        (LAUNCH + " --cpus 1",),
    ),
    CommandAdvice(
        "give either --gpus, those of each machine, or --cpus, the processes on each without GPUs",
        LAUNCH,
        (LAUNCH + " --cpus 2", LAUNCH + " --gpus 1"),
    ),
    CommandAdvice(
        "is not a time of Slurm's: give hours, minutes and seconds, such as 24:00:00, or days",
        LAUNCH + " --cpus 1 --time 'a day'",
        (LAUNCH + " --cpus 1 --time 24:00:00", LAUNCH + " --cpus 1 --time 2-12:00:00"),
    ),
    CommandAdvice(
        "is not a name: give one without spaces",
        LAUNCH + " --cpus 1 --account 'a b'",
        (LAUNCH + " --cpus 1 --account a_b",),
    ),
    CommandAdvice(
        "{} is given twice, with {} and {}: keep one",
        "train {file} --folder {new} --folder {run}",
        ("train {file} --folder {new}",),
        slow=True,
    ),
    CommandAdvice(
        "runs: no run {}: give the folder of a run, or one that contains runs",
        "runs {run}/checkpoints",
        ("runs {run}", "runs {run}/.."),
    ),
    CommandAdvice(
        "vote: give a run's folder, two of them, a folder of images or a table",
        "vote --question 'Which?'",
        ("vote configs/preferences/pairs.jsonl --out {new} --votes 2 --person simulated --port 0",),
        slow=True,
    ),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.slow if c.slow else (), id=c.says[:40]) for c in COMMANDS],
)
def test_following_the_advice_of_a_quick_command(
    case: CommandAdvice, points: Path, tmp_path: Path
) -> None:
    for i, words in enumerate(case.follow):
        advice(
            case.says,
            lambda: ended(case.refused, points, tmp_path / "refused"),
            lambda number=i, kept=words: ended(kept, points, tmp_path / f"new{number}"),
        )
    assert not (tmp_path / "refused").exists()


def test_a_server_has_a_token_that_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_TOKEN", raising=False)
    asked = Serve("brightness", token="A_TOKEN")

    def exported() -> str | None:
        monkeypatch.setenv("A_TOKEN", "secret")
        return _token(asked)

    token = advice(
        "--token: the environment variable {} is empty: export it", lambda: _token(asked), exported
    )
    assert token == "secret"
