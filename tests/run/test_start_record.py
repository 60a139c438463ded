"""A resumed run knows what it was begun with: changes are refused, said, or free."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import yaml
from pydantic import BaseModel
from safetensors.torch import load_file, save_file

from flowrl.json_text import exact_text
from flowrl.run.save import checkpoint
from flowrl.session import atomic
from flowrl.session import start_record as origin
from flowrl.session.state_file import STATE_FILE
from flowrl.settings import RunSettings
from flowrl.settings.base import OnResume, Settings
from tests.support import runs
from tests.support.runs import flowrl, lines
from tests.support.warm import small

BRIGHT = "def bright(samples):\n    return samples.media.flatten(1).mean(1)\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two iterations, with its pipeline, prompts and reward beside it."""
    place = tmp_path_factory.mktemp("finished")
    pipeline = runs.write_pipeline(place / "pipeline")
    (place / "own.py").write_text(BRIGHT)
    tree = small(pipeline, place) | {"rewards": [{"name": f"{place / 'own.py'}:bright"}]}
    tree["train"]["iterations"] = 2
    assert flowrl("train", runs.write(tree, place), "--folder", place / "run") == 0
    return place


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """Restores all files beside the run, and the run itself."""
    shutil.copytree(finished, tmp_path / "kept")
    yield finished
    shutil.rmtree(finished)
    shutil.copytree(tmp_path / "kept", finished)


def edit(run: Path, path: str, value: Any) -> None:
    """Change one setting of a run's run.yaml."""
    tree = yaml.safe_load((run / "run.yaml").read_text())
    *parts, last = path.split(".")
    inner = tree
    for part in parts:
        inner = inner[part]
    inner[last] = value
    (run / "run.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.lora.alpha", 16.0),
        ("model.lora.rank", 8),
        ("model.lora", None),
        ("evaluate.average", None),
        ("evaluate.average", 0.9),
        ("recipe", {"name": "awm", "steps": 8, "group": 2}),
    ],
)
def test_what_weights_and_states_depend_on_cannot_change(place, capsys, path, value):
    run = place / "run"
    edit(run, path, value)
    before = (run / "run.yaml").read_bytes()
    assert flowrl("train", "--resume", run) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"flowrl: {path}") and "cannot change within a run" in error
    assert error.count("\n") == 1
    assert (run / "run.yaml").read_bytes() == before


@pytest.mark.quick_cases("train.seed")
@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("train.lr", 0.001, "train.lr 0.01 -> 0.001"),
        ("recipe.kl", 0.1, "recipe.kl 0.0001 -> 0.1"),
        ("train.seed", 5, "train.seed 0 -> 5"),
        ("checkpoint.best", "bright", 'checkpoint.best null -> "bright"'),
        ("train.rows_per_call", 1, 'train.rows_per_call "auto" -> 1'),
        ("train.alarms", "off", None),
        ("track.images", 0, None),
        ("checkpoint.keep", 5, None),
    ],
)
def test_what_may_change_is_said_or_free(place, capsys, path, value, words):
    run = place / "run"
    edit(run, path, value)
    assert flowrl("train", "--resume", run) == 0
    out = capsys.readouterr().out
    changed = [line for line in out.splitlines() if line.startswith("changed since")]
    assert changed == ([] if words is None else [f"changed since checkpoint 000002: {words}"])


@pytest.mark.slow
def test_weight_decay_and_betas_of_the_file_are_used(place, capsys):
    """The optimizer's saved groups won before, and the file's values were ignored."""
    run = place / "run"
    edit(run, "train.weight_decay", 0.25)
    edit(run, "train.betas", [0.5, 0.6])
    assert flowrl("train", "--resume", run, "--train.iterations", "3") == 0
    assert "train.weight_decay 0.0001 -> 0.25" in capsys.readouterr().out
    newest = checkpoint.newest(run)
    assert newest is not None and newest.name == "000003"
    (group,) = torch.load(newest / "optimizer.pt")["param_groups"]
    assert group["weight_decay"] == 0.25 and tuple(group["betas"]) == (0.5, 0.6)


def scale(folder: Path) -> None:
    file = next((folder / "pipeline" / "transformer").glob("*.safetensors"))
    save_file({k: v * 1.01 for k, v in load_file(file).items()}, file)


def reorder(folder: Path) -> None:
    file = folder / "prompts.jsonl"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))


def turn(folder: Path) -> None:
    (folder / "own.py").write_text(BRIGHT.replace("return ", "return -"))


@pytest.mark.quick_cases("reorder")
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (scale, 2, "is not the one that"),
        (reorder, 0, "the prompts of prompts.train; the prompts of prompts.held_out"),
        (turn, 0, "the source "),
    ],
)
def test_files_beside_the_run_are_compared(
    place: Path, capsys, change: Callable[[Path], None], code: int, words: str
):
    change(place)
    assert flowrl("train", "--resume", place / "run") == code
    shown = capsys.readouterr()
    assert words in (shown.err if code else shown.out)


@pytest.mark.slow
def test_prompts_cannot_change_under_scores_that_are_kept_by_their_place(place, capsys):
    tree = yaml.safe_load((place / "tiny.yaml").read_text())
    tree["budget"] = {"order": "uncertain"}
    config = runs.write(tree, place)
    assert flowrl("train", config, "--folder", place / "rated", "--train.iterations", "1") == 0
    reorder(place)
    assert flowrl("train", "--resume", place / "rated") == 2
    assert "stores scores by prompt index" in capsys.readouterr().err


@pytest.mark.slow
def test_a_finished_run_is_extended_from_the_command_line(place, capsys):
    """To the bits of a run that was begun with as many iterations."""
    assert flowrl("train", "--resume", place / "run", "--train.iterations", "4") == 0
    assert "train.iterations 2 -> 4" in capsys.readouterr().out
    config = place / "tiny.yaml"
    assert flowrl("train", config, "--folder", place / "long", "--train.iterations", "4") == 0
    extended, whole = runs.weights(place / "run"), runs.weights(place / "long")
    assert all(torch.equal(extended[name], whole[name]) for name in whole)
    assert [line["iteration"] for line in lines(place / "run")] == [0, 1, 2, 3, 4]
    assert yaml.safe_load((place / "run" / "run.yaml").read_text())["train"]["iterations"] == 4
    assert flowrl("train", "--resume", place / "run", "--train.iterations", "3") == 2
    assert "has already done 4" in capsys.readouterr().err
    assert yaml.safe_load((place / "run" / "run.yaml").read_text())["train"]["iterations"] == 4


@pytest.mark.slow
def test_a_checkpoint_of_an_older_version_is_resumed_with_one_line(place, capsys):
    run = place / "run"
    newest = checkpoint.newest(run)
    assert newest is not None
    state = json.loads((newest / "state.json").read_text())
    del state["origin"]
    (newest / "state.json").write_text(json.dumps(state))
    (newest / atomic.CONTENTS).write_text(json.dumps(atomic.sums(newest)))
    assert flowrl("train", "--resume", run, "--train.iterations", "3") == 0
    assert capsys.readouterr().out.count("does not record its initial settings") == 1
    edit(run, "model.lora.alpha", 99.0)  # from then on it has one
    assert flowrl("train", "--resume", run) == 2


@pytest.mark.parametrize(("device", "words"), [("gpu", "is not known"), ("cuda", "not available")])
def test_a_device_that_is_not_there(place, capsys, monkeypatch, device, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = place / "tiny.yaml"
    words_given = ("train", config, "--folder", place / "new", "--model.device", device)
    assert flowrl(*words_given) == 2
    error = capsys.readouterr().err
    assert "model.device" in error and words in error and error.count("\n") == 1
    assert not (place / "new").exists()


@pytest.mark.slow
def test_the_header_names_device_precision_and_what_is_trained(place, capsys):
    assert flowrl("train", "--resume", place / "run", "--train.iterations", "4") == 0
    out = capsys.readouterr().out
    assert "device cpu, float32; trained: LoRA of rank 4, " in out
    assert " so far, " in out and "(against the base): bright " in out


def test_large_files_are_sampled_in_their_header_and_over_their_length(tmp_path):
    file = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(2**20), "b": torch.zeros(2**20)}, file)
    digests = {origin._digest(file)}
    size = file.stat().st_size
    for place in (9, size // 2 // 4096 * 4096, size - 1):  # near a block, in the header, the end
        with file.open("r+b") as handle:
            block = place if place in (9, size - 1) else 32 * (size - 4096) // 63
            handle.seek(block)
            handle.write(b"\x07")
        digests.add(origin._digest(file))
    with file.open("ab") as handle:
        handle.write(b"\0")
    digests.add(origin._digest(file))
    assert len(digests) == 5


def sections(kind: type[BaseModel]) -> Iterator[type[Settings]]:
    yield kind
    for field in kind.model_fields.values():
        parts = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for part in parts:
            if isinstance(part, type) and issubclass(part, Settings):
                yield from sections(part)


def test_kinds_of_settings_name_fields(place):
    named = 0
    for kind in sections(RunSettings):
        assert set(kind.ON_RESUME) <= set(kind.model_fields), kind
        named += len(kind.ON_RESUME)
    assert named >= 15
    run = RunSettings.model_validate(yaml.safe_load((place / "tiny.yaml").read_text()))
    assert origin.on_resume(run, ("model", "lora", "alpha")) is OnResume.NEVER
    assert origin.on_resume(run, ("track", "with")) is OnResume.FREE
    assert origin.on_resume(run, ("recipe", "name")) is OnResume.NEVER
    assert origin.on_resume(run, ("recipe", "kl")) is OnResume.SAID


FIELDS = get_type_hints(origin.StartRecord)
OF_NO_FIELD = (2.5, float("nan"), [], ["a"], {"a": 1}, {"a": None})


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_another_kind_makes_a_record_unreadable(tmp_path, name):
    """Of every field: anybody may have written a checkpoint's file."""
    whole = {"settings": {}, "processes": 1, "revision": None, "base": {}, "prompts": {}}
    whole |= {"sources": {"a": "b"}, "revisions": {"a": "b"}, "named_files": {}}

    def read(record: dict[str, Any]) -> origin.StartRecord | None:
        (tmp_path / STATE_FILE).write_text(exact_text({"origin": record}))
        return origin.StartRecord.read(tmp_path)

    assert read(whole) is not None
    for value in OF_NO_FIELD:
        if name == "settings" and isinstance(value, dict):  # they may hold anything
            assert read(whole | {name: value}) is not None
        else:
            assert read(whole | {name: value}) is None, value
